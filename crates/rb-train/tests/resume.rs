//! A run that is stopped and resumed ends in the same bits as one that never stopped.

use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

use rb_train::{Override, Trainer, checkpoint};

const CONFIG: &str = r#"
[run]
seed = 3
[data]
paths = ["text.txt"]
validation_fraction = 0.1
document_mask = true
[tokenizer]
vocab_size = 300
[model]
hidden_size = 16
intermediate_size = 24
num_hidden_layers = 1
num_attention_heads = 4
num_key_value_heads = 2
max_position_embeddings = 16
tie_word_embeddings = true
[train]
max_steps = 9
seq_len = 16
per_device_train_batch_size = 3
gradient_accumulation_steps = 2
lr_scheduler_type = "constant"
warmup_steps = 3
eval_steps = 4
save_steps = 1
save_total_limit = 0
logging_steps = 3
"#;

/// A text short enough that nine steps of 96 tokens pass through it more than once.
fn config(dir: &Path) -> PathBuf {
    let text: String =
        (0..40).map(|i| format!("line {i} of the river and the boat number {}\n", i * 7 % 11)).collect();
    std::fs::write(dir.join("text.txt"), text).unwrap();
    let path = dir.join("tiny.toml");
    std::fs::write(&path, CONFIG).unwrap();
    path
}

fn set(text: &str) -> Override {
    text.parse().unwrap()
}

fn train(config: &Path, out: &Path, steps: u64) {
    let overrides =
        [Override::new("run.out", out.to_str().unwrap()), set(&format!("train.max_steps={steps}"))];
    let mut trainer = Trainer::create(config, &overrides).unwrap();
    trainer.check_model().unwrap();
    trainer.run(&AtomicBool::new(false)).unwrap();
}

fn resume(out: &Path, steps: u64) {
    let mut trainer = Trainer::resume(out, &[set(&format!("train.max_steps={steps}"))]).unwrap();
    trainer.check_model().unwrap();
    trainer.run(&AtomicBool::new(false)).unwrap();
}

fn file(out: &Path, step: u64, name: &str) -> Vec<u8> {
    std::fs::read(checkpoint::step_dir(&out.join("checkpoints"), step).join(name)).unwrap()
}

#[test]
fn resumed_twice_equals_straight() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path());
    let (straight, parts) = (dir.path().join("straight"), dir.path().join("parts"));
    train(&config, &straight, 9);
    train(&config, &parts, 2);
    resume(&parts, 5);
    resume(&parts, 9);
    for step in 1..=9 {
        for name in ["model.safetensors", "trainer/optimizer.safetensors"] {
            assert!(file(&straight, step, name) == file(&parts, step, name), "step {step}: {name} differs");
        }
    }
    // The data was passed more than once, and the curve is one whole curve.
    let state = checkpoint::read_state(&checkpoint::step_dir(&parts.join("checkpoints"), 9)).unwrap();
    assert_eq!(state.tokens, 9 * 96);
    let losses = |out: &Path| -> Vec<(u64, f64)> {
        let records = rb_train::observe::read(&out.join("metrics.jsonl")).unwrap();
        let train = |r: rb_train::observe::Record| match r {
            rb_train::observe::Record::Train(t) => Some((t.step, t.loss.get())),
            _ => None,
        };
        records.into_iter().filter_map(train).collect()
    };
    assert_eq!(losses(&straight), losses(&parts));
    assert_eq!(losses(&parts).len(), 9);
}

#[test]
fn a_damaged_newest_checkpoint_is_passed_over() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path());
    let (straight, run) = (dir.path().join("straight"), dir.path().join("run"));
    train(&config, &straight, 5);
    train(&config, &run, 4);
    let newest = checkpoint::step_dir(&run.join("checkpoints"), 4).join("model.safetensors");
    let bytes = std::fs::read(&newest).unwrap();
    std::fs::write(&newest, &bytes[..bytes.len() / 2]).unwrap();
    let message = checkpoint::verify(newest.parent().unwrap()).unwrap_err().to_string();
    assert!(message.contains("model.safetensors has") && message.contains("truncated"), "{message}");
    resume(&run, 5);
    assert!(file(&straight, 5, "model.safetensors") == file(&run, 5, "model.safetensors"));
    // A file of the right size from another step is noticed by its checksum.
    let (a, b) = (file(&run, 3, "model.safetensors"), file(&run, 2, "model.safetensors"));
    assert!(a.len() == b.len() && a != b);
    let swapped = checkpoint::step_dir(&run.join("checkpoints"), 3);
    std::fs::write(swapped.join("model.safetensors"), b).unwrap();
    assert!(checkpoint::verify(&swapped).unwrap_err().to_string().contains("swapped"));
}

#[test]
fn a_step_that_is_not_finite_stops_the_run_with_a_state_from_before_it() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path());
    let out = dir.path().join("run");
    let overrides = [
        Override::new("run.out", out.to_str().unwrap()),
        set("train.learning_rate=1e30"),
        set("train.min_learning_rate=0"),
        set("train.max_grad_norm=0"),
        set("train.warmup_steps=0"),
        set("train.save_steps=100"),
    ];
    let mut trainer = Trainer::create(&config, &overrides).unwrap();
    let error = trainer.run(&AtomicBool::new(false)).unwrap_err();
    assert_eq!(error.exit_code(), 3);
    let message = error.to_string();
    assert!(message.contains("first bad tensor: ") && message.contains("checkpoints/step-"), "{message}");
    drop(trainer);
    let found = checkpoint::find_latest(&out.join("checkpoints")).unwrap().unwrap();
    assert!(found.step >= 1 && found.step < 9);
}
