//! Runs tests with a mutant active.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use super::rewrite::Mutant;
use crate::error::Error;

/// How often a running test is looked at.
const POLL: Duration = Duration::from_millis(2);
/// Least time until a test counts as hanging: a loop without end is a change that somebody notices.
const PATIENCE: Duration = Duration::from_secs(15);

/// A test of the program and what it runs through.
pub struct Test {
    pub name: String,
    time: Duration,
    reached: BTreeSet<u32>,
}

/// Lists the tests that `wanted` accepts, and runs each one once without any mutant.
///
/// # Errors
/// A test that fails as the code is.
pub fn explore(program: &Path, folder: &Path, wanted: fn(&str) -> bool) -> Result<Vec<Test>, Error> {
    let spawn = |source| Error::Spawn { program: program.display().to_string(), source };
    let listed = Command::new(program).args(["--list", "--format=terse"]).output().map_err(spawn)?;
    let text = String::from_utf8_lossy(&listed.stdout).into_owned();
    let names: Vec<&str> =
        text.lines().filter_map(|line| line.strip_suffix(": test")).filter(|name| wanted(name)).collect();
    let traced = in_parallel(&names, |at, name| {
        let trace = folder.join(format!("trace-{at}"));
        // Left by an earlier run; a test that reaches nothing writes none.
        let _ = std::fs::remove_file(&trace);
        let start = Instant::now();
        let end =
            run(program, name, |command| command.env("TRACE_MUTANTS", &trace), Duration::from_secs(600))?;
        let time = start.elapsed();
        if end != End::Passed {
            let detail = format!("{name} fails as the code is; run `cargo test -p rb-autograd`");
            return Err(Error::Program { program: program.display().to_string(), detail });
        }
        let text = std::fs::read_to_string(&trace).unwrap_or_default();
        let reached = text.lines().filter_map(|line| line.parse().ok()).collect();
        Ok(Test { name: (*name).to_string(), time, reached })
    });
    traced.into_iter().collect()
}

/// How a test ended.
#[derive(Clone, Copy, PartialEq, Eq)]
enum End {
    Passed,
    Failed,
    OutOfTime,
}

/// How a mutant fared.
pub enum Verdict {
    /// This test failed.
    Killed(String),
    /// This test did not end in time.
    Hung(String),
    /// None of so many tests that run through it did.
    Survived(usize),
}

/// Runs the tests that reach each mutant, the likeliest to notice first, until one fails.
pub fn judge(
    program: &Path,
    tests: &[Test],
    mutants: &[&Mutant],
    progress: &(dyn Fn(usize) + Sync),
) -> Result<Vec<Verdict>, Error> {
    let done = AtomicUsize::new(0);
    let verdicts = in_parallel(mutants, |_, mutant| {
        let mut order: Vec<&Test> =
            tests.iter().filter(|test| test.reached.contains(&mutant.number)).collect();
        let module = format!("{}::", mutant.file.trim_end_matches(".rs").replace('/', "::"));
        order.sort_by_key(|test| (!test.name.starts_with(&module), test.time));
        let mut verdict = Verdict::Survived(order.len());
        for test in &order {
            let number = mutant.number.to_string();
            let limit = PATIENCE.max(test.time * 20);
            match run(program, &test.name, |command| command.env("ACTIVE_MUTANT", &number), limit)? {
                End::Passed => continue,
                End::Failed => verdict = Verdict::Killed(test.name.clone()),
                End::OutOfTime => verdict = Verdict::Hung(test.name.clone()),
            }
            break;
        }
        progress(done.fetch_add(1, Ordering::Relaxed) + 1);
        Ok(verdict)
    });
    verdicts.into_iter().collect()
}

/// Runs one test, for `limit` at most.
fn run(
    program: &Path,
    test: &str,
    set: impl FnOnce(&mut Command) -> &mut Command,
    limit: Duration,
) -> Result<End, Error> {
    let spawn = |source| Error::Spawn { program: program.display().to_string(), source };
    let mut command = Command::new(program);
    command.args([test, "--exact", "--quiet", "--test-threads=1"]);
    // A process for each core already.
    command.env("RAYON_NUM_THREADS", "1").env("RUST_BACKTRACE", "0");
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let mut child = set(&mut command).spawn().map_err(spawn)?;
    let start = Instant::now();
    loop {
        if let Some(status) = child.try_wait().map_err(spawn)? {
            return Ok(if status.success() { End::Passed } else { End::Failed });
        }
        if start.elapsed() > limit {
            child.kill().map_err(spawn)?;
            child.wait().map_err(spawn)?;
            return Ok(End::OutOfTime);
        }
        std::thread::sleep(POLL);
    }
}

/// `f` of each item with its position, on all cores, in the order of the items.
fn in_parallel<T: Sync, R: Send>(items: &[T], f: impl Fn(usize, &T) -> R + Sync) -> Vec<R> {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let next = AtomicUsize::new(0);
    let results: Mutex<Vec<(usize, R)>> = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                loop {
                    let at = next.fetch_add(1, Ordering::Relaxed);
                    let Some(item) = items.get(at) else { break };
                    let result = f(at, item);
                    results.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).push((at, result));
                }
            });
        }
    });
    let mut results = results.into_inner().unwrap_or_else(|poisoned| poisoned.into_inner());
    results.sort_by_key(|(at, _)| *at);
    results.into_iter().map(|(_, result)| result).collect()
}

/// Where traces and logs go.
pub fn folder(root: &Path) -> Result<PathBuf, Error> {
    let folder = root.join("target/mutants/trace");
    std::fs::create_dir_all(&folder).map_err(Error::io("create", &folder))?;
    Ok(folder)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_are_in_the_order_of_the_items() {
        let items: Vec<usize> = (0..100).collect();
        assert_eq!(in_parallel(&items, |at, item| at + item), (0..200).step_by(2).collect::<Vec<_>>());
    }
}
