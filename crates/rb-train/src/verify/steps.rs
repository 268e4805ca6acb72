//! Steps and evaluations of rows with unequal numbers of labels.

use rb_autograd::{GradStore, ParamBuilder, ParamStore};
use rb_data::{Batch, IGNORE};
use rb_nn::{CausalLm, LlamaConfig};
use rb_optim::{AdamW, AdamWConfig, Optimizer};
use rb_tensor::{DType, Device, Rng};
use rb_verify::Check;

use crate::Result;
use crate::observe::resident_bytes;
use crate::step::{LossTerms, evaluate, forward_backward};

const ROWS: usize = 8;
const LEN: usize = 12;
const VOCAB: usize = 50;

pub(super) fn model(seed: u64) -> Result<(CausalLm, ParamStore)> {
    let config = LlamaConfig {
        num_key_value_heads: Some(2),
        max_position_embeddings: LEN,
        initializer_range: 0.2,
        tie_word_embeddings: true,
        ..LlamaConfig::new(VOCAB, 16, 21, 2, 4)
    };
    let mut builder = ParamBuilder::default();
    let model = CausalLm::init(&config, &mut builder)?;
    Ok((model, builder.build(&Rng::new(seed), Device::Cpu)?))
}

/// Eight rows of which row `r` has `r + 1` labels and the last none, in batches of `rows`.
fn batches(seed: u64, rows: usize) -> Vec<Batch> {
    let mut rng = Rng::new(seed).fork("unequal rows");
    let ids: Vec<i32> = (0..ROWS * LEN).map(|_| rng.below(VOCAB as u64) as i32).collect();
    let label =
        |i: usize| if i / LEN < ROWS - 1 && i % LEN <= i / LEN { ids[(i + 1) % ids.len()] } else { IGNORE };
    let labels: Vec<i32> = (0..ids.len()).map(label).collect();
    let size = rows * LEN;
    let cut = |(ids, labels): (&[i32], &[i32])| Batch {
        batch_size: rows,
        seq_len: LEN,
        input_ids: ids.to_vec(),
        labels: labels.to_vec(),
        position_ids: (0..size).map(|i| (i % LEN) as i32).collect(),
        doc_start: vec![0; size],
        valid_tokens: labels.iter().filter(|l| **l != IGNORE).count(),
        dropped_targets: 0,
        epoch: 0,
    };
    ids.chunks(size).zip(labels.chunks(size)).map(cut).collect()
}

/// Checks that the loss, the norm and the weights of a step do not depend on how its rows are spread over
/// micro-batches, that the loss is the mean over all labels, and that a held-out loss is too. In f64, so that only a
/// wrong formula can differ.
pub(super) fn unequal_rows(seed: u64) -> Result<Vec<Check>> {
    const TOLERANCE: f64 = 1e-9;
    let (model, narrow) = model(seed)?;
    let params = narrow.to_dtype(DType::F64)?;
    // Row by row, weighted by labels: the truth without any batching.
    let mut sum = 0.0;
    for batch in batches(seed, 1) {
        let count = batch.valid_tokens as f64;
        sum += evaluate(&model, &params, std::iter::once(batch), false)?.0 * count;
    }
    let labels: usize = batches(seed, 1).iter().map(|b| b.valid_tokens).sum();
    let truth = sum / labels as f64;
    let off = |value: f64, expected: f64| {
        let off = (value / expected - 1.0).abs();
        if off.is_nan() { f64::INFINITY } else { off }
    };
    let step = |rows: usize| -> Result<(f64, f64, Vec<f64>)> {
        let mut params = params.to_dtype(DType::F64)?.to_device(Device::Cpu)?;
        let mut grads = GradStore::new(&params)?;
        let mut adam = AdamW::new(AdamWConfig::default(), &params)?;
        let loss =
            forward_backward(&model, &params, &mut grads, &batches(seed, rows), false, LossTerms::default())?;
        let norm = adam.clipped_step(&mut params, &mut grads, 1e-2, 0.1, &loss)?;
        Ok((loss.item()?, norm.item()?, params.arena().as_slice::<f64>()?.to_vec()))
    };
    let whole = step(ROWS)?;
    let mut problem = None;
    for rows in [1, 2, 4] {
        let part = step(rows)?;
        let weights = whole.2.iter().zip(&part.2).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
        if off(part.0, whole.0) > TOLERANCE || off(part.1, whole.1) > TOLERANCE || weights > 1e-7 {
            let (loss, norm) = (part.0, part.1);
            problem = Some(format!(
                "{rows} rows at a time: loss {loss:.6}, norm {norm:.6}, weights off by {weights:.0e}; all at once \
                 {:.6} and {:.6}",
                whole.0, whole.1
            ));
        }
    }
    let detail = problem.clone().unwrap_or_else(|| format!("{ROWS} rows at once, and 1, 2, 4 at a time"));
    let mut checks = vec![Check::new("micro-batches are one batch", problem.is_none(), detail)];
    let detail = format!("{:.6}, the mean over {labels} labels is {truth:.6}", whole.0);
    checks.push(Check::new("loss of a step", off(whole.0, truth) <= TOLERANCE, detail));
    let mut problem = None;
    for rows in [1, 2, 4, 8] {
        let (loss, tokens) = evaluate(&model, &params, batches(seed, rows).into_iter(), false)?;
        if off(loss, truth) > TOLERANCE || tokens != labels as u64 {
            problem = Some(format!(
                "{rows} rows at a time: {loss:.6} over {tokens}, expected {truth:.6} over {labels}"
            ));
        }
    }
    let detail =
        problem.clone().unwrap_or_else(|| format!("{truth:.6} over {labels} labels for every batch size"));
    checks.push(Check::new("held-out loss", problem.is_none(), detail));
    Ok(checks)
}

/// Checks that memory of the process does not grow with the steps.
pub(super) fn memory_is_flat(seed: u64) -> Result<Check> {
    const NAME: &str = "host memory is flat";
    const WARM_UP: usize = 10;
    const STEPS: usize = 60;
    /// What the system and other threads may take meanwhile.
    const NOISE_BYTES: u64 = 16 << 20;
    let config = LlamaConfig {
        max_position_embeddings: 64,
        tie_word_embeddings: true,
        ..LlamaConfig::new(256, 64, 128, 2, 4)
    };
    let mut builder = ParamBuilder::default();
    let model = CausalLm::init(&config, &mut builder)?;
    let mut params = builder.build(&Rng::new(seed), Device::Cpu)?;
    let mut grads = GradStore::new(&params)?;
    let mut adam = AdamW::new(AdamWConfig::default(), &params)?;
    let (rows, len) = (8, 64);
    let mut rng = Rng::new(seed).fork("memory");
    let ids: Vec<i32> = (0..rows * len).map(|_| rng.below(256) as i32).collect();
    let batch = Batch {
        batch_size: rows,
        seq_len: len,
        labels: ids.iter().map(|id| (id + 1) % 256).collect(),
        input_ids: ids,
        position_ids: (0..rows * len).map(|i| (i % len) as i32).collect(),
        doc_start: vec![0; rows * len],
        valid_tokens: rows * len,
        dropped_targets: 0,
        epoch: 0,
    };
    let mut after_warm_up = None;
    for step in 0..WARM_UP + STEPS {
        if step == WARM_UP {
            after_warm_up = resident_bytes();
        }
        let terms = LossTerms::default();
        let loss = forward_backward(&model, &params, &mut grads, std::slice::from_ref(&batch), false, terms)?;
        adam.clipped_step(&mut params, &mut grads, 1e-3, 1.0, &loss)?;
    }
    match (after_warm_up, resident_bytes()) {
        (Some(before), Some(after)) => {
            let grown = after.saturating_sub(before);
            let detail = format!("{STEPS} steps took {} KiB more", grown >> 10);
            Ok(Check::new(NAME, grown <= NOISE_BYTES, detail))
        }
        _ => Ok(Check::new(NAME, true, "not measured: this system does not tell")),
    }
}
