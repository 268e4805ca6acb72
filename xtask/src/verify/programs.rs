//! The programs that the steps run: built as the tests are, so that their dependencies are not built twice, with
//! checks of overflow and without the switches of planted defects.

use std::path::{Path, PathBuf};
use std::process::Command;

use super::process;
use crate::error::Error;

/// A test of few dependencies is built along, by which the libraries get the features of dependencies that tests
/// have, and are shared with them.
const BUILD: &[&str] = &["build", "--workspace", "--bins", "--test", "live", "--target-dir", "target"];

/// Where `rb` lies once it is built.
pub fn rb(root: &Path) -> PathBuf {
    root.join("target/debug/rb")
}

/// Builds the programs where something changed, with the output in `log`; true if that went well.
pub fn build(root: &Path, log: &Path) -> Result<bool, Error> {
    let mut command = Command::new("cargo");
    command.args(BUILD).current_dir(root).env("CARGO_TERM_COLOR", "never");
    process::run_logged(command, log)
}

/// Builds the programs and runs `rb` with `words` and `environment`, with the output in `log`; true if both went
/// well.
pub fn run_rb(root: &Path, words: &[&str], environment: &[(&str, &Path)], log: &Path) -> Result<bool, Error> {
    if !build(root, log)? {
        return Ok(false);
    }
    let mut command = Command::new(rb(root));
    command.args(words).envs(environment.iter().copied()).current_dir(root);
    process::run_logged(command, log)
}
