//! Where a tensor lives.

use std::fmt;

/// The place of a tensor's bytes, passed explicitly and never global.
///
/// A CUDA variant joins here; `storage.rs` (bytes) and `rb-autograd/src/op.rs` (operations) are the only
/// files that match on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Device {
    /// Host memory and the threads of the global `rayon` pool.
    #[default]
    Cpu,
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Device::Cpu => f.write_str("cpu"),
        }
    }
}
