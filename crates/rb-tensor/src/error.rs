//! Errors of tensors: each names the operation, the argument, what was expected and what was given.

use std::fmt::Display;
use std::path::PathBuf;

use crate::{DType, Device};

/// `Result` of this crate.
pub type Result<T, E = TensorError> = std::result::Result<T, E>;

/// An argument whose shape breaks an operation's rule.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{op}: {argument} has shape {got}, expected {expected}")]
pub struct ShapeError {
    /// Operation or function name.
    pub op: &'static str,
    /// Name of the argument.
    pub argument: String,
    /// The shape given.
    pub got: String,
    /// The shape or rule expected, in words.
    pub expected: String,
}

impl ShapeError {
    /// Builds the error from anything printable.
    pub fn new(
        op: &'static str,
        argument: impl Into<String>,
        got: impl Display,
        expected: impl Display,
    ) -> Self {
        ShapeError { op, argument: argument.into(), got: got.to_string(), expected: expected.to_string() }
    }
}

/// Everything that can go wrong with tensors as data.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TensorError {
    /// A shape breaks a rule.
    #[error(transparent)]
    Shape(#[from] ShapeError),
    /// A tensor of another element type was needed.
    #[error("{op}: {argument} is {got}, expected {expected}")]
    DType {
        /// Operation name.
        op: &'static str,
        /// Argument name.
        argument: String,
        /// Type given.
        got: DType,
        /// Types accepted, in words.
        expected: String,
    },
    /// A number of elements or bytes that does not fit in the address space.
    #[error("{op}: shape {shape} has too many elements for this machine")]
    TooLarge {
        /// Operation name.
        op: &'static str,
        /// The shape.
        shape: String,
    },
    /// Two tensors on different devices meet.
    #[error("{op}: {argument} is on {got}, expected {expected}")]
    DeviceMismatch {
        /// Operation name.
        op: &'static str,
        /// Argument name.
        argument: String,
        /// Device given.
        got: Device,
        /// Device expected.
        expected: Device,
    },
    /// A tensor in host memory where a device pointer is needed.
    #[error("{op}: the tensor is in host memory; move it with `Tensor::to_device`")]
    NotOnGpu {
        /// Operation name.
        op: &'static str,
    },
    /// The GPU, its driver or a library failed.
    #[error(transparent)]
    Cuda(#[from] rb_cuda::CudaError),
    /// An arena is to be changed while tensors still look into it.
    #[error(
        "{arena}: {holders} tensor(s) still look into this buffer, so it cannot be changed in place; \
         drop them, or keep copies made by `Tensor::to_owned_copy`"
    )]
    Shared {
        /// Name of the arena.
        arena: String,
        /// Other owners.
        holders: usize,
    },
    /// A file could not be read or written.
    #[error("{path}: {action} failed: {source}")]
    Io {
        /// The file.
        path: PathBuf,
        /// What was tried.
        action: &'static str,
        /// The system's answer.
        #[source]
        source: std::io::Error,
    },
    /// A file was read but is not what it should be.
    #[error("{path}: {reason}")]
    BadFile {
        /// The file.
        path: PathBuf,
        /// What is wrong and what to do.
        reason: String,
    },
}
