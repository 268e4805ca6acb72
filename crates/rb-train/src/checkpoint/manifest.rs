//! `manifest.json`: sizes and SHA-256 of every other file of a checkpoint, written last.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::path::Path;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::write_json;
use crate::{Result, TrainError};

const NAME: &str = "manifest.json";
const VERSION: u32 = 1;

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Manifest {
    format_version: u32,
    step: u64,
    files: BTreeMap<String, FileEntry>,
}

#[derive(Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct FileEntry {
    bytes: u64,
    sha256: String,
}

/// Syncs every file below `dir`, then writes and syncs the manifest and the folders.
pub(super) fn write(dir: &Path, step: u64) -> Result<()> {
    let mut files = BTreeMap::new();
    for name in files_below(dir)? {
        let path = dir.join(&name);
        let file = File::open(&path).map_err(|e| TrainError::io(&path, "opening", e))?;
        file.sync_all().map_err(|e| TrainError::io(&path, "syncing", e))?;
        files.insert(name, digest(&path)?);
    }
    let path = dir.join(NAME);
    write_json(&path, &Manifest { format_version: VERSION, step, files })?;
    for path in [path, dir.join("trainer"), dir.to_path_buf()] {
        File::open(&path).and_then(|f| f.sync_all()).map_err(|e| TrainError::io(&path, "syncing", e))?;
    }
    Ok(())
}

/// Checks that a checkpoint is whole: every listed file is there with its size and checksum. Returns the step.
///
/// # Errors
/// [`TrainError::Checkpoint`] naming the first file that is missing, truncated or changed.
pub fn verify(dir: &Path) -> Result<u64> {
    let bad = |reason: String| TrainError::Checkpoint { path: dir.into(), reason };
    let path = dir.join(NAME);
    let bytes = std::fs::read(&path).map_err(|e| {
        bad(format!(
            "{NAME} cannot be read ({e}); the folder is not a checkpoint or was not written to its end"
        ))
    })?;
    let manifest: Manifest =
        serde_json::from_slice(&bytes).map_err(|e| bad(format!("{NAME} is damaged ({e})")))?;
    if manifest.format_version != VERSION {
        return Err(bad(format!(
            "{NAME} has version {}, this program reads {VERSION}",
            manifest.format_version
        )));
    }
    for (name, expected) in &manifest.files {
        let file = dir.join(name);
        let found = std::fs::metadata(&file).map_err(|e| bad(format!("{name} is missing ({e})")))?.len();
        if found != expected.bytes {
            return Err(bad(format!(
                "{name} has {found} bytes, {} were written: it is truncated or replaced",
                expected.bytes
            )));
        }
        if digest(&file)? != *expected {
            return Err(bad(format!(
                "{name} has another checksum than when it was written: it is damaged or swapped"
            )));
        }
    }
    Ok(manifest.step)
}

fn digest(path: &Path) -> Result<FileEntry> {
    let mut file = File::open(path).map_err(|e| TrainError::io(path, "opening", e))?;
    let mut hash = Sha256::new();
    let mut buffer = vec![0; 1 << 20];
    let mut bytes = 0;
    loop {
        let n = file.read(&mut buffer).map_err(|e| TrainError::io(path, "reading", e))?;
        if n == 0 {
            break;
        }
        bytes += n as u64;
        hash.update(&buffer[..n]);
    }
    let sha256 = hash.finalize().iter().map(|b| format!("{b:02x}")).collect();
    Ok(FileEntry { bytes, sha256 })
}

/// Relative names of all files but the manifest, one folder deep.
fn files_below(dir: &Path) -> Result<Vec<String>> {
    let mut names = Vec::new();
    for (folder, prefix) in [(dir.to_path_buf(), ""), (dir.join("trainer"), "trainer/")] {
        let fail = |e| TrainError::io(&folder, "listing", e);
        for entry in std::fs::read_dir(&folder).map_err(fail)? {
            let entry = entry.map_err(fail)?;
            let name = entry.file_name().to_string_lossy().into_owned();
            if entry.file_type().map_err(fail)?.is_file() && name != NAME {
                names.push(format!("{prefix}{name}"));
            }
        }
    }
    names.sort();
    Ok(names)
}
