//! `rb verify`

use rb_cuda::{Gpu, GpuOptions};
use rb_verify::{
    Extent, Report, loss_gates, verify_attention, verify_config, verify_device, verify_operations,
    verify_variants,
};

use crate::Failure;
use crate::cli::VerifyArgs;

pub(crate) fn run(args: &VerifyArgs) -> Result<(), Failure> {
    let fail = |e: rb_verify::VerifyError| Failure::new(1, e.to_string());
    if !(args.all || args.loss_gates || args.config.is_some() || args.device.is_some()) {
        let what = "say what to check: --all, --config FILE, --loss-gates or --device cuda";
        return Err(Failure::new(2, what));
    }
    let mut report = Report::default();
    if args.all {
        report.extend("operations", verify_operations());
        report.extend("model", verify_variants(args.seed).map_err(fail)?);
        report.extend("training", rb_train::verify::verify_training(args.seed)?);
    }
    if args.all || args.loss_gates {
        report.extend("gates", loss_gates(args.seed).map_err(fail)?);
    }
    if let Some(path) = &args.config {
        let whole = rb_train::config::load(path, &[])?;
        let schedule = Report { checks: vec![rb_train::verify::verify_schedule(&whole)] };
        report.extend("config", schedule);
        let mut config = whole.model;
        if config.vocab_size == 0 {
            // The tokenizer would give it; the size does not matter to these checks.
            config.vocab_size = 257;
        }
        report.extend("config", verify_config(&config, args.seed).map_err(fail)?);
    }
    if args.device.is_some() {
        // What a kernel leaves unwritten must not look like a result.
        let options = GpuOptions { poison: true, ..GpuOptions::default() };
        let gpu = Gpu::open(0, &options).map_err(|e| Failure::new(1, e.to_string()))?;
        println!("{gpu}: {}", gpu.info().name);
        let mut progress = |check: &rb_verify::Check| {
            println!("{} {}: {}", if check.passed { "ok  " } else { "FAIL" }, check.name, check.detail);
        };
        let extent = match (args.quick, args.cover) {
            (_, true) => Extent::Cover,
            (true, _) => Extent::Quick,
            _ => Extent::Full,
        };
        let checks = if args.attention {
            let checks = verify_attention(gpu, args.seed, args.quick).map_err(fail)?;
            checks.checks.iter().for_each(&mut progress);
            checks
        } else {
            verify_device(gpu, args.seed, extent, &mut progress).map_err(fail)?
        };
        report.extend(&gpu.to_string(), checks);
    }
    println!("{report}");
    if let Some(path) = &args.json {
        let text = serde_json::to_string_pretty(&report).map_err(|e| Failure::new(1, e.to_string()))?;
        std::fs::write(path, text).map_err(|e| {
            Failure::new(1, format!("{}: {e}; {}", path.display(), rb_train::observe::remedy(&e)))
        })?;
    }
    match report.refusal() {
        None => Ok(()),
        Some(reason) => Err(Failure::new(3, reason)),
    }
}
