//! The folder of checkpoints: names, the link `latest`, and which ones are kept.

use std::fs::File;
use std::path::{Path, PathBuf};

use super::manifest::verify;
use crate::{Result, TrainError};

/// The folder of one step.
pub fn step_dir(checkpoints: &Path, step: u64) -> PathBuf {
    checkpoints.join(format!("step-{step}"))
}

/// Steps that have a folder, ascending; nothing is said about their content.
pub fn list(checkpoints: &Path) -> Result<Vec<u64>> {
    let entries = match std::fs::read_dir(checkpoints) {
        Ok(entries) => entries,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(e) => return Err(TrainError::io(checkpoints, "listing", e)),
    };
    let names = entries.filter_map(|e| e.ok()?.file_name().into_string().ok());
    let mut steps: Vec<u64> = names.filter_map(|n| n.strip_prefix("step-")?.parse().ok()).collect();
    steps.sort_unstable();
    Ok(steps)
}

/// The newest whole checkpoint.
#[derive(Debug, PartialEq)]
pub struct Found {
    /// Its folder.
    pub path: PathBuf,
    /// Its step.
    pub step: u64,
    /// Newer folders that were passed over, with the reason.
    pub damaged: Vec<String>,
}

/// Finds the newest checkpoint whose manifest and files are whole.
pub fn find_latest(checkpoints: &Path) -> Result<Option<Found>> {
    let mut damaged = Vec::new();
    for step in list(checkpoints)?.into_iter().rev() {
        let path = step_dir(checkpoints, step);
        match verify(&path) {
            Ok(found) if found == step => return Ok(Some(Found { path, step, damaged })),
            Ok(found) => {
                damaged.push(format!("checkpoint {}: its manifest is of step {found}", path.display()))
            }
            Err(error) => damaged.push(error.to_string()),
        }
    }
    if damaged.is_empty() {
        return Ok(None);
    }
    Err(TrainError::Checkpoint {
        path: checkpoints.into(),
        reason: format!("no checkpoint is whole: {}", damaged.join("; ")),
    })
}

/// Moves a finished temporary folder to its name and points `latest` at it.
pub(super) fn publish(checkpoints: &Path, temporary: &Path, target: &Path) -> Result<()> {
    let aside = temporary.with_extension("old");
    let _ = std::fs::remove_dir_all(&aside);
    if target.exists() {
        std::fs::rename(target, &aside)
            .map_err(|e| TrainError::io(target, "moving the old checkpoint aside", e))?;
    }
    std::fs::rename(temporary, target)
        .map_err(|e| TrainError::io(target, "renaming the checkpoint to", e))?;
    File::open(checkpoints)
        .and_then(|f| f.sync_all())
        .map_err(|e| TrainError::io(checkpoints, "syncing", e))?;
    point_latest(checkpoints, target)?;
    let _ = std::fs::remove_dir_all(&aside);
    Ok(())
}

/// Replaces the link `latest` in one rename.
fn point_latest(checkpoints: &Path, target: &Path) -> Result<()> {
    let latest = checkpoints.join("latest");
    let temporary = checkpoints.join(format!(".latest.tmp-{}", std::process::id()));
    let name = target.file_name().unwrap_or_default();
    let _ = std::fs::remove_file(&temporary);
    let linked = link(name.as_ref(), &temporary).and_then(|()| std::fs::rename(&temporary, &latest));
    linked.map_err(|e| TrainError::io(&latest, "pointing at the new checkpoint", e))
}

#[cfg(unix)]
fn link(name: &Path, at: &Path) -> std::io::Result<()> {
    std::os::unix::fs::symlink(name, at)
}

/// Where symbolic links need rights, `latest` is a file that holds the folder's name.
#[cfg(not(unix))]
fn link(name: &Path, at: &Path) -> std::io::Result<()> {
    std::fs::write(at, name.to_string_lossy().as_bytes())
}

/// Which checkpoints stay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Keep {
    /// The newest so many; 0 keeps all.
    pub last: usize,
    /// And every one whose step is a multiple of this; 0 keeps none for that reason.
    pub every: u64,
}

/// Removes checkpoints that `keep` does not cover, never the newest, and what killed processes left behind.
/// A folder is renamed before it is emptied, so that a half-removed one is never taken for a checkpoint.
pub fn prune(checkpoints: &Path, keep: Keep) -> Result<()> {
    let steps = list(checkpoints)?;
    let cut = if keep.last == 0 { 0 } else { steps.len().saturating_sub(keep.last.max(1)) };
    for &step in &steps[..cut] {
        if keep.every != 0 && step % keep.every == 0 {
            continue;
        }
        let path = step_dir(checkpoints, step);
        let trash = checkpoints.join(format!(".step-{step}.trash"));
        let _ = std::fs::remove_dir_all(&trash);
        std::fs::rename(&path, &trash).map_err(|e| TrainError::io(&path, "removing an old checkpoint", e))?;
        std::fs::remove_dir_all(&trash)
            .map_err(|e| TrainError::io(&trash, "removing an old checkpoint", e))?;
    }
    Ok(())
}

/// Removes temporary and half-removed folders of processes that were killed. Call it when a run starts:
/// one run directory has one writer.
pub(crate) fn sweep(checkpoints: &Path) -> Result<()> {
    let Ok(entries) = std::fs::read_dir(checkpoints) else { return Ok(()) };
    for entry in entries.flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let path = entry.path();
        if name.starts_with(".step-") {
            std::fs::remove_dir_all(&path)
                .map_err(|e| TrainError::io(&path, "removing left-over files", e))?;
        } else if name.starts_with(".latest.tmp-") {
            std::fs::remove_file(&path).map_err(|e| TrainError::io(&path, "removing left-over files", e))?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pruning_keeps_the_newest_and_the_multiples() {
        let dir = tempfile::tempdir().unwrap();
        for step in [10, 20, 30, 40, 50] {
            std::fs::create_dir(step_dir(dir.path(), step)).unwrap();
        }
        std::fs::create_dir(dir.path().join(".step-7.tmp-1")).unwrap();
        prune(dir.path(), Keep { last: 2, every: 20 }).unwrap();
        assert_eq!(list(dir.path()).unwrap(), [20, 40, 50]);
        prune(dir.path(), Keep { last: 0, every: 0 }).unwrap();
        assert_eq!(list(dir.path()).unwrap(), [20, 40, 50]);
        sweep(dir.path()).unwrap();
        assert!(!dir.path().join(".step-7.tmp-1").exists());
    }

    #[test]
    fn a_moved_aside_checkpoint_is_not_found() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(find_latest(dir.path()).unwrap(), None);
        std::fs::create_dir(step_dir(dir.path(), 3)).unwrap();
        let message = find_latest(dir.path()).unwrap_err().to_string();
        assert!(message.contains("no checkpoint is whole") && message.contains("step-3"), "{message}");
    }
}
