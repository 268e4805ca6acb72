//! The command line.

use std::path::PathBuf;

use clap::{Parser, ValueEnum};
use rb_autograd::{MasterWeights, Precision};
use rb_nn::LlamaConfig;
use rb_tensor::DType;
use rb_train::config::{Config, DataSection, RunSection, TokenizerSection, TrainSection};

/// Times training steps of a Llama-style model; no speed is shown unless the loss is finite and falls.
#[derive(Parser, Debug, Clone)]
#[command(
    name = "bench",
    version,
    args_override_self = true,
    max_term_width = 100,
    after_help = "bench attention --help: the speed of attention alone."
)]
pub struct Args {
    /// Width of the model.
    #[arg(long, default_value_t = 192)]
    pub d_model: usize,
    /// Layers.
    #[arg(long, default_value_t = 4)]
    pub n_layers: usize,
    /// Query heads.
    #[arg(long, default_value_t = 6)]
    pub n_heads: usize,
    /// Key and value heads.
    #[arg(long, default_value_t = 2)]
    pub n_kv_heads: usize,
    /// Width of a head.
    #[arg(long, default_value_t = 32)]
    pub head_dim: usize,
    /// Width of the feed-forward layer.
    #[arg(long, default_value_t = 512)]
    pub d_ff: usize,
    /// Vocabulary; the table is stored padded to a multiple of 64.
    #[arg(long, default_value_t = 32004)]
    pub vocab: usize,
    /// Tokens of a sequence.
    #[arg(long, default_value_t = 128)]
    pub seq_len: usize,
    /// Sequences of a step.
    #[arg(long, default_value_t = 16)]
    pub batch_size: usize,
    /// Timed steps.
    #[arg(long, default_value_t = 10)]
    pub steps: usize,
    /// Steps before the timed ones [default: 2, on a GPU 5].
    #[arg(long)]
    pub warm_up: Option<usize>,
    /// Learning rate [default: 1e-3, on a GPU 3e-4].
    #[arg(long)]
    pub lr: Option<f64>,
    /// Threads; all cores if left out.
    #[arg(long)]
    pub threads: Option<usize>,
    /// Train on the first GPU instead of the CPU.
    #[arg(long)]
    pub gpu: bool,
    /// Compute in bf16 with fp32 weights, gradients and optimizer state.
    #[arg(long, requires = "gpu")]
    pub mixed_precision: bool,
    /// Element type of the residual stream in mixed precision.
    #[arg(long, value_enum, requires = "mixed_precision", default_value_t = Wide::Fp32)]
    pub residual: Wide,
    /// Element type of the gradients of parameters in mixed precision.
    #[arg(long, value_enum, requires = "mixed_precision", default_value_t = Wide::Fp32)]
    pub gradients: Wide,
    /// How the fp32 weights are kept in mixed precision.
    #[arg(long, value_enum, requires = "mixed_precision", default_value_t = Master::Whole)]
    pub master_weights: Master,
    /// Most MiB of GPU memory that may be taken; what is free if left out.
    #[arg(long, requires = "gpu")]
    pub gpu_memory_budget_mib: Option<usize>,
    /// Search for the fastest algorithm of each product after the first step; choices are kept for later runs.
    #[arg(long, requires = "gpu")]
    pub tune: bool,
    /// Leave every product to cuBLASLt, also those that are faster on a kernel of this program.
    #[arg(long, requires = "gpu")]
    pub library_products: bool,
    /// Launch each step kernel by kernel instead of capturing it once.
    #[arg(long, requires = "gpu")]
    pub no_graph: bool,
    /// Time every kernel of one more step, launched one by one, and say what part of its ceiling each reaches.
    #[arg(long, requires = "gpu")]
    pub profile: bool,
    /// Train on the tokens of this file: a token file of `rb`, little-endian u16 (`.u16`, `.bin`) or u32 (`.u32`)
    /// ids, or any other file, whose bytes are the ids. Random ids if left out.
    #[arg(long, value_name = "FILE")]
    pub tokens: Option<PathBuf>,
    /// What the file holds, where its name does not tell.
    #[arg(long, value_enum, requires = "tokens")]
    pub tokens_as: Option<TokenKind>,
    /// Distinct batches, taken in turn [default: 1, on a GPU 4; with --tokens one for each step].
    #[arg(long)]
    pub batches: Option<usize>,
    /// Write all results to this file; without a name, as the last line of the output.
    #[arg(long, value_name = "FILE", num_args = 0..=1, default_missing_value = "-")]
    pub json: Option<PathBuf>,
}

/// Element type of what is fp32 beside bf16 products unless told otherwise.
#[derive(ValueEnum, Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wide {
    /// As PyTorch's autocast.
    Fp32,
    /// Half the traffic.
    Bf16,
}

impl Wide {
    fn dtype(self) -> DType {
        match self {
            Wide::Fp32 => DType::F32,
            Wide::Bf16 => DType::BF16,
        }
    }

    /// As the reports write it.
    pub fn name(self) -> &'static str {
        match self {
            Wide::Fp32 => "fp32",
            Wide::Bf16 => "bf16",
        }
    }
}

/// How fp32 weights are kept.
#[derive(ValueEnum, Debug, Clone, Copy, PartialEq, Eq)]
pub enum Master {
    /// Beside their bf16 copy.
    Whole,
    /// As the bf16 copy and the 16 bits that complete it.
    Split,
}

impl Master {
    fn weights(self) -> MasterWeights {
        match self {
            Master::Whole => MasterWeights::Whole,
            Master::Split => MasterWeights::Split,
        }
    }

    /// As the reports write it.
    pub fn name(self) -> &'static str {
        match self {
            Master::Whole => "whole",
            Master::Split => "split",
        }
    }
}

/// What a file of tokens holds.
#[derive(ValueEnum, Debug, Clone, Copy, PartialEq, Eq)]
pub enum TokenKind {
    /// Little-endian 16-bit ids.
    U16,
    /// Little-endian 32-bit ids.
    U32,
    /// One id a byte.
    Bytes,
}

impl Args {
    /// Why these settings cannot be run, if they cannot.
    pub fn problem(&self) -> Option<String> {
        let least = [
            ("--steps", self.steps, 2),
            ("--batch-size", self.batch_size, 1),
            ("--seq-len", self.seq_len, 1),
            ("--vocab", self.vocab, 2),
            ("--batches", self.batches.unwrap_or(1), 1),
        ];
        if let Some((flag, value, least)) = least.into_iter().find(|(_, value, least)| value < least) {
            return Some(format!("{flag} is {value}; it must be at least {least}"));
        }
        if self.batch_size.checked_mul(self.seq_len).is_none_or(|tokens| tokens > i32::MAX as usize) {
            return Some("--batch-size times --seq-len is too large".into());
        }
        if !(self.learning_rate().is_finite() && self.learning_rate() > 0.0) {
            return Some(format!("--lr is {}; it must be a finite number above 0", self.learning_rate()));
        }
        None
    }

    /// The learning rate in force.
    pub fn learning_rate(&self) -> f64 {
        self.lr.unwrap_or(if self.gpu { 3e-4 } else { 1e-3 })
    }

    /// Steps before the timed ones, of which there is at least one.
    pub fn warm_up_steps(&self) -> usize {
        self.warm_up.unwrap_or(if self.gpu { 5 } else { 2 }).max(1)
    }

    /// All steps. On a GPU one is added after the timed ones: the time of a step ends when its loss is read, while
    /// the next is enqueued.
    pub fn all_steps(&self) -> usize {
        self.warm_up_steps() + self.steps + usize::from(self.gpu)
    }

    /// Tokens of a step.
    pub fn step_tokens(&self) -> usize {
        self.batch_size * self.seq_len
    }

    /// Element types of the computation.
    pub fn precision(&self) -> Precision {
        if !self.mixed_precision {
            return Precision::Full;
        }
        Precision::Bf16 {
            residual: self.residual.dtype(),
            gradients: self.gradients.dtype(),
            master: self.master_weights.weights(),
        }
    }

    /// The model and the step as the config of a run, from which the step is planned.
    pub fn config(&self) -> Config {
        Config {
            run: RunSection::default(),
            data: DataSection { document_mask: false, ..DataSection::default() },
            tokenizer: TokenizerSection::default(),
            model: LlamaConfig {
                num_key_value_heads: Some(self.n_kv_heads),
                head_dim: Some(self.head_dim),
                max_position_embeddings: self.seq_len,
                tie_word_embeddings: true,
                ..LlamaConfig::new(self.vocab, self.d_model, self.d_ff, self.n_layers, self.n_heads)
            },
            train: TrainSection {
                seq_len: self.seq_len,
                per_device_train_batch_size: self.batch_size,
                gradient_accumulation_steps: 1,
                learning_rate: self.learning_rate(),
                eval_steps: 0,
                ..TrainSection::default()
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The command line that the benchmarks of the project use.
    pub const REFERENCE: &str = "bench --gpu --mixed-precision --d-model 768 --n-layers 16 --n-heads 12 \
         --n-kv-heads 4 --head-dim 64 --d-ff 1408 --seq-len 1024 --batch-size 4 --steps 10 \
         --gpu-memory-budget-mib 9000";

    fn parse(line: &str) -> Result<Args, clap::Error> {
        Args::try_parse_from(line.split_whitespace())
    }

    #[test]
    fn the_reference_command_line() {
        let args = parse(REFERENCE).unwrap();
        assert_eq!(args.problem(), None);
        assert_eq!(args.precision(), Precision::MIXED);
        assert_eq!((args.vocab, args.gpu_memory_budget_mib, args.all_steps()), (32004, Some(9000), 16));
        let plan =
            rb_train::plan::plan(&args.config(), (9, 0), args.precision(), rb_nn::Recompute::None).unwrap();
        assert_eq!(plan.num_parameters, 101_674_752);
        assert!(plan.reserved_bytes < 9000 << 20, "{}", plan.table());
        assert!(!plan.units.is_empty() && !plan.products.is_empty());
        let narrow = Args { residual: Wide::Bf16, ..args };
        let half = rb_train::plan::plan(&narrow.config(), (9, 0), narrow.precision(), rb_nn::Recompute::None)
            .unwrap();
        assert!(half.memory.peak < plan.memory.peak, "a residual stream in bf16 is smaller");
    }

    #[test]
    fn settings_that_belong_together() {
        for line in [
            "bench --mixed-precision",
            "bench --gpu --residual bf16",
            "bench --tune",
            "bench --gpu-memory-budget-mib 100",
            "bench --tokens-as u16",
            "bench --residual fp16",
        ] {
            assert!(parse(line).is_err(), "{line}");
        }
        for line in ["--steps 1", "--batch-size 0", "--lr nan", "--lr -1", "--batches 0", "--seq-len 0"] {
            let args = parse(&format!("bench {}", line.replace(' ', "="))).unwrap();
            assert!(args.problem().is_some_and(|p| p.starts_with(&line[..4])), "{line}");
        }
    }

    #[test]
    fn json_with_and_without_a_file() {
        let json = |line| parse(line).unwrap().json.map(|p| p.display().to_string());
        assert_eq!(json("bench"), None);
        assert_eq!(json("bench --json"), Some("-".into()));
        assert_eq!(json("bench --steps 3 --json out.json --gpu"), Some("out.json".into()));
        assert_eq!(json("bench --json --gpu"), Some("-".into()));
    }
}
