//! Rules that a config must obey, beyond the types of its values.

use super::{Config, MasterChoice, OptimizerChoice, Precision, Scheduler, TrainSection, WideDtype};

/// Tokens of one forward pass at most: far more than fit any device, few enough to be planned for.
const MOST_TOKENS: usize = 1 << 26;

impl Config {
    /// Checks values against each other.
    ///
    /// # Errors
    /// The first broken rule: the key, its value and the remedy.
    pub fn validate(&self) -> Result<(), String> {
        if self.model == super::model_of_folder() {
            return Err(
                "has no section [model]; add one, or name a model to start from in run.init_from".into()
            );
        }
        let t = &self.train;
        at_least("train.max_steps", t.max_steps, 1)?;
        at_least("train.seq_len", t.seq_len as u64, 1)?;
        count("train.per_device_train_batch_size", t.per_device_train_batch_size as u64, 1, i32::MAX as u64)?;
        count("train.gradient_accumulation_steps", t.gradient_accumulation_steps as u64, 1, 1 << 20)?;
        at_least("train.logging_steps", t.logging_steps, 1)?;
        at_least("train.save_steps", t.save_steps, 1)?;
        in_range("train.learning_rate", t.learning_rate, 0.0, f64::MAX)?;
        in_range("train.min_learning_rate", t.min_learning_rate, 0.0, f64::MAX)?;
        in_range("train.weight_decay", t.weight_decay, 0.0, f64::MAX)?;
        in_range("train.max_grad_norm", t.max_grad_norm, 0.0, f64::MAX)?;
        in_range("train.z_loss", t.z_loss, 0.0, f64::MAX)?;
        in_range("train.spike_zscore", t.spike_zscore, f64::MIN_POSITIVE, f64::MAX)?;
        at_least("train.spike_window", t.spike_window as u64, 20)?;
        below_one("train.label_smoothing_factor", t.label_smoothing_factor)?;
        in_range("train.early_stopping_threshold", t.early_stopping_threshold, 0.0, f64::MAX)?;
        if t.early_stopping_patience > 0 && t.eval_steps == 0 {
            return Err(format!(
                "train.early_stopping_patience is {}, but train.eval_steps is 0: nothing is evaluated; set \
                 train.eval_steps",
                t.early_stopping_patience
            ));
        }
        in_range("data.validation_fraction", self.data.validation_fraction, 0.0, 0.5)?;
        if let Some(mib) = self.run.gpu_memory_budget_mib {
            at_least("run.gpu_memory_budget_mib", mib, 1)?;
        }
        if self.data.paths.iter().any(|path| path.as_os_str().is_empty()) {
            return Err("data.paths has an empty path; name a file or a folder, or remove it".into());
        }
        if self.data.text_field.is_empty() {
            return Err("data.text_field is empty; name the field with the text, usually \"text\"".into());
        }
        rb_data::Languages::new(self.data.languages.clone()).map_err(|e| format!("data.languages: {e}"))?;
        if self.tokenizer.path.is_none() {
            // The bytes and the token that ends a document.
            const LEAST: u64 = 256 + 1;
            let most = rb_data::tokenizer::MAX_VOCAB_SIZE as u64;
            count("tokenizer.vocab_size", self.tokenizer.vocab_size as u64, LEAST, most)?;
        }
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
        if self.run.precision == Precision::Fp32 && self.run.master_weights == MasterChoice::Split {
            return Err(
                "run.master_weights is split, but run.precision is fp32, where no bf16 copy is: set \
                        run.precision=\"bf16\""
                    .into(),
            );
        }
        match t.optim {
            OptimizerChoice::Adamw => {
                below_one("train.adam_beta1", t.adam_beta1)?;
                below_one("train.adam_beta2", t.adam_beta2)?;
                if !(t.adam_epsilon > 0.0 && t.adam_epsilon.is_finite()) {
                    return Err(format!(
                        "train.adam_epsilon is {}, expected a finite number above 0",
                        t.adam_epsilon
                    ));
                }
            }
            OptimizerChoice::Sgd => below_one("train.momentum", t.momentum)?,
        }
        if t.lr_scheduler_type == Scheduler::WarmupStableDecay
            && t.warmup_steps.saturating_add(t.decay_steps) > t.max_steps
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
        let tokens = t.per_device_train_batch_size.saturating_mul(t.seq_len);
        if tokens > MOST_TOKENS {
            return Err(format!(
                "train.per_device_train_batch_size {} times train.seq_len {} is {tokens} tokens, expected at most \
                 {MOST_TOKENS} in one forward pass; raise train.gradient_accumulation_steps instead",
                t.per_device_train_batch_size, t.seq_len
            ));
        }
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

impl TrainSection {
    /// What to tell the user of a run that ends before its learning rate has risen: legal, and rarely meant.
    pub fn short_run(&self) -> Option<String> {
        (self.warmup_steps > 0 && self.warmup_steps >= self.max_steps).then(|| {
            format!(
                "train: the run ends in its warm-up (train.warmup_steps {} of train.max_steps {}), so the learning \
                 rate only rises; set train.warmup_steps lower",
                self.warmup_steps, self.max_steps
            )
        })
    }
}

fn at_least(key: &str, value: u64, least: u64) -> Result<(), String> {
    if value >= least { Ok(()) } else { Err(format!("{key} is {value}, expected at least {least}")) }
}

fn count(key: &str, value: u64, least: u64, most: u64) -> Result<(), String> {
    if (least..=most).contains(&value) {
        return Ok(());
    }
    Err(format!("{key} is {value}, expected {least} to {most}"))
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
