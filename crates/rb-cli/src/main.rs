//! `rb`: trains, samples and checks language models.

mod cli;
mod data;
mod doctor;
mod eval;
mod export;
mod generate;
mod import;
mod kernels;
mod logits;
mod model;
mod panic;
mod plan;
mod progress;
mod stop;
mod tokenizer;
mod train;
mod verify;

use std::process::ExitCode;

use clap::Parser;

use cli::{Cli, Command};

fn main() -> ExitCode {
    panic::explain_in_one_line();
    rb_train::observe::keep_freed_memory();
    // Errors found by the argument parser leave with code 2, help and version with 0.
    let cli = Cli::parse();
    let filter = tracing_subscriber::EnvFilter::try_from_default_env().unwrap_or_else(|_| "warn".into());
    let colours = std::io::IsTerminal::is_terminal(&std::io::stderr());
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(colours)
        .without_time()
        .init();
    if let Err(message) = check_processor() {
        eprintln!("error: {message}");
        return ExitCode::FAILURE;
    }
    if let Some(threads) = cli.threads
        && let Err(error) = rayon::ThreadPoolBuilder::new().num_threads(threads.into()).build_global()
    {
        eprintln!("error: --threads {threads}: {error}");
        return ExitCode::FAILURE;
    }
    let result = match cli.command {
        Command::Train(args) => train::run(&args),
        Command::Plan(args) => plan::run(&args),
        Command::Generate(args) => generate::run(&args),
        Command::Eval(args) => eval::run(&args),
        Command::Import(args) => import::run(&args),
        Command::Export(args) => export::run(&args),
        Command::Logits(args) => logits::run(&args),
        Command::Tokenizer { command } => tokenizer::run(&command),
        Command::Data { command } => data::run(&command),
        Command::Doctor => doctor::run(),
        Command::Kernels(args) => kernels::run(&args),
        Command::Verify(args) => verify::run(&args),
        Command::Completions { shell } => cli::completions(shell),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            eprintln!("error: {}", failure.message);
            ExitCode::from(failure.code)
        }
    }
}

/// Why a command ended badly: the message for the user, and 1 failed, 2 bad usage or config, 3 refused.
pub(crate) struct Failure {
    pub(crate) message: String,
    pub(crate) code: u8,
}

impl Failure {
    pub(crate) fn new(code: u8, message: impl Into<String>) -> Failure {
        Failure { message: message.into(), code }
    }

    /// An error with exit code 1.
    pub(crate) fn failed(error: impl std::error::Error + 'static) -> Failure {
        Failure::new(1, explained(&error))
    }
}

impl From<rb_train::TrainError> for Failure {
    fn from(error: rb_train::TrainError) -> Self {
        let mut message = explained(&error);
        if refusal(&error).is_some_and(rb_train::observe::may_continue) {
            message.push_str(", then continue with --resume");
        }
        Failure::new(error.exit_code(), message)
    }
}

/// What the operating system refused, if that led to the error. Readers of compressed files give errors of the same type,
/// which say themselves what is wrong.
fn refusal<'e>(error: &'e (dyn std::error::Error + 'static)) -> Option<&'e std::io::Error> {
    let mut all = std::iter::successors(Some(error), |e| e.source());
    let refusal = all.find_map(|e| e.downcast_ref::<std::io::Error>())?;
    use std::io::ErrorKind::{InvalidData, InvalidInput, Other, UnexpectedEof};
    let of_a_reader = [InvalidData, InvalidInput, Other, UnexpectedEof].contains(&refusal.kind());
    (refusal.get_ref().is_none() || !of_a_reader).then_some(refusal)
}

/// The message of an error; where the operating system refused something, with what the user can do about it.
fn explained(error: &(dyn std::error::Error + 'static)) -> String {
    let message = error.to_string();
    match refusal(error).map(rb_train::observe::remedy) {
        Some(remedy) if !message.contains(remedy) => format!("{message}; {remedy}"),
        _ => message,
    }
}

/// The release is compiled for AVX2 and FMA; an older processor would stop with an illegal instruction.
fn check_processor() -> Result<(), String> {
    #[cfg(target_arch = "x86_64")]
    if !(is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma")) {
        return Err(
            "this program needs a processor with AVX2 and FMA (2013 or later); build it for yours by \
                    removing target-cpu from .cargo/config.toml"
                .into(),
        );
    }
    Ok(())
}
