//! Errors of optimizers.

use rb_autograd::AutogradError;
use rb_tensor::TensorError;

/// `Result` of this crate.
pub type Result<T, E = OptimError> = std::result::Result<T, E>;

/// Everything that can go wrong in a step or when state is loaded.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OptimError {
    /// Missing gradients, parameters of another model.
    #[error(transparent)]
    Autograd(#[from] AutogradError),
    /// Shapes or element types.
    #[error(transparent)]
    Tensor(#[from] TensorError),
    /// Stored state does not fit the model.
    #[error("optimizer state: {reason}")]
    State {
        /// Which tensor, and what is wrong with it.
        reason: String,
    },
}
