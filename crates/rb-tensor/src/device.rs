//! Where a tensor lives.

use std::fmt;

use rb_cuda::Gpu;

/// The place of a tensor's bytes, passed explicitly and never global.
///
/// `storage.rs` (bytes) and `rb-autograd/src/op.rs` (operations) are the only files that match on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Device {
    /// Host memory and the threads of the global `rayon` pool.
    #[default]
    Cpu,
    /// The memory and the stream of one GPU, or a dry run of one.
    Cuda(Gpu),
}

impl Device {
    /// The GPU, if it is one.
    pub fn gpu(&self) -> Option<Gpu> {
        match self {
            Device::Cpu => None,
            Device::Cuda(gpu) => Some(*gpu),
        }
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Device::Cpu => f.write_str("cpu"),
            Device::Cuda(gpu) => write!(f, "{gpu}"),
        }
    }
}
