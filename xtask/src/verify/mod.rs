//! `cargo xtask verify`: every check of the repository, one after the other.
//!
//! The output of a step goes to `target/verify/<step>.log`; a failed step shows what matters of it.
//! All steps run even if one fails, and the table at the end names every step, run or not.

mod counts;
mod kernels;
mod planted;
mod process;
mod programs;
mod quickstart;
mod steps;

use std::path::Path;
use std::time::{Duration, Instant};

use clap::Args;
use serde_json::{Value, json};

use crate::error::Error;
use steps::{Context, STEPS, Step};

#[derive(Args)]
pub struct Options {
    /// Leave out the slow steps: mutants, arbiter, loss-gates, planted-defects, kernels, quickstart-smoke
    #[arg(long)]
    skip_slow: bool,
    /// Run this step only; may be given several times
    #[arg(long, value_name = "STEP")]
    only: Vec<String>,
    /// Fail where a step cannot run for want of something outside the repository, such as a wheel from PyPI
    #[arg(long)]
    require_all: bool,
}

impl Options {
    /// Why `step` is not to be run, if so.
    fn reason_to_skip(&self, step: &Step) -> Option<String> {
        if !self.only.is_empty() && !self.only.iter().any(|name| name == step.name) {
            return Some("not in --only".into());
        }
        (self.skip_slow && step.slow).then(|| "--skip-slow".into())
    }

    /// A step that could not run is a failure where every step is required.
    fn judge(&self, state: State) -> State {
        if state == State::NotRun && self.require_all { State::Failed } else { state }
    }
}

/// How one step ended, a row of the table.
struct Row {
    name: &'static str,
    state: State,
    /// What ran, or what was wrong, in a few words.
    detail: String,
    passed: usize,
    failed: usize,
    time: Duration,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub enum State {
    Ok,
    Failed,
    /// Left out by the options.
    Skipped,
    /// Something outside the repository is missing; the detail says what.
    NotRun,
}

impl State {
    fn label(self) -> &'static str {
        match self {
            State::Ok => "ok",
            State::Failed => "FAILED",
            State::Skipped => "skipped",
            State::NotRun => "NOT RUN",
        }
    }
}

/// Runs the steps; true if none failed.
pub fn run(root: &Path, options: &Options) -> Result<bool, Error> {
    if let Some(unknown) = options.only.iter().find(|name| !STEPS.iter().any(|step| step.name == **name)) {
        let names: Vec<&str> = STEPS.iter().map(|step| step.name).collect();
        return Err(Error::usage(
            format!("no step `{unknown}`"),
            format!("choose from {}", names.join(", ")),
        ));
    }
    let folder = root.join("target/verify");
    std::fs::create_dir_all(&folder).map_err(Error::io("create", &folder))?;
    let context = Context { root, folder: &folder };
    let mut rows = Vec::new();
    for (number, step) in STEPS.iter().enumerate() {
        let title = format!("[{}/{}] {}", number + 1, STEPS.len(), step.name);
        if let Some(reason) = options.reason_to_skip(step) {
            println!("{title}: skipped, {reason}");
            rows.push(Row {
                name: step.name,
                state: State::Skipped,
                detail: reason,
                passed: 0,
                failed: 0,
                time: Duration::ZERO,
            });
            continue;
        }
        println!("{title}: {}", step.describe());
        let start = Instant::now();
        let outcome = step.run(&context)?;
        let state = options.judge(outcome.state);
        let row = Row {
            name: step.name,
            state,
            detail: outcome.detail,
            passed: outcome.passed,
            // A step that failed before it counted anything still counts.
            failed: if state == State::Failed { outcome.failed.max(1) } else { 0 },
            time: start.elapsed(),
        };
        println!("      {} after {:.1} s: {}", row.state.label(), row.time.as_secs_f64(), row.detail);
        if state == State::Failed {
            show_failure(&context, step, &outcome.log);
        }
        rows.push(row);
    }
    let json_path = folder.join("verify.json");
    std::fs::write(&json_path, format!("{:#}\n", report(&rows))).map_err(Error::io("write", &json_path))?;
    print!("\n{}", table(&rows));
    println!("logs and verify.json in target/verify/");
    // Readers of CI output look for this as the last line.
    println!("{}", totals(&rows));
    Ok(rows.iter().all(|row| row.state != State::Failed))
}

fn show_failure(context: &Context, step: &Step, log: &str) {
    println!("      ---- {} ({})", step.name, context.log_path(step.name).display());
    for line in counts::excerpt(log) {
        println!("      | {line}");
    }
    println!("      ----");
}

fn table(rows: &[Row]) -> String {
    let width =
        |heading: &str, cell: fn(&Row) -> usize| rows.iter().map(cell).max().unwrap_or(0).max(heading.len());
    let (name, state) = (width("step", |row| row.name.len()), width("result", |row| row.state.label().len()));
    let detail = width("what ran", |row| row.detail.chars().count());
    let mut lines = format!("{:name$}  {:state$}  {:detail$}  seconds\n", "step", "result", "what ran");
    for row in rows {
        let seconds = row.time.as_secs_f64();
        lines += &format!(
            "{:name$}  {:state$}  {:detail$}  {seconds:7.1}\n",
            row.name,
            row.state.label(),
            row.detail
        );
    }
    lines
}

fn totals(rows: &[Row]) -> String {
    let (passed, failed) = rows.iter().fold((0, 0), |(p, f), row| (p + row.passed, f + row.failed));
    format!("{passed} passed, {failed} failed")
}

fn report(rows: &[Row]) -> Value {
    let step = |row: &Row| {
        json!({
            "step": row.name,
            "result": row.state.label().to_lowercase(),
            "detail": row.detail,
            "passed": row.passed,
            "failed": row.failed,
            "seconds": (row.time.as_secs_f64() * 10.0).round() / 10.0,
            "log": (row.state != State::Skipped).then(|| format!("target/verify/{}.log", row.name)),
        })
    };
    json!({
        "ok": rows.iter().all(|row| row.state != State::Failed),
        "complete": rows.iter().all(|row| !matches!(row.state, State::Skipped | State::NotRun)),
        "passed": rows.iter().map(|row| row.passed).sum::<usize>(),
        "failed": rows.iter().map(|row| row.failed).sum::<usize>(),
        "steps": rows.iter().map(step).collect::<Vec<_>>(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(name: &'static str, state: State, passed: usize, failed: usize) -> Row {
        Row {
            name,
            state,
            detail: format!("{passed} tests"),
            passed,
            failed,
            time: Duration::from_millis(1260),
        }
    }

    #[test]
    fn options_choose_steps_and_say_why_not() {
        let by_name = |name: &str| STEPS.iter().find(|step| step.name == name).unwrap();
        let only = Options { skip_slow: false, only: vec!["tidy".into()], require_all: false };
        assert_eq!(only.reason_to_skip(by_name("tidy")), None);
        assert_eq!(only.reason_to_skip(by_name("tests")), Some("not in --only".into()));
        let quick = Options { skip_slow: true, only: vec![], require_all: true };
        assert_eq!(quick.reason_to_skip(by_name("arbiter")), Some("--skip-slow".into()));
        assert_eq!(quick.reason_to_skip(by_name("tests")), None);
        assert!(quick.judge(State::NotRun) == State::Failed && only.judge(State::NotRun) == State::NotRun);
        assert!(quick.judge(State::Ok) == State::Ok);
    }

    #[test]
    fn an_unknown_step_is_an_error_that_names_the_known() {
        let options = Options { skip_slow: false, only: vec!["nonsense".into()], require_all: false };
        let error = run(Path::new("."), &options).unwrap_err().to_string();
        assert!(error.contains("`nonsense`") && error.contains("quickstart-smoke"), "{error}");
    }

    #[test]
    fn table_totals_and_report_agree() {
        let rows = [
            row("fmt", State::Ok, 0, 0),
            row("tests", State::Failed, 40, 2),
            row("arbiter", State::Skipped, 0, 0),
        ];
        let expected = "step     result   what ran  seconds\nfmt      ok       0 tests       1.3\n\
                        tests    FAILED   40 tests      1.3\narbiter  skipped  0 tests       1.3\n";
        assert_eq!(table(&rows), expected);
        assert_eq!(totals(&rows), "40 passed, 2 failed");
        let report = report(&rows);
        assert_eq!((report["ok"].as_bool(), report["complete"].as_bool()), (Some(false), Some(false)));
        assert_eq!(report["steps"][1]["result"], "failed");
        assert!(report["steps"][2]["log"].is_null());
    }
}
