//! Helpers for the tests of this module: a folder that goes away, and sample records.

use super::{Finite, TrainRecord};
use rb_verify::{Figure, Pass, RunGate};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

/// A new empty folder, removed on drop.
pub struct TempDir(PathBuf);

impl TempDir {
    pub fn new() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let unique = NEXT.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("rb-observe-{}-{unique}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for TempDir {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

pub fn finite(value: f64) -> Finite {
    Finite::new("value", value).unwrap()
}

pub fn pass() -> Pass {
    RunGate::judge(&[2.0, 1.0]).unwrap()
}

pub fn figure(value: f64) -> Option<Figure> {
    Some(Figure::new(&pass(), "value", value).unwrap())
}

/// The record of `step`, one second after that of the step before.
pub fn train(step: u64, loss: f64) -> TrainRecord {
    TrainRecord {
        step,
        tokens: step * 4096,
        epoch: step / 100,
        loss: finite(loss),
        lr: finite(3e-4),
        grad_norm: finite(0.81),
        tokens_per_s: figure(12_345.0),
        step_ms: figure(1000.0),
        valid_tokens: 4096,
        flops_per_s: figure(1.5e12),
        mem_rss_bytes: Some(1 << 30),
        time_unix_ms: 1_700_000_000_000 + step * 1000,
    }
}
