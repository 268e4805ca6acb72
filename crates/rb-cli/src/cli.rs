//! The command line.

use std::path::PathBuf;

use clap::{Args, CommandFactory, Parser, Subcommand, ValueEnum};
use rb_train::Override;

use crate::Failure;

/// Pretrains decoder-only language models.
#[derive(Parser)]
#[command(name = "rb", version, max_term_width = 100)]
pub(crate) struct Cli {
    /// Threads of the CPU path, 1 to 1024; all cores if left out.
    #[arg(long, global = true, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub(crate) threads: Option<u16>,
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Subcommand)]
pub(crate) enum Command {
    /// Train a model from a config file, or continue a run
    #[command(after_help = "Examples:\n  rb train examples/quickstart.toml\n  \
        rb train examples/quickstart.toml --data my_text.txt --set train.max_steps=500\n  \
        rb train examples/quickstart.toml --gpu-memory-budget-mib 4096 --set train.recompute=auto\n  \
        rb train --resume runs/quickstart")]
    Train(TrainArgs),
    /// Print what a run needs of a GPU in memory, time and money, without one
    #[command(after_help = "Examples:\n  rb plan examples/quickstart.toml\n  \
        rb plan examples/quickstart.toml --hours 10\n  \
        rb plan examples/quickstart.toml --money 100 --price 3.50\n  \
        rb plan examples/quickstart.toml --card sm_86 --set train.recompute=block\n  \
        rb plan examples/quickstart.toml --set run.gpu_memory_budget_mib=4096")]
    Plan(PlanArgs),
    /// Write text with a trained model
    #[command(after_help = "Example:\n  rb generate runs/quickstart --prompt \"Once upon a time\"")]
    Generate(GenerateArgs),
    /// Write the logits of fixed random inputs, to compare a model with another program's
    #[command(after_help = "Example:\n  rb logits runs/quickstart --out probe.safetensors\n  \
        python bench-scripts/check_transformers.py runs/quickstart probe.safetensors")]
    Logits(LogitsArgs),
    /// Train a tokenizer
    Tokenizer {
        #[command(subcommand)]
        command: TokenizerCommand,
    },
    /// Show what this machine offers
    #[command(after_help = "Example:\n  rb doctor")]
    Doctor,
    /// Check gradients, models and refusals
    #[command(after_help = "Examples:\n  rb verify --all\n  rb verify --config examples/quickstart.toml\n  \
        rb verify --loss-gates")]
    Verify(VerifyArgs),
    /// Compile every kernel for every architecture and show what each takes
    #[command(hide = true)]
    Kernels(KernelsArgs),
    /// Print shell completions
    #[command(after_help = "Example:\n  rb completions bash > /etc/bash_completion.d/rb")]
    Completions {
        /// The shell.
        shell: clap_complete::Shell,
    },
}

#[derive(Args)]
pub(crate) struct TrainArgs {
    /// Config file (TOML).
    #[arg(required_unless_present = "resume", conflicts_with = "resume")]
    pub(crate) config: Option<PathBuf>,
    /// Run directory to continue from its newest whole checkpoint.
    #[arg(long, value_name = "RUN")]
    pub(crate) resume: Option<PathBuf>,
    /// Text to train on instead of the config's: a .txt or .jsonl file, or a folder. May be repeated.
    #[arg(long, value_name = "PATH")]
    pub(crate) data: Vec<PathBuf>,
    /// Run directory to create.
    #[arg(long, value_name = "DIR", conflicts_with = "resume")]
    pub(crate) out: Option<PathBuf>,
    /// Most MiB of GPU memory to take; a run that needs more is refused before its first step. Left out: what
    /// is free. The same as --set run.gpu_memory_budget_mib=N.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) gpu_memory_budget_mib: Option<u32>,
    /// Override of a config key, for example train.max_steps=100. May be repeated.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    pub(crate) overrides: Vec<Override>,
}

#[derive(Args)]
pub(crate) struct PlanArgs {
    /// Config file (TOML).
    pub(crate) config: PathBuf,
    /// Architecture of the card: sm_80 (A100), sm_86 (RTX 30), sm_89 (RTX 40, L4), sm_90 (H100, H200) or
    /// sm_120 (RTX 50).
    #[arg(long, value_name = "SM", default_value = "sm_90", value_parser = card)]
    pub(crate) card: (u32, u32),
    /// Product name of the card whose measured speed gives the time, or a part of the name.
    #[arg(long, value_name = "NAME", default_value = "NVIDIA H200")]
    pub(crate) gpu: String,
    /// File with what `bench --json` printed on the card at hand, instead of the shipped measurements.
    #[arg(long, value_name = "FILE")]
    pub(crate) measured: Option<PathBuf>,
    /// Tokens a second, instead of any measurement.
    #[arg(long, value_name = "N", value_parser = above_zero, conflicts_with = "measured")]
    pub(crate) tokens_per_second: Option<f64>,
    /// Budget in hours of one card: says how many steps it pays for.
    #[arg(long, value_name = "H", value_parser = above_zero)]
    pub(crate) hours: Option<f64>,
    /// Budget in money; needs --price.
    #[arg(long, value_name = "M", value_parser = above_zero, conflicts_with = "hours", requires = "price")]
    pub(crate) money: Option<f64>,
    /// Money for an hour of the card.
    #[arg(long, value_name = "P", value_parser = above_zero)]
    pub(crate) price: Option<f64>,
    /// Override of a config key, for example train.seq_len=1024. May be repeated.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    pub(crate) overrides: Vec<Override>,
}

fn above_zero(text: &str) -> Result<f64, String> {
    let number: Option<f64> = text.parse().ok().filter(|x: &f64| x.is_finite() && *x > 0.0);
    number.ok_or_else(|| "expected a number above 0".into())
}

/// `(9, 0)` of `sm_90` or `sm_90a`.
fn card(text: &str) -> Result<(u32, u32), String> {
    let digits = text.strip_prefix("sm_").map(|d| d.trim_end_matches(['a', 'f']));
    let number: Option<u32> = digits.and_then(|d| d.parse().ok());
    match number {
        Some(number @ 80..=999) => Ok((number / 10, number % 10)),
        Some(number) => Err(format!("sm_{number} is too old or unknown; kernels need sm_80 or newer")),
        None => Err("expected an architecture such as sm_90 or sm_86".into()),
    }
}

#[derive(Args)]
pub(crate) struct GenerateArgs {
    /// Run directory, or a checkpoint folder.
    pub(crate) model: PathBuf,
    /// Beginning of the text; empty starts a new document.
    #[arg(long, default_value = "")]
    pub(crate) prompt: String,
    /// Tokens at most.
    #[arg(long, default_value_t = 128)]
    pub(crate) max_new_tokens: usize,
    /// Randomness; 0 always takes the likeliest token.
    #[arg(long, default_value_t = 0.8)]
    pub(crate) temperature: f64,
    /// Draw only from so many likeliest tokens; 0 is all.
    #[arg(long, default_value_t = 0)]
    pub(crate) top_k: usize,
    /// Draw only from the likeliest tokens that together have this probability.
    #[arg(long, default_value_t = 0.95)]
    pub(crate) top_p: f64,
    /// Seed of the draws.
    #[arg(long, default_value_t = 0)]
    pub(crate) seed: u64,
}

#[derive(Args)]
pub(crate) struct LogitsArgs {
    /// Run directory, or a checkpoint folder.
    pub(crate) model: PathBuf,
    /// File to write (safetensors): `ids_T` and `logits_T` for some lengths T.
    #[arg(long, value_name = "FILE", default_value = "probe.safetensors")]
    pub(crate) out: PathBuf,
    /// Seed of the inputs.
    #[arg(long, default_value_t = 0)]
    pub(crate) seed: u64,
}

#[derive(Subcommand)]
pub(crate) enum TokenizerCommand {
    /// Train a byte-level BPE tokenizer and write tokenizer.json
    #[command(after_help = "Example:\n  rb tokenizer train my_text/ --vocab-size 16000 --out tokenizer.json")]
    Train(TokenizerArgs),
}

#[derive(Args)]
pub(crate) struct TokenizerArgs {
    /// .txt and .jsonl files, and folders of them.
    #[arg(required = true)]
    pub(crate) data: Vec<PathBuf>,
    /// Entries, the 256 bytes and special tokens included.
    #[arg(long, default_value_t = 8192)]
    pub(crate) vocab_size: usize,
    /// How text is cut before merges.
    #[arg(long, value_enum, default_value_t = SplitterArg::Rb)]
    pub(crate) splitter: SplitterArg,
    /// File to write.
    #[arg(long, default_value = "tokenizer.json")]
    pub(crate) out: PathBuf,
}

#[derive(Clone, Copy, ValueEnum)]
pub(crate) enum SplitterArg {
    /// Letters stay with their marks, joiners stay inside words.
    Rb,
    /// GPT-2's pattern, which cuts words at every combining mark.
    Gpt2,
}

#[derive(Args)]
pub(crate) struct KernelsArgs {
    /// Architecture to compile for. May be repeated.
    #[arg(long, value_name = "SM", default_values = ["sm_80", "sm_86", "sm_89", "sm_90a", "sm_120"])]
    pub(crate) arch: Vec<String>,
    /// One variant of each kernel for every combination of its element types and formulas, whatever its sizes; for
    /// sm_86 and sm_89 whatever its formulas.
    #[arg(long)]
    pub(crate) quick: bool,
}

#[derive(Args)]
pub(crate) struct VerifyArgs {
    /// Check every operation, every model variant and every refusal.
    #[arg(long)]
    pub(crate) all: bool,
    /// Compare this device with the host: every operation, every model variant, training, repeatability.
    #[arg(long, value_name = "DEVICE", value_parser = ["cuda"])]
    pub(crate) device: Option<String>,
    /// With --device: the operations and a few training steps alone, for `compute-sanitizer --tool memcheck`.
    #[arg(long, requires = "device")]
    pub(crate) quick: bool,
    /// With --device: only as many cases as launch every kernel, for `compute-sanitizer --tool racecheck`.
    #[arg(long, requires = "device", conflicts_with = "quick")]
    pub(crate) cover: bool,
    /// With --device: attention alone, every set of kernels against f64; with --quick on fewer shapes.
    #[arg(long, requires = "device", conflicts_with = "cover")]
    pub(crate) attention: bool,
    /// Check the model of this config file.
    #[arg(long, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
    /// Check that faulty models and steps are refused.
    #[arg(long)]
    pub(crate) loss_gates: bool,
    /// Also write the results as JSON.
    #[arg(long, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,
    /// Seed of weights and batches.
    #[arg(long, default_value_t = 0)]
    pub(crate) seed: u64,
}

pub(crate) fn completions(shell: clap_complete::Shell) -> Result<(), Failure> {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "rb", &mut script);
    print!("{}", String::from_utf8_lossy(&script));
    Ok(())
}
