//! CUDA: the only crate that calls it.
//!
//! | concept | type | note |
//! | --- | --- | --- |
//! | a card and its stream | [`Gpu`] | or a dry run that counts memory and kernels without a GPU |
//! | device memory | [`Buffer`] | from a caching allocator with a hard budget |
//! | a kernel source | [`Kernel`] | `kernels/NAME.cu`, embedded; compiled by NVRTC on first launch |
//! | a launch | [`Launch`] | constants, grid, typed arguments |
//! | a product | [`Matmul`] | cuBLASLt, row-major terms |
//! | what is on this machine | [`discover`] | loads nothing |

mod discover;
mod error;
mod gpu;
mod kernel;
mod matmul;
mod memory;

pub use discover::{Component, Found, discover, probe};
pub use error::{CudaError, Result};
pub use gpu::{Buffer, Gpu, GpuInfo, GpuOptions, Holding};
pub use kernel::{Arg, Kernel, Launch, Unit};
pub use matmul::{Matmul, MatrixType, Place};
pub use memory::MemoryStats;
