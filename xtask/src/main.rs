//! `cargo xtask <command>`: the checks and generators of this repository.
//!
//! - `verify`: every check, in order, with a table at the end.
//! - `tidy`: the rules on source, documents and manifests that a compiler does not know.
//! - `ladder`: which crate may depend on which.
//! - `kernels`: compiles every kernel for every architecture with NVRTC; needs no GPU.
//! - `mutate`: changes backward code in one place at a time and looks whether a test notices.
//! - `bench-sweep`: our training step and every installed peer in turns, on every shape of the speed table.
//! - `new-op`: the skeleton of an operation and its registry line.
//!
//! This crate depends on no `rb-*` crate, so it builds in seconds and works when they do not.

mod bench_sweep;
mod error;
mod kernels;
mod ladder;
mod lexer;
mod mutate;
mod new_op;
mod rust_file;
mod tidy;
mod tree;
mod verify;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

use crate::error::Error;

#[derive(Parser)]
#[command(name = "cargo xtask", about = "Checks and generators of this repository", max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Run every check and print a table; logs go to target/verify/
    Verify(verify::Options),
    /// Check the rules on source, documents and manifests
    Tidy,
    /// Check which crate depends on which, and print the edges
    Ladder,
    /// Compile every kernel for every architecture with NVRTC, and show registers, memory and spills
    #[command(after_help = "NVRTC comes with the CUDA toolkit or with `pip install nvidia-cuda-nvrtc`; \
        RUSTINGBRAIN_CUDA_PATH may name its folder. No GPU is needed.")]
    Kernels {
        /// Options of `rb kernels`, for example --arch sm_90a
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        options: Vec<String>,
    },
    /// Change backward code in one place at a time, and see whether a test notices
    #[command(
        after_help = "Examples:\n  cargo xtask mutate --sample 200\n  cargo xtask mutate --file rms_norm"
    )]
    Mutate(mutate::Options),
    /// Time our training step and every installed peer in turns, on every shape
    #[command(after_help = "Examples:\n  cargo build --release -p rb-bench && cargo xtask bench-sweep\n  \
        cargo xtask bench-sweep --model 430m --shapes 8x2048 --peers torch,jax\n  \
        cargo xtask bench-sweep --cpu --shapes 2x32 --steps 4 -- --d-model 64 --n-layers 2 --n-heads 4 \\\n    \
        --n-kv-heads 2 --head-dim 16 --d-ff 96 --vocab 250\n\
        The program runs without a toolchain: copy target/debug/xtask, target/release/bench and bench-scripts/.")]
    BenchSweep(bench_sweep::Options),
    /// Write the skeleton of an operation and add it to the registry
    NewOp {
        /// Name of the operation in snake case, as PyTorch calls it
        name: String,
    },
}

fn main() -> ExitCode {
    let root = tree::root();
    let outcome = match Cli::parse().command {
        Command::Verify(options) => verify::run(&root, &options),
        Command::Tidy => tidy::run(&root).map(print_report),
        Command::Ladder => ladder::run(&root).map(print_report),
        Command::Kernels { options } => kernels::run(&root, &options),
        Command::Mutate(options) => mutate::run(&root, &options),
        Command::BenchSweep(options) => bench_sweep::run(&options),
        Command::NewOp { name } => new_op::run(&root, &name).map(print_report),
    };
    match outcome {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::from(if matches!(error, Error::Usage { .. }) { 2 } else { 1 })
        }
    }
}

/// What an in-process command found: the text to show, one line on what ran, and whether it is good.
pub struct Report {
    pub text: String,
    pub summary: String,
    pub ok: bool,
}

fn print_report(report: Report) -> bool {
    print!("{}", report.text);
    println!("{}", report.summary);
    report.ok
}
