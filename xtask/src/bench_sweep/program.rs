//! The programs that are compared: ours, a fresh process for each run, and the peers, which stay alive between runs since
//! they compile for long.

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use serde_json::Value;

use super::run::Run;
use super::{Options, Shape};
use crate::error::Error;

/// Distinct batches of a run, taken in turn.
pub const BATCHES: usize = 4;
/// Exit code of a program whose loss was not finite or did not fall.
const REFUSED: i32 = 3;

/// A program on one shape.
pub trait Program {
    fn name(&self) -> String;
    /// Waits until it can be timed.
    fn ready(&mut self) -> Result<(), String>;
    /// A run from fresh weights.
    fn run(&mut self) -> Result<Run, String>;
    /// What it said about itself.
    fn about(&self) -> Value;
}

/// Our `bench`.
pub struct Ours {
    program: PathBuf,
    words: Vec<String>,
    result: PathBuf,
    about: Value,
}

impl Ours {
    pub fn new(options: &Options, words: &[String]) -> Ours {
        let mut words = words.to_vec();
        if !options.cpu {
            words.extend(["--gpu".into(), "--mixed-precision".into()]);
        }
        words.extend(options.ours_arg.iter().cloned());
        let result = options.out.join("ours.json");
        words.extend(["--json".into(), result.display().to_string()]);
        Ours { program: options.bench.clone(), words, result, about: Value::Null }
    }

    fn result(&self) -> Result<Value, String> {
        let failed = |what: String| format!("failed: {what}");
        // A result of another run must not be taken for one of this.
        let _ = std::fs::remove_file(&self.result);
        let output = Command::new(&self.program).args(&self.words).stdin(Stdio::null()).output();
        let output = output.map_err(|e| failed(format!("cannot start {}: {e}", self.program.display())))?;
        if !output.status.success() {
            let text = String::from_utf8_lossy(&output.stderr);
            let line =
                text.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or("no output").to_string();
            let refused = output.status.code() == Some(REFUSED);
            return Err(if refused {
                format!("refused: {line}")
            } else {
                failed(format!("{}: {line}", output.status))
            });
        }
        let text = std::fs::read_to_string(&self.result).map_err(|e| failed(e.to_string()))?;
        let _ = std::fs::remove_file(&self.result);
        serde_json::from_str(&text).map_err(|e| failed(e.to_string()))
    }
}

impl Program for Ours {
    fn name(&self) -> String {
        "RustingBrain".into()
    }

    /// The first run compiles kernels, and searches for algorithms where `--tune` asks for it.
    fn ready(&mut self) -> Result<(), String> {
        let mut about = self.result()?;
        // What belongs to a run, and would show a speed that no gate has seen.
        if let Some(object) = about.as_object_mut() {
            object.retain(|key, _| {
                ["version", "command", "params", "precision", "start_to_first_step_s"].contains(&key.as_str())
            });
        }
        self.about = about;
        Ok(())
    }

    fn run(&mut self) -> Result<Run, String> {
        Run::pass(self.result()?)
    }

    fn about(&self) -> Value {
        self.about.clone()
    }
}

/// A peer's process: it says what it is in one line of JSON, then gives a line for each line on its stdin.
pub struct Peer {
    name: String,
    child: Child,
    questions: Option<ChildStdin>,
    answers: BufReader<ChildStdout>,
    log: PathBuf,
    about: Value,
}

impl Peer {
    pub fn start(
        options: &Options,
        script: &Path,
        mode: Option<&str>,
        words: &[String],
    ) -> Result<Peer, Error> {
        let stem = script.file_stem().unwrap_or_default().to_string_lossy().replace("_bench_300m", "");
        let name = mode.map_or(stem.clone(), |mode| format!("{stem} {mode}"));
        let log = options.out.join(format!("{}.log", name.replace(' ', "_")));
        let file = std::fs::File::create(&log).map_err(Error::io("create", &log))?;
        let mut command = Command::new(&options.python);
        command.arg(script).args(words).arg("--serve");
        if let Some(mode) = mode {
            command.args(["--mode", mode]);
        }
        if options.cpu {
            command.arg("--cpu");
        }
        // JAX takes most of a card's memory at its start otherwise, and other programs have none.
        command.env("XLA_PYTHON_CLIENT_PREALLOCATE", "false").env("TF_FORCE_GPU_ALLOW_GROWTH", "true");
        let program = command.get_program().to_string_lossy().into_owned();
        let child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(file).spawn();
        let mut child = child.map_err(|source| Error::Spawn { program: program.clone(), source })?;
        let (questions, answers) = (child.stdin.take(), child.stdout.take());
        let Some(answers) = answers else {
            return Err(Error::Program { program, detail: "its output cannot be read".into() });
        };
        Ok(Peer { name, child, questions, answers: BufReader::new(answers), log, about: Value::Null })
    }

    fn answer(&mut self) -> Result<Value, String> {
        let mut line = String::new();
        let read = self.answers.read_line(&mut line).map_err(|e| format!("failed: {e}"))?;
        if read > 0 {
            return serde_json::from_str(&line).map_err(|e| format!("failed: {e}"));
        }
        let code = self.child.wait().ok().and_then(|status| status.code());
        let text = std::fs::read(&self.log).unwrap_or_default();
        let text = String::from_utf8_lossy(&text).into_owned();
        let last = text.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or("no output").to_string();
        Err(if code == Some(REFUSED) { last } else { format!("failed with exit code {code:?}: {last}") })
    }
}

impl Program for Peer {
    fn name(&self) -> String {
        self.name.clone()
    }

    fn ready(&mut self) -> Result<(), String> {
        self.about = self.answer()?;
        Ok(())
    }

    fn run(&mut self) -> Result<Run, String> {
        let asked = self.questions.as_mut().map(|to| to.write_all(b"run\n").and_then(|()| to.flush()));
        match asked {
            Some(Ok(())) => Run::pass(self.answer()?),
            // It ended: its last words say why.
            _ => Err(self.answer().err().unwrap_or_else(|| "failed: it takes no questions".into())),
        }
    }

    fn about(&self) -> Value {
        self.about.clone()
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Whether this Python has a module, without loading it.
pub fn has_module(python: &str, module: &str) -> Result<bool, Error> {
    let code = format!("import importlib.util, sys; sys.exit(importlib.util.find_spec('{module}') is None)");
    let status = Command::new(python).args(["-c", &code]).stdin(Stdio::null()).stderr(Stdio::null()).status();
    Ok(status.map_err(|source| Error::Spawn { program: python.into(), source })?.success())
}

/// Writes random ids for all batches of a shape, little-endian, two bytes each where they fit.
pub fn random_tokens(folder: &Path, shape: Shape, vocab: u32) -> Result<PathBuf, Error> {
    let count = BATCHES * shape.0 * shape.1 + 1;
    let wide = vocab > 1 << 16;
    let path = folder.join(format!("random_{}x{}.{}", shape.0, shape.1, if wide { "u32" } else { "u16" }));
    let mut bytes = Vec::with_capacity(count * 4);
    // Steele, Lea and Flood's SplitMix64: any good mixer does.
    let mut state = 20240607u64;
    for _ in 0..count {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        let id = (((z ^ (z >> 31)) >> 32) * u64::from(vocab)) >> 32;
        let id = (id as u32).to_le_bytes();
        bytes.extend_from_slice(if wide { &id } else { &id[..2] });
    }
    std::fs::write(&path, bytes).map_err(Error::io("write", &path))?;
    Ok(path)
}
