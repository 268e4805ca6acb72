//! `bench`: the speed of training one model shape, refused unless its loss is finite and falls; `bench attention`:
//! the speed of attention alone.

mod args;
mod attention;
mod batches;
mod profile;
mod report;
mod run;

use std::ffi::OsString;
use std::process::ExitCode;
use std::time::Instant;

use clap::Parser;
use rb_train::{Result, TrainError};

use crate::args::Args;

fn main() -> ExitCode {
    let started = Instant::now();
    rb_train::observe::keep_freed_memory();
    let mut line: Vec<OsString> = std::env::args_os().collect();
    let done = if line.get(1).is_some_and(|word| word == "attention") {
        line.remove(1);
        attention::bench(&attention::Args::parse_from(line))
    } else {
        bench(&Args::parse_from(line), started)
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::from(error.exit_code())
        }
    }
}

fn bench(args: &Args, started: Instant) -> Result<()> {
    if let Some(threads) = args.threads {
        let built = rayon::ThreadPoolBuilder::new().num_threads(threads).build_global();
        built
            .map_err(|error| TrainError::Config { origin: "--threads".into(), reason: error.to_string() })?;
    }
    let report = run::run(args, started, std::env::args().collect())?;
    for line in report.lines() {
        println!("{line}");
    }
    report::write_json(args.json.as_deref(), &report)
}
