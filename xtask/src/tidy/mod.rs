//! The rules that a compiler does not know, one file a group.
//!
//! Every finding names the file, the line, the rule and what to do.

mod documents;
mod globals;
mod kernels;
mod manifests;
mod ops;
mod safety;
mod size;
mod test_code;
mod words;

use std::fmt::{self, Write};
use std::path::Path;

use crate::Report;
use crate::error::Error;
use crate::rust_file::RustFile;
use crate::tree::Tree;

pub use ops::{OPS_FOLDER, REGISTRY, registry};

/// One broken rule at one place.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Finding {
    pub path: String,
    pub line: usize,
    pub rule: &'static str,
    pub problem: String,
    pub remedy: String,
}

impl Finding {
    fn new(
        path: &str,
        line: usize,
        rule: &'static str,
        problem: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Finding {
        Finding { path: path.to_string(), line, rule, problem: problem.into(), remedy: remedy.into() }
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Finding { path, line, rule, problem, remedy } = self;
        write!(f, "{path}:{line}: [{rule}] {problem}; {remedy}")
    }
}

/// Checks one Rust file on its own.
type FileRule = fn(&RustFile, &mut Vec<Finding>);
/// Checks what several files together must fulfil, and files that are not Rust.
type TreeRule = fn(&Tree, &[RustFile], &mut Vec<Finding>);

const FILE_RULES: &[FileRule] = &[
    size::file_length,
    safety::unsafe_is_explained,
    safety::panics_are_explained,
    globals::no_global_state,
    test_code::no_ignored_tests,
    test_code::no_commented_out_tests,
    test_code::no_unfinished_code,
    ops::no_dispatch_in_ops,
];

const TREE_RULES: &[TreeRule] = &[
    ops::registry_is_complete,
    ops::op_files,
    kernels::kernel_files,
    documents::required_files,
    documents::paths_exist,
    words::no_foreign_words,
    manifests::crate_manifests,
];

/// All findings for the repository at `root`.
pub fn run(root: &Path) -> Result<Report, Error> {
    let tree = Tree::load(root)?;
    let rust = RustFile::all(&tree);
    let findings = check(&tree, &rust);
    let mut text = String::new();
    for finding in &findings {
        // INVARIANT: writing to a String does not fail.
        writeln!(text, "{finding}").expect("a String takes all text");
    }
    let rules = FILE_RULES.len() + TREE_RULES.len();
    let counts = format!("{rules} rules, {} files, {} of Rust", tree.len(), rust.len());
    let ok = findings.is_empty();
    let summary = if ok { counts } else { format!("{} problems ({counts})", findings.len()) };
    Ok(Report { text, summary, ok })
}

fn check(tree: &Tree, rust: &[RustFile]) -> Vec<Finding> {
    let mut findings = Vec::new();
    for rule in FILE_RULES {
        rust.iter().for_each(|file| rule(file, &mut findings));
    }
    for rule in TREE_RULES {
        rule(tree, rust, &mut findings);
    }
    findings.sort();
    findings
}

#[cfg(test)]
mod testing {
    use super::*;

    /// No lines.
    pub const NONE: [usize; 0] = [];

    /// The lines that `rule` finds in `text`, taken as the file `path`.
    pub fn lines(rule: FileRule, path: &str, text: &str) -> Vec<usize> {
        let mut findings = Vec::new();
        rule(&RustFile::parse(path, text), &mut findings);
        findings.iter().map(|finding| finding.line).collect()
    }

    /// What `rule` says about `tree`, each finding as printed.
    pub fn messages(rule: TreeRule, tree: &Tree) -> Vec<String> {
        let mut findings = Vec::new();
        rule(tree, &RustFile::all(tree), &mut findings);
        findings.iter().map(Finding::to_string).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_finding_says_where_what_and_what_to_do() {
        let finding = Finding::new("a/b.rs", 7, "rule", "this is wrong", "do that");
        assert_eq!(finding.to_string(), "a/b.rs:7: [rule] this is wrong; do that");
    }

    #[test]
    fn findings_are_sorted_by_place() {
        let tree = Tree::from([
            ("crates/b/src/x.rs", "fn a() { x.unwrap() }"),
            ("crates/a/src/x.rs", "fn a() {}\nfn b() { panic!() }"),
        ]);
        let findings = check(&tree, &RustFile::all(&tree));
        let places: Vec<&str> =
            findings.iter().map(|f| f.path.as_str()).filter(|p| p.ends_with(".rs")).collect();
        assert_eq!(places, ["crates/a/src/x.rs", "crates/b/src/x.rs"]);
    }
}
