//! Words that have no place in a public repository.

use super::Finding;
use crate::rust_file::RustFile;
use crate::tree::Tree;

/// A word, in pieces so that this file does not hold it, and what it is.
const FOREIGN: &[(&[&str], &str)] = &[
    (&["/", "work/"], "a path of one machine"),
    (&["/", "root/"], "a path of one machine"),
    (&["shared", "/notes/"], "a path outside the repository"),
    (&["shared", "/DESIGN"], "a path outside the repository"),
    (&["shared", "/STYLE"], "a path outside the repository"),
    (&["<<<<", "<<< "], "a merge conflict"),
    (&[">>>>", ">>> "], "a merge conflict"),
    (&["PRIVATE", " KEY-----"], "a private key"),
];

pub fn no_foreign_words(tree: &Tree, _: &[RustFile], findings: &mut Vec<Finding>) {
    let words: Vec<(String, &str)> = FOREIGN.iter().map(|(pieces, what)| (pieces.concat(), *what)).collect();
    for (path, text) in tree.texts() {
        for (word, what) in words.iter().filter(|(word, _)| text.contains(word)) {
            for (offset, _) in text.lines().enumerate().filter(|(_, line)| has_word(line, word)) {
                let problem = format!("`{word}` is {what}");
                findings.push(Finding::new(path, offset + 1, "words", problem, "remove it"));
            }
        }
    }
}

/// Whether `line` holds `word`, not as the continuation of a longer path.
fn has_word(line: &str, word: &str) -> bool {
    line.match_indices(word).any(|(at, _)| {
        let before = line[..at].chars().next_back();
        !(word.starts_with('/') && before.is_some_and(|c| c.is_alphanumeric() || "._-~".contains(c)))
    })
}

#[cfg(test)]
mod tests {
    use super::super::testing::messages;
    use super::*;

    #[test]
    fn foreign_words_are_found() {
        for (pieces, what) in FOREIGN {
            let text = format!("first\nsee {}x\n", pieces.concat());
            let found = messages(no_foreign_words, &Tree::from([("any/file.txt", text.as_str())]));
            assert_eq!(found.len(), 1, "{found:#?}");
            assert!(found[0].starts_with("any/file.txt:2:") && found[0].contains(what), "{found:#?}");
        }
    }

    #[test]
    fn other_paths_are_good() {
        let text = "art/work/x ~/work/y ops/shared/rows.rs a << b >> c https://x.y/network/z";
        assert!(messages(no_foreign_words, &Tree::from([("a.md", text)])).is_empty());
    }
}
