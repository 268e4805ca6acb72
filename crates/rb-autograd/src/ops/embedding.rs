//! Stub.
use rb_tensor::Tensor;

use crate::testing::Case;
use crate::{AutogradError, Result, Var};

/// Row `ids[..]` of `weight [V, C]` for each id of `ids [..]` (i32), all below `num_embeddings <= V`.
pub fn embedding<'t>(weight: &Var<'t>, ids: &Tensor, num_embeddings: usize) -> Result<Var<'t>> {
    let _ = (ids, num_embeddings);
    Err(AutogradError::Unsupported { op: "embedding", dtype: weight.dtype(), device: Default::default() })
}
/// None yet.
pub fn cases() -> Vec<Case> {
    Vec::new()
}
