//! Errors of optimizers and schedules.

use rb_autograd::AutogradError;
use rb_tensor::{ShapeError, TensorError};

/// `Result` of this crate.
pub type Result<T, E = OptimError> = std::result::Result<T, E>;

/// Everything that can go wrong in an optimizer step, its state or a schedule.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OptimError {
    /// Missing gradients, or stores of different models.
    #[error(transparent)]
    Autograd(#[from] AutogradError),
    /// A tensor that still looks into the weights; a shape.
    #[error(transparent)]
    Tensor(#[from] TensorError),
    /// A number that an optimizer or schedule cannot work with.
    #[error("{owner}: {name} is {value}, expected {expected}")]
    HyperParameter {
        /// Optimizer or `schedule`.
        owner: &'static str,
        /// Which number.
        name: &'static str,
        /// What was given.
        value: String,
        /// What is allowed.
        expected: &'static str,
    },
    /// Parameters that are read and get a gradient of zeros alone. Nothing was changed.
    #[error(
        "{} parameter(s) had no gradient but zero in {steps} steps and would never learn: {}; look for a factor of \
         zero, a dead activation or rows that nothing reads before them, or freeze them with set_trainable(name, false)",
        names.len(), names.join(", ")
    )]
    DeadParameters {
        /// Their names.
        names: Vec<String>,
        /// Steps that were seen.
        steps: u64,
    },
    /// A gradient that is NaN or infinite, where nothing is clipped and so no norm tells. Nothing was changed.
    #[error(
        "the gradient of {name} is not finite; leave this step out, and look for the first bad value with Tape::checked"
    )]
    NonFiniteGradient {
        /// The first such parameter.
        name: String,
    },
    /// Parameters that have gradients and yet the bits they began with. Nothing was changed.
    #[error(
        "{} parameter(s) have gradients and the same bits as {steps} steps ago: {}; the learning rate is {rate:e} now: \
         look for a rate, a gradient scale or a clip of zero, steps too small for the weights' rounding, or code that \
         puts weights back",
        names.len(), names.join(", ")
    )]
    StillParameters {
        /// Their names.
        names: Vec<String>,
        /// Steps that were made.
        steps: u64,
        /// Learning rate of the step that was refused.
        rate: f64,
    },
    /// Stored state that does not belong to this model and optimizer. Nothing was loaded.
    #[error(
        "{optimizer}: stored state does not fit this model: missing [{}], unexpected [{}]; \
         the model, its frozen parameters and the optimizer must be those of the saved run",
        missing.join(", "), unexpected.join(", ")
    )]
    StateNames {
        /// Optimizer.
        optimizer: &'static str,
        /// Names the optimizer needs and the state lacks.
        missing: Vec<String>,
        /// Names in the state that the optimizer does not know.
        unexpected: Vec<String>,
    },
}

impl From<ShapeError> for OptimError {
    fn from(error: ShapeError) -> Self {
        OptimError::Tensor(error.into())
    }
}

/// Checks one number, naming it.
pub(crate) fn require(
    good: bool,
    owner: &'static str,
    name: &'static str,
    value: impl ToString,
    expected: &'static str,
) -> Result<()> {
    if good {
        return Ok(());
    }
    Err(OptimError::HyperParameter { owner, name, value: value.to_string(), expected })
}
