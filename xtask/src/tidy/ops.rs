//! Operations: the registry, the labels of the module doc, the fixed tests, no dispatch.

use super::Finding;
use crate::rust_file::RustFile;
use crate::tree::Tree;

pub const OPS_FOLDER: &str = "crates/rb-autograd/src/ops";
pub const REGISTRY: &str = "crates/rb-autograd/src/ops.rs";
const GOLDEN_FOLDER: &str = "crates/rb-autograd/golden";

/// Labels that the module doc of every operation has, each followed by text.
const LABELS: &[&str] = &["Computes", "Shapes", "Dtypes", "Backward", "Saves", "Kernels", "Errors", "Source"];
/// Tests that every operation has.
const TESTS: &[&str] = &["shape_rule", "gradcheck"];
/// What `new-op` writes where its author has to write.
pub const FILL_IN: &str = "FILL-IN";

/// Files of operations, as (path, stem); `shared` holds code of several operations.
fn op_paths(tree: &Tree) -> impl Iterator<Item = (&str, &str)> {
    tree.in_folder(OPS_FOLDER, "rs").filter(|(_, stem)| !["mod", "shared"].contains(stem))
}

/// The names in `registry! { .. }` with their lines, and the position of the closing brace.
pub fn registry<'a>(file: &RustFile<'a>) -> Option<(Vec<(&'a str, usize)>, usize)> {
    let open = (0..file.code_len()).find(|&at| file.seq(at, &["registry", "!", "{"]))? + 2;
    let close = file.after_group(open) - 1;
    let names = (open + 1..close).filter_map(|at| Some((file.ident(at)?, file.line(at)))).collect();
    Some((names, close))
}

/// The registry and the folder name the same operations, in alphabetical order.
pub fn registry_is_complete(tree: &Tree, rust: &[RustFile], findings: &mut Vec<Finding>) {
    let files: Vec<(&str, &str)> = op_paths(tree).collect();
    let list = rust.iter().find(|file| file.path == REGISTRY);
    if files.is_empty() && list.is_none() {
        return;
    }
    let mut report = |path: &str, line: usize, problem: String, remedy: &str| {
        findings.push(Finding::new(path, line, "registry", problem, remedy));
    };
    let Some((names, _)) = list.and_then(registry) else {
        let remedy = "list every operation in `registry! { .. }`, one name a line";
        return report(REGISTRY, 1, "no `registry! { .. }`".into(), remedy);
    };
    for (name, line) in &names {
        if !files.iter().any(|(_, stem)| stem == name) {
            report(
                REGISTRY,
                *line,
                format!("`{name}` has no file {OPS_FOLDER}/{name}.rs"),
                "add the file or remove the name",
            );
        }
    }
    for pair in names.windows(2) {
        if pair[0].0 >= pair[1].0 {
            let problem = format!("`{}` comes after `{}`", pair[1].0, pair[0].0);
            report(REGISTRY, pair[1].1, problem, "keep the names in alphabetical order, each once");
        }
    }
    for (path, stem) in files {
        if !names.iter().any(|(name, _)| *name == stem) {
            let remedy =
                "add its name to `registry!` in ops.rs; code shared by operations lives in ops/shared/";
            report(path, 1, format!("`{stem}` is not in the registry"), remedy);
        }
    }
    for (path, stem) in tree.in_folder(GOLDEN_FOLDER, "safetensors") {
        if !names.iter().any(|(name, _)| *name == stem) {
            report(
                path,
                1,
                format!("golden values for `{stem}`, which is no operation"),
                "name the file after the operation",
            );
        }
    }
}

/// Every operation has the labels in its doc and the tests with fixed names.
pub fn op_files(tree: &Tree, rust: &[RustFile], findings: &mut Vec<Finding>) {
    for (path, stem) in op_paths(tree) {
        let Some(file) = rust.iter().find(|file| file.path == path) else { continue };
        let doc = file.module_doc();
        for label in LABELS.iter().filter(|label| !has_label(&doc, label)) {
            let remedy = format!("add a line `//! - **{label}** ..` to the module doc");
            findings.push(Finding::new(path, 1, "op-doc", format!("no label **{label}**"), remedy));
        }
        let golden = format!("{GOLDEN_FOLDER}/{stem}.safetensors");
        let names = file.test_names();
        let wanted = TESTS.iter().copied().chain(tree.has_file(&golden).then_some("golden"));
        for test in wanted.filter(|test| !names.contains(test)) {
            let remedy = match test {
                "golden" => format!("compare with {golden} in `#[test] fn golden()`"),
                _ => format!("add `#[test] fn {test}()`"),
            };
            findings.push(Finding::new(
                path,
                file.line(file.code_len()),
                "op-tests",
                format!("no test `{test}`"),
                remedy,
            ));
        }
        for (offset, _) in
            tree.text(path).unwrap_or("").lines().enumerate().filter(|(_, line)| line.contains(FILL_IN))
        {
            findings.push(Finding::new(
                path,
                offset + 1,
                "op-skeleton",
                "text of the skeleton is left",
                "write what it asks for",
            ));
        }
    }
}

/// Whether the doc has the label with text after it.
fn has_label(doc: &str, label: &str) -> bool {
    let mark = format!("- **{label}** ");
    doc.lines().filter_map(|line| line.trim_start().strip_prefix(&mark)).any(|text| !text.trim().is_empty())
}

/// Operations do not tell dtypes or devices apart: `op.rs`, `storage.rs` and `cast` do.
pub fn no_dispatch_in_ops(file: &RustFile, findings: &mut Vec<Finding>) {
    let name = file.path.strip_prefix(OPS_FOLDER).and_then(|rest| rest.strip_prefix('/'));
    if name.is_none_or(|name| name.contains('/') || name == "cast.rs") {
        return;
    }
    for at in 0..file.code_len() {
        let variant = ["DType", "Device"].into_iter().find(|name| file.seq(at, &[name, "::"]));
        let Some(name) = variant.filter(|_| !file.in_test(at) && is_match_pattern(file, at + 3)) else {
            continue;
        };
        let remedy = "be generic over `Elem`, and let the one dispatch outside the operations choose";
        findings.push(Finding::new(
            file.path,
            file.line(at),
            "dispatch",
            format!("a `match` on `{name}`"),
            remedy,
        ));
    }
}

/// Whether the rest of a pattern from `at` on leads to `=>`, not through the end of an earlier arm.
fn is_match_pattern(file: &RustFile, at: usize) -> bool {
    let mut arm_ended = false;
    for position in at..file.code_len() {
        match file.code(position).map(|token| token.text) {
            Some("=>") => return !arm_ended,
            Some("if") => return !arm_ended && arrow_before_end(file, position),
            Some(",") => arm_ended = true,
            Some(")") => arm_ended = false,
            Some(";" | "{" | "}" | "=" | "." | "!" | "?" | "]") | None => return false,
            Some(_) => {}
        }
    }
    false
}

fn arrow_before_end(file: &RustFile, at: usize) -> bool {
    let mut rest = (at..file.code_len()).filter_map(|at| file.code(at)).map(|token| token.text);
    rest.find(|text| matches!(*text, "=>" | ";" | "{" | "}")) == Some("=>")
}

#[cfg(test)]
mod tests {
    use super::super::testing::{NONE, lines, messages};
    use super::*;

    const GOOD: &str = "//! Adds.\n//!\n//! - **Computes** x\n//! - **Shapes** x\n//! - **Dtypes** x\n//! - **Backward** x\n\
        //! - **Saves** nothing\n//! - **Kernels** x\n//! - **Errors** x\n//! - **Source** x\nfn add() {}\n\
        #[cfg(test)]\nmod tests {\n    #[test]\n    fn shape_rule() {}\n    #[test]\n    fn gradcheck() {}\n}\n";

    #[test]
    fn registry_and_folder_agree() {
        let rule = registry_is_complete;
        let list = "macro_rules! registry { () => {} }\nregistry! {\n    add,\n    mul,\n}\n";
        let add = ("crates/rb-autograd/src/ops/add.rs", GOOD);
        let shared = ("crates/rb-autograd/src/ops/shared/rows.rs", "");
        let shared_mod = ("crates/rb-autograd/src/ops/shared.rs", "");
        let good = Tree::from([
            (REGISTRY, list),
            add,
            ("crates/rb-autograd/src/ops/mul.rs", GOOD),
            shared,
            shared_mod,
        ]);
        assert!(messages(rule, &good).is_empty());
        assert!(messages(rule, &Tree::default()).is_empty());

        let golden = ("crates/rb-autograd/golden/pow.safetensors", "");
        let bad = Tree::from([(REGISTRY, list), add, ("crates/rb-autograd/src/ops/sub.rs", GOOD), golden]);
        let found = messages(rule, &bad);
        assert_eq!(found.len(), 3, "{found:#?}");
        assert!(
            found[0].starts_with("crates/rb-autograd/src/ops.rs:4: [registry] `mul` has no file"),
            "{found:#?}"
        );
        assert!(found[1].contains("ops/sub.rs:1: [registry] `sub` is not in the registry"), "{found:#?}");
        assert!(found[2].contains("`pow`, which is no operation"), "{found:#?}");

        let unsorted = Tree::from([
            (REGISTRY, "registry! { mul, add }"),
            add,
            ("crates/rb-autograd/src/ops/mul.rs", GOOD),
        ]);
        assert!(messages(rule, &unsorted)[0].contains("`add` comes after `mul`"));
        assert!(messages(rule, &Tree::from([add]))[0].contains("no `registry! { .. }`"));
    }

    #[test]
    fn labels_and_tests_are_there() {
        let path = "crates/rb-autograd/src/ops/add.rs";
        assert!(messages(op_files, &Tree::from([(path, GOOD)])).is_empty());
        assert!(messages(op_files, &Tree::from([("crates/rb-autograd/src/ops/shared/a.rs", "")])).is_empty());

        let bad = GOOD
            .replace("**Saves** nothing", "**Saves** ")
            .replace("    #[test]\n    fn gradcheck", "    fn gradcheck");
        let bad = format!("{bad}// {FILL_IN}: say it\n");
        let golden = ("crates/rb-autograd/golden/add.safetensors", "");
        let found = messages(op_files, &Tree::from([(path, bad.as_str()), golden]));
        assert_eq!(found.len(), 4, "{found:#?}");
        assert!(found[0].contains("no label **Saves**"));
        assert!(found[1].contains("no test `gradcheck`"));
        assert!(found[2].contains("no test `golden`"));
        assert!(found[3].starts_with("crates/rb-autograd/src/ops/add.rs:18: [op-skeleton]"), "{found:#?}");
    }

    #[test]
    fn dispatch_is_found() {
        let path = "crates/rb-autograd/src/ops/add.rs";
        let bad = "fn a() {\n match x {\n  DType::F32 => 1,\n  DType::Bf16 | DType::F16 => 2,\n  _ => 3,\n }\n\
                   match (x, y) {\n  (DType::F32, DType::Bf16) => 1,\n  Some(Device::Host) if y => 2,\n  _ => 3,\n }\n}\n";
        assert_eq!(lines(no_dispatch_in_ops, path, bad), [3, 4, 4, 8, 8, 9]);
    }

    #[test]
    fn values_tests_and_other_files_are_no_dispatch() {
        let good = "fn a() {\n let x = DType::F32;\n match y {\n  A => f(DType::F32),\n  B => DType::F32,\n  C => g(DType::F32, 1),\n\
                    D => (DType::F32, 2),\n  E => {}\n }\n if d == DType::F32 { }\n}\n\
                    #[cfg(test)]\nmod tests { fn b() { match x { DType::F32 => 1 } } }\n";
        assert_eq!(lines(no_dispatch_in_ops, "crates/rb-autograd/src/ops/add.rs", good), NONE);
        let matched = "fn a() { match x { DType::F32 => 1 } }";
        for path in [
            "crates/rb-autograd/src/ops/cast.rs",
            "crates/rb-autograd/src/ops/shared/a.rs",
            "crates/rb-nn/src/a.rs",
        ] {
            assert_eq!(lines(no_dispatch_in_ops, path, matched), NONE, "{path}");
        }
    }
}
