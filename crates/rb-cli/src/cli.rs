//! The command line.

use std::path::PathBuf;
use std::str::FromStr;

use clap::{Args, CommandFactory, Parser, Subcommand, ValueEnum};
use rb_eval::TaskKind;
use rb_train::Override;

use crate::Failure;
use crate::data::DataCommand;
use crate::tokenizer::TokenizerCommand;

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
    #[command(after_help = "Examples:\n  rb generate runs/quickstart --prompt \"Once upon a time\"\n  \
        rb generate runs/quickstart --temperature 1 --min-p 0.1 --seed 7 --stats\n  \
        rb generate MODEL_FOLDER --device cuda --max-new-tokens 500")]
    Generate(GenerateArgs),
    /// Judge a model: held-out text beside its baselines, questions with choices
    #[command(after_help = "Examples:\n  rb eval runs/quickstart --held-out\n  \
        rb eval MODEL_FOLDER --data bn=bangla.jsonl --data en=english.jsonl --out results.json\n  \
        rb eval MODEL_FOLDER --task hellaswag=hellaswag_val.jsonl --task choices=my_questions.jsonl --limit 500")]
    Eval(EvalArgs),
    /// Take a Hugging Face folder of the Llama family in, checked, to judge it, generate with it or train it on
    #[command(after_help = "Examples:\n  rb import downloads/some-llama --out models/start\n  \
        rb generate models/start --prompt Hello")]
    Import(ImportArgs),
    /// Write a model for transformers or llama.cpp
    #[command(after_help = "Examples:\n  rb export runs/quickstart --out my-model\n  \
        rb export runs/quickstart --out my-model --dtype bf16 --shard-mib 2000\n  \
        rb export runs/quickstart --format gguf --dtype q8_0 --out my-model.gguf")]
    Export(ExportArgs),
    /// Write the logits of fixed random inputs, to compare a model with another program's
    #[command(after_help = "Example:\n  rb logits runs/quickstart --out probe.safetensors\n  \
        python bench-scripts/check_transformers.py runs/quickstart probe.safetensors")]
    Logits(LogitsArgs),
    /// Train a tokenizer, or report how well one serves each language
    Tokenizer {
        #[command(subcommand)]
        command: TokenizerCommand,
    },
    /// Prepare text for training, or check what was prepared
    Data {
        #[command(subcommand)]
        command: DataCommand,
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
    /// Text to train on instead of the config's: a .txt, .jsonl or .parquet file, a folder, a pattern, or a folder
    /// of `rb data prepare`. May be repeated.
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
    /// Draw only from tokens with at least this part of the likeliest token's probability; 0 is all.
    #[arg(long, default_value_t = 0.0)]
    pub(crate) min_p: f64,
    /// Make tokens that occurred less likely: above 1; 1 changes nothing.
    #[arg(long, default_value_t = 1.0)]
    pub(crate) repetition_penalty: f64,
    /// Seed of the draws.
    #[arg(long, default_value_t = 0)]
    pub(crate) seed: u64,
    /// Go on after the token that ends a text.
    #[arg(long)]
    pub(crate) ignore_eos: bool,
    /// Read the whole text for every token instead of keeping keys and values: slow, the same tokens.
    #[arg(long)]
    pub(crate) no_cache: bool,
    /// Print tokens and seconds to standard error at the end.
    #[arg(long)]
    pub(crate) stats: bool,
    #[command(flatten)]
    pub(crate) place: PlaceArgs,
}

/// Where a model that is only read computes.
#[derive(Args)]
pub(crate) struct PlaceArgs {
    /// A GPU where one is usable (auto), the CPU, or a GPU or an error.
    #[arg(long, value_enum, default_value_t = DeviceArg::Auto)]
    pub(crate) device: DeviceArg,
    /// bf16 on a GPU and fp32 on the CPU (auto), or one of them.
    #[arg(long, value_enum, default_value_t = PrecisionArg::Auto)]
    pub(crate) precision: PrecisionArg,
}

#[derive(Clone, Copy, ValueEnum)]
pub(crate) enum DeviceArg {
    Auto,
    Cpu,
    Cuda,
}

#[derive(Clone, Copy, ValueEnum)]
pub(crate) enum PrecisionArg {
    Auto,
    Fp32,
    Bf16,
}

#[derive(Args)]
pub(crate) struct EvalArgs {
    /// Run directory, checkpoint or model folder.
    pub(crate) model: PathBuf,
    /// Held-out text: a .txt, .jsonl or .parquet file or a folder. Its losses are shown by NAME, or by file where no name is given.
    /// May be repeated.
    #[arg(long, value_name = "[NAME=]PATH")]
    pub(crate) data: Vec<NamedPath>,
    /// Field of .jsonl files, or column of .parquet files, whose value a document's losses are shown by.
    #[arg(long, value_name = "FIELD")]
    pub(crate) language_field: Option<String>,
    /// The text that the model's own run held out, as `held_out`.
    #[arg(long)]
    pub(crate) held_out: bool,
    /// Questions: hellaswag, arc_easy, arc_challenge, piqa, openbookqa or winogrande in their published JSON lines, or
    /// choices: {"context", "choices", "answer"} a line. May be repeated.
    #[arg(long, value_name = "KIND=FILE")]
    pub(crate) task: Vec<TaskFile>,
    /// Only the first N questions of each task.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) limit: Option<u32>,
    /// Write the results in the JSON of lm-evaluation-harness.
    #[arg(long, value_name = "FILE")]
    pub(crate) out: Option<PathBuf>,
    /// Write what each choice of each question got, a JSON object a line.
    #[arg(long, value_name = "FILE")]
    pub(crate) samples: Option<PathBuf>,
    /// Seed of the weights of the random twin.
    #[arg(long, default_value_t = 0)]
    pub(crate) twin_seed: u64,
    /// Tokens read at once; fewer need less memory.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) batch_tokens: Option<u32>,
    #[command(flatten)]
    pub(crate) place: PlaceArgs,
}

/// `NAME=PATH`, or a path alone.
#[derive(Clone)]
pub(crate) struct NamedPath {
    pub(crate) name: Option<String>,
    pub(crate) path: PathBuf,
}

impl FromStr for NamedPath {
    type Err = String;

    fn from_str(text: &str) -> Result<NamedPath, String> {
        match text.split_once('=') {
            Some((name, path)) if !name.is_empty() && !path.is_empty() && !name.contains(['/', '\\']) => {
                Ok(NamedPath { name: Some(name.into()), path: path.into() })
            }
            _ if text.is_empty() => Err("is empty; name a file or a folder".into()),
            _ => Ok(NamedPath { name: None, path: text.into() }),
        }
    }
}

/// `KIND=FILE`.
#[derive(Clone)]
pub(crate) struct TaskFile {
    pub(crate) name: String,
    pub(crate) kind: TaskKind,
    pub(crate) path: PathBuf,
}

impl FromStr for TaskFile {
    type Err = String;

    fn from_str(text: &str) -> Result<TaskFile, String> {
        let (kind, path) = text.split_once('=').ok_or("expected KIND=FILE, for example piqa=valid.jsonl")?;
        let (kind, path) = (kind.parse::<TaskKind>()?, PathBuf::from(path));
        // Own questions go by the name of their file.
        let stem = path.file_stem().map(|stem| stem.to_string_lossy().into_owned());
        let name = if kind == TaskKind::Choices { stem } else { None };
        Ok(TaskFile { name: name.unwrap_or_else(|| kind.name().to_string()), kind, path })
    }
}

#[derive(Args)]
pub(crate) struct ImportArgs {
    /// Folder with config.json, model.safetensors (or shards with their index) and tokenizer.json.
    pub(crate) folder: PathBuf,
    /// Folder to write.
    #[arg(long, value_name = "DIR")]
    pub(crate) out: PathBuf,
    /// Replace a model that is there, once the new one is on disk.
    #[arg(long)]
    pub(crate) overwrite: bool,
}

#[derive(Args)]
pub(crate) struct ExportArgs {
    /// Run directory, checkpoint or model folder.
    pub(crate) model: PathBuf,
    /// Folder, or GGUF file, to write.
    #[arg(long, value_name = "PATH")]
    pub(crate) out: PathBuf,
    /// A Hugging Face folder or a GGUF file.
    #[arg(long, value_enum, default_value_t = ExportFormat::Hf)]
    pub(crate) format: ExportFormat,
    /// Element type of the weights: f32, bf16 or f16 in a folder; f32, f16 or q8_0 in GGUF.
    #[arg(long, value_enum, default_value_t = ExportDtype::F32)]
    pub(crate) dtype: ExportDtype,
    /// Most MiB of a file in a folder; larger models are cut into shards with an index.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) shard_mib: Option<u32>,
    /// Replace a model that is there, once the new one is on disk.
    #[arg(long)]
    pub(crate) overwrite: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum ExportFormat {
    Hf,
    Gguf,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum ExportDtype {
    F32,
    Bf16,
    F16,
    #[value(name = "q8_0")]
    Q8_0,
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
