//! Spikes of the loss and of the gradient norm, found by how far a step is from the steps before it.

use std::collections::VecDeque;

use crate::observe::human_loss;

/// Steps that must be known before one is judged.
const LEAST_STEPS: usize = 20;
/// Outliers in a row after which they are the new level.
const NEW_LEVEL: usize = 8;
/// Smallest spread of losses that counts, as a part of their median: a flat stretch must not make every wiggle a spike.
const LOSS_FLOOR: f64 = 0.02;
/// The same of the logarithm of the norm: a tenth is ten per cent.
const NORM_FLOOR: f64 = 0.1;

/// A step that is far above the ones before it.
#[derive(Clone, Debug, PartialEq)]
pub struct Spike {
    /// `loss` or `gradient norm`.
    pub what: &'static str,
    /// Its value.
    pub value: f64,
    /// Median of the window.
    pub median: f64,
    /// Distance from the median in robust standard deviations.
    pub zscore: f64,
}

impl std::fmt::Display for Spike {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "the {} is {}, {:.1} robust deviations above the median {} of the steps before",
            self.what,
            human_loss(self.value),
            self.zscore,
            human_loss(self.median)
        )
    }
}

/// Finds spikes: a value above the median of the last steps by more than `zscore` times `1.4826` times the median
/// absolute deviation, which a few outliers do not widen. Norms are compared by their logarithms.
///
/// # Examples
/// ```
/// use rb_train::guard::SpikeGuard;
///
/// let mut guard = SpikeGuard::new(10.0, 64);
/// for step in 0..40 {
///     let noise = 0.01 * f64::from(step % 5);
///     assert!(guard.see(4.0 - 0.01 * f64::from(step) + noise, 1.0 + noise).is_none());
/// }
/// assert_eq!(guard.see(9.0, 1.0).unwrap().what, "loss");
/// assert_eq!(guard.see(3.6, 80.0).unwrap().what, "gradient norm");
/// assert!(guard.see(3.6, 1.0).is_none(), "a spike does not change what is normal");
/// ```
#[derive(Clone, Debug)]
pub struct SpikeGuard {
    zscore: f64,
    window: usize,
    losses: VecDeque<f64>,
    norms: VecDeque<f64>,
    in_a_row: usize,
}

impl SpikeGuard {
    /// A guard that compares with the last `window` steps.
    pub fn new(zscore: f64, window: usize) -> SpikeGuard {
        SpikeGuard { zscore, window, losses: VecDeque::new(), norms: VecDeque::new(), in_a_row: 0 }
    }

    /// Judges a step, whose numbers are finite, and takes it into the window unless it is a spike. After several spikes
    /// in a row they are the new level.
    pub fn see(&mut self, loss: f64, grad_norm: f64) -> Option<Spike> {
        let log_norm = grad_norm.max(f64::MIN_POSITIVE).ln();
        let loss_spike = self
            .judge(&self.losses, loss, |median| LOSS_FLOOR * median.abs())
            .map(|(median, zscore)| Spike { what: "loss", value: loss, median, zscore });
        let spike = loss_spike.or_else(|| {
            let (median, zscore) = self.judge(&self.norms, log_norm, |_| NORM_FLOOR)?;
            Some(Spike { what: "gradient norm", value: grad_norm, median: median.exp(), zscore })
        });
        self.in_a_row = if spike.is_some() { self.in_a_row + 1 } else { 0 };
        if spike.is_none() || self.in_a_row >= NEW_LEVEL {
            for (window, value) in [(&mut self.losses, loss), (&mut self.norms, log_norm)] {
                window.push_back(value);
                if window.len() > self.window {
                    window.pop_front();
                }
            }
        }
        spike
    }

    /// Median and z-score, where the value is an outlier.
    fn judge(&self, window: &VecDeque<f64>, value: f64, floor: impl Fn(f64) -> f64) -> Option<(f64, f64)> {
        if window.len() < LEAST_STEPS {
            return None;
        }
        let middle = median(window.iter().copied());
        let spread = 1.4826 * median(window.iter().map(|x| (x - middle).abs()));
        let zscore = (value - middle) / spread.max(floor(middle)).max(f64::MIN_POSITIVE);
        (zscore > self.zscore).then_some((middle, zscore))
    }
}

fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn noise_and_falling_losses_are_no_spikes() {
        let mut rng = rb_tensor::Rng::new(4);
        let mut guard = SpikeGuard::new(10.0, 128);
        for step in 0..3000 {
            let loss = 2.0 + 8.0 * (-f64::from(step) / 300.0).exp() + 0.15 * rng.normal();
            let norm = (0.3 * rng.normal()).exp();
            assert_eq!(guard.see(loss, norm), None, "step {step}");
        }
    }

    #[test]
    fn a_new_level_is_accepted_after_a_while() {
        let mut guard = SpikeGuard::new(10.0, 64);
        (0..64).for_each(|i| assert!(guard.see(2.0 + 0.01 * f64::from(i % 7), 1.0).is_none()));
        let alarms = (0..200).filter(|i| guard.see(6.0 + 0.01 * f64::from(i % 7), 1.0).is_some()).count();
        assert!((NEW_LEVEL..80).contains(&alarms), "{alarms}");
        assert!(guard.see(6.0, 1.0).is_none());
    }

    #[test]
    fn spikes_say_what_and_how_far() {
        let mut guard = SpikeGuard::new(5.0, 32);
        (0..32).for_each(|i| assert!(guard.see(3.0 + 0.01 * f64::from(i % 3), 0.5).is_none()));
        let text = guard.see(7.5, 0.5).unwrap().to_string();
        assert!(
            text.starts_with("the loss is 7.5000, ") && text.ends_with("3.0100 of the steps before"),
            "{text}"
        );
        assert!(SpikeGuard::new(5.0, 32).see(1e9, 1e9).is_none(), "nothing to compare with");
    }
}
