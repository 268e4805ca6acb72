//! The files of the repository, held in memory so that every rule can be tested on a made-up tree.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::error::Error;

/// Larger files are data: their text is not checked.
const MAX_TEXT_BYTES: u64 = 2 << 20;

/// Paths from the repository root, with `/`; the text is `None` for binary and very large files.
#[derive(Default)]
pub struct Tree {
    files: BTreeMap<String, Option<String>>,
}

impl Tree {
    /// Reads what git knows and what it would add; without git, everything but build output.
    pub fn load(root: &Path) -> Result<Tree, Error> {
        let paths = match git_files(root) {
            Some(paths) => paths,
            None => walk(root)?,
        };
        let mut files = BTreeMap::new();
        for path in paths {
            let on_disk = root.join(&path);
            // A file deleted since the last commit is still listed by git.
            let Ok(meta) = std::fs::metadata(&on_disk) else { continue };
            if !meta.is_file() {
                continue;
            }
            let text = if meta.len() <= MAX_TEXT_BYTES {
                let bytes = std::fs::read(&on_disk).map_err(Error::io("read", &on_disk))?;
                String::from_utf8(bytes).ok().filter(|text| !text.contains('\0'))
            } else {
                None
            };
            files.insert(path, text);
        }
        Ok(Tree { files })
    }

    /// Every text file with its path.
    pub fn texts(&self) -> impl Iterator<Item = (&str, &str)> {
        self.files.iter().filter_map(|(path, text)| Some((path.as_str(), text.as_deref()?)))
    }

    pub fn text(&self, path: &str) -> Option<&str> {
        self.files.get(path)?.as_deref()
    }

    /// Whether `path` is a file of the tree.
    pub fn has_file(&self, path: &str) -> bool {
        self.files.contains_key(path)
    }

    /// Whether `path` is a file or a folder with a file in it.
    pub fn has(&self, path: &str) -> bool {
        let path = path.trim_end_matches('/');
        let folder = format!("{path}/");
        self.has_file(path)
            || self.files.range(folder.clone()..).next().is_some_and(|(p, _)| p.starts_with(&folder))
    }

    /// Files directly in `folder` whose name ends in `.ext`, as (path, stem).
    pub fn in_folder<'a>(
        &'a self,
        folder: &'a str,
        ext: &'a str,
    ) -> impl Iterator<Item = (&'a str, &'a str)> {
        self.files.keys().filter_map(move |path| {
            let name = path.strip_prefix(folder)?.strip_prefix('/')?;
            let stem = name.strip_suffix(ext)?.strip_suffix('.')?;
            (!name.contains('/')).then_some((path.as_str(), stem))
        })
    }

    pub fn len(&self) -> usize {
        self.files.len()
    }
}

#[cfg(test)]
impl<const N: usize> From<[(&str, &str); N]> for Tree {
    fn from(files: [(&str, &str); N]) -> Tree {
        Tree { files: files.into_iter().map(|(path, text)| (path.into(), Some(text.into()))).collect() }
    }
}

/// The repository root: the folder above this crate.
pub fn root() -> PathBuf {
    let mut root = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    root.pop();
    root
}

fn git_files(root: &Path) -> Option<Vec<String>> {
    let args = ["ls-files", "-z", "--cached", "--others", "--exclude-standard"];
    let output = Command::new("git").args(args).current_dir(root).output().ok()?;
    let text = output.status.success().then(|| String::from_utf8(output.stdout).ok())??;
    let mut paths: Vec<String> = text.split('\0').filter(|path| !path.is_empty()).map(String::from).collect();
    paths.sort();
    paths.dedup();
    // A tree without one known file is a copy inside another repository that ignores it.
    (!paths.is_empty()).then_some(paths)
}

/// All files below `root` except those that the plain patterns of `.gitignore` name.
fn walk(root: &Path) -> Result<Vec<String>, Error> {
    let ignore = std::fs::read_to_string(root.join(".gitignore")).unwrap_or_default();
    let mut paths = Vec::new();
    let mut folders = vec![String::new()];
    while let Some(folder) = folders.pop() {
        let on_disk = root.join(&folder);
        for entry in std::fs::read_dir(&on_disk).map_err(Error::io("list", &on_disk))? {
            let entry = entry.map_err(Error::io("list", &on_disk))?;
            let name = entry.file_name().to_string_lossy().into_owned();
            let path = format!("{folder}{name}");
            if name == ".git" || ignored(&ignore, &path, &name) {
                continue;
            }
            let kind = entry.file_type().map_err(Error::io("inspect", &entry.path()))?;
            if kind.is_dir() {
                folders.push(format!("{path}/"));
            } else {
                paths.push(path);
            }
        }
    }
    Ok(paths)
}

/// The patterns this repository uses: `/name`, `name`, `name/` and `*.ext`.
fn ignored(ignore: &str, path: &str, name: &str) -> bool {
    ignore.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#')).any(|line| {
        let pattern = line.trim_end_matches('/');
        match (pattern.strip_prefix('/'), pattern.strip_prefix('*')) {
            (Some(rooted), _) => rooted == path,
            (None, Some(end)) => name.ends_with(end),
            (None, None) => pattern == name || pattern == path,
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folders_and_stems() {
        let tree = Tree::from([("a/b.rs", ""), ("a/c/d.rs", ""), ("a/b.txt", ""), ("ab", "")]);
        assert!(tree.has("a") && tree.has("a/c/") && tree.has("a/b.rs") && tree.has("ab"));
        assert!(!tree.has("a/b") && !tree.has("a/d.rs") && !tree.has_file("a"));
        assert_eq!(tree.in_folder("a", "rs").collect::<Vec<_>>(), [("a/b.rs", "b")]);
    }

    #[test]
    fn ignore_patterns() {
        let ignore = "# comment\n/target\n*.tmp\n__pycache__/\n";
        assert!(ignored(ignore, "target", "target"));
        assert!(!ignored(ignore, "crates/target", "target"));
        assert!(ignored(ignore, "x/y.tmp", "y.tmp"));
        assert!(ignored(ignore, "x/__pycache__", "__pycache__"));
        assert!(!ignored(ignore, "src", "src"));
    }

    #[test]
    fn this_file_is_found_with_and_without_git() {
        let this = "xtask/src/tree.rs";
        assert!(Tree::load(&root()).unwrap().has_file(this));
        let walked = walk(&root()).unwrap();
        assert!(walked.iter().any(|path| path == this));
        assert!(!walked.iter().any(|path| path.starts_with("target/") || path.starts_with(".git/")));
    }
}
