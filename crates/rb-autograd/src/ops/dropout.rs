//! Stub.
use rb_tensor::Rng;

use crate::testing::Case;
use crate::{AutogradError, Result, Var};

/// Zeroes each element with probability `p` and scales the others by `1 / (1 - p)`.
pub fn dropout<'t>(x: &Var<'t>, p: f64, rng: &mut Rng) -> Result<Var<'t>> {
    let _ = (p, rng);
    Err(AutogradError::Unsupported { op: "dropout", dtype: x.dtype(), device: Default::default() })
}
/// None yet.
pub fn cases() -> Vec<Case> {
    Vec::new()
}
