//! Where a run stands on held-out text: its lowest loss, and whether the loss has turned and only rises.

use crate::observe::human_loss;

/// Evaluations in a row, the last ones, that must all be far above the lowest.
const LAST: usize = 3;
/// Least distance that counts, in nats a token.
const LEAST_NATS: f64 = 0.02;
/// The same as a part of the lowest loss.
const LEAST_PART: f64 = 0.01;
/// Distance in standard deviations of the noise between evaluations. The lowest of a hundred noisy losses lies two and a
/// half below their mean; of 4,000 simulated runs of 120 noisy evaluations none gave an alarm, one with 7, and 11 with 6.
const NOISE: f64 = 8.0;

/// A held-out loss that has turned.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rise {
    /// Step of the lowest loss.
    pub lowest_step: u64,
    /// The lowest loss, nats a token.
    pub lowest: f64,
    /// The last loss, nats a token.
    pub last: f64,
    /// Evaluations since the lowest.
    pub evaluations: usize,
}

impl std::fmt::Display for Rise {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "the held-out loss rises: it was lowest at step {} with {}, and after {} more evaluations it is {}",
            self.lowest_step,
            human_loss(self.lowest),
            self.evaluations,
            human_loss(self.last)
        )
    }
}

/// The held-out losses of a run, in order.
///
/// A loss *rises* where the last three are all above the lowest by more than 0.02 nats, 1 % of it, and eight times the
/// noise of the losses. That noise is measured by second differences, to which a steady fall or rise adds nothing.
///
/// # Examples
/// ```
/// use rb_train::held_out::HeldOut;
///
/// let mut held_out = HeldOut::default();
/// for (step, loss) in [(1, 5.0), (2, 4.2), (3, 4.0), (4, 4.3), (5, 4.6)] {
///     assert_eq!(held_out.see(step, loss), None);
/// }
/// let rise = held_out.see(6, 4.9).unwrap();
/// assert_eq!((rise.lowest_step, rise.evaluations), (3, 3));
/// assert_eq!(held_out.see(7, 5.2), None, "it is said once");
/// ```
#[derive(Clone, Debug, Default)]
pub struct HeldOut {
    losses: Vec<(u64, f64)>,
    told: bool,
}

impl HeldOut {
    /// Takes the loss of an evaluation. Returns the rise where the loss is found to rise for the first time.
    pub fn see(&mut self, step: u64, loss: f64) -> Option<Rise> {
        self.losses.push((step, loss));
        let rise = if self.told { None } else { self.rise() };
        self.told |= rise.is_some();
        rise
    }

    /// Step and loss of the lowest, the earliest of equals.
    pub fn lowest(&self) -> Option<(u64, f64)> {
        self.lowest_of(|_| true)
    }

    /// The same among steps that `of` accepts.
    pub fn lowest_of(&self, of: impl Fn(u64) -> bool) -> Option<(u64, f64)> {
        let some = self.losses.iter().filter(|(step, _)| of(*step));
        some.copied().min_by(|a, b| a.1.total_cmp(&b.1))
    }

    /// Evaluations since the last that was below all before it by more than `threshold` nats.
    pub fn without_gain(&self, threshold: f64) -> u64 {
        let (mut lowest, mut count) = (f64::INFINITY, 0);
        for (_, loss) in &self.losses {
            count = if *loss < lowest - threshold { 0 } else { count + 1 };
            lowest = lowest.min(*loss);
        }
        count
    }

    fn rise(&self) -> Option<Rise> {
        let (lowest_step, lowest) = self.lowest()?;
        let after: Vec<f64> =
            self.losses.iter().filter(|(step, _)| *step > lowest_step).map(|(_, loss)| *loss).collect();
        let recent = after.get(after.len().checked_sub(LAST)?..)?;
        let margin = LEAST_NATS.max(LEAST_PART * lowest).max(NOISE * self.noise());
        let last = *recent.last()?;
        (recent.iter().all(|loss| loss - lowest > margin)).then_some(Rise {
            lowest_step,
            lowest,
            last,
            evaluations: after.len(),
        })
    }

    /// Standard deviation of what is neither fall nor rise.
    fn noise(&self) -> f64 {
        let mut bends: Vec<f64> =
            self.losses.windows(3).map(|w| (w[0].1 - 2.0 * w[1].1 + w[2].1).abs()).collect();
        bends.sort_by(f64::total_cmp);
        let median = bends.get(bends.len().saturating_sub(1) / 2).copied().unwrap_or(0.0);
        // The second difference of independent noise has sqrt(6) times its deviation; the median of |x| is 0.6745 of it.
        median / (6f64.sqrt() * 0.6745)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn alarm(losses: impl IntoIterator<Item = f64>) -> Option<(usize, Rise)> {
        let mut held_out = HeldOut::default();
        losses.into_iter().enumerate().find_map(|(n, loss)| Some((n + 1, held_out.see(n as u64 + 1, loss)?)))
    }

    #[test]
    fn noise_on_falling_and_flat_losses_is_no_alarm() {
        let mut alarms = Vec::new();
        for seed in 0..200 {
            let mut rng = rb_tensor::Rng::new(seed);
            for noise in [0.002, 0.01, 0.05, 0.2] {
                let mut fallen = |n: i32| 3.0 + 5.0 * (-f64::from(n) / 8.0).exp() + noise * rng.normal();
                let losses: Vec<f64> = (0..120).map(&mut fallen).collect();
                alarms.extend(alarm(losses).map(|found| (seed, noise, found)));
            }
        }
        // A tenth of a per cent of runs this long and noisy.
        assert!(alarms.len() <= 1 && alarms.iter().all(|(_, noise, _)| *noise > 0.1), "{alarms:?}");
    }

    #[test]
    fn one_bad_stretch_is_no_alarm() {
        let fallen = |n: i32| 3.0 + 4.0 * (-f64::from(n) / 5.0).exp();
        // A spike of the loss that two evaluations see.
        let losses = (0..60).map(|n| fallen(n) + if n == 30 || n == 31 { 2.0 } else { 0.0 });
        assert_eq!(alarm(losses), None);
    }

    #[test]
    fn a_loss_that_turns_is_told_soon() {
        for seed in 0..50 {
            let mut rng = rb_tensor::Rng::new(seed);
            // Lowest at the tenth evaluation, 0.6 nats above it ten later.
            let turned = |n: i32| 4.0 + 0.006 * f64::from(n - 10).powi(2) + 0.01 * rng.normal();
            let (when, rise) = alarm((1..40).map(turned)).unwrap();
            assert!((13..=20).contains(&when), "seed {seed}: {when}");
            assert!((8..=12).contains(&rise.lowest_step) && rise.last > rise.lowest, "{rise:?}");
        }
        // What the 101.7M model did that learned its text by heart: lowest at the first evaluation.
        let (when, rise) = alarm([5.6, 6.9, 7.9, 8.6, 9.2, 9.6]).unwrap();
        assert!(when <= 5 && rise.lowest_step == 1, "{when} {rise:?}");
        assert!(rise.to_string().contains("lowest at step 1 with 5.6000"), "{rise}");
    }

    #[test]
    fn gains_are_counted_as_the_threshold_says() {
        let mut held_out = HeldOut::default();
        let counts: Vec<(u64, u64)> = [5.0, 4.0, 4.1, 3.99, 3.98, 4.5, 3.5]
            .iter()
            .enumerate()
            .map(|(n, loss)| {
                held_out.see(n as u64, *loss);
                (held_out.without_gain(0.0), held_out.without_gain(0.05))
            })
            .collect();
        assert_eq!(counts, [(0, 0), (0, 0), (1, 1), (0, 2), (0, 3), (1, 4), (0, 0)]);
        assert_eq!(held_out.lowest(), Some((6, 3.5)));
        assert_eq!(held_out.lowest_of(|step| step < 5), Some((4, 3.98)));
    }
}
