//! Errors of evaluation.

use std::path::PathBuf;

/// `Result` of this crate.
pub type Result<T, E = EvalError> = std::result::Result<T, E>;

/// Everything that can go wrong while a model is judged.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EvalError {
    /// A file of questions is not what its kind says.
    #[error("{}:{line}: {reason}", path.display())]
    Question {
        /// The file.
        path: PathBuf,
        /// Line, from 1.
        line: usize,
        /// What is wrong and what to do.
        reason: String,
    },
    /// A file cannot be used at all.
    #[error("{}: {reason}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What is wrong and what to do.
        reason: String,
    },
    /// A continuation that does not fit into the model beside one token of context.
    #[error("a continuation has {len} tokens, more than the {limit} positions of the model; shorten it")]
    TooLong {
        /// Its tokens.
        len: usize,
        /// The model's positions.
        limit: usize,
    },
    /// A figure that may not be shown.
    #[error("no figure is shown: {0}")]
    Refused(#[from] rb_verify::Refusal),
    /// Nothing to judge with.
    #[error("{what}: there is nothing to judge")]
    Empty {
        /// Which text or task.
        what: String,
    },
    /// Model.
    #[error(transparent)]
    Nn(#[from] rb_nn::NnError),
    /// Parameters.
    #[error(transparent)]
    Autograd(#[from] rb_autograd::AutogradError),
    /// Tensors.
    #[error(transparent)]
    Tensor(#[from] rb_tensor::TensorError),
    /// Tokenizer and text.
    #[error(transparent)]
    Data(#[from] rb_data::DataError),
}
