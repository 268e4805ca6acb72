//! [`Schedule`]: the learning rate as a closed form of the step number.

use crate::Result;
use crate::error::require;

/// What the rate does after warm-up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScheduleKind {
    /// Stays at the peak for ever.
    Constant,
    /// Falls in a line to the floor.
    Linear,
    /// Falls in half a cosine to the floor.
    Cosine,
    /// Stays at the peak, then falls in a line to the floor over the last steps.
    WarmupStableDecay {
        /// Steps of the fall.
        decay_steps: u64,
    },
}

/// A learning rate for each step; steps count from 0.
///
/// - **Warm-up** `peak * (step + 1) / warmup_steps` for `step < warmup_steps`: never 0, the peak at its last
///   step.
/// - **Decay** with `p = (step - start) / (total_steps - start)`, where `start` is `warmup_steps`, or
///   `total_steps - decay_steps` for [`ScheduleKind::WarmupStableDecay`]:
///   linear `floor + (peak - floor) * (1 - p)`, cosine `floor + (peak - floor) * (1 + cos(pi p)) / 2`.
/// - **After** `total_steps` the rate stays at the floor; it never restarts.
///
/// The rate depends on nothing but the step, so a resumed run has nothing to restore.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Schedule {
    /// Shape after warm-up.
    pub kind: ScheduleKind,
    /// Largest rate.
    pub peak_lr: f64,
    /// Floor of the decay, an absolute rate.
    pub min_lr: f64,
    /// Steps of linear warm-up.
    pub warmup_steps: u64,
    /// Steps of the whole run.
    pub total_steps: u64,
}

impl Schedule {
    /// Checks the numbers against each other.
    ///
    /// # Errors
    /// [`crate::OptimError::HyperParameter`] with the number, its value and the rule.
    pub fn validate(&self) -> Result<()> {
        let Schedule { kind, peak_lr, min_lr, warmup_steps, total_steps } = *self;
        let rule = |good, name, value: String, expected| require(good, "schedule", name, value, expected);
        let finite = "a finite number of at least 0";
        rule(peak_lr.is_finite() && peak_lr >= 0.0, "peak_lr", peak_lr.to_string(), finite)?;
        rule(min_lr.is_finite() && min_lr >= 0.0, "min_lr", min_lr.to_string(), finite)?;
        rule(min_lr <= peak_lr, "min_lr", min_lr.to_string(), "at most peak_lr")?;
        rule(warmup_steps <= total_steps, "warmup_steps", warmup_steps.to_string(), "at most total_steps")?;
        if let ScheduleKind::WarmupStableDecay { decay_steps } = kind {
            let room = total_steps - warmup_steps;
            let expected = "at most total_steps - warmup_steps";
            rule(decay_steps <= room, "decay_steps", decay_steps.to_string(), expected)?;
        }
        Ok(())
    }

    /// The rate of `step`.
    pub fn lr(&self, step: u64) -> f64 {
        let Schedule { kind, peak_lr, min_lr, warmup_steps, total_steps } = *self;
        if step < warmup_steps {
            return (peak_lr * ((step + 1) as f64 / warmup_steps as f64)).min(peak_lr);
        }
        let start = match kind {
            ScheduleKind::Constant => return peak_lr,
            ScheduleKind::Linear | ScheduleKind::Cosine => warmup_steps,
            ScheduleKind::WarmupStableDecay { decay_steps } => total_steps.saturating_sub(decay_steps),
        };
        if step >= total_steps {
            return min_lr;
        }
        let progress = step.saturating_sub(start) as f64 / (total_steps - start) as f64;
        let share = match kind {
            ScheduleKind::Cosine => 0.5 * (1.0 + (std::f64::consts::PI * progress).cos()),
            _ => 1.0 - progress,
        };
        // Rounding may leave the interval by one ulp.
        (min_lr + (peak_lr - min_lr) * share).min(peak_lr).max(min_lr)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PEAK: f64 = 3e-4;
    const FLOOR: f64 = 3e-5;

    fn schedule(kind: ScheduleKind, warmup_steps: u64, total_steps: u64) -> Schedule {
        Schedule { kind, peak_lr: PEAK, min_lr: FLOOR, warmup_steps, total_steps }
    }

    /// Compares steps `0..total + 10` with values worked out by `expected` for the steps after warm-up.
    fn check(schedule: Schedule, expected: impl Fn(f64) -> f64) {
        schedule.validate().unwrap();
        let mut last = f64::INFINITY;
        for step in 0..schedule.total_steps + 10 {
            let lr = schedule.lr(step);
            assert!(lr > 0.0 && lr <= PEAK, "step {step}: {lr}");
            let want = if step < schedule.warmup_steps {
                PEAK * (step as f64 + 1.0) / schedule.warmup_steps as f64
            } else {
                assert!(lr <= last, "step {step}: the rate rises from {last} to {lr}");
                last = lr;
                expected(step as f64)
            };
            assert!((lr - want).abs() <= 1e-15, "step {step}: {lr}, expected {want}");
        }
    }

    #[test]
    fn sequences_match_closed_forms() {
        check(schedule(ScheduleKind::Constant, 5, 20), |_| PEAK);
        check(schedule(ScheduleKind::Linear, 4, 24), |s| {
            if s >= 24.0 { FLOOR } else { PEAK - (PEAK - FLOOR) * (s - 4.0) / 20.0 }
        });
        let cosine = |s: f64| {
            let angle = std::f64::consts::PI * ((s - 3.0) / 17.0).min(1.0);
            (PEAK + FLOOR) / 2.0 + (PEAK - FLOOR) / 2.0 * angle.cos()
        };
        check(schedule(ScheduleKind::Cosine, 3, 20), cosine);
        check(schedule(ScheduleKind::WarmupStableDecay { decay_steps: 8 }, 2, 30), |s| match s {
            s if s < 22.0 => PEAK,
            s if s >= 30.0 => FLOOR,
            s => FLOOR + (PEAK - FLOOR) * (30.0 - s) / 8.0,
        });
    }

    #[test]
    fn the_ends() {
        for kind in [
            ScheduleKind::Constant,
            ScheduleKind::Linear,
            ScheduleKind::Cosine,
            ScheduleKind::WarmupStableDecay { decay_steps: 0 },
        ] {
            assert_eq!(schedule(kind, 0, 10).lr(0), PEAK, "{kind:?}: no warm-up starts at the peak");
            assert_eq!(schedule(kind, 4, 10).lr(0), PEAK / 4.0, "{kind:?}: never 0 at step 0");
            assert_eq!(schedule(kind, 4, 10).lr(3), PEAK, "{kind:?}");
            let end = if kind == ScheduleKind::Constant { PEAK } else { FLOOR };
            for step in [10, 11, 20, 1000, u64::MAX] {
                assert_eq!(schedule(kind, 4, 10).lr(step), end, "{kind:?}");
                assert_eq!(schedule(kind, 10, 10).lr(step), end, "{kind:?}: a run that is all warm-up");
            }
        }
    }

    #[test]
    fn impossible_numbers_are_named() {
        let message = |s: Schedule| s.validate().unwrap_err().to_string();
        let long = schedule(ScheduleKind::Cosine, 11, 10);
        assert_eq!(message(long), "schedule: warmup_steps is 11, expected at most total_steps");
        let wsd = schedule(ScheduleKind::WarmupStableDecay { decay_steps: 8 }, 3, 10);
        assert!(message(wsd).contains("decay_steps is 8"));
        let floor = Schedule { min_lr: 1.0, ..schedule(ScheduleKind::Linear, 0, 10) };
        assert!(message(floor).contains("min_lr is 1, expected at most peak_lr"));
        let nan = Schedule { peak_lr: f64::NAN, ..schedule(ScheduleKind::Linear, 0, 10) };
        assert!(message(nan).contains("peak_lr is NaN"));
    }
}
