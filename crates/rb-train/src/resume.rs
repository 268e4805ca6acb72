//! Which settings may change when a run is resumed.
//!
//! The rule: settings that decide what has already been learned from (the model, the tokenizer, the data and
//! its order, the seed, the optimizer's kind) are fixed for the life of a run. All others apply from the
//! resumed step on; every change is printed and recorded.

use crate::{Result, TrainError};

/// Keys, or sections that end in a dot, that a resumed run keeps.
const FIXED: &[&str] = &[
    "model.",
    "tokenizer.",
    "data.",
    "run.seed",
    "run.out",
    "run.init_from",
    "run.precision",
    "train.seq_len",
    "train.optim",
    "train.frozen",
];

/// Refuses changes of fixed settings, naming all of them.
pub(crate) fn check_changes(changes: &[(String, String, String)]) -> Result<()> {
    let fixed = |key: &str| FIXED.iter().any(|f| key == *f || (f.ends_with('.') && key.starts_with(f)));
    let refused: Vec<String> = changes
        .iter()
        .filter(|(k, ..)| fixed(k))
        .map(|(k, old, new)| format!("{k}: {old} -> {new}"))
        .collect();
    if refused.is_empty() {
        return Ok(());
    }
    Err(TrainError::Config {
        origin: "--resume".into(),
        reason: format!(
            "these settings define the run and cannot change: {}; start a new run for them",
            refused.join(", ")
        ),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fixed_settings_are_refused_and_others_pass() {
        let change = |key: &str| [(key.to_string(), "1".to_string(), "2".to_string())];
        for key in [
            "train.learning_rate",
            "train.max_steps",
            "train.per_device_train_batch_size",
            "train.recompute",
            "run.device",
            "run.gpu_memory_budget_mib",
        ] {
            check_changes(&change(key)).unwrap();
        }
        for key in ["model.hidden_size", "run.seed", "data.shuffle", "train.seq_len"] {
            let message = check_changes(&change(key)).unwrap_err().to_string();
            assert!(message.contains(&format!("{key}: 1 -> 2")), "{message}");
        }
    }
}
