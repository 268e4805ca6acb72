//! Choosing the next token from scores.

use rb_tensor::Rng;

/// How tokens are chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SampleOptions {
    /// Tokens at most.
    pub max_new_tokens: usize,
    /// Divides the scores; 0 always takes the best token.
    pub temperature: f64,
    /// Only so many best tokens are drawn from; 0 is all.
    pub top_k: usize,
    /// Only the best tokens that together have this probability are drawn from.
    pub top_p: f64,
    /// Seed of the draws.
    pub seed: u64,
}

impl Default for SampleOptions {
    fn default() -> Self {
        SampleOptions { max_new_tokens: 128, temperature: 0.8, top_k: 0, top_p: 0.95, seed: 0 }
    }
}

/// Why nothing could be chosen.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum SampleError {
    /// A setting is out of range.
    #[error("{option} is {value}, expected {expected}")]
    Option {
        /// Name.
        option: &'static str,
        /// Value.
        value: f64,
        /// Range.
        expected: &'static str,
    },
    /// The model's scores are NaN or infinite.
    #[error("the score of token {token} is not finite: the weights are damaged")]
    NotFinite {
        /// The first such token.
        token: usize,
    },
}

impl SampleOptions {
    /// Checks the ranges.
    pub fn check(&self) -> Result<(), SampleError> {
        let fail = |option, value, expected| Err(SampleError::Option { option, value, expected });
        if !(self.temperature.is_finite() && self.temperature >= 0.0) {
            return fail("temperature", self.temperature, "a finite number of at least 0");
        }
        if !(self.top_p > 0.0 && self.top_p <= 1.0) {
            return fail("top-p", self.top_p, "above 0 and at most 1");
        }
        Ok(())
    }

    /// A token for these scores. Ties go to the lower id.
    pub(crate) fn pick(&self, logits: &[f32], rng: &mut Rng) -> Result<u32, SampleError> {
        if let Some(token) = logits.iter().position(|x| !x.is_finite()) {
            return Err(SampleError::NotFinite { token });
        }
        let mut order: Vec<u32> = (0..logits.len() as u32).collect();
        order.sort_by(|&a, &b| logits[b as usize].total_cmp(&logits[a as usize]).then(a.cmp(&b)));
        if self.temperature == 0.0 {
            return Ok(order[0]);
        }
        if self.top_k > 0 {
            order.truncate(self.top_k);
        }
        let best = f64::from(logits[order[0] as usize]);
        let weight = |id: &u32| ((f64::from(logits[*id as usize]) - best) / self.temperature).exp();
        let weights: Vec<f64> = order.iter().map(weight).collect();
        let total: f64 = weights.iter().sum();
        // The smallest set of best tokens that reaches top_p; at least one.
        let mut kept = 0.0;
        let mut count = 0;
        while count < weights.len() && (count == 0 || kept < self.top_p * total) {
            kept += weights[count];
            count += 1;
        }
        let mut draw = rng.uniform() * kept;
        for (id, w) in order[..count].iter().zip(&weights) {
            draw -= w;
            if draw < 0.0 {
                return Ok(*id);
            }
        }
        Ok(order[count - 1])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(options: SampleOptions, logits: &[f32]) -> Vec<usize> {
        let mut rng = Rng::new(1);
        let mut counts = vec![0; logits.len()];
        (0..2000).for_each(|_| counts[options.pick(logits, &mut rng).unwrap() as usize] += 1);
        counts
    }

    #[test]
    fn greedy_and_limits() {
        let logits = [0.0, 2.0, 1.0, 2.0];
        let base = SampleOptions { temperature: 1.0, top_p: 1.0, ..Default::default() };
        assert_eq!(counts(SampleOptions { temperature: 0.0, ..base }, &logits), [0, 2000, 0, 0]);
        assert_eq!(counts(SampleOptions { top_k: 1, ..base }, &logits), [0, 2000, 0, 0]);
        let two = counts(SampleOptions { top_p: 0.7, ..base }, &logits);
        assert!(two[0] == 0 && two[2] == 0 && two[1] > 800 && two[3] > 800, "{two:?}");
        let all = counts(base, &logits);
        // Probabilities 0.054, 0.400, 0.147, 0.400, within five standard errors.
        for (n, p) in all.iter().zip([0.0541, 0.3995, 0.1470, 0.3995]) {
            assert!((*n as f64 - 2000.0 * p).abs() < 5.0 * (2000.0 * p * (1.0 - p)).sqrt(), "{all:?}");
        }
    }

    #[test]
    fn bad_scores_and_settings_are_errors() {
        let options = SampleOptions::default();
        assert_eq!(
            options.pick(&[0.0, f32::NAN], &mut Rng::new(1)),
            Err(SampleError::NotFinite { token: 1 })
        );
        assert!(SampleOptions { top_p: 0.0, ..options }.check().is_err());
        assert!(SampleOptions { temperature: f64::NAN, ..options }.check().is_err());
    }
}
