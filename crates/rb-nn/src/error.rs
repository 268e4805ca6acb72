//! Errors of models and their configs.

use std::path::PathBuf;

/// `Result` of this crate.
pub type Result<T, E = NnError> = std::result::Result<T, E>;

/// Everything that can go wrong with a model.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NnError {
    /// A config value breaks a rule.
    #[error("model config: {key} is {value}, expected {expected}")]
    Config {
        /// Hugging Face key.
        key: &'static str,
        /// Value given.
        value: String,
        /// Rule and remedy.
        expected: String,
    },
    /// A file of a model folder cannot be used.
    #[error("{}: {reason}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What is wrong and what to do.
        reason: String,
    },
    /// A sequence is longer than the model's positions.
    #[error(
        "the input has {len} positions, above max_position_embeddings {limit}; shorten it or raise the limit"
    )]
    TooLong {
        /// Positions given.
        len: usize,
        /// Positions the model has.
        limit: usize,
    },
    /// Operations and parameters.
    #[error(transparent)]
    Autograd(#[from] rb_autograd::AutogradError),
    /// Tensors and files.
    #[error(transparent)]
    Tensor(#[from] rb_tensor::TensorError),
}
