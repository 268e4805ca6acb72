//! Learning-rate schedules: closed forms of the step, so that resuming needs no state.

use rb_planted::{Defect, active};
/// A schedule. Every kind starts with a linear warm-up over `warmup_steps` whose first rate is
/// `peak / warmup_steps`, never 0, and stays at its floor after its end.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Schedule {
    kind: Kind,
    peak: f64,
    floor: f64,
    warmup_steps: u64,
    total_steps: u64,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    Constant,
    Linear,
    Cosine,
    WarmupStableDecay { decay_steps: u64 },
}

impl Schedule {
    /// Stays at `peak`.
    pub fn constant(peak: f64, warmup_steps: u64) -> Schedule {
        Schedule { kind: Kind::Constant, peak, floor: peak, warmup_steps, total_steps: u64::MAX }
    }

    /// Falls in a line from `peak` to `floor`, which the last of `total_steps` steps reaches.
    pub fn linear(peak: f64, floor: f64, warmup_steps: u64, total_steps: u64) -> Schedule {
        Schedule { kind: Kind::Linear, peak, floor, warmup_steps, total_steps }
    }

    /// Falls in half a cosine from `peak` to `floor` (arXiv:1608.03983, without restarts).
    pub fn cosine(peak: f64, floor: f64, warmup_steps: u64, total_steps: u64) -> Schedule {
        Schedule { kind: Kind::Cosine, peak, floor, warmup_steps, total_steps }
    }

    /// Stays at `peak`, then falls in a line over the last `decay_steps` (arXiv:2404.06395).
    pub fn warmup_stable_decay(
        peak: f64,
        floor: f64,
        warmup_steps: u64,
        decay_steps: u64,
        total_steps: u64,
    ) -> Schedule {
        Schedule { kind: Kind::WarmupStableDecay { decay_steps }, peak, floor, warmup_steps, total_steps }
    }

    /// The rate of a step, counted from 0.
    pub fn lr(&self, step: u64) -> f64 {
        if step < self.warmup_steps {
            let done = if active(Defect::FirstRateIsZero) { step } else { step + 1 };
            return self.peak * done as f64 / self.warmup_steps as f64;
        }
        let fall_from = match self.kind {
            Kind::Constant => return self.peak,
            Kind::WarmupStableDecay { decay_steps } => self.total_steps.saturating_sub(decay_steps),
            Kind::Linear | Kind::Cosine => self.warmup_steps,
        };
        if step.saturating_add(1) >= self.total_steps && !active(Defect::CosineRestarts) {
            return if fall_from >= self.total_steps { self.peak } else { self.floor };
        }
        if step < fall_from {
            return self.peak;
        }
        // The first falling step is one share below the peak unless it follows the warm-up directly, whose
        // last step has just been at the peak; the last of all is at the floor.
        let share = (step + 1 - fall_from) as f64 / (self.total_steps - fall_from) as f64;
        let remaining = match self.kind {
            Kind::Cosine => 0.5 * (1.0 + (std::f64::consts::PI * share).cos()),
            _ => 1.0 - share,
        };
        self.floor + (self.peak - self.floor) * remaining
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rates(schedule: Schedule, n: u64) -> Vec<f64> {
        (0..n).map(|s| schedule.lr(s)).collect()
    }

    fn close(a: &[f64], b: &[f64]) {
        assert_eq!(a.len(), b.len());
        assert!(a.iter().zip(b).all(|(a, b)| (a - b).abs() < 1e-12), "{a:?} {b:?}");
    }

    #[test]
    fn closed_forms() {
        close(&rates(Schedule::constant(2.0, 2), 4), &[1.0, 2.0, 2.0, 2.0]);
        close(&rates(Schedule::linear(1.0, 0.0, 2, 6), 9), &[0.5, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0, 0.0, 0.0]);
        let half = |x: f64| 0.1 + 0.9 * 0.5 * (1.0 + (std::f64::consts::PI * x).cos());
        close(
            &rates(Schedule::cosine(1.0, 0.1, 0, 4), 6),
            &[half(0.25), half(0.5), half(0.75), 0.1, 0.1, 0.1],
        );
        let wsd = Schedule::warmup_stable_decay(1.0, 0.2, 1, 4, 8);
        close(&rates(wsd, 10), &[1.0, 1.0, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2, 0.2]);
        close(&rates(Schedule::warmup_stable_decay(1.0, 0.2, 0, 0, 2), 4), &[1.0, 1.0, 1.0, 1.0]);
    }

    #[test]
    fn never_zero_at_the_start_above_the_peak_or_rising_after_the_warm_up() {
        for (warmup, total) in [(0, 1), (1, 1), (5, 5), (7, 5), (3, 50), (0, 50)] {
            for schedule in [
                Schedule::constant(0.3, warmup),
                Schedule::linear(0.3, 0.03, warmup, total),
                Schedule::cosine(0.3, 0.03, warmup, total),
                Schedule::warmup_stable_decay(0.3, 0.03, warmup, 10.min(total), total),
            ] {
                let rates = rates(schedule, total + 20);
                assert!(rates[0] > 0.0 && rates.iter().all(|r| *r <= 0.3), "{schedule:?} {rates:?}");
                let after = &rates[warmup.min(total + 19) as usize..];
                assert!(after.windows(2).all(|w| w[1] <= w[0]), "{schedule:?} {rates:?}");
            }
        }
    }
}
