//! What a step does, counted without a GPU: memory that stays, launches and copies a layer, recomputation.

use rb_autograd::ops::cross_entropy::CrossEntropyOptions;
use rb_autograd::{GradStore, ParamBuilder, ParamStore, Precision, Tape};
use rb_cuda::{Gpu, GpuOptions};
use rb_nn::{CausalLm, LlamaConfig, Recompute};
use rb_optim::{AdamW, AdamWConfig, Optimizer};
use rb_tensor::{DType, Device};

use crate::batches::packed_documents;
use crate::{Check, Result};

/// Most launches that a layer may cost in a step, forward and backward together, products included, without biases
/// and norms of queries and keys. It is what the fused path takes: a layer that fell back to separate operations takes
/// more. Lower it when a layer gets cheaper.
pub const LAUNCHES_PER_LAYER: u64 = 28;

/// Steps after which memory must be where it was.
const STEPS: usize = 6;

/// Counts of one step.
#[derive(Debug)]
struct Counts {
    launches: u64,
    uploads: u64,
    /// Bytes alive after each step.
    in_use: Vec<usize>,
}

/// Steps of `config` on a device that computes nothing.
fn count(config: &LlamaConfig, precision: Precision) -> Result<Counts> {
    let gpu = Gpu::dry((9, 0), &GpuOptions::default());
    let device = Device::Cuda(gpu);
    let mut builder = ParamBuilder::default();
    let model = CausalLm::init(config, &mut builder)?;
    let mut params = builder.build_zeros(DType::F32, device)?;
    params.set_precision(precision)?;
    let mut adam = AdamW::new(AdamWConfig::default(), &params)?;
    let mut grads = GradStore::new(&params)?;
    let batch = packed_documents(&model, 0)?;
    let all = || gpu.launches().values().sum::<u64>();
    let mut counts = Counts { launches: 0, uploads: 0, in_use: Vec::new() };
    for _ in 0..STEPS {
        let before = (all(), gpu.uploads());
        let loss = {
            let tape = Tape::new(&params);
            let loss = model.loss(&tape, &batch.input, &batch.labels, &CrossEntropyOptions::default())?;
            tape.backward(&loss, &mut grads)?;
            loss.detach()
        };
        drop(adam.clipped_step(&mut params, &mut grads, 1e-3, 1.0, &loss)?);
        drop(loss);
        counts.launches = all() - before.0;
        counts.uploads = gpu.uploads() - before.1;
        counts.in_use.push(gpu.memory().in_use);
    }
    Ok(counts)
}

/// Checks the work of a step of this model: that memory is the same after every step, that a layer costs no copies
/// from the host and no more launches than the fused path takes.
///
/// # Errors
/// A config that breaks a rule.
pub fn step_work(config: &LlamaConfig, precision: Precision) -> Result<Vec<Check>> {
    let of = |layers: usize| {
        let config = LlamaConfig { num_hidden_layers: layers, ..config.clone() };
        count(&config, precision)
    };
    let (two, four) = (of(2)?, of(4)?);
    let settled = &four.in_use[1..];
    let flat = settled.iter().all(|bytes| *bytes == settled[0]);
    let detail = match flat {
        true => format!("{} bytes alive after each of {STEPS} steps", settled[0]),
        false => format!("bytes alive after each step: {:?}", four.in_use),
    };
    let mut checks = vec![Check::new("memory is flat", flat, detail)];
    let uploads = four.uploads == two.uploads;
    let detail =
        format!("{} copies from the host a step with 2 layers, {} with 4", two.uploads, four.uploads);
    checks.push(Check::new("a layer copies nothing from the host", uploads, detail));
    let per_layer = (four.launches - two.launches.min(four.launches)).div_ceil(2);
    // Bias rows and their gradients; norms of queries and keys take the separate path.
    let allowed = LAUNCHES_PER_LAYER
        + if config.attention_bias { 4 } else { 0 }
        + if config.use_qk_norm { 14 } else { 0 };
    let detail = format!("{per_layer} launches a layer, at most {allowed}");
    checks.push(Check::new("launches of a layer", per_layer <= allowed && per_layer > 0, detail));
    Ok(checks)
}

/// Checks that recomputation keeps less for backward, and gives the same bits.
///
/// # Errors
/// The model cannot run at all.
pub fn recomputation(model: &CausalLm, params: &ParamStore, seed: u64) -> Result<Check> {
    let batch = packed_documents(model, seed)?;
    let run = |recompute: Recompute| -> Result<(usize, Vec<u8>)> {
        let model = model.clone().with_recompute(recompute);
        let mut grads = GradStore::new(params)?;
        let tape = Tape::new(params);
        let loss = model.loss(&tape, &batch.input, &batch.labels, &CrossEntropyOptions::default())?;
        let kept = tape.saved_bytes();
        tape.backward(&loss, &mut grads)?;
        let all = grads.arena().view(0, [grads.layout().numel])?.to_device(Device::Cpu)?;
        Ok((kept, all.as_bytes()?.to_vec()))
    };
    let ((all, bits), (mlp, mlp_bits), (block, block_bits)) =
        (run(Recompute::None)?, run(Recompute::Mlp)?, run(Recompute::Block)?);
    let same = bits == mlp_bits && bits == block_bits;
    let less = block < mlp && mlp < all;
    let detail = match (less, same) {
        (_, false) => "gradients have other bits than without recomputation".to_string(),
        _ => format!(
            "bytes kept for backward: {all}, with the feed-forward layer again {mlp}, each layer {block}"
        ),
    };
    Ok(Check::new("recomputation keeps less", less && same, detail))
}
