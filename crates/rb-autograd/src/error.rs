//! Errors of the tape, the operations and the parameter stores.

use rb_tensor::{DType, Device, ShapeError, TensorError};

/// `Result` of this crate.
pub type Result<T, E = AutogradError> = std::result::Result<T, E>;

/// Everything that can go wrong while recording, differentiating or storing parameters.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AutogradError {
    /// A shape, dtype or file problem of a tensor.
    #[error(transparent)]
    Tensor(#[from] TensorError),
    /// No implementation of an operation for this device and element type.
    #[error("{op}: no implementation for {dtype} on {device}; cast to f32 first")]
    Unsupported {
        /// Operation.
        op: &'static str,
        /// Element type asked for.
        dtype: DType,
        /// Device asked for.
        device: Device,
    },
    /// An argument that is not a shape is out of its range.
    #[error("{op}: {argument} is {got}, expected {expected}")]
    Argument {
        /// Operation.
        op: &'static str,
        /// Argument.
        argument: &'static str,
        /// What was given.
        got: String,
        /// What is allowed.
        expected: String,
    },
    /// An index (token id, label) outside its table.
    #[error("{op}: {argument}[{position}] is {index}, expected 0..{bound}")]
    IndexOutOfRange {
        /// Operation.
        op: &'static str,
        /// Argument.
        argument: &'static str,
        /// Flat position of the bad index.
        position: usize,
        /// The index.
        index: i64,
        /// Exclusive upper bound.
        bound: usize,
    },
    /// Variables of two tapes met in one operation.
    #[error("{op}: input {input} belongs to another tape")]
    ForeignVar {
        /// Operation.
        op: &'static str,
        /// Index of the input.
        input: usize,
    },
    /// `backward` was called a second time, or on a tape that records nothing.
    #[error("backward: {reason}")]
    NoHistory {
        /// Which of the two, and what to do.
        reason: &'static str,
    },
    /// An operation's backward left an input without a gradient.
    #[error("{op}: backward gave no gradient for input {input}, which needs one")]
    BackwardIncomplete {
        /// Operation.
        op: &'static str,
        /// Index of the input.
        input: usize,
    },
    /// A part that is run again in backward failed for a reason of its own.
    #[error("recompute: {reason}")]
    Recompute {
        /// What the part says.
        reason: String,
    },
    /// A checked tape met a value that is not finite.
    #[error(
        "output {index} of {op} {shape} is not finite (operation {number} of the step, after reading {param})"
    )]
    NonFinite {
        /// Operation.
        op: &'static str,
        /// Flat position of the first such value.
        index: usize,
        /// Shape of the output.
        shape: rb_tensor::Shape,
        /// Count of the operation on its tape, from 1.
        number: usize,
        /// The parameter that was read last before it.
        param: String,
    },
    /// Backward on a checked tape: the gradient that arrives at an operation is not finite.
    #[error(
        "the gradient that arrives at {op}{} is not finite: an operation after it made it so",
        param.as_ref().map_or(String::new(), |p| format!(" of {p}"))
    )]
    NonFiniteGradient {
        /// Operation.
        op: &'static str,
        /// The first parameter that it reads.
        param: Option<String>,
    },
    /// Backward on a checked tape: an operation gave its parameter a gradient that is not finite.
    #[error("the gradient of {param} is not finite, and what arrived at its {op} was")]
    NonFiniteParameterGradient {
        /// Operation.
        op: &'static str,
        /// Parameter.
        param: String,
    },
    /// Parameters that are trainable but received no gradient since the last step.
    #[error(
        "{} parameter(s) got no gradient this step: {}; connect them to the loss or declare them frozen",
        names.len(), names.join(", ")
    )]
    MissingGradients {
        /// Their names.
        names: Vec<String>,
    },
    /// The weights were changed through their arena and operations would still read the old bf16 copy.
    #[error("the bf16 working weights are older than the weights: call `ParamStore::refresh_working` first")]
    StaleWorkingCopy,
    /// A parameter name that the store does not hold.
    #[error("parameter {name} does not exist in this model")]
    UnknownParameter {
        /// The name.
        name: String,
    },
    /// Only some of the parts of one entry were to be frozen or trained.
    #[error(
        "{name} is packed into one matrix with {}, which cannot be frozen in part: name them all, or none",
        others.join(", ")
    )]
    PackedTogether {
        /// The part that was named.
        name: String,
        /// Parts of the same entry that were not.
        others: Vec<String>,
    },
    /// A parameter name was declared twice.
    #[error("parameter {name} is declared twice")]
    DuplicateParameter {
        /// The name.
        name: String,
    },
    /// Gradients, weights or optimizer state of different models were mixed.
    #[error("{what} has another parameter layout than the weights: build it from the same model")]
    LayoutMismatch {
        /// Which store.
        what: &'static str,
    },
}

impl From<rb_cuda::CudaError> for AutogradError {
    fn from(error: rb_cuda::CudaError) -> Self {
        AutogradError::Tensor(error.into())
    }
}

impl From<ShapeError> for AutogradError {
    fn from(error: ShapeError) -> Self {
        AutogradError::Tensor(error.into())
    }
}
