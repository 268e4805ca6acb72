//! A tiny run and the binary that runs it, for the tests of the command line.

// Each test file uses its own part of this.
#![allow(dead_code)]

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// A model of 3k parameters on a text that one batch passes through several times.
pub const CONFIG: &str = r#"
[run]
seed = 3
[data]
paths = ["text.txt"]
validation_fraction = 0.1
[tokenizer]
vocab_size = 300
[model]
hidden_size = 8
intermediate_size = 12
num_hidden_layers = 1
num_attention_heads = 2
num_key_value_heads = 1
max_position_embeddings = 16
tie_word_embeddings = true
[train]
max_steps = 4
seq_len = 16
per_device_train_batch_size = 2
lr_scheduler_type = "constant"
warmup_steps = 2
eval_steps = 0
save_steps = 1
save_total_limit = 0
logging_steps = 1
"#;

/// A folder with `tiny.toml` and `text.txt`, removed at the end of the test.
pub struct Place(tempfile::TempDir);

impl Place {
    pub fn new() -> Place {
        let place = Place(tempfile::tempdir().unwrap());
        let text: String =
            (0..60).map(|i| format!("line {i} of the river and the boat number {}\n", i * 7 % 11)).collect();
        place.write("text.txt", text);
        place.write("tiny.toml", CONFIG);
        place
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    pub fn write(&self, name: &str, content: impl AsRef<[u8]>) -> PathBuf {
        std::fs::write(self.path(name), content).unwrap();
        self.path(name)
    }

    /// `rb` with these words, to be started in this folder.
    pub fn rb(&self, words: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_rb"));
        command.args(words).current_dir(self.0.path()).env_remove("RUST_LOG");
        command
    }

    /// Runs `rb` and expects exit code 0.
    pub fn good(&self, words: &[&str]) -> String {
        let output = self.rb(words).output().unwrap();
        assert!(output.status.success(), "rb {}: {}", words.join(" "), text(&output));
        text(&output)
    }

    /// Runs `rb` and expects this exit code and one error that holds every part.
    pub fn refused(&self, words: &[&str], code: i32, parts: &[&str]) {
        refused(&self.rb(words).output().unwrap(), &words.join(" "), code, parts);
    }

    /// A run of this name with checkpoints of steps 1 to `steps`.
    pub fn run(&self, name: &str, steps: usize) {
        self.good(&["train", "tiny.toml", "--out", name, "--set", &format!("train.max_steps={steps}")]);
    }
}

/// Checks exit code and message of a command that must have been refused.
pub fn refused(output: &Output, what: &str, code: i32, parts: &[&str]) {
    let (all, errors) = (text(output), String::from_utf8_lossy(&output.stderr).into_owned());
    assert_eq!(output.status.code(), Some(code), "rb {what}: {all}");
    assert_eq!(errors.matches("error: ").count(), 1, "rb {what}: {all}");
    assert!(!errors.contains("panicked"), "rb {what}: {all}");
    for part in parts {
        assert!(errors.contains(part), "rb {what}: no `{part}` in: {all}");
    }
}

pub fn text(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
}

/// The newest step of a run whose checkpoint folder exists.
pub fn newest_step(run: &Path) -> u64 {
    rb_train::checkpoint::list(&run.join("checkpoints")).unwrap().last().copied().unwrap_or(0)
}
