//! CUDA: the only crate that calls it.
//!
//! | concept | type | note |
//! | --- | --- | --- |
//! | a card and its stream | [`Gpu`] | or a dry run that counts memory and kernels without a GPU |
//! | device memory | [`Buffer`] | from a caching allocator with a hard budget |
//! | a kernel source | [`Kernel`] | `kernels/NAME.cu`, embedded; compiled by NVRTC on first launch |
//! | a launch | [`Launch`] | constants, grid, typed arguments |
//! | a product | [`Matmul`] | cuBLASLt or our own kernel, row-major terms |
//! | work captured once | [`Graph`] | a CUDA graph that knows whether its addresses still hold |
//! | compiling without a GPU | [`Compiler`] | NVRTC and the cache of kernels on disk |
//! | what is on this machine | [`discover`] | loads nothing |

mod algorithms;
mod beside;
mod check;
mod compile;
mod cublaslt;
mod discover;
mod driver;
mod dry;
mod error;
mod gpu;
mod graph;
mod inspect;
mod kernel;
mod library;
mod live;
mod matmul;
mod memory;
mod nvrtc;
mod own_product;
mod products;
mod profile;
mod staging;

pub use check::{SelfCheck, own_units};
pub use compile::{Compiled, Compiler};
pub use discover::{Component, Found, discover, probe};
pub use error::{CudaError, Result};
pub use gpu::{Buffer, Gpu, GpuInfo, GpuOptions, Holding, PrepareStats, Reading};
pub use graph::Graph;
pub use inspect::{KernelReport, Resources, inspect_kernels};
pub use kernel::{Arg, Kernel, Launch, Tiles, Unit};
pub use library::LibraryInfo;
pub use matmul::{Matmul, MatrixType, Place};
pub use memory::MemoryStats;
pub use own_product::{OwnProducts, ProductTile};
pub use products::Tuning;
pub use profile::Timing;
