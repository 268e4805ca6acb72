//! Generation's cache of keys and values against the whole text.

use rb_autograd::ParamStore;
use rb_nn::{CausalLm, ModelInput};
use rb_tensor::{DType, Device, Rng, Tensor};

use crate::model::{difference, rounding};
use crate::{Check, Result};

/// Tokens read at once, then one by one.
const TOKENS: usize = 24;
const FIRST: usize = 7;

/// Checks that reading a text in pieces, with keys and values kept, gives the scores of reading all of it.
///
/// # Errors
/// The model cannot run at all.
pub fn cached_scores(model: &CausalLm, params: &ParamStore, seed: u64) -> Result<Check> {
    const ROWS: usize = 2;
    let config = model.config();
    let len = TOKENS.min(config.max_position_embeddings);
    let mut rng = Rng::new(seed).fork("cached scores");
    let ids: Vec<i32> = (0..ROWS * len).map(|_| rng.below(config.vocab_size as u64) as i32).collect();
    let rows = |range: std::ops::Range<usize>| {
        let values = ids.chunks(len).flat_map(|row| row[range.clone()].to_vec()).collect();
        Tensor::from_vec::<i32>(values, [ROWS, range.len()])
    };
    let read = |scores: Tensor| -> Result<Vec<f64>> {
        Ok(scores.to_device(Device::Cpu)?.to_dtype(DType::F64)?.to_vec()?)
    };
    let mut cache = model.new_cache(params, ROWS, len)?;
    let (mut worst, mut largest) = (0.0f64, 1.0f64);
    while cache.len() < len {
        let start = cache.len();
        let end = if start == 0 { FIRST.min(len) } else { start + 1 };
        let got = read(model.next_token_logits_cached(params, &mut cache, &rows(start..end)?)?)?;
        let want = read(model.next_token_logits(params, &ModelInput::causal(rows(0..end)?))?)?;
        worst = worst.max(difference(&got, &want));
        largest = want.iter().fold(largest, |m, x| m.max(x.abs()));
    }
    let detail = format!("{len} tokens in pieces score as the whole within {worst:.0e}");
    Ok(Check::new("cached scores", worst <= rounding(params) * largest, detail))
}
