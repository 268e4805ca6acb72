//! Files that appear whole or not at all: temporary name, fsync, rename, fsync of the folder.
//!
//! Every file that replaces another one goes through here, those of runs and reports included.

use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

/// What the operating system refused: the caller's own error type says what to do about it.
#[derive(Debug, thiserror::Error)]
#[error("cannot {action} {}: {source}", path.display())]
pub struct FileError {
    /// What was tried, an infinitive.
    pub action: &'static str,
    /// The file or folder.
    pub path: PathBuf,
    /// The operating system's answer.
    #[source]
    pub source: io::Error,
}

impl FileError {
    fn new(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> FileError {
        move |source| FileError { action, path: path.to_path_buf(), source }
    }
}

/// Checks that a file can be put at `path`, for a command that would know only after hours of work.
///
/// # Errors
/// A folder that does not exist; a folder, a device or a pipe at `path`, which is never replaced.
pub fn check(path: &Path) -> Result<(), FileError> {
    let refuse = |source| Err(FileError { action: "write", path: path.to_path_buf(), source });
    if let Ok(metadata) = fs::metadata(path)
        && !metadata.is_file()
    {
        return refuse(match metadata.is_dir() {
            true => io::Error::from(io::ErrorKind::IsADirectory),
            false => {
                io::Error::other("it is a device or a pipe, and files appear whole by a rename; name a file")
            }
        });
    }
    match fs::metadata(folder_of(path)) {
        Ok(folder) if folder.is_dir() => Ok(()),
        Ok(_) => refuse(io::ErrorKind::NotADirectory.into()),
        Err(e) => refuse(e),
    }
}

fn folder_of(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}

/// Writes `bytes` to `path`; an existing file is replaced only once the new one is on disk.
///
/// # Errors
/// A full or read-only disk, a missing folder: the old file is untouched.
pub fn write(path: &Path, bytes: &[u8]) -> Result<(), FileError> {
    let mut file = AtomicFile::create(path)?;
    file.file().write_all(bytes).map_err(FileError::new("write", path))?;
    file.commit()
}

/// Replaces `path` by what `fill` writes, or leaves it untouched.
///
/// # Errors
/// Those of `fill` and of [`write()`].
pub fn replace<E: From<FileError>>(
    path: &Path,
    fill: impl FnOnce(&mut BufWriter<&mut File>) -> Result<(), E>,
) -> Result<(), E> {
    let mut file = AtomicFile::create(path)?;
    let mut writer = BufWriter::new(file.file());
    fill(&mut writer)?;
    writer.flush().map_err(FileError::new("write", path))?;
    drop(writer);
    Ok(file.commit()?)
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
    pub(crate) fn create(target: &Path) -> Result<Self, FileError> {
        check(target)?;
        let mut name = std::ffi::OsString::from(".");
        name.push(target.file_name().unwrap_or_default());
        name.push(format!(".tmp-{}", std::process::id()));
        let temporary = target.with_file_name(name);
        let file = File::options()
            .read(true)
            .write(true)
            .create(true)
            .truncate(true)
            .open(&temporary)
            .map_err(FileError::new("create", target))?;
        Ok(Self { file, temporary, target: target.to_path_buf(), committed: false })
    }

    /// The open file.
    pub(crate) fn file(&mut self) -> &mut File {
        &mut self.file
    }

    /// Puts the file in its place.
    pub(crate) fn commit(mut self) -> Result<(), FileError> {
        self.file.sync_all().map_err(FileError::new("flush to disk", &self.target))?;
        fs::rename(&self.temporary, &self.target).map_err(FileError::new("replace", &self.target))?;
        self.committed = true;
        // Some file systems cannot sync a folder; the rename itself has succeeded by now.
        if let Ok(dir) = File::open(folder_of(&self.target)) {
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
    fn failed_replacement_leaves_the_old_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("report.html");
        write(&path, b"old").unwrap();
        let failed = replace(&path, |out| {
            out.write_all(b"half").unwrap();
            Err(FileError::new("draw", &path)(io::Error::other("no")))
        });
        assert!(failed.unwrap_err().to_string().starts_with("cannot draw "));
        assert_eq!(fs::read(&path).unwrap(), b"old");
        replace(&path, |out| out.write_all(b"new").map_err(FileError::new("write", &path))).unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"new");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn missing_folder_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let err = write(&dir.path().join("no/such/a.json"), b"x").unwrap_err().to_string();
        assert!(err.contains("cannot write") && err.contains("no/such"), "{err}");
    }

    #[cfg(unix)]
    #[test]
    fn only_files_are_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let err = write(dir.path(), b"x").unwrap_err();
        assert_eq!(err.source.kind(), io::ErrorKind::IsADirectory, "{err}");
        let socket = dir.path().join("socket");
        let _listening = std::os::unix::net::UnixListener::bind(&socket).unwrap();
        let err = write(&socket, b"x").unwrap_err().to_string();
        assert!(err.contains("device or a pipe"), "{err}");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
        let err = check(&dir.path().join("socket/a.json")).unwrap_err();
        assert_eq!(err.source.kind(), io::ErrorKind::NotADirectory, "{err}");
    }
}
