//! Documents exist, and the paths they name exist.

use super::Finding;
use crate::rust_file::RustFile;
use crate::tree::Tree;

const REQUIRED: &[&str] =
    &["README.md", "CHANGELOG.md", "LICENSE-MIT", "LICENSE-APACHE", "docs/architecture.md", "docs/log.md"];

/// Folders at the root of the repository; a word that starts with one of them is taken for a path.
const TOP_FOLDERS: &[&str] =
    &["crates/", "kernels/", "xtask/", "docs/", "examples/", "bench-scripts/", ".ci/", ".cargo/"];

/// Records of the past: a path may have gone since.
const RECORDS: &[&str] = &["docs/log.md", "docs/decisions/", "docs/benchmarks/", "CHANGELOG.md"];

pub fn required_files(tree: &Tree, _: &[RustFile], findings: &mut Vec<Finding>) {
    for path in REQUIRED.iter().filter(|path| !tree.has_file(path)) {
        findings.push(Finding::new(path, 1, "documents", "the file is missing", "write it"));
    }
}

/// Paths in backticks and in code blocks, and the targets of links, exist.
pub fn paths_exist(tree: &Tree, _: &[RustFile], findings: &mut Vec<Finding>) {
    let documents = tree
        .texts()
        .filter(|(path, _)| path.ends_with(".md") && (path.starts_with("docs/") || !path.contains('/')));
    for (path, text) in documents.filter(|(path, _)| !RECORDS.iter().any(|record| path.starts_with(record))) {
        let mut in_block = false;
        for (offset, line) in text.lines().enumerate() {
            if line.trim_start().starts_with("```") {
                in_block = !in_block;
                continue;
            }
            let code = if in_block { vec![line] } else { line.split('`').skip(1).step_by(2).collect() };
            let named = code.into_iter().flat_map(str::split_whitespace).filter_map(repository_path);
            let links = if in_block { Vec::new() } else { link_targets(path, line) };
            for missing in named.map(String::from).chain(links).filter(|named| !tree.has(named)) {
                let problem = format!("`{missing}` does not exist");
                let remedy = "correct the path; write `<name>` for a part that the reader chooses";
                findings.push(Finding::new(path, offset + 1, "paths", problem, remedy));
            }
        }
    }
}

/// The path in a word of code, if it is one of this repository with no placeholder in it.
fn repository_path(word: &str) -> Option<&str> {
    let word = word.trim_matches(['"', '\'', ',', ';', '(', ')']).trim_start_matches("./");
    let word = word.split(['#', ':']).next().unwrap_or(word).trim_end_matches('.');
    let known = TOP_FOLDERS.iter().any(|folder| word.starts_with(folder));
    (known && !word.contains(['<', '>', '*', '{', '$', '[', '?', '=', '|']) && !word.contains(".."))
        .then_some(word)
}

/// Targets of the links in a line, from the repository root; links to the web and in the page left out.
fn link_targets(path: &str, line: &str) -> Vec<String> {
    let targets = line.split("](").skip(1).filter_map(|rest| rest.split(')').next());
    let targets = targets.map(|target| target.split(['#', ' ']).next().unwrap_or(target));
    let local =
        targets.filter(|target| !target.is_empty() && !target.contains(':') && !target.starts_with('/'));
    local.map(|target| resolve(path, target)).collect()
}

/// `target` as seen from the folder of `path`, with `.` and `..` worked out.
fn resolve(path: &str, target: &str) -> String {
    let mut parts: Vec<&str> = path.split('/').collect();
    parts.pop();
    for part in target.split('/') {
        match part {
            "" | "." => {}
            ".." => drop(parts.pop()),
            name => parts.push(name),
        }
    }
    parts.join("/")
}

#[cfg(test)]
mod tests {
    use super::super::testing::messages;
    use super::*;

    #[test]
    fn required_files_are_named() {
        let found = messages(required_files, &Tree::from([("README.md", ""), ("docs/log.md", "")]));
        assert_eq!(found.len(), REQUIRED.len() - 2);
        assert!(found[0].starts_with("CHANGELOG.md:1:"));
        let all = REQUIRED.map_tree();
        assert!(messages(required_files, &all).is_empty());
    }

    trait MapTree {
        fn map_tree(&self) -> Tree;
    }

    impl MapTree for &[&str] {
        fn map_tree(&self) -> Tree {
            let files: [(&str, &str); 6] = std::array::from_fn(|at| (self[at], ""));
            Tree::from(files)
        }
    }

    #[test]
    fn missing_paths_are_found() {
        let text = "See `docs/none.md` and [it](none.md).\n```\ncargo run -- train examples/none.toml\n```\n`crates/rb-x/src/none.rs:12`\n";
        let found = messages(paths_exist, &Tree::from([("docs/a.md", text)]));
        assert_eq!(found.len(), 4, "{found:#?}");
        for (message, place) in
            found.iter().zip(["docs/a.md:1:", "docs/a.md:1:", "docs/a.md:3:", "docs/a.md:5:"])
        {
            assert!(message.starts_with(place), "{message}");
        }
    }

    #[test]
    fn present_paths_placeholders_and_records_are_good() {
        let text = "`docs/a.md`, `crates/x/src/lib.rs:3`, `crates/x/`, `kernels/<op>_fwd.cu`, `kernels/*.cu`, `and/or`, docs/none\n\
                    [a](a.md#top) [b](../README.md) [c](https://x.y/z) [d](#here)\n```\nls crates/x\n```\n";
        let record = ("docs/log.md", "`docs/gone.md`");
        let files =
            [("docs/a.md", text), ("README.md", "[a](docs/a.md)"), ("crates/x/src/lib.rs", ""), record];
        assert_eq!(messages(paths_exist, &Tree::from(files)), Vec::<String>::new());
    }
}
