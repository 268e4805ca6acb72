//! Rules that a config must obey, beyond the types of its values.

use super::{Config, OptimizerChoice, Precision, Scheduler, WideDtype};

impl Config {
    /// Checks values against each other.
    ///
    /// # Errors
    /// The first broken rule: the key, its value and the remedy.
    pub fn validate(&self) -> Result<(), String> {
        let t = &self.train;
        at_least("train.max_steps", t.max_steps, 1)?;
        at_least("train.seq_len", t.seq_len as u64, 1)?;
        at_least("train.per_device_train_batch_size", t.per_device_train_batch_size as u64, 1)?;
        at_least("train.gradient_accumulation_steps", t.gradient_accumulation_steps as u64, 1)?;
        at_least("train.logging_steps", t.logging_steps, 1)?;
        at_least("train.save_steps", t.save_steps, 1)?;
        in_range("train.learning_rate", t.learning_rate, 0.0, f64::MAX)?;
        in_range("train.min_learning_rate", t.min_learning_rate, 0.0, f64::MAX)?;
        in_range("train.weight_decay", t.weight_decay, 0.0, f64::MAX)?;
        in_range("train.max_grad_norm", t.max_grad_norm, 0.0, f64::MAX)?;
        in_range("train.z_loss", t.z_loss, 0.0, f64::MAX)?;
        below_one("train.label_smoothing_factor", t.label_smoothing_factor)?;
        in_range("data.validation_fraction", self.data.validation_fraction, 0.0, 0.5)?;
        if t.min_learning_rate > t.learning_rate {
            return Err(format!(
                "train.min_learning_rate is {}, above train.learning_rate {}; the floor must not exceed the peak",
                t.min_learning_rate, t.learning_rate
            ));
        }
        for (key, dtype) in
            [("run.residual_dtype", self.run.residual_dtype), ("run.gradient_dtype", self.run.gradient_dtype)]
        {
            if self.run.precision == Precision::Fp32 && dtype == WideDtype::Bf16 {
                return Err(format!("{key} is bf16, but run.precision is fp32: set run.precision=\"bf16\""));
            }
        }
        match t.optim {
            OptimizerChoice::Adamw => {
                below_one("train.adam_beta1", t.adam_beta1)?;
                below_one("train.adam_beta2", t.adam_beta2)?;
                in_range("train.adam_epsilon", t.adam_epsilon, f64::MIN_POSITIVE, f64::MAX)?;
            }
            OptimizerChoice::Sgd => below_one("train.momentum", t.momentum)?,
        }
        if t.lr_scheduler_type == Scheduler::WarmupStableDecay && t.warmup_steps + t.decay_steps > t.max_steps
        {
            return Err(format!(
                "train.warmup_steps {} and train.decay_steps {} do not fit into train.max_steps {}",
                t.warmup_steps, t.decay_steps, t.max_steps
            ));
        }
        let mut model = self.model.clone();
        // The tokenizer gives the vocabulary later; the other rules need not wait for it.
        model.vocab_size = model.vocab_size.max(1);
        model.validate().map_err(|e| e.to_string())?;
        let limit = self.model.max_position_embeddings;
        if t.seq_len > limit {
            return Err(format!(
                "train.seq_len is {}, above model.max_position_embeddings {limit}; raise the one or lower the other",
                t.seq_len
            ));
        }
        Ok(())
    }
}

fn at_least(key: &str, value: u64, least: u64) -> Result<(), String> {
    if value >= least { Ok(()) } else { Err(format!("{key} is {value}, expected at least {least}")) }
}

fn in_range(key: &str, value: f64, low: f64, high: f64) -> Result<(), String> {
    if value.is_finite() && (low..=high).contains(&value) {
        return Ok(());
    }
    let expected = if high == f64::MAX {
        format!("a finite number of at least {low}")
    } else {
        format!("{low} to {high}")
    };
    Err(format!("{key} is {value}, expected {expected}"))
}

fn below_one(key: &str, value: f64) -> Result<(), String> {
    if (0.0..1.0).contains(&value) { Ok(()) } else { Err(format!("{key} is {value}, expected 0 to below 1")) }
}
