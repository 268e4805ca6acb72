//! What a run does about a loss that does not fall, about spikes, and its statistics on request.

use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

use rb_train::observe::{EventKind, Record};
use rb_train::{Outcome, Override, TrainError, Trainer};

const CONFIG: &str = r#"
[data]
paths = ["text.txt"]
validation_fraction = 0.2
[tokenizer]
vocab_size = 280
[model]
hidden_size = 8
intermediate_size = 12
num_hidden_layers = 1
num_attention_heads = 2
max_position_embeddings = 16
[train]
max_steps = 40
seq_len = 16
per_device_train_batch_size = 2
learning_rate = 1e-2
warmup_steps = 0
logging_steps = 10
eval_steps = 0
save_steps = 10
"#;

fn run(dir: &Path, overrides: &[&str]) -> (Result<Outcome, TrainError>, PathBuf) {
    let text: String =
        (0..60).map(|i| format!("line {i} of the river and the boat number {}\n", i * 7 % 11)).collect();
    run_on(dir, &text, overrides)
}

fn run_on(dir: &Path, text: &str, overrides: &[&str]) -> (Result<Outcome, TrainError>, PathBuf) {
    std::fs::write(dir.join("text.txt"), text).unwrap();
    std::fs::write(dir.join("tiny.toml"), CONFIG).unwrap();
    let out = dir.join("run");
    let mut all = vec![Override::new("run.out", out.to_str().unwrap())];
    all.extend(overrides.iter().map(|o| o.parse::<Override>().unwrap()));
    let mut trainer = Trainer::create(&dir.join("tiny.toml"), &all).unwrap();
    (trainer.run(&AtomicBool::new(false)), out)
}

fn records(out: &Path) -> Vec<Record> {
    rb_train::observe::read(&out.join("metrics.jsonl")).unwrap()
}

fn events(out: &Path, kind: EventKind) -> Vec<String> {
    let of_kind = |record: Record| match record {
        Record::Event(event) if event.event == kind => Some(event.message),
        _ => None,
    };
    records(out).into_iter().filter_map(of_kind).collect()
}

/// Whether each training record has a speed.
fn speeds(out: &Path) -> Vec<bool> {
    let of = |record: Record| match record {
        Record::Train(train) => Some(train.tokens_per_s.is_some() && train.step_ms.is_some()),
        _ => None,
    };
    records(out).into_iter().filter_map(of).collect()
}

#[test]
fn a_loss_that_does_not_fall_has_no_figures_and_exit_code_3() {
    let dir = tempfile::tempdir().unwrap();
    // A batch is all the data, so that the loss is flat to rounding.
    let flat = [
        "train.learning_rate=1e-30",
        "train.min_learning_rate=0",
        "train.weight_decay=0",
        "train.max_steps=30",
        "train.eval_steps=30",
        "train.per_device_train_batch_size=200",
        "data.shuffle=false",
    ];
    let (ended, out) = run(dir.path(), &flat);
    let error = ended.unwrap_err();
    assert_eq!(error.exit_code(), 3, "{error}");
    assert!(error.to_string().contains("the loss does not fall"), "{error}");
    let seen = speeds(&out);
    assert_eq!(seen.len(), 30);
    assert!(seen[..19].iter().all(|has| *has) && seen[19..].iter().all(|has| !has), "{seen:?}");
    assert!(!records(&out).iter().any(|r| matches!(r, Record::Eval(_))), "a held-out loss was written");
    assert!(events(&out, EventKind::Warning).iter().any(|m| m.contains("held-out loss is not shown")));
    let page = std::fs::read_to_string(out.join("report.html")).unwrap();
    assert!(page.contains("No figure of this run is shown") && !page.contains("<svg"), "{page}");
}

#[test]
fn a_loss_that_falls_has_figures() {
    let dir = tempfile::tempdir().unwrap();
    let (ended, out) = run(dir.path(), &["train.eval_steps=40", "train.statistics_steps=20"]);
    assert!(ended.unwrap().eval_loss.is_some());
    assert!(speeds(&out).iter().all(|has| *has));
    assert!(records(&out).iter().any(|r| matches!(r, Record::Eval(_))));
    assert!(std::fs::read_to_string(out.join("report.html")).unwrap().contains("<svg"));

    let lines = std::fs::read_to_string(out.join("statistics.jsonl")).unwrap();
    let all: Vec<serde_json::Value> = lines.lines().map(|l| serde_json::from_str(l).unwrap()).collect();
    let of = |step: u64, kind: &str| all.iter().filter(|s| s["step"] == step && s["kind"] == kind).count();
    // Eight parameters that are named: q, k, v and gate, up are parts of packed ones.
    assert_eq!((of(20, "gradient"), of(20, "weight")), (12, 12), "{lines}");
    assert_eq!((of(40, "gradient"), of(20, "activation")), (12, of(40, "activation")));
    assert!(of(20, "activation") > 10 && all.iter().all(|s| s["rms"].is_number() && s["non_finite"] == 0));
    assert!(lines.contains("rms_norm after model.layers.0.input_layernorm.weight"), "{lines}");
}

/// Nearly everything above the median counts as a spike.
const TOUCHY: &str = "train.spike_zscore=0.001";

#[test]
fn spikes_warn_stop_or_are_left_out() {
    let dir = tempfile::tempdir().unwrap();
    let (ended, out) = run(dir.path(), &[TOUCHY, "train.learning_rate=1e-3"]);
    assert_eq!(ended.unwrap().step, 40);
    assert!(
        events(&out, EventKind::Warning).iter().any(|m| m.contains("robust deviations above the median"))
    );

    let dir = tempfile::tempdir().unwrap();
    let (ended, out) = run(dir.path(), &[TOUCHY, "train.learning_rate=1e-3", "train.on_spike=stop"]);
    let error = ended.unwrap_err();
    assert_eq!(error.exit_code(), 3);
    assert!(
        error.to_string().contains("robust deviations") && error.to_string().contains("step-20"),
        "{error}"
    );
    assert_eq!(events(&out, EventKind::Stop).len(), 1);

    let dir = tempfile::tempdir().unwrap();
    let (ended, out) = run(dir.path(), &[TOUCHY, "train.learning_rate=1e-3", "train.on_spike=skip"]);
    assert_eq!(ended.unwrap().step, 40);
    let skipped = events(&out, EventKind::SkippedStep).len();
    assert!(skipped > 0);
    let state = rb_train::checkpoint::read_state(&out.join("checkpoints/step-40")).unwrap();
    assert_eq!((state.skipped_steps, state.optimizer_steps), (skipped as u64, 40 - skipped as u64));
    assert_eq!(speeds(&out).len(), 40 - skipped);
}

#[test]
fn a_roll_back_takes_the_weights_of_the_newest_checkpoint() {
    let dir = tempfile::tempdir().unwrap();
    let settings =
        [TOUCHY, "train.learning_rate=1e-3", "train.on_spike=rollback", "train.save_total_limit=0"];
    let (ended, out) = run(dir.path(), &settings);
    let mut messages = events(&out, EventKind::Warning);
    messages.retain(|message| message.contains("robust deviations"));
    assert!(messages[0].contains("those after step 20 again (1 of at most 3 times)"), "{messages:?}");
    // Three times at most, then it stops.
    assert_eq!(messages.iter().filter(|m| m.contains("again (")).count(), 3);
    let error = ended.unwrap_err();
    assert!(error.exit_code() == 3 && error.to_string().contains("often enough"), "{error}");
}

/// The tail, which is held out, has nothing of the rest: whatever is learned makes its loss rise.
fn alien_tail() -> String {
    "the river and the boat on the river\n".repeat(40) + &"QZ9#VK7%XJ3&WP5@".repeat(22)
}

const WATCHED: [&str; 4] = [
    "train.eval_steps=2",
    "train.save_steps=1000",
    "train.learning_rate=2e-2",
    "train.lr_scheduler_type=constant",
];

#[test]
fn a_held_out_loss_that_rises_is_said_once_with_what_to_do() {
    let dir = tempfile::tempdir().unwrap();
    let long = [&WATCHED[..], &["train.max_steps=120"]].concat();
    let (ended, out) = run_on(dir.path(), &alien_tail(), &long);
    let outcome = ended.unwrap();
    assert_eq!((outcome.step, outcome.stopped_early), (120, false));
    let warnings = events(&out, EventKind::Warning);
    let said: Vec<&String> = warnings.iter().filter(|m| m.contains("the held-out loss rises")).collect();
    assert_eq!(said.len(), 1, "{warnings:?}");
    for part in
        ["WARNING", "lowest at step", "no state with an evaluation is saved", "early_stopping_patience"]
    {
        assert!(said[0].contains(part), "no `{part}` in {said:?}");
    }
    // The text is a few steps long: that it is read too often is said before the first of them.
    let first = &warnings[0];
    assert!(first.contains("the run reads its text") && first.contains("lower train.max_steps"), "{first}");
    // The last step alone is saved and was evaluated.
    assert_eq!(outcome.best.unwrap().0, 120);

    let dir = tempfile::tempdir().unwrap();
    let (ended, out) = run(dir.path(), &["train.eval_steps=2"]);
    assert_eq!(ended.unwrap().step, 40);
    assert!(!events(&out, EventKind::Warning).iter().any(|m| m.contains("rises")));
}

#[test]
fn early_stopping_ends_a_run_and_keeps_its_best_state() {
    let patient = [&WATCHED[..], &["train.early_stopping_patience=4", "train.save_total_limit=2"]].concat();
    let dir = tempfile::tempdir().unwrap();
    let (ended, out) = run_on(dir.path(), &alien_tail(), &patient);
    let outcome = ended.unwrap();
    let (best, loss) = outcome.best.unwrap();
    assert!(outcome.stopped_early && !outcome.interrupted, "{outcome:?}");
    assert_eq!(outcome.step, best + 8, "four evaluations after the lowest");
    assert!(loss < outcome.eval_loss.unwrap());
    let checkpoints = out.join("checkpoints");
    assert_eq!(rb_train::checkpoint::list(&checkpoints).unwrap(), [best, outcome.step]);
    assert_eq!(rb_train::checkpoint::verify(&checkpoints.join("best")).unwrap(), best);
    assert_eq!(rb_train::checkpoint::verify(&checkpoints.join("latest")).unwrap(), outcome.step);
    assert!(events(&out, EventKind::Stop)[0].contains("4 evaluations in a row"));

    // What is counted is in the records: a run that was interrupted stops at the same step.
    let dir = tempfile::tempdir().unwrap();
    let first = [&patient[..], &["train.max_steps=6"]].concat();
    let (ended, out) = run_on(dir.path(), &alien_tail(), &first);
    assert!(!ended.unwrap().stopped_early);
    let more = ["train.max_steps=40".parse::<Override>().unwrap()];
    let again = Trainer::resume(&out, &more).unwrap().run(&AtomicBool::new(false)).unwrap();
    assert_eq!((again.step, again.best, again.stopped_early), (outcome.step, outcome.best, true));

    let dir = tempfile::tempdir().unwrap();
    let none = [&patient[..], &["data.validation_fraction=0"]].concat();
    std::fs::write(dir.path().join("text.txt"), alien_tail()).unwrap();
    std::fs::write(dir.path().join("tiny.toml"), CONFIG).unwrap();
    let mut all = vec![Override::new("run.out", dir.path().join("run").to_str().unwrap())];
    all.extend(none.iter().map(|o| o.parse::<Override>().unwrap()));
    let error = Trainer::create(&dir.path().join("tiny.toml"), &all).err().unwrap();
    assert!(error.exit_code() == 2 && error.to_string().contains("needs held-out text"), "{error}");
}
