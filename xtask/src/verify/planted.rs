//! The suite of planted defects: its table, and the proof that nothing that is shipped holds the switches.

use std::path::Path;
use std::process::Command;

use serde_json::Value;

use super::steps::{Context, Outcome};
use super::{State, process, programs};
use crate::error::Error;

/// The feature that compiles the switches in, as the tests of the workspace are built too.
pub const FEATURE: &str = "rb-train/planted-defects";

pub const WORDS: &[&str] = &[
    "test",
    "--workspace",
    "--features",
    FEATURE,
    "--test",
    "planted",
    "--",
    "--json",
    "target/verify/planted.json",
];

/// What the suite wrote, from the repository root.
const REPORT: &str = "target/verify/planted.json";
/// In pieces, so that this program does not hold it.
const MARK: [&str; 2] = ["<planted defects ", "are compiled in!>"];
/// Goal of the suite.
const LEAST_DEFECTS: usize = 25;

/// Runs the suite, prints its table, and searches the shipped programs.
pub fn run(context: &Context, log_path: &Path) -> Result<Outcome, Error> {
    let path = context.root.join(REPORT);
    match std::fs::remove_file(&path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            return Err(Error::io("remove", &path)(error));
        }
        _ => {}
    }
    let mut command = Command::new("cargo");
    // The suite runs in the folder of its crate.
    let words = WORDS.iter().map(|word| match *word {
        REPORT => path.display().to_string(),
        word => word.to_string(),
    });
    command.args(words).current_dir(context.root).env("CARGO_TERM_COLOR", "never");
    let exited_well = process::run_logged(command, log_path)?;
    let bytes = std::fs::read(log_path).map_err(Error::io("read", log_path))?;
    let mut log = String::from_utf8_lossy(&bytes).into_owned();
    let text = std::fs::read_to_string(&path).unwrap_or_default();
    let report: Value = serde_json::from_str(&text).unwrap_or_default();
    let Found { caught, on_paper, mut problems } = judge(&report);
    if !exited_well && problems.is_empty() {
        problems.push("the command failed".into());
    }
    // `rb` as the steps before ran it: what is shipped is the same source, without the feature too.
    if !programs::build(context.root, &context.log_path("planted-defects-build"))? {
        problems.push("the programs could not be built without the switches".into());
    }
    problems.extend(switches(&programs::rb(context.root), report["program"].as_str().map(Path::new)));
    log.lines().skip_while(|line| !line.starts_with("result ")).for_each(|line| println!("      {line}"));
    let detail = format!("{caught} defects caught, {on_paper} in kernels wait for a GPU, none shipped");
    let detail = if problems.is_empty() { detail } else { format!("{} problems", problems.len()) };
    problems.iter().for_each(|problem| log.extend(["error: ", problem, "\n"]));
    std::fs::write(log_path, &log).map_err(Error::io("write", log_path))?;
    let state = if problems.is_empty() { State::Ok } else { State::Failed };
    Ok(Outcome { state, detail, passed: caught, failed: problems.len(), log })
}

/// What a report of the suite says.
#[derive(Default)]
struct Found {
    caught: usize,
    /// Defects of kernels: only the change of the source was tried.
    on_paper: usize,
    problems: Vec<String>,
}

fn judge(report: &Value) -> Found {
    let mut found = Found::default();
    let rows = report["rows"].as_array().map_or(&[][..], Vec::as_slice);
    for row in rows {
        let text = |key: &str| row[key].as_str().unwrap_or_default();
        match (text("defect"), row["good"] == true, text("device")) {
            ("nothing", true, _) => {}
            (_, true, "none") => found.on_paper += 1,
            (_, true, _) => found.caught += 1,
            (defect, ..) => found.problems.push(format!("{defect}: {}", text("detail"))),
        }
    }
    if !rows.iter().any(|row| row["defect"] == "nothing") {
        found.problems.push("the suite did not run on clean code".into());
    }
    if found.caught < LEAST_DEFECTS && found.problems.is_empty() {
        found
            .problems
            .push(format!("{} defects caught, at least {LEAST_DEFECTS} are expected", found.caught));
    }
    found
}

/// The suite's program holds the mark of the switches, and `rb` does not.
fn switches(rb: &Path, suite: Option<&Path>) -> Vec<String> {
    let mark = MARK.concat();
    let holds = |path: &Path| -> Result<bool, String> {
        let bytes = std::fs::read(path).map_err(|e| format!("{}: {e}", path.display()))?;
        Ok(bytes.windows(mark.len()).any(|window| window == mark.as_bytes()))
    };
    let mut problems = Vec::new();
    match suite.map(&holds) {
        Some(Ok(true)) => {}
        Some(Ok(false)) => problems.push("the suite's program does not hold the mark of the switches".into()),
        Some(Err(problem)) => problems.push(problem),
        None => problems.push("the suite does not say which program ran".into()),
    }
    match holds(rb) {
        Ok(false) => {}
        Ok(true) => problems.push(format!("{} holds the switches of planted defects", rb.display())),
        Err(problem) => problems.push(problem),
    }
    problems
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn row(defect: &str, good: bool, device: &str) -> Value {
        json!({ "defect": defect, "good": good, "device": device, "detail": "seen" })
    }

    #[test]
    fn uncaught_defects_and_missing_runs_are_problems() {
        let mut rows: Vec<Value> = (0..LEAST_DEFECTS).map(|i| row(&format!("D{i}"), true, "cpu")).collect();
        rows.push(row("Kernel", true, "none"));
        let without_clean = judge(&json!({ "rows": rows }));
        assert_eq!(without_clean.problems, ["the suite did not run on clean code"]);
        rows.push(row("nothing", true, "cpu"));
        let good = judge(&json!({ "rows": rows }));
        assert_eq!((good.caught, good.on_paper, good.problems.len()), (LEAST_DEFECTS, 1, 0));
        rows[3] = row("D3", false, "cpu");
        assert_eq!(judge(&json!({ "rows": rows })).problems, ["D3: seen"]);
        assert_eq!(judge(&Value::Null).problems.len(), 1);
    }

    #[test]
    fn the_mark_is_searched_for() {
        let root = std::env::temp_dir().join(format!("xtask-planted-{}", std::process::id()));
        std::fs::create_dir_all(&root).unwrap();
        let (suite, shipped) = (root.join("suite"), root.join("rb"));
        std::fs::write(&suite, format!("\0x{}y", MARK.concat())).unwrap();
        std::fs::write(&shipped, "clean").unwrap();
        assert_eq!(switches(&shipped, Some(&suite)), Vec::<String>::new());
        std::fs::copy(&suite, &shipped).unwrap();
        assert_eq!(switches(&shipped, Some(&suite)).len(), 1);
        std::fs::write(&suite, "clean").unwrap();
        std::fs::write(&shipped, "clean").unwrap();
        assert_eq!(switches(&shipped, Some(&suite)).len(), 1);
        assert_eq!(switches(&shipped, None).len(), 1);
        std::fs::remove_dir_all(&root).unwrap();
    }
}
