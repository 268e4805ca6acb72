//! The config of a run: one TOML file.
//!
//! Model keys are Hugging Face's model keys, training keys are those of its `TrainingArguments` where one
//! exists. Unknown keys are errors that name the nearest known key; `key=value` overrides come last.

mod load;
mod validate;

use std::path::PathBuf;

use rb_autograd::MasterWeights;
use rb_nn::{LlamaConfig, Recompute};
use rb_tensor::DType;
use serde::{Deserialize, Serialize};

pub(crate) use load::apply;
pub use load::{Override, load};

/// A whole config file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// Where the run lives and on what it runs.
    #[serde(default)]
    pub run: RunSection,
    /// Text.
    #[serde(default)]
    pub data: DataSection,
    /// Tokenizer to read or to train.
    #[serde(default)]
    pub tokenizer: TokenizerSection,
    /// The model, with Hugging Face's keys. `vocab_size` comes from the tokenizer. Left out: that of `run.init_from`.
    #[serde(default = "model_of_folder")]
    pub model: LlamaConfig,
    /// Steps, optimizer, schedule, evaluation and saving.
    #[serde(default)]
    pub train: TrainSection,
}

/// What stands for a `[model]` that is left out.
fn model_of_folder() -> LlamaConfig {
    LlamaConfig::new(0, 0, 0, 0, 0)
}

/// `[run]`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RunSection {
    /// Run directory. Left out: `runs/<name of the config file>`, numbered if that exists.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub out: Option<PathBuf>,
    /// Model whose weights the run starts from: a Hugging Face folder of the Llama family, a checkpoint or a run. Its
    /// tokenizer is taken unless `tokenizer.path` names the same one, and its shape unless `[model]` says the same.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub init_from: Option<PathBuf>,
    /// Seed of weights and data order.
    pub seed: u64,
    /// `auto` (a GPU where one is usable), `cpu` or `cuda`.
    pub device: DeviceChoice,
    /// `auto` (`bf16` on a GPU, `fp32` on the CPU), `fp32` or `bf16`. Weights and optimizer state are fp32 in each.
    pub precision: Precision,
    /// Element type of the residual stream with bf16: `fp32`, as PyTorch's autocast, or `bf16`.
    pub residual_dtype: WideDtype,
    /// Element type of the gradients of parameters with bf16: `fp32`, or `bf16`, which takes half the memory and
    /// rounds sums over micro-batches.
    pub gradient_dtype: WideDtype,
    /// How the fp32 weights of matrices are kept with bf16: `whole`, beside their bf16 copy, or `split`, as the copy and
    /// the 16 bits that complete it, in 4 bytes instead of 6. They have the same bits in both; of a weight half way
    /// between two bf16 numbers the split copy is the one away from zero.
    pub master_weights: MasterChoice,
    /// Time the library's algorithms for each product on a GPU once, and keep the fastest on disk by card, driver and
    /// library. Bits repeat as long as that file stays.
    pub tune_products: bool,
    /// On a GPU, capture a step once and launch it whole from then on. Bits are those of steps launch by launch, which are
    /// made where a step cannot be captured.
    pub graph: bool,
    /// Most MiB of GPU memory that the run may take. Left out: what is free when it starts.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gpu_memory_budget_mib: Option<u64>,
}

impl Default for RunSection {
    fn default() -> Self {
        RunSection {
            out: None,
            init_from: None,
            seed: 0,
            device: DeviceChoice::Auto,
            precision: Precision::Auto,
            residual_dtype: WideDtype::Fp32,
            gradient_dtype: WideDtype::Fp32,
            master_weights: MasterChoice::Whole,
            tune_products: true,
            graph: true,
            gpu_memory_budget_mib: None,
        }
    }
}

/// Where to run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DeviceChoice {
    /// A usable GPU, else the CPU.
    Auto,
    /// The CPU.
    Cpu,
    /// A GPU, or an error.
    Cuda,
}

/// Numerics of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Precision {
    /// bf16 on a GPU, fp32 on the CPU.
    Auto,
    /// IEEE single precision throughout.
    Fp32,
    /// bf16 mixed precision: fp32 weights, gradients, optimizer state, statistics and loss; bf16 products and
    /// activations. Only on a GPU.
    Bf16,
}

/// Element type of what bf16 mixed precision keeps in fp32 unless told otherwise, as PyTorch's autocast does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum WideDtype {
    /// fp32.
    Fp32,
    /// bf16: half the traffic and memory.
    Bf16,
}

impl From<WideDtype> for DType {
    fn from(dtype: WideDtype) -> DType {
        match dtype {
            WideDtype::Fp32 => DType::F32,
            WideDtype::Bf16 => DType::BF16,
        }
    }
}

/// How bf16 mixed precision keeps fp32 weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum MasterChoice {
    /// Beside their bf16 copy.
    Whole,
    /// As the bf16 copy and the bits that complete it.
    Split,
}

impl From<MasterChoice> for MasterWeights {
    fn from(choice: MasterChoice) -> MasterWeights {
        match choice {
            MasterChoice::Whole => MasterWeights::Whole,
            MasterChoice::Split => MasterWeights::Split,
        }
    }
}

/// `[data]`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct DataSection {
    /// `.txt`, `.jsonl` (`.gz`, `.zst`) and `.parquet` files, folders of them and patterns, relative to the config
    /// file; or one folder that `rb data prepare` made.
    pub paths: Vec<PathBuf>,
    /// Field or column with the text.
    pub text_field: String,
    /// Part of the text that is held out, in [0, 0.5].
    pub validation_fraction: f64,
    /// Whether attention stays inside each document.
    pub document_mask: bool,
    /// Whether sequences are shuffled in each epoch.
    pub shuffle: bool,
    /// Languages of the text: a tokenizer is trained on equal parts of them (or by `weight`), and a run is refused
    /// where one has fewer characters a token than its `floor`, or than half of the best one's.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub languages: Vec<rb_data::Language>,
}

impl Default for DataSection {
    fn default() -> Self {
        DataSection {
            paths: Vec::new(),
            text_field: "text".into(),
            validation_fraction: 0.05,
            document_mask: false,
            shuffle: true,
            languages: Vec::new(),
        }
    }
}

/// `[tokenizer]`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TokenizerSection {
    /// An existing `tokenizer.json`. Left out: one is trained on the data.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub path: Option<PathBuf>,
    /// Entries of a tokenizer that is trained.
    pub vocab_size: usize,
    /// `bpe` or `unigram`.
    pub model: rb_data::ModelKind,
    /// How text is cut before merges: `rb` keeps combining marks inside words, `gpt2` and `cl100k` do not, `o200k` does
    /// but cuts at joiners.
    pub splitter: rb_data::Splitter,
    /// `none`: decoding gives back the text byte for byte; `nfc`: composed and decomposed characters get equal ids.
    pub normalization: rb_data::Normalization,
}

impl Default for TokenizerSection {
    fn default() -> Self {
        TokenizerSection {
            path: None,
            vocab_size: 8192,
            model: rb_data::ModelKind::Bpe,
            splitter: rb_data::Splitter::Rb,
            normalization: rb_data::Normalization::None,
        }
    }
}

/// `[train]`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TrainSection {
    /// Optimizer steps.
    pub max_steps: u64,
    /// Tokens of a sequence.
    pub seq_len: usize,
    /// Sequences of one forward pass.
    pub per_device_train_batch_size: usize,
    /// Forward passes of one optimizer step.
    pub gradient_accumulation_steps: usize,
    /// Which optimizer.
    pub optim: OptimizerChoice,
    /// Peak learning rate.
    pub learning_rate: f64,
    /// Floor of the schedule, an absolute rate.
    pub min_learning_rate: f64,
    /// Shape of the schedule.
    pub lr_scheduler_type: Scheduler,
    /// Steps of linear warm-up; the first step already has a rate above 0.
    pub warmup_steps: u64,
    /// Steps of the final decay (`warmup_stable_decay` only).
    pub decay_steps: u64,
    /// Decoupled weight decay, on matrices only.
    pub weight_decay: f64,
    /// AdamW's first-moment decay.
    pub adam_beta1: f64,
    /// AdamW's second-moment decay.
    pub adam_beta2: f64,
    /// AdamW's epsilon, outside the root.
    pub adam_epsilon: f64,
    /// SGD's momentum.
    pub momentum: f64,
    /// Global-norm clipping; 0 turns it off.
    pub max_grad_norm: f64,
    /// Label smoothing of the training loss.
    pub label_smoothing_factor: f64,
    /// Weight of the squared log-partition term of the training loss.
    pub z_loss: f64,
    /// What layers compute again in backward to need less memory, with the same bits: `none`, `mlp`, `block`, or
    /// `auto`: the first of these with which a step fits the GPU's memory budget (`none` on the CPU).
    pub recompute: RecomputeChoice,
    /// Parameters that stay as they start, by exact name or by a prefix that ends in `*`.
    pub frozen: Vec<String>,
    /// What a step with a non-finite loss or gradient does.
    pub on_non_finite: OnNonFinite,
    /// What a step does whose loss or gradient norm is far above those of the steps before.
    pub on_spike: OnSpike,
    /// How far that is, in robust standard deviations (1.4826 times the median absolute deviation).
    pub spike_zscore: f64,
    /// Steps that a step is compared with, at least 20.
    pub spike_window: usize,
    /// Steps between lines of `statistics.jsonl`: sizes of every activation, gradient and weight. 0 turns them off.
    pub statistics_steps: u64,
    /// Steps between log lines.
    pub logging_steps: u64,
    /// Steps between evaluations; 0 turns them off.
    pub eval_steps: u64,
    /// Sequences of one evaluation at most; 0 is all.
    pub eval_max_sequences: usize,
    /// Evaluations in a row without a lower held-out loss after which the run ends, as if it had done all its steps; 0
    /// turns it off. Every step with the lowest loss so far is then saved, and `checkpoints/best` is that one.
    pub early_stopping_patience: u64,
    /// How much lower a held-out loss must be to count as lower, nats a token.
    pub early_stopping_threshold: f64,
    /// Steps between checkpoints; one is always saved at the end.
    pub save_steps: u64,
    /// Checkpoints that are kept: that of `checkpoints/best` and the newest, at least one of these; 0 keeps all.
    pub save_total_limit: usize,
    /// Checkpoints whose step is a multiple of this are kept for ever; 0 turns it off.
    pub save_keep_every: u64,
    /// Beginning of the text generated at the end; empty turns it off.
    pub sample_prompt: String,
    /// Tokens of that text.
    pub sample_tokens: usize,
}

impl Default for TrainSection {
    fn default() -> Self {
        TrainSection {
            max_steps: 1000,
            seq_len: 256,
            per_device_train_batch_size: 8,
            gradient_accumulation_steps: 1,
            optim: OptimizerChoice::Adamw,
            learning_rate: 1e-3,
            min_learning_rate: 1e-4,
            lr_scheduler_type: Scheduler::Cosine,
            warmup_steps: 50,
            decay_steps: 0,
            weight_decay: 0.1,
            adam_beta1: 0.9,
            adam_beta2: 0.95,
            adam_epsilon: 1e-8,
            momentum: 0.9,
            max_grad_norm: 1.0,
            label_smoothing_factor: 0.0,
            z_loss: 0.0,
            recompute: RecomputeChoice::None,
            frozen: Vec::new(),
            on_non_finite: OnNonFinite::Stop,
            on_spike: OnSpike::Warn,
            spike_zscore: 10.0,
            spike_window: 128,
            statistics_steps: 0,
            logging_steps: 10,
            eval_steps: 100,
            eval_max_sequences: 0,
            early_stopping_patience: 0,
            early_stopping_threshold: 0.0,
            save_steps: 200,
            save_total_limit: 3,
            save_keep_every: 0,
            sample_prompt: String::new(),
            sample_tokens: 64,
        }
    }
}

/// What is computed again in backward.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RecomputeChoice {
    /// Nothing.
    None,
    /// The feed-forward part of each layer.
    Mlp,
    /// Each layer.
    Block,
    /// As little as fits the memory budget.
    Auto,
}

impl RecomputeChoice {
    /// What it may come to, the fastest first.
    pub fn candidates(self) -> &'static [Recompute] {
        match self {
            RecomputeChoice::None => &[Recompute::None],
            RecomputeChoice::Mlp => &[Recompute::Mlp],
            RecomputeChoice::Block => &[Recompute::Block],
            RecomputeChoice::Auto => &[Recompute::None, Recompute::Mlp, Recompute::Block],
        }
    }
}

/// Optimizers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OptimizerChoice {
    /// Adam with decoupled weight decay.
    Adamw,
    /// Stochastic gradient descent with momentum.
    Sgd,
}

/// Schedules after warm-up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Scheduler {
    /// Stays at the peak.
    Constant,
    /// Falls in a line to the floor.
    Linear,
    /// Falls in half a cosine to the floor.
    Cosine,
    /// Stays at the peak, then falls over `decay_steps` to the floor.
    WarmupStableDecay,
}

/// What happens at a step whose loss or gradient norm is not finite.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OnNonFinite {
    /// Save the state from before the step and stop with exit code 3.
    Stop,
    /// Leave the weights as they are, count the step and go on.
    Skip,
}

/// What happens at a step whose loss or gradient norm is a spike.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OnSpike {
    /// Nothing: it is not looked for.
    Off,
    /// A warning in the log and in the metrics.
    Warn,
    /// The weights stay as they are. On a GPU each step is then waited for.
    Skip,
    /// The run stops with exit code 3.
    Stop,
    /// Weights and optimizer state of the newest checkpoint are taken again; the data go on. A few times at most.
    Rollback,
}
