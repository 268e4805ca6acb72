//! `cargo xtask bench-sweep`: our training step and every installed peer, in turns, on every shape of the speed table.
//!
//! Needs no toolchain: a copy of this program, of `bench` and of `bench-scripts/` is enough on the machine with the card.

mod program;
mod report;
mod run;

use std::path::PathBuf;

use clap::{Args, ValueEnum};

use crate::error::Error;
use program::{Ours, Peer, Program};
use report::{Column, Sweep};

/// Options of `bench-sweep`.
#[derive(Args, Debug)]
pub struct Options {
    /// Our benchmark program.
    #[arg(long, value_name = "PATH", default_value = "target/release/bench")]
    bench: PathBuf,
    /// Folder of the peers' programs.
    #[arg(long, value_name = "FOLDER", default_value = "bench-scripts")]
    scripts: PathBuf,
    /// Python that runs them.
    #[arg(long, value_name = "PROGRAM", default_value = "python3")]
    python: String,
    /// Shapes: sequences x tokens.
    #[arg(
        long, value_delimiter = ',', value_parser = parse_shape,
        default_value = "1x512,1x1024,4x512,8x512,4x1024,16x1024,64x1024"
    )]
    shapes: Vec<Shape>,
    /// Peers; one whose framework is not installed is named in the table and left out.
    #[arg(long, value_delimiter = ',', value_enum, default_value = "torch,jax,tf")]
    peers: Vec<PeerKind>,
    /// Modes of the PyTorch peer, each a program of its own.
    #[arg(long, value_delimiter = ',', default_value = "graph")]
    torch_modes: Vec<String>,
    /// Runs of each program on each shape.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    repeats: u32,
    /// Timed steps of a run.
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..))]
    steps: u32,
    /// Model: another preset, or the flags after `--`.
    #[arg(long, value_enum, default_value_t = Model::M101)]
    model: Model,
    /// One more argument of our program: --ours-arg=--tune. May be repeated.
    #[arg(long, value_name = "ARG", allow_hyphen_values = true)]
    ours_arg: Vec<String>,
    /// Where table.md, results.json and speeds.svg go.
    #[arg(long, value_name = "FOLDER", default_value = "target/bench-sweep")]
    out: PathBuf,
    /// Everything in fp32 on the CPU: tests the sweep and measures nothing.
    #[arg(long)]
    cpu: bool,
    /// Flags of the model for all programs, such as --d-model 64 --n-layers 2.
    #[arg(last = true)]
    model_flags: Vec<String>,
}

/// Sequences and tokens of one.
pub type Shape = (usize, usize);

fn parse_shape(text: &str) -> Result<Shape, String> {
    let parts = text.split_once('x').and_then(|(b, t)| Some((b.parse().ok()?, t.parse().ok()?)));
    match parts {
        Some((batch, len)) if batch > 0 && len > 0 => Ok((batch, len)),
        _ => Err("a shape is sequences x tokens, such as 4x1024".into()),
    }
}

#[derive(ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
enum PeerKind {
    Torch,
    Jax,
    Tf,
}

impl PeerKind {
    /// Script, and the module that must be there.
    fn names(self) -> (&'static str, &'static str) {
        match self {
            PeerKind::Torch => ("torch_bench_300m.py", "torch"),
            PeerKind::Jax => ("jax_bench_300m.py", "jax"),
            PeerKind::Tf => ("tf_bench_300m.py", "tensorflow"),
        }
    }
}

/// Models of the speed tables.
#[derive(ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
enum Model {
    /// 101.7M: hidden 768, 16 layers, heads 12/4 of 64, intermediate 1408, vocabulary 32004.
    #[value(name = "101m")]
    M101,
    /// 0.43B: hidden 1024, 24 layers, heads 16/4 of 64, intermediate 4096, vocabulary 64000.
    #[value(name = "430m")]
    M430,
}

impl Model {
    fn flags(self) -> &'static [(&'static str, u32)] {
        match self {
            Model::M101 => &[
                ("--d-model", 768),
                ("--n-layers", 16),
                ("--n-heads", 12),
                ("--n-kv-heads", 4),
                ("--head-dim", 64),
                ("--d-ff", 1408),
                ("--vocab", 32004),
            ],
            Model::M430 => &[
                ("--d-model", 1024),
                ("--n-layers", 24),
                ("--n-heads", 16),
                ("--n-kv-heads", 4),
                ("--head-dim", 64),
                ("--d-ff", 4096),
                ("--vocab", 64000),
            ],
        }
    }
}

impl Options {
    /// Flags of the model with the ones after `--`, which come later and so win.
    fn model_words(&self) -> Vec<String> {
        let preset =
            self.model.flags().iter().flat_map(|(flag, value)| [flag.to_string(), value.to_string()]);
        preset.chain(self.model_flags.iter().cloned()).collect()
    }

    /// Ids below which random tokens are drawn.
    fn vocab(&self) -> Result<u32, Error> {
        let words = self.model_words();
        let at = words.iter().rposition(|word| word == "--vocab").unwrap_or(0);
        words.get(at + 1).and_then(|value| value.parse().ok()).filter(|&v| v > 0).ok_or_else(|| {
            Error::usage("--vocab in the flags of the model has no number", "write --vocab 32004")
        })
    }
}

/// Runs the sweep; true where our program passed the gate on every shape and so did every peer that is installed.
pub fn run(options: &Options) -> Result<bool, Error> {
    if !options.bench.is_file() {
        return Err(Error::usage(
            format!("{} is missing", options.bench.display()),
            "run `cargo build --release -p rb-bench`, or name the program with --bench",
        ));
    }
    std::fs::create_dir_all(&options.out).map_err(Error::io("create", &options.out))?;
    let (peers, missing) = installed(options)?;
    let mut sweep = Sweep::new(options.cpu, options.repeats, missing);
    let mut good = true;
    for &shape in &options.shapes {
        let columns = on_shape(options, shape, &peers)?;
        good &= columns.iter().all(|column| column.outcome.is_ok());
        sweep.add(shape, columns);
        // After each shape, so that what was measured is kept when a later one is cut short.
        sweep.write(&options.out)?;
    }
    print!("{}", sweep.table());
    println!("written to {}", options.out.display());
    Ok(good)
}

/// Script and mode of a peer.
type Chosen = (PathBuf, Option<String>);

/// Each peer that can run, and a line for each that cannot.
fn installed(options: &Options) -> Result<(Vec<Chosen>, Vec<String>), Error> {
    let (mut peers, mut missing) = (Vec::new(), Vec::new());
    for kind in &options.peers {
        let (script, module) = kind.names();
        let path = options.scripts.join(script);
        if !path.is_file() {
            return Err(Error::usage(
                format!("{} is missing", path.display()),
                "name the folder of the peers' programs with --scripts",
            ));
        }
        if !program::has_module(&options.python, module)? {
            missing.push(format!("{script}: {module} is not installed for {}", options.python));
            continue;
        }
        match kind {
            PeerKind::Torch => {
                peers.extend(options.torch_modes.iter().map(|m| (path.clone(), Some(m.clone()))))
            }
            _ => peers.push((path, None)),
        }
    }
    Ok((peers, missing))
}

/// All programs on one shape, in turns.
fn on_shape(options: &Options, shape: Shape, peers: &[Chosen]) -> Result<Vec<Column>, Error> {
    let tokens = program::random_tokens(&options.out, shape, options.vocab()?)?;
    let mut words = options.model_words();
    for (flag, value) in [
        ("--batch-size", shape.0.to_string()),
        ("--seq-len", shape.1.to_string()),
        ("--steps", options.steps.to_string()),
        ("--warm-up", "5".into()),
        ("--batches", program::BATCHES.to_string()),
        ("--lr", "3e-4".into()),
        ("--tokens", tokens.display().to_string()),
    ] {
        words.extend([flag.to_string(), value]);
    }
    let mut programs: Vec<Box<dyn Program>> = vec![Box::new(Ours::new(options, &words))];
    for (script, mode) in peers {
        // Peers start and compile side by side, before anything is timed.
        programs.push(Box::new(Peer::start(options, script, mode.as_deref(), &words)?));
    }
    let mut columns: Vec<Column> = Vec::new();
    for program in &mut programs {
        let outcome = program.ready().map(|()| Vec::new());
        println!(
            "{}x{} {}: {}",
            shape.0,
            shape.1,
            program.name(),
            if outcome.is_ok() { "ready" } else { "failed" }
        );
        columns.push(Column { name: program.name(), about: program.about(), outcome });
    }
    for repeat in 0..options.repeats {
        let mut order: Vec<usize> = (0..programs.len()).collect();
        // The order alternates, so that a card that warms up favours none.
        if repeat % 2 == 1 {
            order.reverse();
        }
        for i in order {
            let (program, column) = (&mut programs[i], &mut columns[i]);
            let Ok(runs) = &mut column.outcome else { continue };
            match program.run() {
                Ok(run) => {
                    println!("{}x{} run {} {}: {run}", shape.0, shape.1, repeat + 1, column.name);
                    runs.push(run);
                }
                Err(reason) => {
                    println!("{}x{} run {} {}: {reason}", shape.0, shape.1, repeat + 1, column.name);
                    column.outcome = Err(reason);
                }
            }
        }
    }
    std::fs::remove_file(&tokens).map_err(Error::io("remove", &tokens))?;
    Ok(columns)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shapes_are_read() {
        assert_eq!(parse_shape("4x1024"), Ok((4, 1024)));
        for bad in ["4", "x", "0x8", "4x", "4x1024x2"] {
            assert!(parse_shape(bad).is_err(), "{bad}");
        }
    }
}
