//! Tensors as data: dtype, shape, storage, random numbers and files. No mathematics and no gradients.
//!
//! | concept | type | note |
//! | --- | --- | --- |
//! | element type | [`DType`], [`Elem`] | `f32`, `f64`, `bf16`, `i32` |
//! | dimensions | [`Shape`] | row-major, contiguous; no strides |
//! | place | [`Device`] | where the bytes live; the match on it is in `storage.rs` |
//! | values | [`Tensor`] | shared, immutable, a view is an offset along the first axis |
//! | one buffer of many tensors | [`Arena`] | parameters, gradients and optimizer state; mutable only when unshared |
//! | random numbers | [`Rng`] | Philox4x32-10: a seed, a stream and a counter, nothing global |
//! | files | [`io`] | safetensors, read with full validation |

mod arena;
mod device;
mod dtype;
mod error;
pub mod io;
mod rng;
pub mod rules;
mod shape;
mod storage;
mod tensor;

pub use arena::Arena;
pub use device::Device;
pub use dtype::{DType, Elem};
pub use error::{Result, ShapeError, TensorError};
pub use half::bf16;
pub use rng::{Rng, RngState};
pub use shape::Shape;
pub use tensor::{LaterItem, Tensor};
