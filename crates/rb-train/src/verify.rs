//! Checks of the training loop's parts: data, steps, evaluation, schedules, checkpoints.
//!
//! | file | holds |
//! | --- | --- |
//! | `data.rs` | batches against the documents, coverage of an epoch, order |
//! | `steps.rs` | accumulation, loss and evaluation of unequal rows, memory |
//! | `resume.rs` | a run that goes through a checkpoint ends in the same bits |

mod data;
mod resume;
mod steps;

use rb_data::Loader;
use rb_optim::Schedule;
use rb_verify::{Check, Report, schedule_keeps_its_promises};

use crate::config::Config;
use crate::{Result, trainer};

/// Tokens up to which a run goes through its data before its first step, to prove that each is trained on once.
const MOST_TOKENS: u64 = 1 << 25;

/// All checks of the loop's parts, on small models and data of their own.
///
/// # Errors
/// A check that could not run at all; one that ran and failed is in the report.
pub fn verify_training(seed: u64) -> Result<Report> {
    let mut report = Report::default();
    report.checks.extend(data::batches_hold_the_documents(seed)?);
    report.checks.extend(data::epochs_are_complete(seed)?);
    report.push(data::order_has_a_seed(seed)?);
    report.checks.extend(schedules());
    report.checks.extend(steps::unequal_rows(seed)?);
    report.push(steps::memory_is_flat(seed)?);
    report.checks.extend(resume::resumes_bit_for_bit(seed)?);
    Ok(report)
}

/// Every kind of schedule, with and without a warm-up.
fn schedules() -> Vec<Check> {
    let (peak, floor, total) = (3e-4, 3e-5, 1000);
    let mut checks = Vec::new();
    for warmup in [0, 100] {
        for (name, schedule) in [
            ("constant", Schedule::constant(peak, warmup)),
            ("linear", Schedule::linear(peak, floor, warmup, total)),
            ("cosine", Schedule::cosine(peak, floor, warmup, total)),
            ("warmup_stable_decay", Schedule::warmup_stable_decay(peak, floor, warmup, 200, total)),
        ] {
            let check = schedule_keeps_its_promises(&schedule, peak, warmup, total);
            checks.push(Check { name: format!("{}: {name}, warm-up {warmup}", check.name), ..check });
        }
    }
    checks
}

/// The learning rates of a config.
pub fn verify_schedule(config: &Config) -> Check {
    let t = &config.train;
    schedule_keeps_its_promises(&trainer::schedule(config), t.learning_rate, t.warmup_steps, t.max_steps)
}

/// What a run checks of its data and schedule before its first step.
pub(crate) fn before_training(config: &Config, loader: &mut Loader) -> Result<Report> {
    let mut report = Report::default();
    report.push(verify_schedule(config));
    let tokens = loader.data().len();
    if tokens <= MOST_TOKENS {
        report.push(coverage("data", loader));
    }
    Ok(report)
}

/// One epoch of a loader: each token but the first is a target once, or is counted as given up.
fn coverage(name: &str, loader: &mut Loader) -> Check {
    match loader.check() {
        Ok(seen) => {
            let detail = format!(
                "{} sequences an epoch: {} targets, {} at the start of a document given up, {} places of padding",
                seen.sequences, seen.valid, seen.dropped, seen.padded
            );
            Check::new(name, true, detail)
        }
        Err(error) => Check::new(name, false, error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_loop_passes() {
        let report = verify_training(5).unwrap();
        assert!(report.passed(), "{report}");
    }

    #[test]
    fn rates_of_zero_are_refused() {
        let check = schedule_keeps_its_promises(&Schedule::constant(0.0, 0), 0.0, 0, 10);
        assert!(!check.passed && check.detail.contains("moves nothing"), "{check:?}");
        let above = schedule_keeps_its_promises(&Schedule::constant(2e-3, 0), 1e-3, 0, 10);
        assert!(!above.passed && above.detail.contains("above the peak"), "{above:?}");
    }
}
