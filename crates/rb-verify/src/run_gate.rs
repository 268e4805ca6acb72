//! The gate between a run and its figures: a speed, a held-out loss or a summary exists only for losses that are finite
//! and fall.
//!
//! [`Pass`] and [`Figure`] have no constructor outside this file, so a figure that was not gated does not compile:
//! ```compile_fail,E0423
//! let forged = rb_verify::Figure(12_345.0);
//! ```
//! ```compile_fail,E0423
//! let forged = rb_verify::Pass(());
//! ```
//! ```compile_fail,E0451
//! let forged = rb_verify::Figure { value: f64::NAN };
//! ```
//! ```compile_fail,E0277
//! let forged: rb_verify::Figure = 12_345.0.into();
//! ```
//! ```compile_fail,E0599
//! let forged = rb_verify::Figure::default();
//! ```
//! ```compile_fail,E0277
//! let forged = rb_verify::Figure::try_from(12_345.0);
//! ```
//! A gated one does:
//! ```
//! use rb_verify::{Figure, RunGate};
//!
//! let pass = RunGate::judge(&[4.2, 3.9, 3.1])?;
//! let speed = Figure::new(&pass, "tokens/s", 12_345.0)?;
//! assert_eq!(speed.get(), 12_345.0);
//! assert!(RunGate::judge(&[4.2, f64::NAN]).is_err());
//! # Ok::<(), rb_verify::Refusal>(())
//! ```

use std::collections::VecDeque;
use std::fmt;

use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Losses at each end whose means are compared: enough that one batch does not decide.
const WINDOW: usize = 10;

/// Part of the loss by which it must have fallen: less could be rounding.
const ROUNDING: f64 = 1e-4;

/// Proof that the losses of a run, as far as they are known, are finite and fall. Only a [`RunGate`] makes one.
#[derive(Clone, Copy, Debug)]
pub struct Pass {
    _private: (),
}

/// Why there is no figure.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("{reason}")]
pub struct Refusal {
    /// What was seen.
    pub reason: String,
}

/// How a run stands at its end.
#[derive(Clone, Copy, Debug)]
pub enum Verdict {
    /// Its loss fell.
    Falls(Pass),
    /// It had fewer steps than it takes to tell.
    TooShort,
}

/// Sees the loss of every step of a run, and says whether figures of it may be shown.
#[derive(Clone, Debug, Default)]
pub struct RunGate {
    first: Vec<f64>,
    last: VecDeque<f64>,
    steps: u64,
    broken: Option<String>,
}

impl RunGate {
    /// A gate for a new run.
    pub fn new() -> RunGate {
        RunGate::default()
    }

    /// A gate for a run that goes on: `losses` are those of its steps so far, in order.
    pub fn resumed(losses: impl IntoIterator<Item = f64>) -> RunGate {
        let mut gate = RunGate::new();
        losses.into_iter().for_each(|loss| gate.record(loss));
        gate
    }

    /// Takes the loss of the next step.
    pub fn record(&mut self, loss: f64) {
        self.steps += 1;
        if !loss.is_finite() {
            self.broken.get_or_insert_with(|| format!("the loss of step {} is {loss}", self.steps));
            return;
        }
        if self.first.len() < WINDOW {
            self.first.push(loss);
        }
        self.last.push_back(loss);
        if self.last.len() > WINDOW {
            self.last.pop_front();
        }
    }

    /// Whether figures may be shown now. Until twenty steps are known a run is given the benefit of the doubt, unless a
    /// loss was not finite.
    ///
    /// # Errors
    /// The loss that is not finite, or the means that do not fall.
    pub fn pass(&self) -> Result<Pass, Refusal> {
        match self.verdict()? {
            Verdict::Falls(pass) => Ok(pass),
            Verdict::TooShort => Ok(Pass { _private: () }),
        }
    }

    /// What a summary of the run may hold: nothing, where it was too short to tell.
    ///
    /// # Errors
    /// As [`RunGate::pass`].
    pub fn verdict(&self) -> Result<Verdict, Refusal> {
        if let Some(reason) = &self.broken {
            return Err(Refusal { reason: reason.clone() });
        }
        if self.steps < 2 * WINDOW as u64 {
            return Ok(Verdict::TooShort);
        }
        let (first, last) = (mean(self.first.iter()), mean(self.last.iter()));
        if last < first - ROUNDING * first.abs() {
            return Ok(Verdict::Falls(Pass { _private: () }));
        }
        Err(Refusal {
            reason: format!(
                "the loss does not fall: {first:.4} over the first {WINDOW} steps, {last:.4} over the last {WINDOW} \
                 of {}",
                self.steps
            ),
        })
    }

    /// Judges a short run by all its losses: each finite, the last below the first.
    ///
    /// # Errors
    /// The step whose loss is not finite, or losses that do not fall.
    pub fn judge(losses: &[f64]) -> Result<Pass, Refusal> {
        if let Some(step) = losses.iter().position(|l| !l.is_finite()) {
            return Err(Refusal { reason: format!("the loss of step {} is {}", step + 1, losses[step]) });
        }
        match losses {
            [first, .., last] if last < first => Ok(Pass { _private: () }),
            _ => Err(Refusal { reason: format!("the losses {losses:?} do not fall") }),
        }
    }

    /// Judges an evaluation, whose costs have no order in which they could fall: there is at least one, and each is
    /// finite and not below zero.
    ///
    /// # Errors
    /// The first cost that is not.
    pub fn evaluated(costs: &[f64]) -> Result<Pass, Refusal> {
        if costs.is_empty() {
            return Err(Refusal { reason: "nothing was evaluated".into() });
        }
        match costs.iter().position(|cost| !(cost.is_finite() && *cost >= 0.0)) {
            None => Ok(Pass { _private: () }),
            Some(at) => {
                Err(Refusal { reason: format!("cost {} of the evaluation is {}", at + 1, costs[at]) })
            }
        }
    }
}

fn mean<'a>(values: impl ExactSizeIterator<Item = &'a f64>) -> f64 {
    let count = values.len().max(1) as f64;
    values.sum::<f64>() / count
}

/// A finite number of a run that passed the gate: the only kind that is printed, written or plotted as a result.
///
/// One that is read back was written by a run that passed.
#[derive(Clone, Copy, Debug, PartialEq, PartialOrd)]
pub struct Figure {
    value: f64,
}

impl Figure {
    /// A figure of the run that `pass` is about; `name` is for the error.
    ///
    /// # Errors
    /// A value that is not finite.
    pub fn new(_: &Pass, name: &str, value: f64) -> Result<Figure, Refusal> {
        if value.is_finite() {
            return Ok(Figure { value });
        }
        Err(Refusal { reason: format!("{name} is {value}") })
    }

    /// The number.
    pub fn get(self) -> f64 {
        self.value
    }
}

impl Serialize for Figure {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_f64(self.value)
    }
}

impl<'de> Deserialize<'de> for Figure {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Figure, D::Error> {
        let value = f64::deserialize(deserializer)?;
        if value.is_finite() { Ok(Figure { value }) } else { Err(D::Error::custom("a figure is not finite")) }
    }
}

impl fmt::Display for Figure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.value.fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_runs_are_judged_by_both_ends() {
        assert!(RunGate::judge(&[3.0, 3.5, 2.0]).is_ok());
        let reason = |losses: &[f64]| RunGate::judge(losses).unwrap_err().reason;
        assert_eq!(reason(&[3.0, f64::NAN, 2.0]), "the loss of step 2 is NaN");
        assert_eq!(reason(&[3.0, 2.0, f64::INFINITY]), "the loss of step 3 is inf");
        for flat in [&[3.0, 3.0][..], &[2.0, 3.0], &[3.0], &[]] {
            assert!(reason(flat).contains("do not fall"));
        }
    }

    #[test]
    fn evaluations_need_not_fall() {
        assert!(RunGate::evaluated(&[2.0, 0.0, 3.0]).is_ok());
        let reason = |costs: &[f64]| RunGate::evaluated(costs).unwrap_err().reason;
        assert_eq!(reason(&[]), "nothing was evaluated");
        assert_eq!(reason(&[1.0, f64::NAN]), "cost 2 of the evaluation is NaN");
        assert_eq!(reason(&[-0.5]), "cost 1 of the evaluation is -0.5");
        assert_eq!(reason(&[f64::INFINITY]), "cost 1 of the evaluation is inf");
    }

    #[test]
    fn long_runs_are_judged_by_means() {
        let falling = RunGate::resumed((0..30).map(|i| 5.0 - 0.1 * f64::from(i)));
        assert!(matches!(falling.verdict(), Ok(Verdict::Falls(_))));
        let flat = RunGate::resumed((0..30).map(|_| 5.0));
        assert!(flat.pass().unwrap_err().reason.starts_with("the loss does not fall: 5.0000"));
        let short = RunGate::resumed((0..19).map(|_| 5.0));
        assert!(short.pass().is_ok() && matches!(short.verdict(), Ok(Verdict::TooShort)));
        let mut broken = short;
        broken.record(f64::NAN);
        (0..30).for_each(|i| broken.record(4.0 - f64::from(i)));
        assert_eq!(broken.pass().unwrap_err().reason, "the loss of step 20 is NaN");
    }

    #[test]
    fn a_figure_is_finite() {
        let pass = RunGate::judge(&[2.0, 1.0]).unwrap();
        assert_eq!(Figure::new(&pass, "speed", 2.5).unwrap().get(), 2.5);
        assert_eq!(Figure::new(&pass, "speed", f64::NAN).unwrap_err().reason, "speed is NaN");
    }
}
