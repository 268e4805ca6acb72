//! One progress bar on a terminal, plain lines elsewhere.
//!
//! Both show [`TrainRecord`]s, so a step whose loss is not finite has no way to show a speed: report it with
//! [`Progress::println`]. What is shown here is a convenience and `metrics.jsonl` is the record, so a terminal
//! or pipe that has gone away (`rb train | head`) does not stop a run.

use super::human;
use super::{EvalRecord, TrainRecord};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use rb_verify::Figure;
use std::collections::VecDeque;
use std::io::{self, IsTerminal, Write};

/// Records that the time left is estimated from: enough to smooth, few enough to follow a change of speed.
const ETA_WINDOW_RECORDS: usize = 64;

/// Shows where a run is.
pub struct Progress {
    output: Output,
    total_steps: u64,
    log_interval: u64,
    last_printed: Option<u64>,
    /// Step and time in milliseconds of the latest records: evaluations and checkpoints count as time too.
    recent: VecDeque<(u64, u64)>,
}

enum Output {
    Bar(ProgressBar),
    Plain(Box<dyn Write + Send>),
}

impl Progress {
    /// Shows a bar on stderr if stdout and stderr are terminals that can draw one (`NO_COLOR` unset, `TERM`
    /// not `dumb`); else prints a line to stdout every `log_interval` steps.
    ///
    /// `done_steps` is 0, or the step that the run is resumed from.
    pub fn new(total_steps: u64, done_steps: u64, log_interval: u64) -> Self {
        if io::stdout().is_terminal() && io::stderr().is_terminal() && !no_color() {
            let bar = ProgressBar::with_draw_target(Some(total_steps), ProgressDrawTarget::stderr());
            // The bar is hidden where the terminal cannot move its cursor.
            if !bar.is_hidden() {
                bar.set_style(bar_style());
                bar.set_position(done_steps);
                return Self::with_output(Output::Bar(bar), total_steps, log_interval);
            }
        }
        Self::plain(Box::new(io::stdout()), total_steps, log_interval)
    }

    /// Prints plain lines to `writer`, whatever it is.
    pub fn plain(writer: Box<dyn Write + Send>, total_steps: u64, log_interval: u64) -> Self {
        Self::with_output(Output::Plain(writer), total_steps, log_interval)
    }

    fn with_output(output: Output, total_steps: u64, log_interval: u64) -> Self {
        let recent = VecDeque::with_capacity(ETA_WINDOW_RECORDS + 1);
        Self { output, total_steps, log_interval: log_interval.max(1), last_printed: None, recent }
    }

    /// Shows a step. Plain lines come for the first step shown, the last one, and one in each log interval.
    pub fn train(&mut self, record: &TrainRecord) {
        self.recent.push_back((record.step, record.time_unix_ms));
        if self.recent.len() > ETA_WINDOW_RECORDS {
            self.recent.pop_front();
        }
        let eta_s = self.eta_s(record);
        if let Output::Bar(bar) = &self.output {
            bar.set_position(record.step);
            bar.set_message(bar_message(record, eta_s));
            return;
        }
        let interval = self.log_interval;
        let due = self.last_printed.is_none_or(|last| record.step / interval > last / interval);
        if due || record.step >= self.total_steps {
            self.last_printed = Some(record.step);
            self.println(&train_line(record, self.total_steps, eta_s));
        }
    }

    /// Shows an evaluation.
    pub fn eval(&mut self, record: &EvalRecord) {
        self.println(&eval_line(record, self.total_steps));
    }

    /// Prints a line: above the bar, or in its place among the plain lines.
    pub fn println(&mut self, line: &str) {
        match &mut self.output {
            Output::Bar(bar) => bar.println(line),
            Output::Plain(writer) => {
                // See the module: the reader may have gone away, and the run goes on.
                let _ = writeln!(writer, "{line}").and_then(|()| writer.flush());
            }
        }
    }

    /// Runs `f`, which may write to the terminal, with the bar out of the way.
    pub fn suspend<R>(&self, f: impl FnOnce() -> R) -> R {
        match &self.output {
            Output::Bar(bar) => bar.suspend(f),
            Output::Plain(_) => f(),
        }
    }

    /// Leaves the bar as it is and goes to the next line; dropping does the same.
    pub fn finish(&self) {
        if let Output::Bar(bar) = &self.output {
            bar.abandon();
        }
    }

    /// Seconds left at the pace of the latest records.
    fn eta_s(&self, record: &TrainRecord) -> f64 {
        let left = self.total_steps.saturating_sub(record.step) as f64;
        let pace_ms = match (self.recent.front(), self.recent.back()) {
            (Some(&(step0, time0)), Some(&(step1, time1))) if step1 > step0 && time1 > time0 => {
                (time1 - time0) as f64 / (step1 - step0) as f64
            }
            _ => record.step_ms.map_or(0.0, Figure::get),
        };
        left * pace_ms / 1000.0
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.finish();
    }
}

/// The convention of no-color.org: set and not empty.
fn no_color() -> bool {
    std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty())
}

fn bar_style() -> ProgressStyle {
    // INVARIANT: the template is a constant, and the test `bar_template_is_valid` parses it.
    ProgressStyle::with_template("{bar:24.green/dim} {pos}/{len}  {wide_msg}").expect("template is valid")
}

fn bar_message(record: &TrainRecord, eta_s: f64) -> String {
    format!("loss {}  {}  eta {}", human::loss(record.loss.get()), speed(record), human::duration(eta_s))
}

/// Returns `step   120/2000  loss 3.4521  lr 3.00e-4  norm 0.81  12.3k tok/s  eta 1m12s`.
pub fn train_line(record: &TrainRecord, total_steps: u64, eta_s: f64) -> String {
    format!(
        "{}  loss {}  lr {:.2e}  norm {}  {}  eta {}",
        step_of(record.step, total_steps),
        human::loss(record.loss.get()),
        record.lr.get(),
        human::short(record.grad_norm.get()),
        speed(record),
        human::duration(eta_s)
    )
}

fn speed(record: &TrainRecord) -> String {
    match record.tokens_per_s {
        Some(speed) => format!("{} tok/s", human::si(speed.get())),
        None => "no speed: the loss does not fall".into(),
    }
}

/// Returns `step   120/2000  eval loss 3.4102  ppl 30.27  bits/byte 1.12`.
pub fn eval_line(record: &EvalRecord, total_steps: u64) -> String {
    let mut line = format!(
        "{}  eval loss {}  ppl {}",
        step_of(record.step, total_steps),
        human::loss(record.loss.get()),
        human::short(record.perplexity.get())
    );
    if let Some(bits) = record.bits_per_byte {
        line.push_str(&format!("  bits/byte {:.4}", bits.get()));
    }
    line
}

fn step_of(step: u64, total_steps: u64) -> String {
    let total = total_steps.to_string();
    format!("step  {step:>width$}/{total}", width = total.len())
}

#[cfg(test)]
mod tests {
    use super::super::testing::{figure, finite, pass, train};
    use super::*;
    use std::sync::{Arc, Mutex};

    #[derive(Clone, Default)]
    struct Shared(Arc<Mutex<Vec<u8>>>);

    impl Write for Shared {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    impl Shared {
        fn lines(&self) -> Vec<String> {
            String::from_utf8(self.0.lock().unwrap().clone()).unwrap().lines().map(str::to_owned).collect()
        }
    }

    struct Gone;

    impl Write for Gone {
        fn write(&mut self, _: &[u8]) -> io::Result<usize> {
            Err(io::ErrorKind::BrokenPipe.into())
        }

        fn flush(&mut self) -> io::Result<()> {
            Err(io::ErrorKind::BrokenPipe.into())
        }
    }

    #[test]
    fn plain_line_format() {
        let mut record = train(120, 3.45212);
        assert_eq!(
            train_line(&record, 2000, 72.0),
            "step   120/2000  loss 3.4521  lr 3.00e-4  norm 0.81  12.3k tok/s  eta 1m12s"
        );
        record.grad_norm = finite(54_321.0);
        record.lr = finite(0.0);
        assert_eq!(
            train_line(&record, 120, 0.0),
            "step  120/120  loss 3.4521  lr 0.00e0  norm 5.43e4  12.3k tok/s  eta 0s"
        );
        let eval = EvalRecord::new(&pass(), 120, 3.41, 1000, Some(4392)).unwrap();
        assert_eq!(eval_line(&eval, 2000), "step   120/2000  eval loss 3.4100  ppl 30.27  bits/byte 1.1201");
        let eval = EvalRecord::new(&pass(), 5, 3.41, 1000, None).unwrap();
        assert_eq!(eval_line(&eval, 9), "step  5/9  eval loss 3.4100  ppl 30.27");
        assert_eq!(bar_message(&record, 5.0), "loss 3.4521  12.3k tok/s  eta 5s");
    }

    #[test]
    fn plain_lines_come_once_an_interval() {
        let shared = Shared::default();
        let mut progress = Progress::plain(Box::new(shared.clone()), 25, 10);
        for step in 1..=25 {
            progress.train(&train(step, 4.0));
            if step == 15 {
                progress.println("step 15: loss is NaN, step skipped");
            }
        }
        let starts: Vec<String> = shared.lines().iter().map(|l| l.chars().take(11).collect()).collect();
        assert_eq!(starts, ["step   1/25", "step  10/25", "step 15: lo", "step  20/25", "step  25/25"]);
    }

    #[test]
    fn records_that_come_once_an_interval_are_all_shown() {
        let shared = Shared::default();
        let mut progress = Progress::plain(Box::new(shared.clone()), 100, 10);
        for step in [5, 15, 25] {
            progress.train(&train(step, 4.0));
        }
        assert_eq!(shared.lines().len(), 3);
    }

    #[test]
    fn eta_follows_the_clock_and_not_the_step_time_alone() {
        let shared = Shared::default();
        let mut progress = Progress::plain(Box::new(shared.clone()), 100, 1);
        let mut record = train(10, 4.0);
        record.step_ms = figure(500.0);
        progress.train(&record);
        // Ten steps took 10 s in all, evaluations included.
        let mut later = train(20, 4.0);
        later.step_ms = figure(500.0);
        progress.train(&later);
        let lines = shared.lines();
        assert!(lines[0].ends_with("eta 45s"), "{}", lines[0]);
        assert!(lines[1].ends_with("eta 1m20s"), "{}", lines[1]);
    }

    #[test]
    fn reader_that_went_away_does_not_stop_the_run() {
        let mut progress = Progress::plain(Box::new(Gone), 2, 0);
        progress.train(&train(1, 4.0));
        progress.eval(&EvalRecord::new(&pass(), 1, 4.0, 1, None).unwrap());
        assert_eq!(progress.suspend(|| 7), 7);
    }

    #[test]
    fn bar_template_is_valid() {
        let bar = ProgressBar::hidden();
        bar.set_style(bar_style());
        let mut progress = Progress::with_output(Output::Bar(bar), 10, 1);
        progress.train(&train(3, 4.0));
        progress.println("a line");
        let Output::Bar(bar) = &progress.output else { panic!("a bar was given") };
        assert_eq!(bar.position(), 3);
    }
}
