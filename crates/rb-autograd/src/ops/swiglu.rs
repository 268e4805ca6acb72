//! Stub.
use crate::testing::Case;
use crate::{AutogradError, Result, Var};

/// `silu(gate) * up` where the last axis of `gate_up [.., 2F]` holds gate and then up.
pub fn swiglu<'t>(gate_up: &Var<'t>) -> Result<Var<'t>> {
    Err(AutogradError::Unsupported { op: "swiglu", dtype: gate_up.dtype(), device: Default::default() })
}
/// None yet.
pub fn cases() -> Vec<Case> {
    Vec::new()
}
