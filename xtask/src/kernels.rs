//! Compiles every kernel for every architecture, without a GPU: `rb kernels` does the work, since it is the
//! program that knows which kernels there are.

use std::path::Path;
use std::process::Command;

use crate::error::Error;

const WORDS: &[&str] = &["run", "--quiet", "--release", "-p", "rb-cli", "--", "kernels"];

/// Runs it with `options` after its own; true if all kernels are good.
pub fn run(root: &Path, options: &[String]) -> Result<bool, Error> {
    let program = format!("cargo {}", WORDS.join(" "));
    let status = Command::new("cargo").args(WORDS).args(options).current_dir(root).status();
    Ok(status.map_err(|source| Error::Spawn { program, source })?.success())
}
