//! No global state: context, stream, random numbers and precision are arguments.

use super::Finding;
use crate::rust_file::RustFile;

/// Files that may read the process environment, and why.
const ENVIRONMENT_READERS: &[(&str, &str)] = &[
    ("crates/rb-cuda/src/discover.rs", "CUDA libraries are where the environment says"),
    ("crates/rb-train/src/observe/progress.rs", "NO_COLOR and TERM are how terminals say what they can show"),
];

const GLOBAL_TYPES: &[&str] = &["OnceLock", "LazyLock", "lazy_static", "once_cell"];
const ENVIRONMENT_CALLS: &[&str] = &["var", "var_os", "vars", "vars_os", "set_var", "remove_var"];

pub fn no_global_state(file: &RustFile, findings: &mut Vec<Finding>) {
    let reads_environment = ENVIRONMENT_READERS.iter().any(|(path, _)| *path == file.path);
    for at in 0..file.code_len() {
        let in_test = file.in_test(at);
        let mut report = |problem: String, remedy: &str| {
            findings.push(Finding::new(file.path, file.line(at), "global-state", problem, remedy));
        };
        if file.seq(at, &["static", "mut"]) {
            report("`static mut`".into(), "pass the value as an argument");
        } else if in_test {
            continue;
        } else if file.seq(at, &["thread_local", "!"]) {
            report("`thread_local!`".into(), "pass the value as an argument");
        } else if let Some(name) = file.ident(at).filter(|name| GLOBAL_TYPES.contains(name)) {
            report(format!("`{name}`"), "pass the value as an argument");
        } else if file.seq(at, &["env", "::"]) && !reads_environment {
            let call = file.ident(at + 2).filter(|name| ENVIRONMENT_CALLS.contains(name));
            if let Some(name) = call {
                let remedy = "make it a field of the config, or add the file with a reason to ENVIRONMENT_READERS \
                              in xtask/src/tidy/globals.rs";
                report(format!("`env::{name}`"), remedy);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{NONE, lines};
    use super::*;

    #[test]
    fn globals_are_found() {
        let bad = "static mut A: u8 = 0;\nthread_local! {}\nuse std::sync::OnceLock;\nstatic B: LazyLock<u8> = c();\n\
                   fn d() { std::env::var(\"X\") }\n#[cfg(test)]\nmod tests {\n    static mut E: u8 = 0;\n}\n";
        assert_eq!(lines(no_global_state, "src/a.rs", bad), [1, 2, 3, 4, 5, 8]);
    }

    #[test]
    fn ordinary_statics_and_words_in_text_are_good() {
        let good = "static A: u8 = 0; // thread_local!\nfn b(x: &'static mut u8) { \"OnceLock\"; env::args(); env!(\"X\"); }\n\
                    #[cfg(test)]\nmod tests { fn a() { std::env::var(\"X\"); } }\n";
        assert_eq!(lines(no_global_state, "src/a.rs", good), NONE);
        let reads = "fn a() { std::env::var(\"X\"); }\nstatic mut B: u8 = 0;\n";
        for (path, _) in ENVIRONMENT_READERS {
            assert_eq!(lines(no_global_state, path, reads), [2], "{path}");
        }
    }
}
