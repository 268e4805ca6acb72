//! What a run needs of a GPU, found before its first step by running that step on a device that only counts.

use std::fmt::Write as _;

use rb_autograd::ops::attention::mma_reason;
use rb_autograd::{GradStore, ParamBuilder, Precision};
use rb_cuda::{Gpu, GpuOptions, Matmul, MemoryStats, PrepareStats, Unit};
use rb_data::Batch;
use rb_nn::{CausalLm, Recompute};
use rb_tensor::{DType, Device};

use crate::config::{Config, Precision as PrecisionChoice, RecomputeChoice};
use crate::step::{self, LossTerms};
use crate::stepper::{Parts, Settings, Stepper};
use crate::{Result, TrainError, trainer};

/// Memory, kernels and products of one training step.
#[derive(Debug)]
pub struct Plan {
    /// What layers compute again in backward.
    pub recompute: Recompute,
    /// Named parameters' elements.
    pub num_parameters: usize,
    /// Bytes in use at the peak of a step, by holder.
    pub memory: MemoryStats,
    /// Bytes that the allocator takes from the driver for it.
    pub reserved_bytes: usize,
    /// Kernels with their constants.
    pub units: Vec<Unit>,
    /// Distinct products.
    pub products: Vec<Matmul>,
    /// Launches in a step, products included.
    pub launches: u64,
    /// Why attention in bf16 runs on the plain kernels, many times slower than on tensor cores, if it does.
    pub plain_attention: Option<String>,
}

/// Plans a step of `config` (whose vocabulary is known) for a card of this compute capability, with layers that
/// compute again what `recompute` says, whatever the config says.
///
/// # Errors
/// A config that no model can be built from, or a step that no GPU can run.
pub fn plan(
    config: &Config,
    capability: (u32, u32),
    precision: Precision,
    recompute: Recompute,
) -> Result<Plan> {
    let gpu = Gpu::dry(capability, &GpuOptions::default());
    let device = Device::Cuda(gpu);
    let mut builder = ParamBuilder::default();
    let model = CausalLm::init(&config.model, &mut builder)?.with_recompute(recompute);
    let mut params = builder.build_zeros(DType::F32, device)?;
    params.set_precision(precision)?;
    trainer::freeze(&mut params, &config.train.frozen)?;
    let mut grads = GradStore::new(&params)?;
    let mut optimizer = trainer::build_optimizer(config, &params)?;
    let batch = blank_batch(config);
    // Two micro-batches are enough to meet gradients that are overwritten and ones that are added to.
    let count = config.train.gradient_accumulation_steps.min(2);
    let batches: Vec<Batch> = (0..count).map(|_| batch.clone()).collect();
    let terms =
        LossTerms { label_smoothing: config.train.label_smoothing_factor, z_loss: config.train.z_loss };
    let mask = config.data.document_mask;
    let before: u64 = gpu.launches().values().sum();
    let settings = Settings {
        document_mask: mask,
        terms,
        max_grad_norm: config.train.max_grad_norm,
        lr: config.train.learning_rate,
    };
    let mut parts =
        Parts { model: &model, params: &mut params, grads: &mut grads, optimizer: optimizer.as_mut() };
    let mut stepper = Stepper::new(false);
    drop(stepper.step(&mut parts, &batches, &settings)?);
    let launches = gpu.launches().values().sum::<u64>() - before;
    let memory = gpu.memory();
    if config.train.eval_steps != 0 {
        step::evaluate(&model, &params, std::iter::once(batch), mask)?;
    }
    Ok(Plan {
        recompute,
        num_parameters: params.layout().num_parameters(),
        memory,
        reserved_bytes: gpu.memory().reserved,
        units: gpu.units(),
        products: gpu.matmuls(),
        launches,
        plain_attention: match precision {
            Precision::Full => None,
            Precision::Bf16 { .. } => mma_reason(capability, config.model.head_dim()),
        },
    })
}

/// Plans a step with the first choice of `train.recompute` that fits `budget` bytes; where none does, the plan
/// that needs least.
///
/// # Errors
/// As [`plan`].
pub fn choose(config: &Config, capability: (u32, u32), precision: Precision, budget: usize) -> Result<Plan> {
    let mut least: Option<Plan> = None;
    for &recompute in config.train.recompute.candidates() {
        let plan = plan(config, capability, precision, recompute)?;
        if plan.reserved_bytes <= budget {
            return Ok(plan);
        }
        if least.as_ref().is_none_or(|l| plan.reserved_bytes < l.reserved_bytes) {
            least = Some(plan);
        }
    }
    match least {
        Some(plan) => Ok(plan),
        None => plan(config, capability, precision, Recompute::None),
    }
}

/// Refuses a plan that takes more than `budget` bytes.
///
/// # Errors
/// [`TrainError::Config`] with the largest holders and a setting with which the step fits.
pub fn check(
    plan: &Plan,
    config: &Config,
    capability: (u32, u32),
    precision: Precision,
    budget: usize,
) -> Result<()> {
    if plan.reserved_bytes <= budget {
        return Ok(());
    }
    Err(TrainError::Config {
        origin: "GPU memory".into(),
        reason: format!(
            "a step needs {} and {} may be used; largest: {}; {}",
            mib(plan.reserved_bytes),
            mib(budget),
            largest(&plan.memory),
            remedy(config, capability, precision, budget)?
        ),
    })
}

/// The smallest change that makes a step fit: recomputation, which changes no number of the run, then smaller
/// batches that are accumulated to the same step.
fn remedy(config: &Config, capability: (u32, u32), precision: Precision, budget: usize) -> Result<String> {
    let mut config = config.clone();
    let mut least = usize::MAX;
    for recompute in [Recompute::Mlp, Recompute::Block] {
        let needed = plan(&config, capability, precision, recompute)?.reserved_bytes;
        if needed <= budget {
            return Ok(format!("it fits with train.recompute=\"{}\"", name(recompute)));
        }
        least = least.min(needed);
    }
    let whole = config.train.per_device_train_batch_size;
    while config.train.per_device_train_batch_size > 1 {
        let size = config.train.per_device_train_batch_size;
        // The next smaller size that divides the old one keeps the sequences of a step.
        let Some(smaller) = (1..size).rev().find(|s| whole.is_multiple_of(*s)) else { break };
        config.train.per_device_train_batch_size = smaller;
        config.train.gradient_accumulation_steps = config.train.gradient_accumulation_steps * size / smaller;
        let needed = plan(&config, capability, precision, Recompute::Block)?.reserved_bytes;
        if needed <= budget {
            return Ok(format!(
                "it fits with train.per_device_train_batch_size={smaller}, \
                 train.gradient_accumulation_steps={} and train.recompute=\"block\"",
                config.train.gradient_accumulation_steps
            ));
        }
        least = least.min(needed);
    }
    Ok(format!(
        "with one sequence a batch and train.recompute=\"block\" it still needs {}: raise \
         --gpu-memory-budget-mib to {}, or lower train.seq_len or the model's size",
        mib(least),
        least.div_ceil(1 << 20)
    ))
}

/// Plans the run, checks that it fits, compiles its kernels in parallel and takes its memory at once; gives what
/// layers compute again.
pub(crate) fn prepare(
    config: &Config,
    gpu: Gpu,
    precision: Precision,
    say: &mut dyn FnMut(&str),
) -> Result<Recompute> {
    let info = gpu.info();
    let budget = gpu.budget_bytes();
    let plan = choose(config, info.capability, precision, budget)?;
    check(&plan, config, info.capability, precision, budget)?;
    plan.make_ready(gpu, say)?;
    if config.run.tune_products {
        plan.tune(gpu, say)?;
    }
    if config.train.recompute == RecomputeChoice::Auto {
        say(&format!("train.recompute=\"auto\" is \"{}\" here", name(plan.recompute)));
    }
    Ok(plan.recompute)
}

/// The config with the vocabulary that its run will have, as far as that is known before any text is read: the
/// model's, else that of `tokenizer.path` or of the prepared data, else the size asked for in `[tokenizer]`.
///
/// # Errors
/// A tokenizer that cannot be read; a model that breaks a rule.
pub fn with_vocabulary(mut config: Config) -> Result<Config> {
    if config.model.vocab_size == 0 {
        let prepared = crate::prepare::prepared_folder(&config).map(|folder| folder.join("tokenizer.json"));
        config.model.vocab_size = match config.tokenizer.path.clone().or(prepared) {
            Some(path) => rb_data::Tokenizer::load(path)?.vocab_size(),
            None => config.tokenizer.vocab_size,
        };
    }
    config.model.validate()?;
    Ok(config)
}

/// Plans a run from its config alone for a card of this compute capability, in the run's precision and within
/// its memory budget.
///
/// # Errors
/// As [`plan`] and [`with_vocabulary`].
pub fn for_card(config: Config, capability: (u32, u32)) -> Result<CardPlan> {
    let config = with_vocabulary(config)?;
    let precision = match config.run.precision {
        PrecisionChoice::Fp32 => Precision::Full,
        _ => crate::device::mixed(&config.run),
    };
    let budget = config.run.gpu_memory_budget_mib.map(crate::device::budget_bytes);
    let plan = choose(&config, capability, precision, budget.unwrap_or(usize::MAX))?;
    Ok(CardPlan { plan, config, capability, precision, budget })
}

/// A plan with what it was made for.
#[derive(Debug)]
pub struct CardPlan {
    /// The plan.
    pub plan: Plan,
    config: Config,
    capability: (u32, u32),
    precision: Precision,
    budget: Option<usize>,
}

impl CardPlan {
    /// A table for people.
    pub fn table(&self) -> String {
        let (major, minor) = self.capability;
        let t = &self.config.train;
        let precision = match self.precision {
            Precision::Full => "fp32",
            Precision::Bf16 { .. } => "bf16",
        };
        format!(
            "card                  sm_{major}{minor}, {precision}\nbatch                 {} sequences of {} tokens, \
             vocabulary {}\n{}",
            t.per_device_train_batch_size,
            t.seq_len,
            self.config.model.vocab_size,
            self.plan.table()
        )
    }

    /// Refuses a plan above the config's memory budget, if it has one.
    ///
    /// # Errors
    /// As [`check`].
    pub fn check(&self) -> Result<()> {
        match self.budget {
            None => Ok(()),
            Some(budget) => check(&self.plan, &self.config, self.capability, self.precision, budget),
        }
    }
}

fn name(recompute: Recompute) -> &'static str {
    match recompute {
        Recompute::None => "none",
        Recompute::Mlp => "mlp",
        Recompute::Block => "block",
    }
}

impl Plan {
    /// Makes `gpu` ready for the planned step: checks that it fits, compiles its kernels in parallel and takes
    /// its memory at once.
    ///
    /// # Errors
    /// A step larger than the budget, a kernel that does not compile.
    pub fn make_ready(&self, gpu: Gpu, say: &mut dyn FnMut(&str)) -> Result<PrepareStats> {
        let budget = gpu.budget_bytes();
        if self.reserved_bytes > budget {
            return Err(TrainError::Config {
                origin: "GPU memory".into(),
                reason: format!(
                    "a step needs {} and {} may be used; largest: {}; lower train.per_device_train_batch_size or \
                     train.seq_len (bench: --batch-size or --seq-len), or raise --gpu-memory-budget-mib",
                    mib(self.reserved_bytes),
                    mib(budget),
                    largest(&self.memory)
                ),
            });
        }
        let stats = gpu.prepare(&self.units).map_err(rb_tensor::TensorError::from)?;
        gpu.reserve(self.reserved_bytes);
        say(&format!(
            "{}: {}, {} of {} planned; {} kernels ready in {:.1} s ({} compiled, {} from the cache)",
            gpu,
            gpu.info().name,
            mib(self.memory.peak),
            mib(budget),
            self.units.len(),
            stats.milliseconds / 1e3,
            stats.compiled,
            stats.cached
        ));
        if let Some(reason) = &self.plain_attention {
            say(&plain_attention_notice(reason));
        }
        Ok(stats)
    }

    /// Finds the fastest algorithm of each product that no earlier run has timed, and says what that gave.
    ///
    /// # Errors
    /// A driver error.
    pub fn tune(&self, gpu: Gpu, say: &mut dyn FnMut(&str)) -> Result<()> {
        let tuned = gpu.tune(&self.products).map_err(rb_tensor::TensorError::from)?;
        let (mut count, mut candidates, mut before, mut after) = (0, 0, 0.0, 0.0);
        for t in tuned.iter().filter(|t| t.candidates > 0) {
            (count, candidates) = (count + 1, candidates + t.candidates);
            (before, after) = (before + t.default_us, after + t.best_us);
        }
        if count > 0 {
            say(&format!(
                "products: {count} timed over {candidates} algorithms: {before:.0} us together with the library's first \
                 choices, {after:.0} us with the fastest"
            ));
        }
        Ok(())
    }

    /// A table for people.
    pub fn table(&self) -> String {
        let mut text = String::new();
        // Writing to a string cannot fail.
        let _ =
            writeln!(text, "parameters            {}", crate::observe::grouped(self.num_parameters as u64));
        let _ = writeln!(text, "recomputation         {}", name(self.recompute));
        let _ = writeln!(text, "peak of a step        {}", mib(self.memory.peak));
        let (shown, small): (Vec<_>, Vec<_>) =
            self.memory.peak_holders.iter().copied().partition(|(_, bytes)| *bytes >= LEAST_SHOWN_BYTES);
        for (holder, bytes) in shown {
            let _ = writeln!(text, "  {holder:<20}{}", mib(bytes));
        }
        if !small.is_empty() {
            let bytes = small.iter().map(|(_, bytes)| bytes).sum();
            let _ = writeln!(text, "  {:<20}{}", format!("{} small ones", small.len()), mib(bytes));
        }
        let _ = writeln!(text, "taken from the driver {}", mib(self.reserved_bytes));
        let _ = writeln!(text, "kernels to compile    {}", self.units.len());
        let _ = writeln!(text, "launches a step       {}", self.launches);
        if let Some(reason) = &self.plain_attention {
            let _ = writeln!(text, "{}", plain_attention_notice(reason));
        }
        text
    }
}

fn plain_attention_notice(reason: &str) -> String {
    format!("attention runs without tensor cores, many times slower: {reason}")
}

/// Holders of less are one row of the table.
const LEAST_SHOWN_BYTES: usize = 100 << 10;

fn mib(bytes: usize) -> String {
    format!("{:.1} MiB", bytes as f64 / (1 << 20) as f64)
}

/// A batch of the config's shape; on a device that only counts, ids do not matter.
fn blank_batch(config: &Config) -> Batch {
    let (batch_size, seq_len) = (config.train.per_device_train_batch_size, config.train.seq_len);
    let tokens = batch_size * seq_len;
    Batch {
        batch_size,
        seq_len,
        input_ids: vec![0; tokens],
        labels: vec![0; tokens],
        doc_start: vec![0; tokens],
        position_ids: (0..batch_size).flat_map(|_| 0..seq_len as i32).collect(),
        valid_tokens: tokens,
        dropped_targets: 0,
        epoch: 0,
    }
}

fn largest(memory: &MemoryStats) -> String {
    let three = memory.peak_holders.iter().take(3).map(|(name, bytes)| format!("{name} {}", mib(*bytes)));
    three.collect::<Vec<_>>().join(", ")
}
