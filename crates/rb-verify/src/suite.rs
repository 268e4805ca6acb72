//! The checks together: before a run, for a config, over all model variants and over all operations.

use rb_autograd::ops::REGISTRY;
use rb_autograd::{GradStore, ParamBuilder, ParamStore, Precision, testing};
use rb_nn::{CausalLm, LlamaConfig, RopeScaling};
use rb_optim::{AdamW, AdamWConfig, Optimizer};
use rb_tensor::{Device, Rng, Tensor};

use crate::batches::random_batch;
use crate::model::backward;
use crate::{
    Check, LanguageModel, Report, Result, accumulation, cached_scores, causality, every_part_matters,
    follows_formulas, fused_trains_as_unfused, gradient_flow, gradients_are_slopes, gradients_follow_f64,
    independence, initial_loss, moved_after_step, optimizer_follows_formula, overfit, position_sensitivity,
    recomputation, step_work, tied_weights,
};

/// What every run executes before its first step; the weights are not changed. `fresh` is false for a resumed
/// run, whose loss says nothing about its beginning.
pub fn check_before_training(
    model: &dyn LanguageModel,
    params: &ParamStore,
    seed: u64,
    fresh: bool,
) -> Result<Report> {
    let mut report = Report::default();
    let batch = random_batch(model, 2, seed)?;
    let mut grads = GradStore::new(params)?;
    let loss = backward(model, params, &mut grads, &batch)?;
    report.push(gradient_flow(params, &grads)?);
    if fresh {
        report.push(initial_loss(model, loss));
    }
    report.push(causality(model, params, &batch.0)?);
    report.push(position_sensitivity(model, params, &batch.0)?);
    Ok(report)
}

/// Several times what the slowest variant needs.
const OVERFIT_STEPS: usize = 200;

/// Parameters up to which a model is taken as it is; of a larger one the checks of structure see a narrow copy.
const MOST_PARAMETERS: usize = 2_000_000;

/// All checks on a new model of this config, training included, on the CPU.
pub fn verify_config(config: &LlamaConfig, seed: u64) -> Result<Report> {
    verify_config_on(config, Device::Cpu, Precision::Full, seed)
}

/// As [`verify_config`], on any device and in any precision it has.
pub fn verify_config_on(
    config: &LlamaConfig,
    device: Device,
    precision: Precision,
    seed: u64,
) -> Result<Report> {
    let build = |config: &LlamaConfig| -> Result<(CausalLm, ParamStore)> {
        let mut builder = ParamBuilder::default();
        let model = CausalLm::init(config, &mut builder)?;
        let mut params = builder.build(&Rng::new(seed), device)?;
        params.set_precision(precision)?;
        Ok((model, params))
    };
    let (model, mut params) = build(config)?;
    if params.layout().num_parameters() <= MOST_PARAMETERS {
        return verify_model(&model, &mut params, seed);
    }
    let mut report = check_before_training(&model, &params, seed, true)?;
    let narrow = narrowed(config);
    let (small, mut small_params) = build(&narrow)?;
    let mut structure = Report::default();
    check_structure(&mut structure, &small, &small_params, seed)?;
    structure.checks.extend(optimizer_follows_formula(&small, &mut small_params, seed)?);
    report.extend(&format!("narrow copy ({} wide)", narrow.hidden_size), structure);
    report.push(step_check(&model, &mut params, seed)?);
    report.push(overfit(&model, &mut params, OVERFIT_STEPS, seed)?);
    Ok(report)
}

/// The same structure with small sizes: heads and their groups, norms, biases, rotary scaling and tying are kept.
fn narrowed(config: &LlamaConfig) -> LlamaConfig {
    let head_dim = config.head_dim().min(8);
    LlamaConfig {
        vocab_size: config.vocab_size.min(257),
        hidden_size: config.num_attention_heads * head_dim,
        head_dim: Some(head_dim),
        intermediate_size: config.intermediate_size.min(101),
        num_hidden_layers: config.num_hidden_layers.min(2),
        max_position_embeddings: config.max_position_embeddings.min(64),
        bos_token_id: None,
        eos_token_id: None,
        ..config.clone()
    }
}

/// All checks of a model and its parameters, on their device and in their precision. Training included: the weights
/// change. For a decoder of `rb-nn` that is everything; a model of one's own leaves out what only that decoder can be
/// compared with (its formulas, its unfused twin, recomputation, the work of a step).
///
/// # Errors
/// A check that could not run at all; one that ran and failed is in the report.
pub fn verify_model(model: &dyn LanguageModel, params: &mut ParamStore, seed: u64) -> Result<Report> {
    let mut report = check_before_training(model, params, seed, true)?;
    check_structure(&mut report, model, params, seed)?;
    report.push(step_check(model, params, seed)?);
    report.checks.extend(optimizer_follows_formula(model, params, seed)?);
    report.push(overfit(model, params, OVERFIT_STEPS, seed)?);
    Ok(report)
}

/// The checks that compare a model with what it should compute; no weight changes.
fn check_structure(
    report: &mut Report,
    model: &dyn LanguageModel,
    params: &ParamStore,
    seed: u64,
) -> Result<()> {
    if params.arena().device() == Device::Cpu {
        // On the host in f64: the same on every device, so said once.
        if let Some(decoder) = model.as_causal_lm() {
            report.checks.extend(follows_formulas(decoder, params, seed)?);
            report.checks.extend(step_work(decoder.config(), params.precision())?);
        }
        report.push(gradients_are_slopes(model, params, seed)?);
    }
    report.push(every_part_matters(model, params, seed)?);
    report.push(gradients_follow_f64(model, params, seed)?);
    report.checks.extend(independence(model, params, seed)?);
    report.checks.extend(accumulation(model, params, seed)?);
    if let Some(decoder) = model.as_causal_lm() {
        report.push(tied_weights(decoder, params, seed)?);
        report.push(cached_scores(decoder, params, seed)?);
        report.push(recomputation(decoder, params, seed)?);
        if params.precision() == Precision::Full {
            report.push(fused_trains_as_unfused(decoder, params, seed)?);
        }
    }
    Ok(())
}

fn step_check(model: &dyn LanguageModel, params: &mut ParamStore, seed: u64) -> Result<Check> {
    // One matrix is frozen meanwhile: it must not move, weight decay included.
    let layout = params.layout().clone();
    let matrices: Vec<_> = layout.entries.iter().filter(|e| e.trainable && e.shape.rank() >= 2).collect();
    let frozen = matrices.first().filter(|_| matrices.len() > 1);
    let frozen: Vec<&str> = frozen.iter().flat_map(|e| e.parts.iter().map(|p| p.name.as_str())).collect();
    params.set_all_trainable(&frozen, false)?;
    let before: Vec<(String, Tensor)> = {
        let parts = params.layout().parts().map(|(_, p)| p.name.clone()).collect::<Vec<_>>();
        parts
            .into_iter()
            .map(|n| Ok((n.clone(), params.part(&n)?.to_owned_copy()?)))
            .collect::<Result<_>>()?
    };
    let mut grads = GradStore::new(params)?;
    let mut adam = AdamW::new(AdamWConfig::default(), params)?;
    backward(model, params, &mut grads, &random_batch(model, 2, seed)?)?;
    adam.step(params, &mut grads, 1e-3, 1.0)?;
    let check = moved_after_step(params.layout(), &before, params)?;
    params.set_all_trainable(&frozen, true)?;
    Ok(check)
}

/// All checks on every variant of the model: tied and untied, each ratio of heads, biases, QK-norm, each kind
/// of rotary scaling, odd vocabularies, a sliding window, capped scores.
pub fn verify_variants(seed: u64) -> Result<Report> {
    verify_variants_on(Device::Cpu, Precision::Full, seed)
}

/// As [`verify_variants`], on any device and in any precision it has.
pub fn verify_variants_on(device: Device, precision: Precision, seed: u64) -> Result<Report> {
    let mut report = Report::default();
    for (name, config) in variants() {
        report.extend(&name, verify_config_on(&config, device, precision, seed)?);
    }
    Ok(report)
}

fn variants() -> Vec<(String, LlamaConfig)> {
    let base = LlamaConfig {
        max_position_embeddings: 64,
        initializer_range: 0.05,
        ..LlamaConfig::new(101, 48, 40, 2, 12)
    };
    let llama3 = RopeScaling::Llama3 {
        factor: 8.0,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_max_position_embeddings: 32,
    };
    let mut variants = Vec::new();
    for kv_heads in [12, 6, 4, 3, 1] {
        for tied in [false, true] {
            let name = format!("{}:1 heads, {}", 12 / kv_heads, if tied { "tied" } else { "untied" });
            let config = LlamaConfig {
                num_key_value_heads: Some(kv_heads),
                tie_word_embeddings: tied,
                ..base.clone()
            };
            variants.push((name, config));
        }
    }
    variants.extend([
        ("attention bias".to_string(), LlamaConfig { attention_bias: true, ..base.clone() }),
        ("sliding window".to_string(), LlamaConfig { sliding_window: Some(5), ..base.clone() }),
        ("capped scores".to_string(), LlamaConfig { attn_logit_softcapping: Some(2.0), ..base.clone() }),
        (
            "QK-norm".to_string(),
            LlamaConfig { use_qk_norm: true, num_key_value_heads: Some(4), ..base.clone() },
        ),
        (
            "linear rope".to_string(),
            LlamaConfig { rope_scaling: Some(RopeScaling::Linear { factor: 4.0 }), ..base.clone() },
        ),
        ("llama3 rope".to_string(), LlamaConfig { rope_scaling: Some(llama3), ..base.clone() }),
        ("vocabulary of 257".to_string(), LlamaConfig { vocab_size: 257, ..base.clone() }),
        ("vocabulary of 2".to_string(), LlamaConfig { vocab_size: 2, ..base }),
    ]);
    variants
}

/// Finite differences and precision of every operation of the registry.
pub fn verify_operations() -> Report {
    let mut report = Report::default();
    for op in REGISTRY {
        let count = (op.cases)().len();
        let result = testing::check_op(op.name);
        let detail = result.as_ref().err().map_or(format!("{count} cases"), ToString::to_string);
        report.push(Check::new(format!("operation {}", op.name), result.is_ok(), detail));
    }
    report
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_variant_passes() {
        let report = verify_variants(7).unwrap();
        assert!(report.passed(), "{report}");
        assert_eq!(report.checks.len(), 18 * 24);
    }
}
