//! The checks together: before a run, for a config, over all model variants and over all operations.

use rb_autograd::ops::REGISTRY;
use rb_autograd::{GradStore, ParamBuilder, ParamStore, Precision, testing};
use rb_nn::{CausalLm, LlamaConfig, RopeScaling};
use rb_optim::{AdamW, AdamWConfig, Optimizer};
use rb_tensor::{Device, Rng, Tensor};

use crate::model::{backward, random_batch};
use crate::{
    Check, Report, Result, causality, gradient_flow, initial_loss, moved_after_step, overfit,
    position_sensitivity,
};

/// What every run executes before its first step; the weights are not changed. `fresh` is false for a resumed
/// run, whose loss says nothing about its beginning.
pub fn check_before_training(
    model: &CausalLm,
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
    let mut builder = ParamBuilder::default();
    let model = CausalLm::init(config, &mut builder)?;
    let mut params = builder.build(&Rng::new(seed), device)?;
    params.set_precision(precision)?;
    let mut report = check_before_training(&model, &params, seed, true)?;
    report.push(step_check(&model, &mut params, seed)?);
    report.push(overfit(&model, &mut params, OVERFIT_STEPS, seed)?);
    Ok(report)
}

fn step_check(model: &CausalLm, params: &mut ParamStore, seed: u64) -> Result<Check> {
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
    moved_after_step(params.layout(), &before, params)
}

/// All checks on every variant of the model: tied and untied, each ratio of heads, biases, QK-norm, each kind
/// of rotary scaling, odd vocabularies.
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
        assert_eq!(report.checks.len(), 18 * 6);
    }
}
