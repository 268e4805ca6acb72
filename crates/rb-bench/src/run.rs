//! The steps and their times.

use std::time::Instant;

use rb_autograd::{GradStore, ParamBuilder, ParamStore};
use rb_cuda::{Gpu, GpuOptions, OwnProducts, PrepareStats};
use rb_data::Batch;
use rb_nn::CausalLm;
use rb_optim::{AdamW, AdamWConfig};
use rb_tensor::{Device, LaterItem, Rng, TensorError};
use rb_train::config::Config;
use rb_train::plan::Plan;
use rb_train::step::LossTerms;
use rb_train::stepper::{Numbers, Parts, Settings, Stepper};
use rb_train::{Result, TrainError};
use rb_verify::RunGate;

use crate::args::Args;
use crate::batches::{self, Batches};
use crate::profile::{self, Profile};
use crate::report::{self, FLOP_FORMULA, GpuReport, Report, Shape, Tuned};

/// A card that is ready for the step.
struct Card {
    gpu: Gpu,
    plan: Plan,
    prepared: PrepareStats,
}

impl Card {
    fn open(args: &Args, config: &Config) -> Result<Card> {
        let budget_bytes = args.gpu_memory_budget_mib.map(|mib| mib.saturating_mul(1 << 20));
        let gpu = Gpu::open(0, &GpuOptions { budget_bytes, ..GpuOptions::default() }).map_err(|error| {
            TrainError::Config {
                origin: "--gpu".into(),
                reason: format!("{error}; or leave --gpu out to run on the CPU"),
            }
        })?;
        if args.library_products {
            gpu.use_own_products(OwnProducts::Never);
        }
        let plan =
            rb_train::plan::plan(config, gpu.info().capability, args.precision(), rb_nn::Recompute::None)?;
        let prepared = plan.make_ready(gpu, &mut |line| println!("{line}"))?;
        Ok(Card { gpu, plan, prepared })
    }

    fn tune(&self) -> Result<Tuned> {
        let started = Instant::now();
        // After a step, so that each product is known with the alignment of its pointers.
        let found = self.gpu.tune(&self.gpu.matmuls()).map_err(TensorError::from)?;
        let searched = found.iter().filter(|t| t.candidates > 0).count();
        Ok(Tuned {
            searched,
            known: found.len() - searched,
            seconds: started.elapsed().as_secs_f64(),
            first_guess_us: found.iter().map(|t| t.default_us).sum(),
            best_us: found.iter().map(|t| t.best_us).sum(),
        })
    }
}

/// What is trained.
struct Training {
    model: CausalLm,
    params: ParamStore,
    grads: GradStore,
    adam: AdamW,
    stepper: Stepper,
    settings: Settings,
}

impl Training {
    fn new(args: &Args, config: &Config, device: Device) -> Result<Training> {
        let mut builder = ParamBuilder::default();
        let model = CausalLm::init(&config.model, &mut builder)?;
        let mut params = builder.build(&Rng::new(0), device)?;
        params.set_precision(args.precision())?;
        let grads = GradStore::new(&params)?;
        let t = &config.train;
        let settings = AdamWConfig {
            beta1: t.adam_beta1,
            beta2: t.adam_beta2,
            eps: t.adam_epsilon,
            weight_decay: t.weight_decay,
        };
        let adam = AdamW::new(settings, &params)?;
        let settings = Settings {
            document_mask: false,
            terms: LossTerms::default(),
            max_grad_norm: t.max_grad_norm,
            lr: t.learning_rate,
        };
        Ok(Training { model, params, grads, adam, stepper: Stepper::new(!args.no_graph), settings })
    }

    /// Enqueues a step, or takes it on the CPU.
    fn step(&mut self, batch: &Batch) -> Result<LaterItem> {
        let Training { model, params, grads, adam, stepper, settings } = self;
        let mut parts = Parts { model, params, grads, optimizer: adam };
        let Numbers { loss, .. } = stepper.step(&mut parts, std::slice::from_ref(batch), settings)?;
        Ok(loss.item_later()?)
    }

    /// Times each piece of one step that is launched piece by piece.
    fn profile(&mut self, gpu: Gpu, batch: &Batch) -> Result<Profile> {
        self.stepper = Stepper::new(false);
        self.step(batch)?.wait()?;
        let empty = gpu.profile(|| profile::nothing(gpu))?;
        let timings = gpu.profile(|| self.step(batch).map(drop))?;
        Ok(Profile::new(timings, &empty, &gpu.info().name, self.model.config().padded_vocab_size()))
    }
}

/// Losses of all steps and when each was known.
#[derive(Default)]
struct Record {
    losses: Vec<f64>,
    arrivals: Vec<Instant>,
}

impl Record {
    fn read(&mut self, loss: LaterItem) -> Result<()> {
        self.losses.push(loss.wait()?);
        self.arrivals.push(Instant::now());
        Ok(())
    }

    /// Milliseconds of the steps that follow `warm_up` others. On a GPU the next step is enqueued while one is
    /// waited for, so the time between two arrivals is that of a step, host and card side by side.
    fn step_ms(&self, warm_up: usize, steps: usize) -> Vec<f64> {
        let gaps = self.arrivals.windows(2).skip(warm_up.saturating_sub(1)).take(steps);
        gaps.map(|pair| (pair[1] - pair[0]).as_secs_f64() * 1e3).collect()
    }
}

/// Runs the benchmark of a command line. `started` is the start of the program.
///
/// # Errors
/// Settings that cannot be run, [`TrainError::Gate`] where the loss is not finite and falling.
pub fn run(args: &Args, started: Instant, command: Vec<String>) -> Result<Report> {
    if let Some(problem) = args.problem() {
        return Err(TrainError::Config { origin: "command line".into(), reason: problem });
    }
    let config = args.config();
    config.model.validate()?;
    let Batches { all: batches, origin } = batches::make(args)?;
    let card = if args.gpu { Some(Card::open(args, &config)?) } else { None };
    let mut training =
        Training::new(args, &config, card.as_ref().map_or(Device::Cpu, |card| Device::Cuda(card.gpu)))?;
    let params = training.params.layout().num_parameters();
    let threads = rayon::current_num_threads();
    println!(
        "model: {params} parameters; {}x{} tokens a step, {threads} threads",
        args.batch_size, args.seq_len
    );

    let batch = |step: usize| &batches[step % batches.len()];
    let mut record = Record::default();
    let first = training.step(batch(0))?;
    record.read(first)?;
    let start_to_first_step_s = started.elapsed().as_secs_f64();
    let tuning = match &card {
        Some(card) if args.tune => Some(card.tune()?),
        _ => None,
    };
    if let Some(card) = &card {
        card.gpu.reset_peak();
    }
    let warm_up = args.warm_up_steps();
    let mut pending: Option<LaterItem> = None;
    let mut launches = Vec::new();
    for step in 1..args.all_steps() {
        let before = card.as_ref().filter(|_| step + 1 == args.all_steps()).map(|card| card.gpu.launches());
        let loss = training.step(batch(step))?;
        if let (Some(card), Some(before)) = (&card, before) {
            let gained =
                card.gpu.launches().into_iter().map(|(k, n)| (k, n - before.get(k).copied().unwrap_or(0)));
            launches = gained.filter(|(_, n)| *n > 0).collect();
        }
        if card.is_none() {
            record.read(loss)?;
        } else if let Some(earlier) = pending.replace(loss) {
            record.read(earlier)?;
        }
    }
    if let Some(last) = pending {
        record.read(last)?;
    }
    let pass = RunGate::judge(&record.losses).map_err(|refusal| TrainError::Gate {
        reason: format!("refused: {refusal}; a speed is reported only for a finite, falling loss"),
    })?;

    let graph_nodes = training.stepper.captured_nodes();
    if let Some(reason) = training.stepper.take_refusal() {
        println!("the step was not captured: {reason}");
    }
    let profile = match &card {
        Some(card) if args.profile => Some(training.profile(card.gpu, batch(0))?),
        _ => None,
    };
    let step_ms_all = record.step_ms(warm_up, args.steps);
    let step_ms = report::median(&step_ms_all);
    let (tokens_per_s, flops_per_token, tflops) = report::rates(&config.model, args, step_ms / 1e3);
    let peak = card
        .as_ref()
        .filter(|_| args.mixed_precision)
        .and_then(|card| report::bf16_peak_tflops(&card.gpu.info().name));
    let gpu =
        card.map(|card| GpuReport { graph_nodes, profile, ..gpu_report(args, &card, launches, tuning) });
    Ok(Report {
        _pass: pass,
        tokens_per_s,
        step_ms,
        step_ms_mean: step_ms_all.iter().sum::<f64>() / step_ms_all.len().max(1) as f64,
        step_ms_all,
        params,
        flops_per_token,
        flops_formula: FLOP_FORMULA,
        tflops,
        mfu: peak.map(|peak| tflops / peak),
        mfu_peak_tflops: peak,
        loss_first: record.losses.first().copied().unwrap_or(f64::NAN),
        loss_last: record.losses.last().copied().unwrap_or(f64::NAN),
        losses: record.losses,
        start_to_first_step_s,
        gpu,
        resident_mib: rb_train::observe::resident_bytes().map(|bytes| mib(bytes as usize)),
        precision: if args.mixed_precision { "bf16" } else { "fp32" },
        data: origin,
        batches: batches.len(),
        shape: Shape::new(args, &config.model),
        steps: args.steps,
        warm_up,
        lr: args.learning_rate(),
        threads,
        version: env!("CARGO_PKG_VERSION"),
        command,
    })
}

fn gpu_report(
    args: &Args,
    card: &Card,
    launches_by_kernel: Vec<(&'static str, u64)>,
    tuning: Option<Tuned>,
) -> GpuReport {
    let info = card.gpu.info();
    let memory = card.gpu.memory();
    let (major, minor) = info.capability;
    GpuReport {
        card: info.name.clone(),
        capability: format!("{major}.{minor}"),
        libraries: card.gpu.libraries().iter().map(|l| format!("{} {}", l.name, l.version)).collect(),
        residual: args.residual.name(),
        gradients: args.gradients.name(),
        master_weights: args.master_weights.name(),
        peak_mib: mib(memory.peak),
        planned_peak_mib: mib(card.plan.memory.peak),
        reserved_mib: mib(memory.reserved),
        budget_mib: mib(card.gpu.budget_bytes()),
        peak_holders_mib: memory.peak_holders.iter().map(|(who, bytes)| (*who, mib(*bytes))).collect(),
        launches_per_step: launches_by_kernel.iter().map(|(_, n)| n).sum(),
        launches_by_kernel,
        kernels_compiled: card.prepared.compiled,
        kernels_cached: card.prepared.cached,
        kernels_ms: card.prepared.milliseconds,
        tuning,
        graph_nodes: None,
        profile: None,
    }
}

fn mib(bytes: usize) -> f64 {
    bytes as f64 / (1 << 20) as f64
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use clap::Parser;

    use super::*;

    fn args(more: &str) -> Args {
        let line = "bench --d-model 16 --n-layers 1 --n-heads 2 --n-kv-heads 1 --head-dim 8 --d-ff 16 --vocab 40 \
                    --seq-len 8 --batch-size 2 --steps 3 --lr 0.01 ";
        Args::try_parse_from(format!("{line}{more}").split_whitespace()).unwrap()
    }

    #[test]
    fn a_tiny_model_on_the_cpu() {
        let report = run(&args(""), Instant::now(), vec!["bench".into()]).unwrap();
        assert_eq!((report.losses.len(), report.step_ms_all.len(), report.warm_up), (5, 3, 2));
        assert!(report.loss_last < report.loss_first && report.tokens_per_s > 0.0);
        assert_eq!((report.mfu, report.shape.vocab_padded), (None, 64));
        assert!(report.lines().iter().any(|line| line.starts_with("speed: ")));
        let json = serde_json::to_value(&report).unwrap();
        for key in ["tokens_per_s", "step_ms", "loss_first", "loss_last", "params"] {
            assert!(json[key].is_number(), "{key}");
        }
    }

    #[test]
    fn refusals_and_their_exit_codes() {
        let refused = run(&args("--lr 1e-30"), Instant::now(), Vec::new()).err().unwrap();
        assert_eq!(refused.exit_code(), 3, "{refused}");
        let usage = run(&args("--steps 1"), Instant::now(), Vec::new()).err().unwrap();
        assert_eq!(usage.exit_code(), 2, "{usage}");
    }

    #[test]
    fn times_are_those_between_arrivals() {
        let start = Instant::now();
        let at = |ms: u64| start + Duration::from_millis(ms);
        // The first three steps are warm-up, the last is there to be enqueued while the one before is read.
        let record = Record { losses: Vec::new(), arrivals: [0, 900, 1000, 1010, 1030, 1031].map(at).into() };
        let rounded: Vec<f64> = record.step_ms(3, 2).iter().map(|ms| ms.round()).collect();
        assert_eq!(rounded, [10.0, 20.0]);
    }
}
