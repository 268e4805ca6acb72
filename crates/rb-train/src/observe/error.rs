//! The errors of this module: which file, what happened, what to do.

use std::io;
use std::path::{Path, PathBuf};

/// Why a record, an event file or a report could not be built, written or read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ObserveError {
    /// A loss, norm or speed that is NaN or infinite: there is no record for such a step.
    #[error(
        "{name} is {value}, expected a finite number: a step like this gets no record and no speed, only an \
         event; look at its data, the learning rate and the gradient norm before it"
    )]
    NotFinite { name: &'static str, value: f64 },

    /// A figure of a run that did not pass its gate.
    #[error(transparent)]
    Refused(#[from] rb_verify::Refusal),

    /// The operating system refused.
    #[error("cannot {action} {}: {source}; {}", path.display(), remedy(source))]
    Io { action: &'static str, path: PathBuf, source: io::Error },

    /// A new run would write into the files of another one.
    #[error(
        "{} already exists and holds another run's records; continue that run with --resume, or choose a new \
         run directory", path.display()
    )]
    AlreadyExists { path: PathBuf },

    /// A line before the last one that is no record: not the trace of a crash, so nothing is dropped silently.
    #[error(
        "{} line {line} is not a record: {source}; repair or delete that line, or move the file away to start \
         a new one", path.display()
    )]
    BadRecord { path: PathBuf, line: u64, source: serde_json::Error },

    /// A record that could not be turned into JSON.
    #[error("cannot encode a record for {}: {source}; this is a defect in RustingBrain, please report it",
        path.display())]
    Encode { path: PathBuf, source: serde_json::Error },

    /// The plotting library failed.
    #[error(
        "cannot draw the chart `{chart}`: {reason}; metrics.jsonl is complete, the report can be made later"
    )]
    Plot { chart: &'static str, reason: String },
}

impl ObserveError {
    pub(crate) fn io(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_path_buf();
        move |source| Self::Io { action, path, source }
    }
}

impl From<rb_data::atomic::FileError> for ObserveError {
    fn from(error: rb_data::atomic::FileError) -> Self {
        Self::Io { action: error.action, path: error.path, source: error.source }
    }
}

/// Whether what [`remedy`] says may let an interrupted run go on from where it is.
pub fn may_continue(error: &io::Error) -> bool {
    use io::ErrorKind::{
        InvalidData, IsADirectory, NotADirectory, NotFound, PermissionDenied, ReadOnlyFilesystem,
    };
    let otherwise =
        [InvalidData, IsADirectory, NotADirectory, NotFound, PermissionDenied, ReadOnlyFilesystem];
    !otherwise.contains(&error.kind())
}

/// What the user can do about an error of the operating system.
pub fn remedy(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::StorageFull => {
            "the disk is full: free some space (old checkpoints are the largest files)"
        }
        io::ErrorKind::FileTooLarge => {
            "the file is larger than `ulimit -f` or the file system allows: raise the limit"
        }
        io::ErrorKind::QuotaExceeded => "your disk quota is used up: free some space or ask for more",
        io::ErrorKind::ReadOnlyFilesystem => {
            "the file system is read-only: put the run directory on one that can be written"
        }
        io::ErrorKind::PermissionDenied => {
            "check who owns the file and its folder and their permissions, or choose another place"
        }
        io::ErrorKind::InvalidData => "save the file as UTF-8 text",
        io::ErrorKind::NotFound => "the file or its folder does not exist: check the path",
        io::ErrorKind::NotADirectory | io::ErrorKind::IsADirectory => {
            "a file and a folder are mixed up there: move it away or choose another place"
        }
        _ => "check the disk and the path",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_name_path_cause_and_remedy() {
        // 28 is ENOSPC and 30 is EROFS on Linux.
        for (code, cause) in [(28, "the disk is full"), (30, "the file system is read-only")] {
            let source = io::Error::from_raw_os_error(code);
            let text = ObserveError::io("write", Path::new("runs/a/metrics.jsonl"))(source).to_string();
            assert!(text.starts_with("cannot write runs/a/metrics.jsonl: "), "{text}");
            assert!(text.contains(cause), "{text}");
        }
    }
}
