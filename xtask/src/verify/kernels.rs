//! The step that compiles every kernel without a GPU, with the NVRTC of a wheel from PyPI.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use super::counts::{number_after, number_before};
use super::steps::{Context, Outcome};
use super::{State, programs};
use crate::error::Error;

/// The wheel, pinned: another compiler may give other registers and spills.
const WHEEL: &str = "nvidia-cuda-nvrtc==13.5.37";
/// Where it is unpacked, from the repository root; the name has the version, so that a new pin is fetched.
const FOLDER: &str = "target/nvrtc-13.5.37";
/// Ways to call pip, tried in order.
const PIPS: &[&[&str]] = &[&["python3", "-m", "pip"], &["pip3"], &["pip"]];

pub const WORDS: &[&str] = &["kernels", "--quick"];

/// Fetches NVRTC if it is not there, compiles the kernels, and reads what was compiled.
pub fn run(context: &Context, log_path: &Path) -> Result<Outcome, Error> {
    let folder = match nvrtc(context.root) {
        Ok(folder) => folder,
        Err(reason) => {
            let detail = format!("no NVRTC: {reason}");
            let log = format!("{detail}\n");
            std::fs::write(log_path, &log).map_err(Error::io("write", log_path))?;
            return Ok(Outcome { state: State::NotRun, detail, passed: 0, failed: 0, log });
        }
    };
    let environment = [("RUSTINGBRAIN_CUDA_PATH", folder.as_path())];
    let exited_well = programs::run_rb(context.root, WORDS, &environment, log_path)?;
    let bytes = std::fs::read(log_path).map_err(Error::io("read", log_path))?;
    let log = String::from_utf8_lossy(&bytes).into_owned();
    let (compiled, problems) = compilations(&log);
    let good = exited_well && compiled > 0 && problems == 0;
    let detail = format!("{compiled} compilations, {problems} problems");
    let state = if good { State::Ok } else { State::Failed };
    Ok(Outcome { state, detail, passed: compiled.saturating_sub(problems), failed: problems, log })
}

/// The folder with NVRTC in it, or why there is none.
fn nvrtc(root: &Path) -> Result<PathBuf, String> {
    let folder = root.join(FOLDER);
    if folder.join("nvidia").is_dir() {
        return Ok(folder);
    }
    // Unpacked beside its place and moved, so that half a wheel is never taken for a whole one.
    let part = folder.with_extension("part");
    let mut reason = "pip is not installed".to_string();
    for pip in PIPS {
        // A leftover of a run that was stopped; if it cannot be removed, pip or the move says so.
        let _ = std::fs::remove_dir_all(&part);
        let mut command = Command::new(pip[0]);
        command.args(&pip[1..]).args(["install", "--quiet", "--no-deps", "--only-binary=:all:"]);
        command.args(["--disable-pip-version-check", "--retries", "2", "--timeout", "20", "--target"]);
        command.arg(&part).arg(WHEEL).current_dir(root).stdin(Stdio::null());
        // A program that does not start leaves the reason of the one before.
        let Ok(output) = command.output() else { continue };
        if output.status.success() {
            std::fs::rename(&part, &folder).map_err(|e| format!("cannot create {FOLDER}: {e}"))?;
            return Ok(folder);
        }
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        let last = text.lines().rev().map(str::trim).find(|line| !line.is_empty());
        if !text.contains("No module named pip") {
            reason = format!("`pip install {WHEEL}`: {}", last.unwrap_or("failed without a word"));
        }
    }
    Err(reason)
}

/// Compilations and problems by the line `N compilations, M problems` that `rb kernels` prints.
fn compilations(log: &str) -> (usize, usize) {
    let line = log.lines().rev().find(|line| line.contains(" compilations, "));
    line.map_or((0, 0), |line| (number_before(line, " compilations"), number_after(line, " compilations, ")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_line_is_read() {
        assert_eq!(compilations("x\n1415 compilations, 2 problems\nerror: kernels\n"), (1415, 2));
        assert_eq!(compilations("error: no NVRTC"), (0, 0));
    }

    #[test]
    fn pin_and_folder_name_one_version() {
        let version = WHEEL.split("==").nth(1).unwrap();
        assert!(FOLDER.ends_with(version));
    }
}
