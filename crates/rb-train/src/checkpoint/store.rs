//! The folder of checkpoints: names, the links `latest` and `best`, and which ones are kept.

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
    point(checkpoints, "latest", target)?;
    let _ = std::fs::remove_dir_all(&aside);
    Ok(())
}

/// Makes `best` the checkpoint of `step`; without one there is no such link.
pub fn point_best(checkpoints: &Path, step: Option<u64>) -> Result<()> {
    if let Some(step) = step {
        return point(checkpoints, "best", &step_dir(checkpoints, step));
    }
    let best = checkpoints.join("best");
    match std::fs::remove_file(&best) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
            Err(TrainError::io(&best, "removing the link to a checkpoint that is gone", e))
        }
        _ => Ok(()),
    }
}

/// Replaces the link `name` in one rename.
fn point(checkpoints: &Path, name: &str, target: &Path) -> Result<()> {
    let place = checkpoints.join(name);
    let temporary = checkpoints.join(format!(".{name}.tmp-{}", std::process::id()));
    let folder = target.file_name().unwrap_or_default();
    let _ = std::fs::remove_file(&temporary);
    let linked = link(folder.as_ref(), &temporary).and_then(|()| std::fs::rename(&temporary, &place));
    linked.map_err(|e| TrainError::io(&place, "pointing at a checkpoint", e))
}

#[cfg(unix)]
fn link(name: &Path, at: &Path) -> std::io::Result<()> {
    std::os::unix::fs::symlink(name, at)
}

/// Where symbolic links need rights, a link is a file that holds the folder's name.
#[cfg(not(unix))]
fn link(name: &Path, at: &Path) -> std::io::Result<()> {
    std::fs::write(at, name.to_string_lossy().as_bytes())
}

/// Which checkpoints stay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Keep {
    /// So many, the newest and `best`; 0 keeps all.
    pub last: usize,
    /// And every one whose step is a multiple of this; 0 keeps none for that reason.
    pub every: u64,
    /// The step that `best` points at, which stays as one of `last`.
    pub best: Option<u64>,
}

/// Removes checkpoints that `keep` does not cover, never the newest, and what killed processes left behind.
/// A folder is renamed before it is emptied, so that a half-removed one is never taken for a checkpoint.
pub fn prune(checkpoints: &Path, keep: Keep) -> Result<()> {
    let steps = list(checkpoints)?;
    let newest = |count: usize| steps.len().saturating_sub(count.max(1));
    let cut = match keep.best {
        _ if keep.last == 0 => 0,
        // It takes the place of the oldest that would have stayed.
        Some(best) if steps[..newest(keep.last)].contains(&best) => newest(keep.last - 1),
        _ => newest(keep.last),
    };
    for &step in &steps[..cut] {
        if (keep.every != 0 && step % keep.every == 0) || keep.best == Some(step) {
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
        } else if name.starts_with(".latest.tmp-") || name.starts_with(".best.tmp-") {
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
        prune(dir.path(), Keep { last: 2, every: 20, best: None }).unwrap();
        assert_eq!(list(dir.path()).unwrap(), [20, 40, 50]);
        prune(dir.path(), Keep { last: 0, every: 0, best: None }).unwrap();
        assert_eq!(list(dir.path()).unwrap(), [20, 40, 50]);
        sweep(dir.path()).unwrap();
        assert!(!dir.path().join(".step-7.tmp-1").exists());
    }

    #[test]
    fn the_best_stays_in_the_place_of_an_older_one() {
        for (last, best, kept) in [
            (3, 20, &[20, 40, 50][..]),
            (1, 20, &[20, 50]),
            (1, 50, &[50]),
            (2, 40, &[40, 50]),
            (2, 30, &[30, 50]),
            (9, 10, &[10, 20, 30, 40, 50]),
            (2, 7, &[40, 50]),
        ] {
            let dir = tempfile::tempdir().unwrap();
            for step in [10, 20, 30, 40, 50] {
                std::fs::create_dir(step_dir(dir.path(), step)).unwrap();
            }
            prune(dir.path(), Keep { last, every: 0, best: Some(best) }).unwrap();
            assert_eq!(list(dir.path()).unwrap(), kept, "{last} with {best} as best");
        }
    }

    #[test]
    fn best_follows_and_goes() {
        let dir = tempfile::tempdir().unwrap();
        for step in [10, 20] {
            std::fs::create_dir(step_dir(dir.path(), step)).unwrap();
            std::fs::write(step_dir(dir.path(), step).join("mark"), step.to_string()).unwrap();
        }
        let mark = || std::fs::read_to_string(dir.path().join("best/mark")).ok();
        point_best(dir.path(), None).unwrap();
        assert_eq!(mark(), None);
        for step in [20, 10] {
            point_best(dir.path(), Some(step)).unwrap();
            assert_eq!(mark(), Some(step.to_string()));
        }
        point_best(dir.path(), None).unwrap();
        assert!(mark().is_none() && std::fs::read_dir(dir.path()).unwrap().count() == 2);
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
