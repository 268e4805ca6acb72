//! From a config to the parts of a run.

use rb_autograd::{ParamBuilder, ParamStore};
use rb_nn::CausalLm;
use rb_optim::{AdamW, AdamWConfig, Optimizer, Schedule, Sgd, SgdConfig};
use rb_tensor::{Device, Rng};

use crate::config::{Config, OptimizerChoice, Scheduler};
use crate::{Result, TrainError};

/// The optimizer of a config, for `params`.
pub(crate) fn build_optimizer(config: &Config, params: &ParamStore) -> Result<Box<dyn Optimizer>> {
    let t = &config.train;
    Ok(match t.optim {
        OptimizerChoice::Adamw => {
            let settings = AdamWConfig {
                beta1: t.adam_beta1,
                beta2: t.adam_beta2,
                eps: t.adam_epsilon,
                weight_decay: t.weight_decay,
            };
            Box::new(AdamW::new(settings, params)?)
        }
        OptimizerChoice::Sgd => {
            let settings = SgdConfig { momentum: t.momentum, weight_decay: t.weight_decay };
            Box::new(Sgd::new(settings, params)?)
        }
    })
}

pub(super) fn build_model(config: &Config, device: Device) -> Result<(CausalLm, ParamStore)> {
    let mut builder = ParamBuilder::default();
    let model = CausalLm::init(&config.model, &mut builder)?;
    let params = builder.build(&Rng::new(config.run.seed).fork("weights"), device)?;
    Ok((model, params))
}

/// Declares parameters frozen by exact name or by a prefix that ends in `*`.
pub(crate) fn freeze(params: &mut ParamStore, patterns: &[String]) -> Result<()> {
    let names: Vec<String> = params.layout().parts().map(|(_, p)| p.name.clone()).collect();
    let mut frozen: Vec<&str> = Vec::new();
    for pattern in patterns {
        let matches = |name: &&String| match pattern.strip_suffix('*') {
            Some(prefix) => name.starts_with(prefix),
            None => *name == pattern,
        };
        let hit: Vec<&String> = names.iter().filter(matches).collect();
        if hit.is_empty() {
            return Err(TrainError::Config {
                origin: "train.frozen".into(),
                reason: format!("`{pattern}` matches no parameter; names look like {}", names[0]),
            });
        }
        frozen.extend(hit.into_iter().map(String::as_str));
    }
    params
        .set_all_trainable(&frozen, false)
        .map_err(|error| TrainError::Config { origin: "train.frozen".into(), reason: error.to_string() })?;
    if !params.layout().entries.iter().any(|entry| entry.trainable) {
        return Err(TrainError::Config {
            origin: "train.frozen".into(),
            reason: "freezes every parameter, so that there is nothing to train; leave some out".into(),
        });
    }
    Ok(())
}

/// The schedule of a config.
pub(crate) fn schedule(config: &Config) -> Schedule {
    let t = &config.train;
    let (peak, floor, warmup, total) = (t.learning_rate, t.min_learning_rate, t.warmup_steps, t.max_steps);
    match t.lr_scheduler_type {
        Scheduler::Constant => Schedule::constant(peak, warmup),
        Scheduler::Linear => Schedule::linear(peak, floor, warmup, total),
        Scheduler::Cosine => Schedule::cosine(peak, floor, warmup, total),
        Scheduler::WarmupStableDecay => {
            Schedule::warmup_stable_decay(peak, floor, warmup, t.decay_steps, total)
        }
    }
}
