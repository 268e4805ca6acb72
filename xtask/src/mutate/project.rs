//! The copy of the crate under `target/mutants`: its sources with all mutants, in a workspace of its own.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::Value;

use crate::error::Error;

/// The crate under test, from the repository root.
pub const CRATE: &str = "crates/rb-autograd";
/// The copy, from the repository root.
const COPY: &str = "target/mutants";

/// The module that the copy has more than the original.
const SWITCH: &str = r#"//! Which mutant is active.

use std::io::Write;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicBool, Ordering};

static ACTIVE: LazyLock<u32> =
    LazyLock::new(|| std::env::var("ACTIVE_MUTANT").map_or(0, |text| text.parse().unwrap()));
static TRACE: LazyLock<Option<String>> = LazyLock::new(|| std::env::var("TRACE_MUTANTS").ok());
static REACHED: [AtomicBool; NUM_MUTANTS] = [const { AtomicBool::new(false) }; NUM_MUTANTS];

#[inline]
pub fn is(number: u32) -> bool {
    match *ACTIVE {
        0 => reached(number),
        active => active == number,
    }
}

fn reached(number: u32) -> bool {
    if let Some(path) = TRACE.as_deref()
        && !REACHED[number as usize].swap(true, Ordering::Relaxed)
    {
        let mut file = std::fs::OpenOptions::new().append(true).create(true).open(path).unwrap();
        file.write_all(format!("{number}\n").as_bytes()).unwrap();
    }
    false
}

pub trait Whole: Copy {
    fn less(self) -> Self;
}

macro_rules! whole {
    ($($t:ty),*) => { $(impl Whole for $t { fn less(self) -> Self { self.wrapping_sub(1) } })* };
}
whole!(usize, u64, u32, u16, u8, isize, i64, i32);

#[inline]
pub fn less<T: Whole>(number: u32, end: T) -> T {
    if is(number) { end.less() } else { end }
}
"#;

/// Writes the copy with `files`, paths from its folder `src`, in place of the originals.
pub fn write(root: &Path, files: &[(String, String)], num_mutants: usize) -> Result<(), Error> {
    let copy = root.join(COPY);
    let krate = copy.join(CRATE);
    for folder in ["src", "golden"] {
        copy_folder(&root.join(CRATE).join(folder), &krate.join(folder))?;
    }
    copy_folder(&root.join("kernels"), &copy.join("kernels"))?;
    for (path, text) in files {
        put(&krate.join("src").join(path), text)?;
    }
    let library = krate.join("src/lib.rs");
    // Warnings of rewritten code are of no use to anybody.
    let text = format!("{}\n#[allow(missing_docs)]\npub mod mutant;\n", read(&library)?);
    let text = text.replacen("\npub mod ", "\n#![allow(warnings, clippy::all)]\n\npub mod ", 1);
    put(&library, &text)?;
    put(&krate.join("src/mutant.rs"), &SWITCH.replace("NUM_MUTANTS", &(num_mutants + 1).to_string()))?;
    let manifest = read(&root.join(CRATE).join("Cargo.toml"))?;
    put(&krate.join("Cargo.toml"), &manifest.replace("[lints]\nworkspace = true\n", ""))?;
    let manifest = workspace(&read(&root.join("Cargo.toml"))?);
    put(&copy.join("Cargo.toml"), &manifest)?;
    put(&copy.join("Cargo.lock"), &read(&root.join("Cargo.lock"))?)
}

/// The manifest of the repository, for one crate: other crates are where they were. Another version keeps cargo from
/// taking what it built of the original for the copy.
fn workspace(manifest: &str) -> String {
    let line = |line: &str| -> String {
        match line.split_once(" = ") {
            Some(("members", _)) => format!("members = [\"{CRATE}\"]"),
            Some(("default-members", _)) => String::new(),
            Some(("version", _)) => "version = \"0.0.0-mutants\"".into(),
            _ => line.replace("path = \"crates/", "path = \"../../crates/"),
        }
    };
    manifest.lines().map(line).collect::<Vec<_>>().join("\n")
}

/// Builds the unit tests of the copy; the program that runs them. Dependencies are those of the repository's own
/// tests.
pub fn build(root: &Path) -> Result<PathBuf, Error> {
    let words = ["test", "--lib", "--no-run", "--message-format=json-render-diagnostics"];
    let program = format!("cargo {}", words.join(" "));
    let mut command = Command::new("cargo");
    command.args(words).current_dir(root.join(COPY)).stdin(Stdio::null()).stderr(Stdio::piped());
    command.arg("--target-dir").arg(root.join("target"));
    let output = command.output().map_err(|source| Error::Spawn { program: program.clone(), source })?;
    if !output.status.success() {
        let detail = String::from_utf8_lossy(&output.stderr).into_owned();
        return Err(Error::Program { program, detail });
    }
    let messages = String::from_utf8_lossy(&output.stdout);
    let mut executable = messages.lines().filter_map(|line| {
        let message: Value = serde_json::from_str(line).ok()?;
        Some(PathBuf::from(message["executable"].as_str()?))
    });
    executable.next_back().ok_or(Error::Program { program, detail: "it built no test program".into() })
}

fn copy_folder(from: &Path, to: &Path) -> Result<(), Error> {
    std::fs::create_dir_all(to).map_err(Error::io("create", to))?;
    let entries = std::fs::read_dir(from).map_err(Error::io("read", from))?;
    for entry in entries {
        let path = entry.map_err(Error::io("read", from))?.path();
        let Some(name) = path.file_name() else { continue };
        let target = to.join(name);
        if path.is_dir() {
            copy_folder(&path, &target)?;
        } else {
            let bytes = std::fs::read(&path).map_err(Error::io("read", &path))?;
            put_bytes(&target, &bytes)?;
        }
    }
    Ok(())
}

fn read(path: &Path) -> Result<String, Error> {
    std::fs::read_to_string(path).map_err(Error::io("read", path))
}

fn put(path: &Path, text: &str) -> Result<(), Error> {
    put_bytes(path, text.as_bytes())
}

/// Writes a file unless it has this content already, so that nothing is built twice.
fn put_bytes(path: &Path, bytes: &[u8]) -> Result<(), Error> {
    if std::fs::read(path).is_ok_and(|old| old == bytes) {
        return Ok(());
    }
    std::fs::write(path, bytes).map_err(Error::io("write", path))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_copy_has_a_workspace_of_its_own() {
        let manifest = "[workspace]\nmembers = [\"crates/*\", \"xtask\"]\ndefault-members = [\"a\"]\n\
            [workspace.package]\nversion = \"0.0.0\"\nedition = \"2024\"\n[workspace.dependencies]\n\
            rb-cuda = { path = \"crates/rb-cuda\" }\nrand = \"=0.9.5\"";
        let expected = "[workspace]\nmembers = [\"crates/rb-autograd\"]\n\n[workspace.package]\n\
            version = \"0.0.0-mutants\"\nedition = \"2024\"\n[workspace.dependencies]\n\
            rb-cuda = { path = \"../../crates/rb-cuda\" }\nrand = \"=0.9.5\"";
        assert_eq!(workspace(manifest), expected);
    }
}
