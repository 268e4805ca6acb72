//! Choosing the next token from scores.
//!
//! In this order, as transformers does: the repetition penalty changes scores, the temperature divides them, `top_k`,
//! `top_p` and `min_p` leave tokens out, and one of the rest is drawn.

use std::cmp::Ordering;

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
    /// Only tokens with at least this part of the best token's probability are drawn from; 0 is all.
    pub min_p: f64,
    /// Scores of tokens that the text holds already are divided by this where they are above 0 and multiplied by it
    /// where they are below; 1 changes nothing. **Source** arXiv:1909.05858.
    pub repetition_penalty: f64,
    /// Seed of the draws.
    pub seed: u64,
    /// Whether the token that ends a text is a token like any other: for measurements.
    pub ignore_eos: bool,
    /// Whether keys and values of the text so far are kept. Without them each token costs a pass over the whole text; the
    /// tokens are the same.
    pub kv_cache: bool,
}

impl Default for SampleOptions {
    fn default() -> Self {
        SampleOptions {
            max_new_tokens: 128,
            temperature: 0.8,
            top_k: 0,
            top_p: 0.95,
            min_p: 0.0,
            repetition_penalty: 1.0,
            seed: 0,
            ignore_eos: false,
            kv_cache: true,
        }
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
    ///
    /// # Errors
    /// [`SampleError::Option`]: the first setting out of its range.
    pub fn check(&self) -> Result<(), SampleError> {
        let fail = |option, value, expected| Err(SampleError::Option { option, value, expected });
        if !(self.temperature.is_finite() && self.temperature >= 0.0) {
            return fail("temperature", self.temperature, "a finite number of at least 0");
        }
        if !(self.top_p > 0.0 && self.top_p <= 1.0) {
            return fail("top-p", self.top_p, "above 0 and at most 1");
        }
        if !(0.0..=1.0).contains(&self.min_p) {
            return fail("min-p", self.min_p, "0 to 1");
        }
        if !(self.repetition_penalty.is_finite() && self.repetition_penalty > 0.0) {
            return fail("repetition-penalty", self.repetition_penalty, "a finite number above 0");
        }
        Ok(())
    }

    /// A token for these scores after the tokens `before`. Ties go to the lower id.
    pub(crate) fn pick(&self, logits: &[f32], before: &[u32], rng: &mut Rng) -> Result<u32, SampleError> {
        if let Some(token) = logits.iter().position(|x| !x.is_finite()) {
            return Err(SampleError::NotFinite { token });
        }
        let penalised = self.penalised(logits, before);
        let logits = penalised.as_deref().unwrap_or(logits);
        let better = |a: &u32, b: &u32| -> Ordering {
            logits[*b as usize].total_cmp(&logits[*a as usize]).then(a.cmp(b))
        };
        let mut order: Vec<u32> = (0..logits.len() as u32).collect();
        let keep = if self.temperature == 0.0 { 1 } else { self.top_k };
        if keep > 0 && keep < order.len() {
            order.select_nth_unstable_by(keep - 1, better);
            order.truncate(keep);
        }
        order.sort_unstable_by(better);
        if self.temperature == 0.0 {
            return Ok(order[0]);
        }
        let best = f64::from(logits[order[0] as usize]);
        // The probability of a token, as a part of the best one's.
        let weight = |id: &u32| ((f64::from(logits[*id as usize]) - best) / self.temperature).exp();
        let weights: Vec<f64> = order.iter().map(weight).collect();
        let total: f64 = weights.iter().sum();
        // The smallest set of best tokens that reaches top_p, of those that min_p leaves; at least one.
        let mut kept = 0.0;
        let mut count = 0;
        while count < weights.len()
            && (count == 0 || (kept < self.top_p * total && weights[count] >= self.min_p))
        {
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

    /// The scores with the penalty of tokens that occurred, if there is one.
    fn penalised(&self, logits: &[f32], before: &[u32]) -> Option<Vec<f32>> {
        if self.repetition_penalty == 1.0 {
            return None;
        }
        let mut seen = before.to_vec();
        seen.sort_unstable();
        seen.dedup();
        let penalty = self.repetition_penalty as f32;
        let mut scores = logits.to_vec();
        for id in seen {
            if let Some(score) = scores.get_mut(id as usize) {
                *score = if *score > 0.0 { *score / penalty } else { *score * penalty };
            }
        }
        Some(scores)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(options: SampleOptions, logits: &[f32]) -> Vec<usize> {
        let mut rng = Rng::new(1);
        let mut counts = vec![0; logits.len()];
        (0..2000).for_each(|_| counts[options.pick(logits, &[], &mut rng).unwrap() as usize] += 1);
        counts
    }

    fn all() -> SampleOptions {
        SampleOptions { temperature: 1.0, top_p: 1.0, ..Default::default() }
    }

    #[test]
    fn greedy_and_limits() {
        let logits = [0.0, 2.0, 1.0, 2.0];
        assert_eq!(counts(SampleOptions { temperature: 0.0, ..all() }, &logits), [0, 2000, 0, 0]);
        assert_eq!(counts(SampleOptions { top_k: 1, ..all() }, &logits), [0, 2000, 0, 0]);
        let two = counts(SampleOptions { top_p: 0.7, ..all() }, &logits);
        assert!(two[0] == 0 && two[2] == 0 && two[1] > 800 && two[3] > 800, "{two:?}");
        let three = counts(SampleOptions { top_k: 3, ..all() }, &logits);
        assert!(three[0] == 0 && three[1..].iter().all(|n| *n > 200), "{three:?}");
        let all = counts(all(), &logits);
        // Probabilities 0.054, 0.400, 0.147, 0.400, within five standard errors.
        for (n, p) in all.iter().zip([0.0541, 0.3995, 0.1470, 0.3995]) {
            assert!((*n as f64 - 2000.0 * p).abs() < 5.0 * (2000.0 * p * (1.0 - p)).sqrt(), "{all:?}");
        }
    }

    /// Parts of the best probability: 0.135, 1, 0.368, 1. The temperature comes first.
    #[test]
    fn min_p_is_a_part_of_the_best() {
        let logits = [0.0, 2.0, 1.0, 2.0];
        let seen = |options| counts(options, &logits).iter().map(|n| *n > 0).collect::<Vec<_>>();
        assert_eq!(seen(SampleOptions { min_p: 0.13, ..all() }), [true; 4]);
        assert_eq!(seen(SampleOptions { min_p: 0.14, ..all() }), [false, true, true, true]);
        assert_eq!(seen(SampleOptions { min_p: 0.4, ..all() }), [false, true, false, true]);
        assert_eq!(seen(SampleOptions { min_p: 0.4, temperature: 2.0, ..all() }), [false, true, true, true]);
        assert_eq!(seen(SampleOptions { min_p: 1.0, ..all() }), [false, true, false, true]);
    }

    #[test]
    fn repeated_tokens_lose() {
        let options = SampleOptions { temperature: 0.0, repetition_penalty: 2.0, ..all() };
        let pick = |logits: &[f32], before: &[u32]| options.pick(logits, before, &mut Rng::new(1)).unwrap();
        assert_eq!(pick(&[3.0, 2.0, 1.0], &[]), 0);
        assert_eq!(pick(&[3.0, 2.0, 1.0], &[0, 0, 0]), 1, "3 / 2 once, however often it occurred");
        assert_eq!(pick(&[3.0, 2.0, 1.0], &[0, 1, 99]), 0);
        assert_eq!(pick(&[-1.0, -1.5], &[0]), 1, "-1 * 2 is below -1.5");
    }

    #[test]
    fn bad_scores_and_settings_are_errors() {
        let options = SampleOptions::default();
        assert_eq!(
            options.pick(&[0.0, f32::NAN], &[], &mut Rng::new(1)),
            Err(SampleError::NotFinite { token: 1 })
        );
        let refused = |options: SampleOptions| options.check().unwrap_err().to_string();
        assert!(refused(SampleOptions { top_p: 0.0, ..options }).starts_with("top-p is 0"));
        assert!(
            refused(SampleOptions { temperature: f64::NAN, ..options }).starts_with("temperature is NaN")
        );
        assert!(refused(SampleOptions { min_p: 1.5, ..options }).starts_with("min-p is 1.5"));
        assert!(
            refused(SampleOptions { repetition_penalty: 0.0, ..options }).starts_with("repetition-penalty")
        );
    }
}
