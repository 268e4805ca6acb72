//! Kernel files: the header, one entry point named after the file, and a Rust file that launches it.

use super::Finding;
use crate::lexer::{Kind, lex};
use crate::rust_file::RustFile;
use crate::tree::Tree;

const FOLDER: &str = "kernels";

/// Fields of the comment that opens a kernel file, each with text.
const FIELDS: &[&str] = &[
    "Computes",
    "Inputs",
    "Outputs",
    "Requires",
    "Launch",
    "Traffic",
    "Accumulates",
    "Determinism",
    "Source",
];

pub fn kernel_files(tree: &Tree, rust: &[RustFile], findings: &mut Vec<Finding>) {
    for (path, stem) in tree.in_folder(FOLDER, "cu") {
        let text = tree.text(path).unwrap_or("");
        let mut report = |line: usize, problem: String, remedy: String| {
            findings.push(Finding::new(path, line, "kernel", problem, remedy));
        };
        let header: Vec<&str> = text.lines().map_while(|line| line.strip_prefix("//")).collect();
        if !header.first().is_some_and(|line| line.starts_with(&format!(" {stem} -- "))) {
            report(
                1,
                "the first line does not name the kernel".into(),
                format!("open with `// {stem} -- what it does.`"),
            );
        }
        for field in FIELDS.iter().filter(|field| !has_field(&header, field)) {
            report(
                1,
                format!("no header field `{field}`"),
                format!("add `// {field}  ..` to the opening comment"),
            );
        }
        let entries = entry_points(text);
        if entries.iter().map(|(name, _)| name).ne([stem].iter()) {
            let names: Vec<&str> = entries.iter().map(|(name, _)| *name).collect();
            let line = entries.first().map_or(1, |(_, line)| *line);
            report(
                line,
                format!("entry points {names:?}"),
                format!("have exactly one, `{stem}`, as the file is named"),
            );
        }
        if !rust.iter().any(|file| names_kernel(file, stem)) {
            let remedy = format!("name \"{stem}\" in the operation that launches it, or delete the file");
            report(1, "no Rust code launches this kernel".into(), remedy);
        }
    }
}

fn has_field(header: &[&str], field: &str) -> bool {
    let after =
        |line: &&str| line.strip_prefix(' ').and_then(|line| line.strip_prefix(field)).map(str::to_owned);
    header.iter().filter_map(after).any(|rest| rest.starts_with(' ') && !rest.trim().is_empty())
}

/// Names and lines of the `__global__` functions; the tokens of C are near enough to those of Rust.
fn entry_points(text: &str) -> Vec<(&str, usize)> {
    let tokens: Vec<_> = lex(text).into_iter().filter(|token| token.kind != Kind::Comment).collect();
    let mut names = Vec::new();
    for at in (0..tokens.len()).filter(|&at| tokens[at].is("__global__")) {
        let mut pairs = tokens[at..].windows(2);
        let named = |pair: &&[crate::lexer::Token]| {
            let attributes = ["__launch_bounds__", "__cluster_dims__"];
            pair[0].kind == Kind::Ident && pair[1].is("(") && !attributes.contains(&pair[0].text)
        };
        names.extend(pairs.find(named).map(|pair| (pair[0].text, pair[0].line)));
    }
    names
}

/// Whether non-test code of a crate holds the string `stem`.
fn names_kernel(file: &RustFile, stem: &str) -> bool {
    file.path.starts_with("crates/")
        && (0..file.code_len())
            .any(|at| file.code(at).and_then(|token| token.str_value()) == Some(stem) && !file.in_test(at))
}

#[cfg(test)]
mod tests {
    use super::super::testing::messages;
    use super::*;

    const GOOD: &str = "// add_fwd -- adds.\n// Computes     y = a + b\n// Inputs       a\n// Outputs      y\n\
        // Requires     nothing\n// Launch       grid\n// Traffic      bytes\n// Accumulates  f32\n\
        // Determinism  bitwise\n// Source       none\n#include \"prelude.cuh\"\n\
        extern \"C\" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(256) add_fwd(const Elem* a, Elem* y) { f(a); }\n";
    const OP: (&str, &str) =
        ("crates/rb-autograd/src/ops/add.rs", "const FWD: Kernel = kernel!(\"add_fwd\");");

    #[test]
    fn a_good_kernel() {
        let lab = ("kernels/lab/add/01_naive.cu", "");
        let tree = Tree::from([("kernels/add_fwd.cu", GOOD), OP, lab, ("kernels/prelude.cuh", "")]);
        assert_eq!(messages(kernel_files, &tree), Vec::<String>::new());
    }

    #[test]
    fn what_is_missing_is_named() {
        let bad = GOOD
            .replace("Traffic      bytes", "Traffic")
            .replace("add_fwd(", "add_forward(")
            .replace("// add_fwd --", "// add --");
        let tree =
            Tree::from([("kernels/add_fwd.cu", bad.as_str()), ("crates/a/src/b.rs", "// \"add_fwd\"")]);
        let found = messages(kernel_files, &tree);
        let expected = [
            "first line does not name",
            "no header field `Traffic`",
            "[\"add_forward\"]",
            "no Rust code launches",
        ];
        assert_eq!(found.len(), expected.len(), "{found:#?}");
        for (message, part) in found.iter().zip(expected) {
            assert!(message.contains(part), "{message}");
        }
        assert!(found[2].starts_with("kernels/add_fwd.cu:12:"), "{found:#?}");
    }
}
