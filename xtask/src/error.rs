//! The one error type of xtask.

use std::fmt;
use std::path::{Path, PathBuf};

/// Why a command could not do its work; findings of a check are not errors.
#[derive(Debug)]
pub enum Error {
    /// A file or folder could not be read or written.
    Io { action: &'static str, path: PathBuf, source: std::io::Error },
    /// A program could not be started.
    Spawn { program: String, source: std::io::Error },
    /// A program ended with a failure, or printed what could not be understood.
    Program { program: String, detail: String },
    /// The command line, or a file it names, asks for something that cannot be done.
    Usage { problem: String, remedy: String },
}

impl Error {
    pub fn io(action: &'static str, path: &Path) -> impl FnOnce(std::io::Error) -> Error {
        let path = path.to_path_buf();
        move |source| Error::Io { action, path, source }
    }

    pub fn usage(problem: impl Into<String>, remedy: impl Into<String>) -> Error {
        Error::Usage { problem: problem.into(), remedy: remedy.into() }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Io { action, path, source } => write!(f, "cannot {action} {}: {source}", path.display()),
            Error::Spawn { program, source } => write!(f, "cannot start `{program}`: {source}"),
            Error::Program { program, detail } => write!(f, "`{program}`: {detail}"),
            Error::Usage { problem, remedy } => write!(f, "{problem}; {remedy}"),
        }
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Error::Io { source, .. } | Error::Spawn { source, .. } => Some(source),
            Error::Program { .. } | Error::Usage { .. } => None,
        }
    }
}
