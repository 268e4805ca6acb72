//! What a run does about spikes, and its statistics on request.

use rb_data::Batch;
use rb_tensor::Tensor;

use super::Trainer;
use crate::config::OnSpike;
use crate::guard::Spike;
use crate::observe::EventKind;
use crate::stepper::Stepper;
use crate::{Result, TrainError, checkpoint, statistics};

/// Times that a run may go back to one checkpoint: more would be a loop.
const MOST_ROLLBACKS: u32 = 3;

impl Trainer {
    /// Whether something is to be seen between the gradients and the update of the next step, which a captured step
    /// does not stop for.
    pub(super) fn looks_before_the_update(&self) -> bool {
        self.config.train.on_spike == OnSpike::Skip || self.statistics_are_due()
    }

    fn statistics_are_due(&self) -> bool {
        let every = self.config.train.statistics_steps;
        every != 0 && (self.step + 1).is_multiple_of(every)
    }

    /// With `on_spike = "skip"`: judges a step before it changes anything, which on a GPU waits for its numbers. True
    /// where it was left out.
    pub(super) fn spikes_before_the_update(&mut self, loss: &Tensor, batches: &[Batch]) -> Result<bool> {
        if self.config.train.on_spike != OnSpike::Skip {
            return Ok(false);
        }
        self.settle(0)?;
        let (value, grad_norm) = (loss.item()?, self.grads.global_norm()?);
        // What is not finite is another guard's.
        if !(value.is_finite() && grad_norm.is_finite()) {
            return Ok(false);
        }
        let Some(spike) = self.guard.see(value, grad_norm) else { return Ok(false) };
        self.grads.mark_stale();
        self.step += 1;
        self.tokens += batches.iter().map(|b| (b.batch_size * b.seq_len) as u64).sum::<u64>();
        self.skipped_steps += 1;
        let message = format!("{spike}; skipped, {} steps so far", self.skipped_steps);
        self.observer.event(self.step, EventKind::SkippedStep, message)?;
        self.observer.skip();
        Ok(true)
    }

    /// Judges a finished step and does what the config says.
    pub(super) fn watch_for_spikes(&mut self, step: u64, loss: f64, grad_norm: f64) -> Result<()> {
        let action = self.config.train.on_spike;
        if matches!(action, OnSpike::Off | OnSpike::Skip) {
            return Ok(());
        }
        let Some(spike) = self.guard.see(loss, grad_norm) else { return Ok(()) };
        match action {
            OnSpike::Rollback => self.roll_back(step, &spike),
            OnSpike::Stop => self.stop_at(step, &spike, "train.on_spike is \"stop\""),
            _ => self.observer.event(step, EventKind::Warning, spike.to_string()),
        }
    }

    /// Takes weights and optimizer state from the newest checkpoint. Steps and data go on, so that what led to the
    /// spike is not seen again.
    fn roll_back(&mut self, step: u64, spike: &Spike) -> Result<()> {
        let Some(found) = checkpoint::find_latest(&self.run.checkpoints())? else {
            return self.stop_at(step, spike, "there is no checkpoint to go back to yet");
        };
        if self.rollbacks >= MOST_ROLLBACKS {
            return self.stop_at(step, spike, "the run has gone back often enough");
        }
        self.rollbacks += 1;
        // Steps that were enqueued meanwhile started from the weights that are given up.
        while let Some(later) = self.pending.pop_front() {
            later.loss.wait()?;
            later.grad_norm.wait()?;
        }
        let state = checkpoint::read_state(&found.path)?;
        checkpoint::restore(&found.path, &state, &mut self.params, self.optimizer.as_mut())?;
        self.grads.mark_stale();
        // A captured step may not know where the state lies now.
        self.stepper = Stepper::new(self.config.run.graph);
        let message = format!(
            "{spike}; weights and optimizer state are those after step {} again ({} of at most {MOST_ROLLBACKS} times), \
             the data go on",
            found.step, self.rollbacks
        );
        self.observer.event(self.step, EventKind::Warning, message)
    }

    fn stop_at(&mut self, step: u64, spike: &Spike, why: &str) -> Result<()> {
        self.pending.clear();
        self.observer.event(step, EventKind::Stop, spike.to_string())?;
        self.observer.finish(step)?;
        let saved = match checkpoint::find_latest(&self.run.checkpoints())? {
            Some(found) => format!("the newest state is {}", found.path.display()),
            None => "no state was saved yet".to_string(),
        };
        Err(TrainError::Gate {
            reason: format!(
                "step {step}: {spike}; {why}; {saved}; lower train.learning_rate, look at the data of this step, or set \
                 train.on_spike=\"skip\""
            ),
        })
    }

    /// Every `train.statistics_steps` steps: sizes of activations, gradients and weights.
    pub(super) fn write_statistics(&mut self, batches: &[Batch]) -> Result<()> {
        let (true, Some(batch)) = (self.statistics_are_due(), batches.first()) else { return Ok(()) };
        let started = std::time::Instant::now();
        let mask = self.config.data.document_mask;
        let all = statistics::collect(&self.model, &self.params, &self.grads, batch, mask, self.step + 1)?;
        statistics::append(&self.run.path().join("statistics.jsonl"), &all)?;
        self.observer.pause(started.elapsed());
        Ok(())
    }
}
