//! Files that appear whole or not at all: temporary name, fsync, rename, fsync of the folder.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};

use crate::error::{DataError, Result};

/// Writes `bytes` to `path`; an existing file is replaced only once the new one is on disk.
pub(crate) fn write(path: &Path, bytes: &[u8]) -> Result<()> {
    let mut file = AtomicFile::create(path)?;
    file.file().write_all(bytes).map_err(|e| DataError::io("write", path, e))?;
    file.commit()
}

/// A file under a temporary name in the folder of its final one; removed unless committed.
pub(crate) struct AtomicFile {
    file: File,
    temporary: PathBuf,
    target: PathBuf,
    committed: bool,
}

impl AtomicFile {
    /// Creates the temporary file, readable and writable.
    pub(crate) fn create(target: &Path) -> Result<Self> {
        let mut name = target.file_name().unwrap_or_default().to_os_string();
        name.push(format!(".tmp-{}", std::process::id()));
        let temporary = target.with_file_name(name);
        let file = File::options()
            .read(true)
            .write(true)
            .create(true)
            .truncate(true)
            .open(&temporary)
            .map_err(|e| DataError::io("create", &temporary, e))?;
        Ok(Self { file, temporary, target: target.to_path_buf(), committed: false })
    }

    /// The open file.
    pub(crate) fn file(&mut self) -> &mut File {
        &mut self.file
    }

    /// Puts the file in its place.
    pub(crate) fn commit(mut self) -> Result<()> {
        self.file.sync_all().map_err(|e| DataError::io("sync", &self.temporary, e))?;
        fs::rename(&self.temporary, &self.target).map_err(|e| DataError::io("rename", &self.target, e))?;
        self.committed = true;
        let folder = match self.target.parent() {
            Some(p) if !p.as_os_str().is_empty() => p.to_path_buf(),
            _ => PathBuf::from("."),
        };
        // Some file systems cannot sync a folder; the rename itself has succeeded by now.
        if let Ok(dir) = File::open(&folder) {
            let _ = dir.sync_all();
        }
        Ok(())
    }
}

impl Drop for AtomicFile {
    fn drop(&mut self) {
        if !self.committed {
            let _ = fs::remove_file(&self.temporary);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn replaces_whole_and_leaves_nothing_on_failure() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.json");
        write(&path, b"one").unwrap();
        write(&path, b"two").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"two");
        let file = AtomicFile::create(&path).unwrap();
        drop(file);
        assert_eq!(fs::read(&path).unwrap(), b"two");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1, "temporary files must be removed");
    }

    #[test]
    fn missing_folder_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let err = write(&dir.path().join("no/such/a.json"), b"x").unwrap_err().to_string();
        assert!(err.contains("cannot create") && err.contains("no/such"), "{err}");
    }
}
