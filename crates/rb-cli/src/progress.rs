//! A line that says how far a command is, on a terminal alone.

use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};

/// Time between two looks of the line.
const PAUSE: Duration = Duration::from_millis(200);

/// Counts something up to its end.
pub(crate) struct Counter {
    what: String,
    visible: bool,
    shown: Option<Instant>,
}

impl Counter {
    pub(crate) fn new(what: &str) -> Counter {
        Counter { what: what.to_string(), visible: std::io::stderr().is_terminal(), shown: None }
    }

    /// `done` of `all`.
    pub(crate) fn show(&mut self, done: usize, all: usize) {
        if !self.visible || self.shown.is_some_and(|shown| shown.elapsed() < PAUSE) {
            return;
        }
        self.shown = Some(Instant::now());
        let mut out = std::io::stderr().lock();
        // A terminal that is gone is no reason to stop.
        let _ = write!(out, "\r{}: {done} of {all}", self.what).and_then(|()| out.flush());
    }

    /// Clears the line.
    pub(crate) fn finish(&mut self) {
        if self.shown.is_some() {
            let width = self.what.chars().count() + 40;
            let _ = write!(std::io::stderr(), "\r{:width$}\r", "");
        }
    }
}
