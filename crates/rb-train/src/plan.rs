//! What a run needs of a GPU, found before its first step by running that step on a device that only counts.

use std::fmt::Write as _;

use rb_autograd::{GradStore, ParamBuilder, Precision};
use rb_cuda::{Gpu, GpuOptions, Matmul, MemoryStats, PrepareStats, Unit};
use rb_data::Batch;
use rb_nn::CausalLm;
use rb_tensor::{DType, Device};

use crate::config::Config;
use crate::step::{self, LossTerms};
use crate::{Result, TrainError, trainer};

/// Memory, kernels and products of one training step.
#[derive(Debug)]
pub struct Plan {
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
}

/// Plans a step of `config` (whose vocabulary is known) for a card of this compute capability.
///
/// # Errors
/// A config that no model can be built from, or a step that no GPU can run.
pub fn plan(config: &Config, capability: (u32, u32), precision: Precision) -> Result<Plan> {
    let gpu = Gpu::dry(capability, &GpuOptions::default());
    let device = Device::Cuda(gpu);
    let mut builder = ParamBuilder::default();
    let model = CausalLm::init(&config.model, &mut builder)?;
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
    let loss = step::forward_backward(&model, &params, &mut grads, &batches, mask, terms)?;
    let limit = config.train.max_grad_norm;
    drop(optimizer.clipped_step(&mut params, &mut grads, config.train.learning_rate, limit, &loss)?);
    let launches = gpu.launches().values().sum::<u64>() - before;
    let memory = gpu.memory();
    if config.train.eval_steps != 0 {
        step::evaluate(&model, &params, std::iter::once(batch), mask)?;
    }
    let reserved_bytes = gpu.memory().reserved;
    let num_parameters = params.layout().num_parameters();
    Ok(Plan { num_parameters, memory, reserved_bytes, units: gpu.units(), products: gpu.matmuls(), launches })
}

/// Plans the run, checks that it fits, compiles its kernels in parallel and takes its memory at once.
pub(crate) fn prepare(
    config: &Config,
    gpu: Gpu,
    precision: Precision,
    say: &mut dyn FnMut(&str),
) -> Result<()> {
    let plan = plan(config, gpu.info().capability, precision)?;
    plan.make_ready(gpu, say)?;
    if config.run.tune_products { plan.tune(gpu, say) } else { Ok(()) }
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
        let _ = writeln!(text, "peak of a step        {}", mib(self.memory.peak));
        for (holder, bytes) in &self.memory.peak_holders {
            let _ = writeln!(text, "  {holder:<20}{}", mib(*bytes));
        }
        let _ = writeln!(text, "taken from the driver {}", mib(self.reserved_bytes));
        let _ = writeln!(text, "kernels to compile    {}", self.units.len());
        let _ = writeln!(text, "launches a step       {}", self.launches);
        text
    }
}

fn largest(memory: &MemoryStats) -> String {
    let three = memory.peak_holders.iter().take(3).map(|(name, bytes)| format!("{name} {}", mib(*bytes)));
    three.collect::<Vec<_>>().join(", ")
}

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
