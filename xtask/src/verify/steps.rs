//! The steps of `verify`, in order: cheap ones first, and steps of one build profile together.

use std::path::{Path, PathBuf};
use std::process::Command;

use super::counts::{TestCounts, checks, number_before, printed_checks};
use super::{State, kernels, planted, process, programs, quickstart};
use crate::error::Error;
use crate::{Report, ladder, tidy};

pub struct Context<'a> {
    pub root: &'a Path,
    /// Where logs go: `target/verify`.
    pub folder: &'a Path,
}

impl Context<'_> {
    pub fn log_path(&self, step: &str) -> PathBuf {
        self.folder.join(format!("{step}.log"))
    }
}

pub struct Step {
    pub name: &'static str,
    /// Left out by `--skip-slow`.
    pub slow: bool,
    work: Work,
}

enum Work {
    /// A check in this program.
    Here(fn(&Path) -> Result<Report, Error>),
    /// `cargo` with these words, then a look at what it left.
    Cargo { words: &'static [&'static str], inspect: fn(&Context, log: &str) -> Inspection },
    /// `rb` with these words, and such a look.
    Rb { words: &'static [&'static str], inspect: fn(&Context, log: &str) -> Inspection },
    /// Every kernel, compiled without a GPU.
    Kernels,
    /// The suite of planted defects.
    Planted,
}

/// What a command left, seen after it ended.
#[derive(Default)]
struct Inspection {
    detail: String,
    passed: usize,
    failed: usize,
    /// Reasons to fail the step although the command did not.
    problems: Vec<String>,
}

pub struct Outcome {
    pub state: State,
    pub detail: String,
    pub passed: usize,
    pub failed: usize,
    pub log: String,
}

/// Report of the model checks, from the repository root.
const ARBITER_REPORT: &str = "target/verify/arbiter.json";
/// Run directory of the smoke test, from the repository root.
const SMOKE_RUN: &str = "target/verify/quickstart-run";

/// Changes of backward code that are tried: with the build, what two cores do in two minutes.
const NUM_MUTANTS: &str = "120";
/// Which of them: the same in every run, so that a check of one commit has one result.
const MUTANTS_SEED: &str = "1796049767";

pub const STEPS: &[Step] = &[
    cargo("fmt", &["fmt", "--all", "--check"], nothing_more),
    cargo(
        "clippy",
        &["clippy", "--workspace", "--all-targets", "--features", planted::FEATURE, "--", "-D", "warnings"],
        nothing_more,
    ),
    Step { name: "tidy", slow: false, work: Work::Here(tidy::run) },
    Step { name: "ladder", slow: false, work: Work::Here(ladder::run) },
    cargo("docs", &["doc", "--workspace", "--no-deps"], nothing_more),
    // With the switches compiled in and none on, so that the suite of planted defects needs no second build.
    cargo("tests", &["test", "--workspace", "--features", planted::FEATURE, "--no-fail-fast"], tests_ran),
    Step {
        slow: true,
        ..cargo(
            "mutants",
            &["xtask", "mutate", "--sample", NUM_MUTANTS, "--seed", MUTANTS_SEED],
            mutants_died,
        )
    },
    rb("arbiter", &["verify", "--all", "--json", ARBITER_REPORT], checks_ran),
    rb("loss-gates", &["verify", "--loss-gates"], gates_ran),
    Step { name: "planted-defects", slow: true, work: Work::Planted },
    Step { name: "kernels", slow: true, work: Work::Kernels },
    rb(
        "quickstart-smoke",
        &["train", "examples/quickstart.toml", "--set", "train.max_steps=20", "--out", SMOKE_RUN],
        run_is_complete,
    ),
];

const fn cargo(
    name: &'static str,
    words: &'static [&'static str],
    inspect: fn(&Context, &str) -> Inspection,
) -> Step {
    Step { name, slow: false, work: Work::Cargo { words, inspect } }
}

/// A slow step.
const fn rb(
    name: &'static str,
    words: &'static [&'static str],
    inspect: fn(&Context, &str) -> Inspection,
) -> Step {
    Step { name, slow: true, work: Work::Rb { words, inspect } }
}

impl Step {
    /// What the step runs, for the console.
    pub fn describe(&self) -> String {
        match &self.work {
            Work::Here(_) => format!("cargo xtask {}", self.name),
            Work::Cargo { words, .. } => format!("cargo {}", words.join(" ")),
            Work::Rb { words, .. } => format!("rb {}", words.join(" ")),
            Work::Kernels => format!("rb {}", kernels::WORDS.join(" ")),
            Work::Planted => format!("cargo {}", planted::WORDS.join(" ")),
        }
    }

    /// Runs the step. A command that cannot be started is a failed step, not an error.
    pub fn run(&self, context: &Context) -> Result<Outcome, Error> {
        let log_path = context.log_path(self.name);
        match &self.work {
            Work::Here(check) => {
                let failed = |error: Error| Report {
                    text: format!("{error}\n"),
                    summary: "could not run".into(),
                    ok: false,
                };
                let report = check(context.root).unwrap_or_else(failed);
                let log = format!("{}{}\n", report.text, report.summary);
                std::fs::write(&log_path, &log).map_err(Error::io("write", &log_path))?;
                let state = if report.ok { State::Ok } else { State::Failed };
                Ok(Outcome { state, detail: report.summary, passed: 0, failed: 0, log })
            }
            Work::Cargo { words, inspect } => {
                let mut command = Command::new("cargo");
                command.args(*words).current_dir(context.root);
                command.env("CARGO_TERM_COLOR", "never");
                if self.name == "docs" {
                    command.env("RUSTDOCFLAGS", "-D warnings");
                }
                let exited_well = process::run_logged(command, &log_path)?;
                judge(context, &log_path, exited_well, *inspect)
            }
            Work::Rb { words, inspect } => {
                self.clear_results(context)?;
                let exited_well = programs::run_rb(context.root, words, &[], &log_path)?;
                judge(context, &log_path, exited_well, *inspect)
            }
            Work::Kernels => kernels::run(context, &log_path),
            Work::Planted => planted::run(context, &log_path),
        }
    }

    /// Removes what an earlier run of a step left, so that it is not taken for the result of this one.
    fn clear_results(&self, context: &Context) -> Result<(), Error> {
        let path = match self.name {
            "arbiter" => context.root.join(ARBITER_REPORT),
            "quickstart-smoke" => context.root.join(SMOKE_RUN),
            _ => return Ok(()),
        };
        let removed =
            if path.is_dir() { std::fs::remove_dir_all(&path) } else { std::fs::remove_file(&path) };
        match removed {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                Err(Error::io("remove", &path)(error))
            }
            _ => Ok(()),
        }
    }
}

/// The outcome of a command by its exit and by what it left.
fn judge(
    context: &Context,
    log_path: &Path,
    exited_well: bool,
    inspect: fn(&Context, &str) -> Inspection,
) -> Result<Outcome, Error> {
    let bytes = std::fs::read(log_path).map_err(Error::io("read", log_path))?;
    let mut log = String::from_utf8_lossy(&bytes).into_owned();
    let Inspection { mut detail, passed, failed, problems } = inspect(context, &log);
    if !exited_well {
        let verdict = "the command failed";
        detail = if detail.is_empty() { verdict.into() } else { format!("{detail}; {verdict}") };
    } else if !problems.is_empty() {
        detail = format!("{} problems", problems.len());
        problems.iter().for_each(|problem| log.extend(["error: ", problem, "\n"]));
        std::fs::write(log_path, &log).map_err(Error::io("write", log_path))?;
    }
    let state = if exited_well && problems.is_empty() { State::Ok } else { State::Failed };
    Ok(Outcome { state, detail, passed, failed, log })
}

fn nothing_more(_: &Context, _: &str) -> Inspection {
    Inspection { detail: "clean".into(), ..Inspection::default() }
}

fn tests_ran(context: &Context, log: &str) -> Inspection {
    let counts = TestCounts::parse(log);
    let mut problems = Vec::new();
    if counts.passed + counts.failed == 0 {
        problems.push("no test ran".into());
    }
    if counts.ignored > 0 {
        problems.push(format!("{} tests are ignored; make them run or delete them", counts.ignored));
    }
    let libraries = num_libraries(context.root);
    if counts.doc_crates < libraries {
        problems.push(format!("doc examples were tried in {} of {libraries} libraries", counts.doc_crates));
    }
    let detail =
        format!("{} tests, of which {} doc examples", counts.passed + counts.failed, counts.doc_passed);
    let detail = if counts.failed > 0 { format!("{detail}, {} failed", counts.failed) } else { detail };
    Inspection { detail, passed: counts.passed, failed: counts.failed, problems }
}

fn num_libraries(root: &Path) -> usize {
    let crates = std::fs::read_dir(root.join("crates")).into_iter().flatten().flatten();
    crates.filter(|entry| entry.path().join("src/lib.rs").is_file()).count()
}

fn checks_ran(context: &Context, _: &str) -> Inspection {
    let text = std::fs::read_to_string(context.root.join(ARBITER_REPORT)).unwrap_or_default();
    let (passed, failed) = serde_json::from_str(&text).map(|report| checks(&report)).unwrap_or((0, 0));
    let mut problems = Vec::new();
    if passed == 0 {
        problems.push(format!("no passed check in {ARBITER_REPORT}"));
    }
    if failed > 0 {
        problems.push(format!("{failed} failed checks in {ARBITER_REPORT}, but the command exited with 0"));
    }
    Inspection {
        detail: format!("{} model checks, {failed} failed", passed + failed),
        passed,
        failed,
        problems,
    }
}

fn gates_ran(_: &Context, log: &str) -> Inspection {
    let (passed, failed) = printed_checks(log);
    let mut problems = Vec::new();
    if passed == 0 {
        problems.push("no gate was checked".into());
    }
    if failed > 0 {
        problems.push(format!("{failed} failed checks, but the command exited with 0"));
    }
    Inspection { detail: format!("{} gates, {failed} failed", passed + failed), passed, failed, problems }
}

fn mutants_died(_: &Context, log: &str) -> Inspection {
    let line = log.lines().rev().find(|line| line.contains("kill rate")).unwrap_or("");
    let (passed, failed) = (number_before(line, " killed"), number_before(line, " survived"));
    let seed = log.lines().find(|line| line.starts_with("sample of ")).unwrap_or("no sample");
    let mut problems = Vec::new();
    if passed == 0 {
        problems.push("no changed code was noticed".into());
    }
    let rate = line.split("kill rate ").nth(1).unwrap_or("unknown");
    Inspection { detail: format!("{seed}, kill rate {rate}"), passed, failed, problems }
}

fn run_is_complete(context: &Context, _: &str) -> Inspection {
    let (problems, num_losses) = quickstart::inspect(&context.root.join(SMOKE_RUN));
    let detail = format!("{} steps, {num_losses} losses, run directory complete", quickstart::NUM_STEPS);
    Inspection { detail, problems, ..Inspection::default() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique_and_the_smoke_test_runs_the_steps_it_looks_for() {
        for (at, step) in STEPS.iter().enumerate() {
            assert!(STEPS[..at].iter().all(|other| other.name != step.name), "{}", step.name);
        }
        let smoke = STEPS.iter().find(|step| step.name == "quickstart-smoke").unwrap();
        assert!(smoke.describe().contains(&format!("train.max_steps={} ", quickstart::NUM_STEPS)));
    }

    #[test]
    fn the_kill_rate_is_read_and_must_be_there() {
        let root = crate::tree::root();
        let context = Context { root: &root, folder: &root };
        let log = "sample of 9, seed 4\n8 killed, 1 survived of 9 mutants tried (20 in all; 0 equivalent): kill rate 88.9 % in 3 s\n";
        let seen = mutants_died(&context, log);
        assert_eq!((seen.passed, seen.failed, seen.problems.len()), (8, 1, 0));
        assert_eq!(seen.detail, "sample of 9, seed 4, kill rate 88.9 % in 3 s");
        assert_eq!(mutants_died(&context, "").problems.len(), 1);
    }

    #[test]
    fn gates_that_did_not_run_are_a_problem() {
        let root = crate::tree::root();
        let context = Context { root: &root, folder: &root };
        assert!(gates_ran(&context, "x\n5 passed, 0 failed\n").problems.is_empty());
        assert_eq!(gates_ran(&context, "").problems.len(), 1);
        assert_eq!(gates_ran(&context, "5 passed, 1 failed\n").problems.len(), 1);
    }

    #[test]
    fn a_test_run_without_tests_or_doc_tests_is_a_problem() {
        let root = crate::tree::root();
        let context = Context { root: &root, folder: &root };
        assert_eq!(tests_ran(&context, "").problems.len(), 2);
        let libraries = "Doc-tests x\n".repeat(num_libraries(&root));
        let good = format!("{libraries}test result: ok. 3 passed; 0 failed; 0 ignored;");
        let seen = tests_ran(&context, &good);
        assert!(seen.problems.is_empty(), "{:?}", seen.problems);
        assert_eq!((seen.passed, seen.detail.as_str()), (3, "3 tests, of which 3 doc examples"));
        assert_eq!(tests_ran(&context, &good.replace("0 ignored", "1 ignored")).problems.len(), 1);
    }
}
