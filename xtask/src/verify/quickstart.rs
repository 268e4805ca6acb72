//! What a short training run must leave in its run directory.

use std::path::{Path, PathBuf};

use serde_json::Value;

pub const NUM_STEPS: u64 = 20;

/// Files that a run directory has besides the checkpoint.
const RUN_FILES: &[&str] = &["config.toml", "metrics.jsonl", "report.html"];
/// Files of a checkpoint, which is a Hugging Face model folder.
const CHECKPOINT_FILES: &[&str] = &["config.json", "model.safetensors", "tokenizer.json"];

/// What is wrong with the run directory `run`; the number of loss values seen is added to the result.
pub fn inspect(run: &Path) -> (Vec<String>, usize) {
    let mut problems: Vec<String> = RUN_FILES.iter().filter_map(|name| missing(&run.join(name))).collect();
    match latest_checkpoint(&run.join("checkpoints")) {
        Some(checkpoint) => {
            problems.extend(CHECKPOINT_FILES.iter().filter_map(|name| missing(&checkpoint.join(name))))
        }
        None => problems.push(format!("{}/checkpoints/latest leads to no checkpoint", run.display())),
    }
    let metrics = std::fs::read_to_string(run.join("metrics.jsonl")).unwrap_or_default();
    let num_losses = inspect_metrics(&metrics, &mut problems);
    (problems, num_losses)
}

fn missing(path: &Path) -> Option<String> {
    let meta = std::fs::metadata(path).ok();
    match meta.map(|meta| meta.len()) {
        None => Some(format!("{} is missing", path.display())),
        Some(0) => Some(format!("{} is empty", path.display())),
        Some(_) => None,
    }
}

/// `latest` is a link to the checkpoint folder, or a file with its name.
fn latest_checkpoint(folder: &Path) -> Option<PathBuf> {
    let latest = folder.join("latest");
    if latest.is_dir() {
        return Some(latest);
    }
    let name = std::fs::read_to_string(&latest).ok()?;
    Some(folder.join(name.trim())).filter(|path| !name.trim().is_empty() && path.is_dir())
}

/// Every line is JSON, every loss is finite and no step was skipped, the last step was reached, and the
/// training loss fell.
fn inspect_metrics(text: &str, problems: &mut Vec<String>) -> usize {
    let (mut num_losses, mut last_step) = (0, 0);
    let mut train_losses = Vec::new();
    for (offset, line) in text.lines().enumerate() {
        let place = format!("metrics.jsonl:{}", offset + 1);
        let Ok(record) = serde_json::from_str::<Value>(line) else {
            problems.push(format!("{place}: not JSON"));
            continue;
        };
        let field = |name: &str| record.get(name).and_then(Value::as_str);
        last_step = record.get("step").and_then(Value::as_u64).unwrap_or(0).max(last_step);
        if field("event") == Some("skipped_step") {
            problems
                .push(format!("{place}: a step was skipped: {}", field("message").unwrap_or("no reason")));
        }
        match record.get("loss").map(Value::as_f64) {
            Some(Some(loss)) => {
                num_losses += 1;
                train_losses.extend((field("kind") == Some("train")).then_some(loss));
            }
            // JSON has no NaN: a loss that is not finite is written as null or as a string.
            Some(None) => problems.push(format!("{place}: the loss is not finite")),
            None => {}
        }
    }
    match train_losses[..] {
        [first, .., last] if last < first => {}
        [first, .., last] => {
            problems.push(format!("metrics.jsonl: the training loss went from {first} to {last}"))
        }
        _ => problems
            .push(format!("metrics.jsonl: {} training losses, expected 2 or more", train_losses.len())),
    }
    if last_step != NUM_STEPS {
        problems.push(format!("metrics.jsonl: ends at step {last_step}, expected {NUM_STEPS}"));
    }
    num_losses
}

#[cfg(test)]
mod tests {
    use super::*;

    fn metrics(text: &str) -> (usize, Vec<String>) {
        let mut problems = Vec::new();
        (inspect_metrics(text, &mut problems), problems)
    }

    /// Records of a run that learns, the last at the last step.
    const GOOD: &str = "{\"kind\": \"train\", \"step\": 1, \"loss\": 9.5}\n\
                        {\"kind\": \"eval\", \"step\": 10, \"loss\": 9}\n\
                        {\"kind\": \"train\", \"step\": 20, \"loss\": 8}\n";

    #[test]
    fn metrics_are_read() {
        assert_eq!(metrics(GOOD), (3, vec![]));
        let skipped = "{\"event\": \"skipped_step\", \"message\": \"loss is NaN\"}";
        let cases = [
            (GOOD.replace("9.5", "null"), "metrics.jsonl:1: the loss is not finite"),
            (format!("{GOOD}nonsense\n"), "metrics.jsonl:4: not JSON"),
            (GOOD.replace("9.5", "7.5"), "went from 7.5 to 8"),
            (GOOD.replace("20", "19"), "ends at step 19"),
            (format!("{GOOD}{skipped}"), "skipped: loss is NaN"),
            (String::new(), "0 training losses"),
        ];
        for (text, part) in cases {
            let (_, problems) = metrics(&text);
            assert!(problems.iter().any(|problem| problem.contains(part)), "{part}: {problems:#?}");
        }
    }

    #[test]
    fn a_run_directory_is_inspected() {
        let run = std::env::temp_dir().join(format!("xtask-quickstart-{}", std::process::id()));
        let checkpoint = run.join("checkpoints/step-20");
        std::fs::create_dir_all(&checkpoint).unwrap();
        let (problems, _) = inspect(&run);
        assert_eq!(problems.len(), RUN_FILES.len() + 3, "{problems:#?}");

        RUN_FILES.iter().for_each(|name| std::fs::write(run.join(name), GOOD).unwrap());
        CHECKPOINT_FILES.iter().for_each(|name| std::fs::write(checkpoint.join(name), "x").unwrap());
        std::fs::write(run.join("checkpoints/latest"), "step-20\n").unwrap();
        assert_eq!(inspect(&run), (vec![], 3));

        std::fs::write(checkpoint.join("model.safetensors"), "").unwrap();
        let (problems, _) = inspect(&run);
        assert!(problems.len() == 1 && problems[0].ends_with("model.safetensors is empty"), "{problems:#?}");
        std::fs::remove_dir_all(&run).unwrap();
    }
}
