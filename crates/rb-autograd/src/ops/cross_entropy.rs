//! Stub.
use rb_tensor::Tensor;

use crate::testing::Case;
use crate::{AutogradError, Result, Var};

/// What the sum of row losses is divided by.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Denominator {
    /// The number of labels that are not ignored.
    ValidTokens,
    /// A given number: the count of valid tokens of a whole step that is split into micro-batches.
    Fixed(f64),
}

/// Attributes of [`cross_entropy`].
#[derive(Clone, Debug)]
pub struct CrossEntropyOptions {
    /// Columns that are classes; the others are padding without probability. `None`: all columns.
    pub num_classes: Option<usize>,
    /// Rows with this label count for nothing.
    pub ignore_index: i32,
    /// Share of the target that is spread evenly over all classes.
    pub label_smoothing: f64,
    /// Coefficient of `lse^2`.
    pub z_loss: f64,
    /// What the sum is divided by.
    pub denominator: Denominator,
    /// A factor for the loss of each row, of the labels' shape.
    pub row_weights: Option<Tensor>,
}

impl Default for CrossEntropyOptions {
    fn default() -> Self {
        CrossEntropyOptions {
            num_classes: None,
            ignore_index: -100,
            label_smoothing: 0.0,
            z_loss: 0.0,
            denominator: Denominator::ValidTokens,
            row_weights: None,
        }
    }
}

/// The cross entropy between `logits [.., V]` and `labels [..]` (i32), as a scalar.
pub fn cross_entropy<'t>(
    logits: &Var<'t>,
    labels: &Tensor,
    options: &CrossEntropyOptions,
) -> Result<Var<'t>> {
    let _ = (labels, options);
    Err(AutogradError::Unsupported { op: "cross_entropy", dtype: logits.dtype(), device: Default::default() })
}

/// The loss of each row, `[..]`: zero where the label is ignored; the denominator does not count.
pub fn row_losses<'t>(
    logits: &Var<'t>,
    labels: &Tensor,
    options: &CrossEntropyOptions,
) -> Result<Var<'t>> {
    cross_entropy(logits, labels, options)
}
/// None yet.
pub fn cases() -> Vec<Case> {
    Vec::new()
}
