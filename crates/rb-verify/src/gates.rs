//! Negative controls: what must be refused is refused.
//!
//! A check that cannot fail proves nothing, so each one is shown a case that it has to catch.

use rb_autograd::{GradStore, ParamBuilder, ParamStore};
use rb_nn::{CausalLm, LlamaConfig};
use rb_optim::{AdamW, AdamWConfig, Optimizer};
use rb_tensor::{Device, Rng, Tensor};

use crate::batches::random_batch;
use crate::model::backward;
use crate::{
    Check, Report, Result, causality, gradient_flow, initial_loss, moved_after_step, position_sensitivity,
};

/// Plants faults in a small model and checks that each is caught.
pub fn loss_gates(seed: u64) -> Result<Report> {
    let mut report = Report::default();
    let mut caught = |fault: &str, check: &Check| {
        report.push(Check::new(format!("caught: {fault}"), !check.passed, check.detail.clone()));
    };
    let (model, mut params) = small(seed)?;
    let batch = random_batch(&model, 2, seed)?;

    // No backward has run: every gradient is missing.
    caught("no gradient at all", &gradient_flow(&params, &GradStore::new(&params)?)?);

    // A zero output projection lets nothing through to the queries, keys and values behind it.
    let name = "model.layers.0.self_attn.o_proj.weight";
    let kept = params.part(name)?.to_owned_copy()?;
    fill(&mut params, name, 0.0)?;
    let mut grads = GradStore::new(&params)?;
    backward(&model, &params, &mut grads, &batch)?;
    caught("an operation that passes no gradient back", &gradient_flow(&params, &grads)?);
    params.set_part(name, &kept)?;

    // NaN in one weight.
    fill(&mut params, name, f32::NAN)?;
    let mut grads = GradStore::new(&params)?;
    backward(&model, &params, &mut grads, &batch)?;
    caught("NaN in one weight", &gradient_flow(&params, &grads)?);
    caught("NaN in the scores", &causality(&model, &params, &batch.0)?);
    params.set_part(name, &kept)?;

    // Without queries and keys attention is a mean, which sees no order.
    for layer in 0..2 {
        fill(&mut params, &format!("model.layers.{layer}.self_attn.q_proj.weight"), 0.0)?;
    }
    caught("positions without effect", &position_sensitivity(&model, &params, &batch.0)?);

    caught(
        "a loss far above even odds",
        &initial_loss(&model, 3.0 * (model.config().vocab_size as f64).ln()),
    );
    caught("a loss that is NaN", &initial_loss(&model, f64::NAN));

    // A learning rate of 0 moves nothing.
    let (model, mut params) = small(seed)?;
    let names: Vec<String> = params.layout().parts().map(|(_, p)| p.name.clone()).collect();
    let before: Vec<(String, Tensor)> =
        names.iter().map(|n| Ok((n.clone(), params.part(n)?.to_owned_copy()?))).collect::<Result<_>>()?;
    let mut grads = GradStore::new(&params)?;
    let mut adam = AdamW::new(AdamWConfig::default(), &params)?;
    backward(&model, &params, &mut grads, &batch)?;
    adam.step(&mut params, &mut grads, 0.0, 1.0)?;
    caught("learning rate zero", &moved_after_step(params.layout(), &before, &params)?);

    // The optimizer refuses a second step from used gradients.
    let refused = adam.step(&mut params, &mut grads, 1e-3, 1.0).err();
    let detail =
        refused.as_ref().map_or("accepted".to_string(), |e| e.to_string().chars().take(60).collect());
    report.push(Check::new("caught: a step without new gradients", refused.is_some(), detail));
    Ok(report)
}

fn small(seed: u64) -> Result<(CausalLm, ParamStore)> {
    let config = LlamaConfig {
        num_key_value_heads: Some(2),
        max_position_embeddings: 32,
        initializer_range: 0.1,
        ..LlamaConfig::new(61, 24, 20, 2, 6)
    };
    let mut builder = ParamBuilder::default();
    let model = CausalLm::init(&config, &mut builder)?;
    Ok((model, builder.build(&Rng::new(seed), Device::Cpu)?))
}

fn fill(params: &mut ParamStore, name: &str, value: f32) -> Result<()> {
    let shape = params.part(name)?.shape().clone();
    Ok(params.set_part(name, &Tensor::from_vec(vec![value; shape.numel()], shape)?)?)
}

#[cfg(test)]
mod tests {
    #[test]
    fn every_planted_fault_is_caught() {
        let report = super::loss_gates(3).unwrap();
        assert!(report.passed(), "{report}");
    }
}
