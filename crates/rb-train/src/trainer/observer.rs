//! What the loop tells the world: metrics, TensorBoard, progress and the report, kept in step.

use std::time::{Duration, Instant};

use rb_verify::{Figure, Refusal, RunGate, Verdict};

use crate::Result;
use crate::config::Config;
use crate::held_out::{HeldOut, Rise};
use crate::observe::{
    EvalRecord, EventKind, EventRecord, Finite, MetricsWriter, ObserveError, Progress, Record, Report,
    TensorBoardWriter, TrainRecord, now_unix_ms, resident_bytes,
};
use crate::run_dir::RunDir;

/// A finished step, before it is known to be presentable.
pub(super) struct StepNumbers {
    pub step: u64,
    pub tokens: u64,
    pub step_tokens: u64,
    pub valid_tokens: u64,
    pub epoch: u64,
    pub loss: f64,
    pub lr: f64,
    pub grad_norm: f64,
}

pub(super) struct Observer {
    run: std::path::PathBuf,
    title: String,
    config_text: String,
    metrics: MetricsWriter,
    tensorboard: TensorBoardWriter,
    progress: Progress,
    flops_per_token: f64,
    gate: RunGate,
    pub(super) held_out: HeldOut,
    samples: Vec<(String, String)>,
    /// Start of the step that is timed now; moved forward by pauses.
    started: Instant,
}

impl Observer {
    pub(super) fn create(run: &RunDir, config: &Config) -> Result<Observer> {
        let metrics = MetricsWriter::create(&run.metrics())?;
        let tensorboard = TensorBoardWriter::create(run.path())?;
        let mut observer = Observer::new(run, config, metrics, tensorboard, 0)?;
        observer.event(0, EventKind::Start, "run started")?;
        Ok(observer)
    }

    /// Continues the files of a run; records after `step` are taken back.
    pub(super) fn resume(run: &RunDir, config: &Config, step: u64) -> Result<Observer> {
        let metrics = MetricsWriter::resume(&run.metrics(), step)?;
        let tensorboard = TensorBoardWriter::resume(run.path(), step)?;
        let mut observer = Observer::new(run, config, metrics, tensorboard, step)?;
        let records = crate::observe::read(&run.metrics())?;
        for record in &records {
            if let Record::Eval(eval) = record {
                observer.held_out.see(eval.step, eval.loss.get());
            }
        }
        let losses = records.into_iter().filter_map(|record| match record {
            Record::Train(train) => Some(train.loss.get()),
            _ => None,
        });
        observer.gate = RunGate::resumed(losses);
        Ok(observer)
    }

    fn new(
        run: &RunDir,
        config: &Config,
        metrics: MetricsWriter,
        tensorboard: TensorBoardWriter,
        done: u64,
    ) -> Result<Observer> {
        let name = run.path().file_name().map_or("run".into(), |n| n.to_string_lossy().into_owned());
        Ok(Observer {
            run: run.path().to_path_buf(),
            title: name,
            config_text: config.to_toml()?,
            metrics,
            tensorboard,
            progress: Progress::new(config.train.max_steps, done, config.train.logging_steps),
            flops_per_token: rb_nn::flops_per_token(&config.model, config.train.seq_len),
            gate: RunGate::new(),
            held_out: HeldOut::default(),
            samples: Vec::new(),
            started: Instant::now(),
        })
    }

    /// Whether figures of the run may stand.
    pub(super) fn verdict(&self) -> std::result::Result<Verdict, Refusal> {
        self.gate.verdict()
    }

    pub(super) fn say(&mut self, line: &str) {
        self.progress.println(line);
        self.started = Instant::now();
    }

    pub(super) fn step(&mut self, n: StepNumbers) -> Result<()> {
        let elapsed = self.started.elapsed().as_secs_f64().max(1e-9);
        let tokens_per_s = n.step_tokens as f64 / elapsed;
        self.gate.record(n.loss);
        let pass = self.gate.pass().ok();
        let figure = |name, value| {
            let figure = pass.map(|pass| Figure::new(&pass, name, value)).transpose();
            figure.map_err(ObserveError::from)
        };
        let record = TrainRecord {
            step: n.step,
            tokens: n.tokens,
            epoch: n.epoch,
            loss: Finite::new("loss", n.loss)?,
            lr: Finite::new("learning rate", n.lr)?,
            grad_norm: Finite::new("gradient norm", n.grad_norm)?,
            tokens_per_s: figure("tokens/s", tokens_per_s)?,
            step_ms: figure("step time", elapsed * 1e3)?,
            valid_tokens: n.valid_tokens,
            flops_per_s: figure("FLOP/s", tokens_per_s * self.flops_per_token)?,
            mem_rss_bytes: resident_bytes(),
            time_unix_ms: now_unix_ms(),
        };
        self.progress.train(&record);
        self.tensorboard.train(&record)?;
        self.metrics.append(record)?;
        self.started = Instant::now();
        Ok(())
    }

    /// Leaves a step without numbers out of the timing.
    pub(super) fn skip(&mut self) {
        self.started = Instant::now();
    }

    /// Leaves `spent` out of the timing of the current step.
    pub(super) fn pause(&mut self, spent: Duration) {
        self.started += spent;
    }

    /// Shows an evaluation, and returns whether its loss is found to rise.
    pub(super) fn evaluation(
        &mut self,
        step: u64,
        loss: f64,
        tokens: u64,
        text_bytes: Option<u64>,
        spent: Duration,
    ) -> Result<Option<Rise>> {
        let pass = match self.gate.pass() {
            Ok(pass) => pass,
            Err(refusal) => {
                self.pause(spent);
                let message = format!("the held-out loss is not shown: {refusal}");
                self.event(step, EventKind::Warning, message)?;
                return Ok(None);
            }
        };
        let record = EvalRecord::new(&pass, step, loss, tokens, text_bytes)?;
        self.progress.eval(&record);
        self.tensorboard.eval(&record)?;
        self.metrics.append(record)?;
        self.pause(spent);
        Ok(self.held_out.see(step, loss))
    }

    pub(super) fn event(&mut self, step: u64, kind: EventKind, message: impl Into<String>) -> Result<()> {
        let message = message.into();
        if kind != EventKind::Start {
            self.progress.println(&format!("step {step}: {message}"));
        }
        self.metrics.append(EventRecord::new(step, kind, message))?;
        Ok(())
    }

    pub(super) fn sync(&self) -> Result<()> {
        Ok(self.metrics.sync()?)
    }

    pub(super) fn set_sample(&mut self, prompt: &str, text: &str) {
        self.samples = vec![(prompt.to_string(), text.to_string())];
    }

    pub(super) fn finish(&mut self, step: u64) -> Result<()> {
        self.progress.finish();
        self.sync()?;
        self.write_report(step)
    }

    pub(super) fn write_report(&mut self, step: u64) -> Result<()> {
        let summary = vec![("steps".to_string(), step.to_string())];
        let refusal = self.gate.verdict().err();
        let report = Report {
            withheld: refusal.as_ref().map(|r| r.reason.as_str()),
            title: &self.title,
            config_text: &self.config_text,
            summary: &summary,
            samples: &self.samples,
        };
        report.write(&self.run)?;
        Ok(())
    }
}
