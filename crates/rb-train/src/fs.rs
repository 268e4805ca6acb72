//! Small files that appear whole or not at all.

use std::path::Path;

use crate::{Result, TrainError};

/// Replaces `path` by `bytes`: temporary name, fsync, rename.
pub(crate) fn write_atomic(path: &Path, bytes: &[u8]) -> Result<()> {
    use std::io::Write;
    crate::observe::replace_atomically(path, |file| {
        file.write_all(bytes).map_err(crate::observe::ObserveError::io("write", path))
    })
    .map_err(TrainError::from)
}
