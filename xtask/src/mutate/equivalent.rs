//! The checked-in list of mutants that change nothing anybody could notice, each with the reason.

use std::path::Path;

use serde::Deserialize;

use super::project::CRATE;
use super::rewrite::Mutant;
use crate::error::Error;

/// The list, in the folder of the crate.
pub const LIST: &str = "equivalent_mutants.toml";

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Equivalents {
    #[serde(default)]
    equivalent: Vec<Entry>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    /// Source file, from the folder `src` of the crate.
    file: String,
    /// The whole source line, trimmed: line numbers would move.
    line: String,
    /// Changes of the line that are equivalent, as reports print them.
    changes: Vec<String>,
    /// Why nobody can notice them.
    reason: String,
}

impl Equivalents {
    pub fn load(root: &Path) -> Result<Equivalents, Error> {
        let path = root.join(CRATE).join(LIST);
        let text = std::fs::read_to_string(&path).map_err(Error::io("read", &path))?;
        toml::from_str(&text)
            .map_err(|error| Error::usage(format!("{}: {error}", path.display()), "correct it"))
    }

    /// Why `mutant` is equivalent, if it is listed.
    pub fn reason(&self, mutant: &Mutant) -> Option<&str> {
        let fits = |entry: &&Entry| {
            entry.file == mutant.file && entry.line == mutant.source && entry.changes.contains(&mutant.change)
        };
        self.equivalent.iter().find(fits).map(|entry| entry.reason.as_str())
    }

    /// What is wrong with the list: changes that are not among `mutants`, reasons that are empty.
    pub fn problems(&self, mutants: &[Mutant]) -> Vec<String> {
        let mut problems = Vec::new();
        for Entry { file, line, changes, reason } in &self.equivalent {
            if reason.trim().is_empty() {
                problems.push(format!("{LIST}: `{line}` of {file} has no reason"));
            }
            for change in changes {
                let exists =
                    mutants.iter().any(|m| m.file == *file && m.source == *line && m.change == *change);
                if !exists {
                    problems.push(format!("{LIST}: no mutant `{change}` of `{line}` in {file}; remove it"));
                }
            }
        }
        problems
    }
}

#[cfg(test)]
pub mod tests {
    use super::*;

    /// A list of one change.
    pub fn list(file: &str, line: &str, change: &str) -> Equivalents {
        let [file, line, change, reason] = [file, line, change, "a reason"].map(str::to_string);
        Equivalents { equivalent: vec![Entry { file, line, changes: vec![change], reason }] }
    }

    #[test]
    fn entries_are_found_by_text_and_stale_ones_are_named() {
        let list: Equivalents = toml::from_str(
            "[[equivalent]]\nfile = \"a.rs\"\nline = \"a < b\"\nchanges = [\"a < b -> a <= b\", \"gone\"]\n\
            reason = \"never equal\"\n[[equivalent]]\nfile = \"b.rs\"\nline = \"x\"\nchanges = []\nreason = \" \"",
        )
        .unwrap();
        let mutant = |change: &str| Mutant {
            number: 1,
            file: "a.rs".into(),
            line: 3,
            source: "a < b".into(),
            change: change.into(),
        };
        let mutants = [mutant("a < b -> a <= b"), mutant("a < b -> a >= b")];
        assert_eq!(list.reason(&mutants[0]), Some("never equal"));
        assert_eq!(list.reason(&mutants[1]), None);
        let problems = list.problems(&mutants);
        assert_eq!(problems.len(), 2, "{problems:?}");
        assert!(problems[0].contains("`gone`") && problems[1].contains("no reason"), "{problems:?}");
    }
}
