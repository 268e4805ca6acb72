//! The training loop.

mod build;
mod held_out;
mod observer;
mod spikes;

use std::collections::VecDeque;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rb_autograd::{GradStore, ParamStore};
use rb_data::{Batch, EvalConfig, Loader, LoaderConfig, loader};
use rb_nn::CausalLm;
use rb_optim::{Optimizer, Schedule};
use rb_tensor::{Device, LaterItem};

use crate::checkpoint::{self, Contents, Keep, TrainerState};
use crate::config::{Config, OnNonFinite, Override};
use crate::guard::SpikeGuard;
use crate::observe::EventKind;
use crate::prepare::{self, Data};
use crate::run_dir::RunDir;
use crate::start;
use crate::step::{self, LossTerms};
use crate::stepper::{Numbers, Parts, Settings, Stepper};
use crate::{Result, TrainError};

use build::build_model;
pub(crate) use build::{build_optimizer, freeze, schedule};
use observer::{Observer, StepNumbers};

/// Batches that are made while a step is computed.
const BATCHES_AHEAD: usize = 2;

/// A run between two steps.
pub struct Trainer {
    config: Config,
    run: RunDir,
    data: Data,
    loader: Loader,
    model: CausalLm,
    params: ParamStore,
    grads: GradStore,
    optimizer: Box<dyn Optimizer>,
    schedule: Schedule,
    guard: SpikeGuard,
    rollbacks: u32,
    stepper: Stepper,
    observer: Observer,
    step: u64,
    tokens: u64,
    skipped_steps: u64,
    saved_step: Option<u64>,
    /// Steps enqueued and not read: at most one, and none on the CPU.
    pending: VecDeque<Pending>,
}

/// How a run ended.
#[derive(Clone, Debug, PartialEq)]
pub struct Outcome {
    /// Steps done.
    pub step: u64,
    /// Whether a stop was asked for before the last step.
    pub interrupted: bool,
    /// Whether `train.early_stopping_patience` ended the run.
    pub stopped_early: bool,
    /// Last held-out loss, nats a token.
    pub eval_loss: Option<f64>,
    /// Step and held-out loss of `checkpoints/best`.
    pub best: Option<(u64, f64)>,
}

/// A step whose numbers may still be on their way from the device.
struct Pending {
    numbers: StepNumbers,
    loss: LaterItem,
    grad_norm: LaterItem,
    batches: Vec<Batch>,
}

impl Trainer {
    /// Starts a new run from a config file: run directory, tokenizer, tokens, model.
    pub fn create(config_path: &Path, overrides: &[Override]) -> Result<Trainer> {
        let mut config = crate::config::load(config_path, overrides)?;
        // A device that cannot be had is refused before anything is made.
        let device = crate::device::select(&config.run)?;
        crate::device::precision(&config.run, device.0)?;
        crate::host_memory::check(&config, device.0)?;
        let start = config.run.init_from.as_deref().map(start::folder).transpose()?;
        start.as_ref().map_or(Ok(()), |folder| start::check(&config, folder))?;
        let stem = config_path.file_stem().map_or("run".into(), |s| s.to_string_lossy().into_owned());
        let run = RunDir::create(config.run.out.as_deref(), &stem)?;
        println!("run directory: {}", run.path().display());
        if let Some(line) = config.train.short_run() {
            println!("{line}");
        }
        let data = prepare::prepare(&config, &run, &mut |line| println!("{line}"))?;
        held_out::check_early_stopping(&config, &data)?;
        match &start {
            None => {
                config.model.vocab_size = data.tokenizer.vocab_size();
                config.model.bos_token_id = Some(data.tokenizer.bos_id());
            }
            Some(folder) => {
                start::check_tokenizer(&data.tokenizer, folder)?;
                config.model.vocab_size = start::model(folder)?.vocab_size;
            }
        }
        config.model.eos_token_id = Some(data.tokenizer.eos_id());
        config.model.validate()?;
        rb_data::atomic::write(&run.config(), config.to_toml()?.as_bytes())?;
        let observer = Observer::create(&run, &config)?;
        let mut trainer = Trainer::assemble(config, run, data, observer, device)?;
        if let Some(folder) = &start {
            start::load(&mut trainer.params, folder)?;
            trainer.observer.say(&format!("weights: those of {}", folder.display()));
        }
        trainer.warn_of_repetition()?;
        Ok(trainer)
    }

    /// Continues a run from its newest whole checkpoint. Settings changed by `overrides` are printed; those
    /// that define the run (model, data, tokenizer, seed, sequence length, optimizer) are refused.
    pub fn resume(run_path: &Path, overrides: &[Override]) -> Result<Trainer> {
        let run = RunDir::open(run_path)?;
        let stored = crate::config::load(&run.config(), &[])?;
        let config = crate::config::apply(&stored, overrides)?;
        let changes = stored.differences(&config)?;
        crate::resume::check_changes(&changes)?;
        let checkpoints = run.checkpoints();
        checkpoint::sweep(&checkpoints)?;
        let Some(found) = checkpoint::find_latest(&checkpoints)? else {
            return Err(TrainError::RunDir {
                path: run_path.into(),
                reason:
                    "has no checkpoint yet, so there is nothing to resume; start it again with a new --out"
                        .into(),
            });
        };
        let state = checkpoint::read_state(&found.path)?;
        let device = crate::device::select(&config.run)?;
        let data = prepare::open(&config, &run)?;
        held_out::check_early_stopping(&config, &data)?;
        let observer = Observer::resume(&run, &config, state.step)?;
        let mut trainer = Trainer::assemble(config, run, data, observer, device)?;
        checkpoint::restore(&found.path, &state, &mut trainer.params, trainer.optimizer.as_mut())?;
        trainer.loader.set_state(&state.loader)?;
        (trainer.step, trainer.tokens, trainer.skipped_steps) =
            (state.step, state.tokens, state.skipped_steps);
        trainer.saved_step = Some(state.step);
        for line in &found.damaged {
            trainer.observer.event(state.step, EventKind::Warning, format!("passed over: {line}"))?;
        }
        for (key, old, new) in &changes {
            trainer.observer.event(
                state.step,
                EventKind::Warning,
                format!("changed on resume: {key}: {old} -> {new}"),
            )?;
        }
        let origin = found.path.display();
        trainer.observer.event(
            state.step,
            EventKind::Resume,
            format!("resumed at step {} from {origin}", state.step),
        )?;
        if changes.iter().any(|(key, ..)| key == "train.max_steps") {
            trainer.warn_of_repetition()?;
        }
        if !changes.is_empty() {
            let text = trainer.config.to_toml()?;
            rb_data::atomic::write(&trainer.run.config(), text.as_bytes())?;
        }
        Ok(trainer)
    }

    fn assemble(
        config: Config,
        run: RunDir,
        data: Data,
        observer: Observer,
        (device, note): (Device, Option<String>),
    ) -> Result<Trainer> {
        let precision = crate::device::precision(&config.run, device)?;
        let mut observer = observer;
        if let Some(note) = note {
            observer.say(&note);
        }
        let recompute = match device {
            Device::Cuda(gpu) => {
                crate::plan::prepare(&config, gpu, precision, &mut |line| observer.say(line))?
            }
            _ => config.train.recompute.candidates()[0],
        };
        let t = &config.train;
        let loader = Loader::new(
            data.train.clone(),
            LoaderConfig {
                seq_len: t.seq_len,
                batch_size: t.per_device_train_batch_size,
                seed: config.run.seed,
                shuffle: config.data.shuffle,
                document_mask: config.data.document_mask,
                prefetch: BATCHES_AHEAD,
                ..LoaderConfig::default()
            },
        )?;
        let (model, mut params) = build_model(&config, device)?;
        let model = model.with_recompute(recompute);
        params.set_precision(precision)?;
        freeze(&mut params, &t.frozen)?;
        let grads = GradStore::new(&params)?;
        let mut optimizer = build_optimizer(&config, &params)?;
        optimizer.halt_on_non_finite(t.on_non_finite == OnNonFinite::Stop);
        let schedule = schedule(&config);
        let guard = SpikeGuard::new(config.train.spike_zscore, config.train.spike_window);
        let stepper = Stepper::new(config.run.graph);
        Ok(Trainer {
            config,
            run,
            data,
            loader,
            model,
            params,
            grads,
            optimizer,
            schedule,
            guard,
            rollbacks: 0,
            stepper,
            observer,
            step: 0,
            tokens: 0,
            skipped_steps: 0,
            saved_step: None,
            pending: VecDeque::new(),
        })
    }

    /// The run directory.
    pub fn run_path(&self) -> &Path {
        self.run.path()
    }

    /// Weights, for generation after the run.
    pub fn parts(&self) -> (&CausalLm, &ParamStore, &rb_data::Tokenizer) {
        (&self.model, &self.params, &self.data.tokenizer)
    }

    /// The config in force.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Checks the model before any step is paid for: the gradient-flow arbiter, causality, position
    /// sensitivity and the initial loss; that the data leave no token out and repeat none, and that no learning rate
    /// is zero.
    ///
    /// # Errors
    /// [`TrainError::Gate`] with the checks that refused.
    pub fn check_model(&mut self) -> Result<()> {
        let device = self.params.arena().device();
        let frozen: Vec<String> =
            self.params.layout().parts().filter(|(e, _)| !e.trainable).map(|(_, p)| p.name.clone()).collect();
        // A trained model's loss on random tokens is not that of a new one.
        let fresh = self.step == 0 && self.config.run.init_from.is_none();
        let report = rb_verify::check_before_training(&self.model, &self.params, self.config.run.seed, fresh);
        let report = report
            .map_err(|e| TrainError::Gate { reason: format!("the model checks could not run: {e}") })?;
        if let Some(refusal) = report.refusal() {
            return Err(TrainError::Gate {
                reason: format!("the model was refused before training: {refusal}"),
            });
        }
        let loop_report = crate::verify::before_training(&self.config, &mut self.loader)?;
        if let Some(refusal) = loop_report.refusal() {
            return Err(TrainError::Gate {
                reason: format!("the run was refused before training: {refusal}"),
            });
        }
        self.observer.say(&format!(
            "model: {} parameters on {device}; {}{}",
            crate::observe::grouped(self.params.layout().num_parameters() as u64),
            report.summary(),
            if frozen.is_empty() { String::new() } else { format!("; frozen: {}", frozen.join(", ")) }
        ));
        self.observer.say(&format!("data and rates: {}", loop_report.summary()));
        Ok(())
    }

    /// Runs to the last step, or until `stop` is set: then the current step is finished and saved.
    pub fn run(&mut self, stop: &AtomicBool) -> Result<Outcome> {
        let total = self.config.train.max_steps;
        let mut eval_loss = None;
        let mut given_up = None;
        while self.step < total && given_up.is_none() && !stop.load(Ordering::Relaxed) {
            let batches = self.next_batches();
            self.train_step(batches)?;
            let last = self.step == total;
            let step = self.step;
            let every = |steps: u64| steps != 0 && step.is_multiple_of(steps);
            let pause = every(self.config.train.eval_steps) || every(self.config.train.save_steps) || last;
            // On a GPU the numbers of a step are read while the next one runs.
            let lag = usize::from(!pause && self.params.arena().device() != Device::Cpu);
            self.settle(lag)?;
            if every(self.config.train.eval_steps) || (last && self.config.train.eval_steps != 0) {
                eval_loss = self.evaluate()?.or(eval_loss);
                given_up = self.given_up();
            }
            if every(self.config.train.save_steps) || last || self.is_best_to_keep() {
                self.save()?;
            }
        }
        self.settle(0)?;
        let stopped_early = given_up.is_some();
        let interrupted = self.step < total && !stopped_early;
        if self.step < total {
            self.save()?;
        }
        let usual = if interrupted { "interrupted; the state is saved" } else { "all steps are done" };
        let reason = given_up.unwrap_or_else(|| usual.into());
        self.observer.event(self.step, EventKind::Stop, reason)?;
        self.observer.finish(self.step)?;
        match self.observer.verdict() {
            Err(refusal) if !interrupted => Err(TrainError::Gate {
                reason: format!(
                    "{refusal}; the state is saved, and no figure of this run is shown or plotted"
                ),
            }),
            _ => {
                let best = self.best_checkpoint()?;
                Ok(Outcome { step: self.step, interrupted, stopped_early, eval_loss, best })
            }
        }
    }

    fn next_batches(&mut self) -> Vec<Batch> {
        (0..self.config.train.gradient_accumulation_steps).map(|_| self.loader.next_batch()).collect()
    }

    /// Enqueues one step; its numbers are read by [`Trainer::settle`].
    fn train_step(&mut self, batches: Vec<Batch>) -> Result<()> {
        let lr = self.schedule.lr(self.step);
        let settings = Settings {
            document_mask: self.config.data.document_mask,
            terms: self.loss_terms(),
            max_grad_norm: self.config.train.max_grad_norm,
            lr,
        };
        let Numbers { loss, grad_norm } = if self.looks_before_the_update() {
            let Settings { document_mask, terms, max_grad_norm, .. } = settings;
            let (model, params, grads) = (&self.model, &self.params, &mut self.grads);
            let loss = step::forward_backward(model, params, grads, &batches, document_mask, terms)?;
            self.write_statistics(&batches)?;
            if self.spikes_before_the_update(&loss, &batches)? {
                return Ok(());
            }
            let (params, grads) = (&mut self.params, &mut self.grads);
            let grad_norm = self.optimizer.clipped_step(params, grads, lr, max_grad_norm, &loss)?;
            Numbers { loss, grad_norm }
        } else {
            let mut parts = Parts {
                model: &self.model,
                params: &mut self.params,
                grads: &mut self.grads,
                optimizer: self.optimizer.as_mut(),
            };
            self.stepper.step(&mut parts, &batches, &settings)?
        };
        self.step += 1;
        if let Some(reason) = self.stepper.take_refusal() {
            let message = format!("steps are launched kernel by kernel, not captured: {reason}");
            self.observer.event(self.step, EventKind::Warning, message)?;
        }
        let seen: usize = batches.iter().map(|b| b.batch_size * b.seq_len).sum();
        let valid = step::valid_tokens(&batches);
        self.tokens += seen as u64;
        let numbers = StepNumbers {
            step: self.step,
            tokens: self.tokens,
            step_tokens: seen as u64,
            valid_tokens: valid as u64,
            epoch: batches.first().map_or(0, |b| b.epoch),
            loss: f64::NAN,
            lr,
            grad_norm: f64::NAN,
        };
        let (loss, grad_norm) = (loss.item_later()?, grad_norm.item_later()?);
        self.pending.push_back(Pending { numbers, loss, grad_norm, batches });
        Ok(())
    }

    /// Reads enqueued steps, oldest first, until `lag` are left.
    fn settle(&mut self, lag: usize) -> Result<()> {
        while self.pending.len() > lag {
            let Some(Pending { mut numbers, loss, grad_norm, batches }) = self.pending.pop_front() else {
                break;
            };
            (numbers.loss, numbers.grad_norm) = (loss.wait()?, grad_norm.wait()?);
            if numbers.loss.is_finite() && numbers.grad_norm.is_finite() {
                let (step, loss, grad_norm) = (numbers.step, numbers.loss, numbers.grad_norm);
                self.observer.step(numbers)?;
                self.watch_for_spikes(step, loss, grad_norm)?;
            } else {
                self.not_finite(&numbers, &batches)?;
            }
        }
        Ok(())
    }

    fn loss_terms(&self) -> LossTerms {
        LossTerms {
            label_smoothing: self.config.train.label_smoothing_factor,
            z_loss: self.config.train.z_loss,
        }
    }

    /// Names the first bad tensor of a step by running it again, its forward on a checked tape.
    fn culprit(&mut self, batches: &[Batch]) -> Result<String> {
        let (mask, terms) = (self.config.data.document_mask, self.loss_terms());
        let found = match step::find_non_finite(&self.model, &self.params, batches, mask, terms)? {
            Some(name) => Some(name),
            None => {
                let (model, params, grads) = (&self.model, &self.params, &mut self.grads);
                match step::find_non_finite_in_backward(model, params, grads, batches, mask, terms)? {
                    Some(name) => Some(name),
                    // Only the sum over micro-batches may be too large.
                    None => step::find_non_finite_gradient(&self.grads)?,
                }
            }
        };
        Ok(found.unwrap_or_else(|| "the sum of squares of the gradients (each gradient is finite)".into()))
    }

    /// A step that is not finite: nothing was updated. Stops with the state from before it, or counts it.
    fn not_finite(&mut self, numbers: &StepNumbers, batches: &[Batch]) -> Result<()> {
        let bad = numbers.step;
        match self.config.train.on_non_finite {
            OnNonFinite::Skip => {
                // A later step may already have changed the weights on a GPU: the place of the fault is gone.
                let culprit = if self.pending.is_empty() {
                    self.culprit(batches)?
                } else {
                    "not looked for, as the next step had begun".into()
                };
                let what = describe(numbers, &culprit);
                self.grads.mark_stale();
                self.skipped_steps += 1;
                let count = self.skipped_steps;
                self.observer.event(
                    bad,
                    EventKind::SkippedStep,
                    format!("{what}; skipped, {count} so far"),
                )?;
                self.observer.skip();
                Ok(())
            }
            OnNonFinite::Stop => {
                // Steps enqueued after the bad one changed nothing (the optimizer halts) and do not count.
                let undone = self.step - bad + 1;
                self.pending.clear();
                self.step = bad - 1;
                self.tokens -= undone * numbers.step_tokens;
                let culprit = self.culprit(batches)?;
                let what = describe(numbers, &culprit);
                self.grads.mark_stale();
                // The loader has moved on; the saved state must see that data again.
                let mut place = self.loader.state();
                let rows = self.config.train.gradient_accumulation_steps
                    * self.config.train.per_device_train_batch_size;
                place.samples_seen -= undone * rows as u64;
                self.loader.set_state(&place)?;
                self.observer.event(bad, EventKind::Stop, what.clone())?;
                let saved = match self.step {
                    0 => "no step was good, so there is no state to save".to_string(),
                    good => format!("the state after step {good} is in {}", self.save()?.display()),
                };
                self.observer.finish(self.step)?;
                Err(TrainError::Gate {
                    reason: format!(
                        "{what}; the run is stopped and {saved}; lower train.learning_rate, or set \
                         train.on_non_finite=\"skip\" to leave such steps out"
                    ),
                })
            }
        }
    }

    /// Saves a checkpoint of the state between two steps.
    pub fn save(&mut self) -> Result<std::path::PathBuf> {
        let dir = checkpoint::step_dir(&self.run.checkpoints(), self.step);
        if self.saved_step == Some(self.step) {
            return Ok(dir);
        }
        let started = std::time::Instant::now();
        let mut state = TrainerState::new(
            self.step,
            self.tokens,
            self.skipped_steps,
            self.optimizer.steps_done()?,
            self.loader.state(),
        );
        state.finished = self.step == self.config.train.max_steps;
        self.observer.sync()?;
        let path = checkpoint::save(
            &self.run.checkpoints(),
            &Contents {
                model: &self.model,
                params: &self.params,
                optimizer: self.optimizer.as_ref(),
                state: &state,
                tokenizer: &self.data.tokenizer,
            },
        )?;
        self.saved_step = Some(self.step);
        let best = self.best_checkpoint()?.map(|(step, _)| step);
        checkpoint::point_best(&self.run.checkpoints(), best)?;
        let (last, every) = (self.config.train.save_total_limit, self.config.train.save_keep_every);
        checkpoint::prune(&self.run.checkpoints(), Keep { last, every, best })?;
        let size = crate::observe::grouped(self.params.layout().num_parameters() as u64);
        self.observer.pause(started.elapsed());
        self.observer.event(
            self.step,
            EventKind::Checkpoint,
            format!("saved {} ({size} parameters)", path.display()),
        )?;
        Ok(path)
    }

    /// Writes text generated from the weights into the run directory and the report.
    pub fn add_sample(&mut self, prompt: &str, text: &str) -> Result<()> {
        let path = self.run.path().join("sample.txt");
        rb_data::atomic::write(&path, text.as_bytes())?;
        self.observer.set_sample(prompt, text);
        self.observer.write_report(self.step)
    }
}

fn describe(numbers: &StepNumbers, culprit: &str) -> String {
    let StepNumbers { step, loss, grad_norm, .. } = numbers;
    format!("step {step}: loss {loss}, gradient norm {grad_norm}; first bad tensor: {culprit}")
}

/// Held-out loss in nats a token, the tokens it is over, and whether that is the whole held-out text.
pub fn evaluate_on(
    model: &CausalLm,
    params: &ParamStore,
    data: Arc<rb_data::TokenData>,
    config: &Config,
) -> Result<(f64, u64, bool)> {
    let mask = config.data.document_mask;
    let rows = config.train.per_device_train_batch_size;
    let settings = EvalConfig {
        seq_len: config.train.seq_len,
        batch_size: rows,
        document_mask: mask,
        rank: 0,
        world_size: 1,
    };
    let batches = loader::sequential(data, settings)?;
    let limit = match config.train.eval_max_sequences {
        0 => u64::MAX,
        n => (n as u64).div_ceil(rows as u64),
    };
    let whole = batches.num_batches() <= limit;
    let (loss, tokens) =
        step::evaluate(model, params, batches.take(limit.min(usize::MAX as u64) as usize), mask)?;
    Ok((loss, tokens, whole))
}
