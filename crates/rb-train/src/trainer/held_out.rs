//! What a run does about its held-out loss.

use super::{Trainer, evaluate_on};
use crate::config::Config;
use crate::observe::EventKind;
use crate::prepare::Data;
use crate::{Result, TrainError, checkpoint, forecast};

impl Trainer {
    /// The held-out loss, and a warning where it is found to rise.
    pub(super) fn evaluate(&mut self) -> Result<Option<f64>> {
        let Some(data) = self.data.validation.clone() else { return Ok(None) };
        let started = std::time::Instant::now();
        let text_bytes = data.text_bytes();
        let (loss, tokens, whole) = evaluate_on(&self.model, &self.params, data, &self.config)?;
        let text_bytes = whole.then_some(text_bytes);
        let rise = self.observer.evaluation(self.step, loss, tokens, text_bytes, started.elapsed())?;
        if let Some(rise) = rise {
            let passes = self.tokens as f64 / self.data.train.len().max(1) as f64;
            let state = match self.best_checkpoint()? {
                Some((step, _)) if step == rise.lowest_step => "its state is checkpoints/best".to_string(),
                Some((step, _)) => format!("the best state saved is checkpoints/best, of step {step}"),
                None => "no state with an evaluation is saved".to_string(),
            };
            let message = format!(
                "WARNING: {rise}; the training text has been read {passes:.1} times, and the model now learns it by heart \
                 or has come apart; {state}: stop here and use that, add text, or let train.early_stopping_patience end \
                 such a run"
            );
            self.observer.event(self.step, EventKind::Warning, message)?;
        }
        Ok(Some(loss))
    }

    /// Why the run ends before its last step, where `train.early_stopping_patience` says so.
    pub(super) fn given_up(&self) -> Option<String> {
        let train = &self.config.train;
        let count = self.observer.held_out.without_gain(train.early_stopping_threshold);
        (train.early_stopping_patience > 0 && count >= train.early_stopping_patience).then(|| {
            format!(
                "stopped early: {count} evaluations in a row gave no lower held-out loss \
                 (train.early_stopping_patience)"
            )
        })
    }

    /// Whether early stopping wants the state of this step: no loss before it was as low.
    pub(super) fn is_best_to_keep(&self) -> bool {
        let lowest = self.observer.held_out.lowest().map(|(step, _)| step);
        self.config.train.early_stopping_patience > 0 && lowest == Some(self.step)
    }

    /// Step and loss of the checkpoint with the lowest held-out loss.
    pub(super) fn best_checkpoint(&self) -> Result<Option<(u64, f64)>> {
        let saved = checkpoint::list(&self.run.checkpoints())?;
        Ok(self.observer.held_out.lowest_of(|step| saved.contains(&step)))
    }

    /// Says so before the first step where the run reads its text too often.
    pub(super) fn warn_of_repetition(&mut self) -> Result<()> {
        let train = &self.config.train;
        let rows = train.per_device_train_batch_size * train.gradient_accumulation_steps;
        let step_tokens = (rows * train.seq_len) as f64;
        match forecast::repetition(train.max_steps, step_tokens, self.data.train.len() as f64) {
            Some(warning) => {
                self.observer.event(self.step, EventKind::Warning, format!("warning: {warning}"))
            }
            None => Ok(()),
        }
    }
}

/// Early stopping without held-out text would never stop.
pub(super) fn check_early_stopping(config: &Config, data: &Data) -> Result<()> {
    if config.train.early_stopping_patience == 0 || data.validation.is_some() {
        return Ok(());
    }
    Err(TrainError::Config {
        origin: "train.early_stopping_patience".into(),
        reason: "needs held-out text, and none is held out; raise data.validation_fraction, or leave it out"
            .into(),
    })
}
