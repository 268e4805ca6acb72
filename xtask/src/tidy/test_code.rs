//! Tests run, all of them, and code is finished.

use super::Finding;
use crate::lexer::Kind;
use crate::rust_file::RustFile;

pub fn no_ignored_tests(file: &RustFile, findings: &mut Vec<Finding>) {
    let remedy = "assert today's wrong value with a FIXME, or delete the test";
    for at in 0..file.code_len() {
        if !file.seq(at, &["#", "["]) {
            continue;
        }
        let plain = file.is(at + 2, "ignore");
        let conditional =
            file.is(at + 2, "cfg_attr") && (at..file.after_group(at + 1)).any(|at| file.is(at, "ignore"));
        if plain || conditional {
            findings.push(Finding::new(
                file.path,
                file.line(at),
                "ignored-test",
                "a test that does not run",
                remedy,
            ));
        }
    }
    for token in file.tokens.iter().filter(|token| token.is_doc()) {
        let fence = |line: &str| {
            let line = line.trim_start_matches(['/', '!', '*', ' ']);
            line.strip_prefix("```").is_some_and(|info| info.split(',').any(|word| word.trim() == "ignore"))
        };
        for (offset, _) in token.text.lines().enumerate().filter(|(_, line)| fence(line)) {
            let remedy = "make it run, or mark it `no_run` or `text`";
            findings.push(Finding::new(
                file.path,
                token.line + offset,
                "ignored-test",
                "a doc example that does not run",
                remedy,
            ));
        }
    }
}

pub fn no_commented_out_tests(file: &RustFile, findings: &mut Vec<Finding>) {
    for token in file.tokens.iter().filter(|token| token.kind == Kind::Comment && !token.is_doc()) {
        for (offset, line) in token.text.lines().enumerate() {
            let line = line.trim_start_matches(['/', '*', ' ']);
            if line.starts_with("#[test]") || line.starts_with("#[cfg(test)]") || is_function_header(line) {
                let remedy = "delete it, git remembers, or make it run";
                findings.push(Finding::new(
                    file.path,
                    token.line + offset,
                    "commented-out",
                    "a commented-out test or function",
                    remedy,
                ));
            }
        }
    }
}

/// Whether a line of a comment is `[pub] fn name(..) .. {`.
fn is_function_header(line: &str) -> bool {
    let header = line.strip_prefix("pub ").unwrap_or(line).strip_prefix("fn ");
    header.is_some_and(|rest| rest.contains('(') && rest.trim_end().ends_with('{'))
}

pub fn no_unfinished_code(file: &RustFile, findings: &mut Vec<Finding>) {
    for at in 0..file.code_len() {
        let name = ["todo", "unimplemented"].into_iter().find(|name| file.seq(at, &[name, "!"]));
        if let Some(name) = name {
            let remedy = "finish it, or leave the item out";
            findings.push(Finding::new(file.path, file.line(at), "unfinished", format!("`{name}!`"), remedy));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{NONE, lines};
    use super::*;

    #[test]
    fn ignored_tests_are_found() {
        let bad = "#[test]\n#[ignore]\nfn a() {}\n#[ignore = \"slow\"]\nfn b() {}\n#[cfg_attr(miri, ignore)]\nfn c() {}\n\
                   /// Doc.\n/// ```rust,ignore\n/// x\n/// ```\nfn d() {}\n";
        assert_eq!(lines(no_ignored_tests, "src/a.rs", bad), [2, 4, 6, 9]);
        let good = "#[test]\nfn ignore() {}\n// #[ignore]\n/// ```no_run\n/// ```\nfn a() { \"#[ignore]\" }\n#[cfg(ignore_me)]\nfn b() {}";
        assert_eq!(lines(no_ignored_tests, "src/a.rs", good), NONE);
    }

    #[test]
    fn commented_out_tests_are_found() {
        let bad =
            "// #[test]\n//fn a() {\n// }\n/*\n#[test]\nfn b() {\n}\n*/\n    // pub fn c(x: u8) -> u8 {\n";
        assert_eq!(lines(no_commented_out_tests, "src/a.rs", bad), [1, 2, 5, 6, 9]);
        let good = "/// #[test]\n// The attribute #[test] marks it.\n// fn pointers are (mostly) small.\nfn a() { \"// #[test]\" }";
        assert_eq!(lines(no_commented_out_tests, "src/a.rs", good), NONE);
    }

    #[test]
    fn unfinished_code_is_found() {
        assert_eq!(
            lines(no_unfinished_code, "src/a.rs", "fn a() {\n todo!()\n}\nfn b() { unimplemented!(\"x\") }"),
            [2, 4]
        );
        assert_eq!(lines(no_unfinished_code, "src/a.rs", "// todo!\nfn todo() { \"todo!\" }"), NONE);
    }
}
