//! A file of records that a crash or a full disk cannot spoil.

use super::ObserveError;
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// A file that grows by whole records: an append that fails is taken back.
#[derive(Debug)]
pub struct AppendFile {
    path: PathBuf,
    file: File,
    /// Bytes of the records written so far: what follows, if anything, is the rest of a failed append.
    good_len_bytes: u64,
    torn: bool,
}

impl AppendFile {
    /// Creates a file that does not exist yet.
    pub fn create_new(path: &Path) -> Result<Self, ObserveError> {
        let file = OpenOptions::new().append(true).create_new(true).open(path).map_err(|source| {
            if source.kind() == io::ErrorKind::AlreadyExists {
                ObserveError::AlreadyExists { path: path.to_path_buf() }
            } else {
                ObserveError::io("create", path)(source)
            }
        })?;
        Ok(Self { path: path.to_path_buf(), file, good_len_bytes: 0, torn: false })
    }

    /// Opens a file that exists, to append at its end.
    pub fn open(path: &Path) -> Result<Self, ObserveError> {
        let file = OpenOptions::new().append(true).open(path).map_err(ObserveError::io("open", path))?;
        let good_len_bytes = file.metadata().map_err(ObserveError::io("read the size of", path))?.len();
        Ok(Self { path: path.to_path_buf(), file, good_len_bytes, torn: false })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Writes one record with one system call where possible; on an error the file is as it was before.
    pub fn append(&mut self, record: &[u8]) -> Result<(), ObserveError> {
        if self.torn {
            self.take_back().map_err(ObserveError::io("repair", &self.path))?;
        }
        if let Err(source) = self.file.write_all(record) {
            self.torn = true;
            // If this fails too, the next append tries again before it writes.
            let _ = self.take_back();
            return Err(ObserveError::io("write", &self.path)(source));
        }
        self.good_len_bytes += record.len() as u64;
        Ok(())
    }

    /// Waits until the records are on the disk.
    pub fn sync(&self) -> Result<(), ObserveError> {
        self.file.sync_data().map_err(ObserveError::io("flush to disk", &self.path))
    }

    fn take_back(&mut self) -> io::Result<()> {
        self.file.set_len(self.good_len_bytes)?;
        self.torn = false;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::TempDir;
    use super::*;

    #[test]
    fn failed_append_is_taken_back() {
        let dir = TempDir::new();
        let mut file = AppendFile::create_new(&dir.path().join("a")).unwrap();
        file.append(b"one\n").unwrap();
        // What a full disk leaves: part of a record, and a take-back that could not be done at once.
        (&file.file).write_all(b"tw").unwrap();
        file.torn = true;
        file.append(b"two\n").unwrap();
        assert_eq!(std::fs::read(file.path()).unwrap(), b"one\ntwo\n");
        assert!(matches!(AppendFile::create_new(file.path()), Err(ObserveError::AlreadyExists { .. })));
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn full_disk_is_named() {
        let mut file = AppendFile::open(Path::new("/dev/full")).unwrap();
        let text = file.append(b"x").unwrap_err().to_string();
        assert!(text.starts_with("cannot write /dev/full: ") && text.contains("the disk is full"), "{text}");
    }
}
