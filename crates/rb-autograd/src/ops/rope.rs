//! Stub.
use std::sync::Arc;

use rb_tensor::Tensor;

use crate::testing::Case;
use crate::{AutogradError, Result, Var};

/// Rotation speeds of the pairs of a head.
#[derive(Clone, Debug, PartialEq)]
pub struct RopeTable {
    /// Radians a position, one for each of the `D/2` pairs.
    pub inv_freq: Arc<[f64]>,
    /// Factor of both cosine and sine; 1 in the plain case.
    pub attention_scaling: f64,
}

/// Rotates the first `num_rotated` heads of `x [B, T, H, D]` by `positions [B, T]` (i32); copies the others.
pub fn rope<'t>(x: &Var<'t>, positions: &Tensor, table: &RopeTable, num_rotated: usize) -> Result<Var<'t>> {
    let _ = (positions, table, num_rotated);
    Err(AutogradError::Unsupported { op: "rope", dtype: x.dtype(), device: Default::default() })
}
/// None yet.
pub fn cases() -> Vec<Case> {
    Vec::new()
}
