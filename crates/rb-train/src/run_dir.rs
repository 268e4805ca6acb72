//! The run directory: what lies where.
//!
//! ```text
//! runs/NAME/
//!   config.toml        the resolved config
//!   tokenizer.json
//!   data/train.bin     tokens; data/validation.bin where text is held out
//!   metrics.jsonl  tensorboard/  report.html  sample.txt
//!   checkpoints/step-N/  checkpoints/latest  checkpoints/best
//! ```

use std::fs::{File, TryLockError};
use std::path::{Path, PathBuf};

use crate::{Result, TrainError};

/// A run directory that this process may write: it holds a lock until it is dropped.
#[derive(Debug)]
pub struct RunDir {
    path: PathBuf,
    _lock: File,
}

impl RunDir {
    /// Makes a new run directory.
    ///
    /// With `out` given, that directory is used and must be empty or new; otherwise `runs/<stem>` or the first
    /// free `runs/<stem>-N`.
    pub fn create(out: Option<&Path>, stem: &str) -> Result<RunDir> {
        let path = match out {
            Some(path) => {
                if path.join("config.toml").exists() {
                    return Err(TrainError::RunDir {
                        path: path.into(),
                        reason: format!(
                            "holds a run already; continue it with `rb train --resume {}`, or choose another --out",
                            path.display()
                        ),
                    });
                }
                if !is_free(path) {
                    return Err(TrainError::RunDir {
                        path: path.into(),
                        reason: "is not empty and is not a run; choose another --out".into(),
                    });
                }
                path.to_path_buf()
            }
            None => {
                let base = Path::new("runs");
                let names = std::iter::once(stem.to_string()).chain((2..).map(|n| format!("{stem}-{n}")));
                names.map(|n| base.join(n)).find(|p| !p.exists()).unwrap_or_else(|| base.join(stem))
            }
        };
        std::fs::create_dir_all(path.join("data"))
            .map_err(|e| TrainError::io(&path, "creating the run directory", e))?;
        RunDir::lock(path)
    }

    /// Opens an existing run directory to continue it.
    pub fn open(path: &Path) -> Result<RunDir> {
        if !path.join("config.toml").is_file() {
            return Err(TrainError::RunDir {
                path: path.into(),
                reason:
                    "is not a run directory (it has no config.toml); give the folder that `rb train` printed"
                        .into(),
            });
        }
        RunDir::lock(path.to_path_buf())
    }

    /// Two writers would destroy each other's files, so the second is refused. The lock goes with the process.
    fn lock(path: PathBuf) -> Result<RunDir> {
        let name = path.join(".lock");
        let file = File::create(&name).map_err(|e| TrainError::io(&name, "creating the lock", e))?;
        match file.try_lock() {
            Ok(()) => Ok(RunDir { path, _lock: file }),
            Err(TryLockError::WouldBlock) => Err(TrainError::RunDir {
                path,
                reason: "is in use by another process; wait for it or stop it".into(),
            }),
            Err(TryLockError::Error(e)) => Err(TrainError::io(&name, "locking", e)),
        }
    }

    /// The directory.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// `config.toml`
    pub fn config(&self) -> PathBuf {
        self.path.join("config.toml")
    }

    /// `tokenizer.json`
    pub fn tokenizer(&self) -> PathBuf {
        self.path.join("tokenizer.json")
    }

    /// `data/train.bin`
    pub fn train_tokens(&self) -> PathBuf {
        self.path.join("data/train.bin")
    }

    /// `data/validation.bin`
    pub fn validation_tokens(&self) -> PathBuf {
        self.path.join("data/validation.bin")
    }

    /// `metrics.jsonl`
    pub fn metrics(&self) -> PathBuf {
        self.path.join("metrics.jsonl")
    }

    /// `checkpoints/`
    pub fn checkpoints(&self) -> PathBuf {
        self.path.join("checkpoints")
    }
}

/// Whether a new run may use this folder: it does not exist, is empty, or holds only what a run leaves that
/// was refused before it had a config (its text was missing, for example).
fn is_free(path: &Path) -> bool {
    let Ok(entries) = std::fs::read_dir(path) else { return true };
    let left_by_a_start =
        |name: &std::ffi::OsStr| [".lock", "data", "tokenizer.json"].iter().any(|n| name == *n);
    let mut entries = entries.flatten().peekable();
    entries.peek().is_none()
        || (path.join(".lock").exists() && entries.all(|entry| left_by_a_start(&entry.file_name())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_is_not_overwritten_and_has_one_writer() {
        let dir = tempfile::tempdir().unwrap();
        let out = dir.path().join("run");
        let run = RunDir::create(Some(&out), "x").unwrap();
        let message = RunDir::create(Some(&out), "x").unwrap_err().to_string();
        assert!(message.contains("in use by another process"), "{message}");
        std::fs::write(run.config(), "").unwrap();
        let message = RunDir::create(Some(&out), "x").unwrap_err().to_string();
        assert!(message.contains("--resume"), "{message}");
        let message = RunDir::open(&out).unwrap_err().to_string();
        assert!(message.contains("in use by another process"), "{message}");
        drop(run);
        RunDir::open(&out).unwrap();
        assert!(RunDir::open(dir.path()).unwrap_err().to_string().contains("no config.toml"));
        let message = RunDir::create(Some(dir.path()), "x").unwrap_err().to_string();
        assert!(message.contains("is not empty"), "{message}");
    }

    #[test]
    fn a_start_that_was_refused_can_be_tried_again_at_the_same_place() {
        let dir = tempfile::tempdir().unwrap();
        let out = dir.path().join("run");
        drop(RunDir::create(Some(&out), "x").unwrap());
        drop(RunDir::create(Some(&out), "x").unwrap());
        std::fs::write(out.join("mine.txt"), "x").unwrap();
        assert!(RunDir::create(Some(&out), "x").unwrap_err().to_string().contains("is not empty"));
    }
}
