//! `rb verify`

use rb_verify::{Report, loss_gates, verify_config, verify_operations, verify_variants};

use crate::Failure;
use crate::cli::VerifyArgs;

pub(crate) fn run(args: &VerifyArgs) -> Result<(), Failure> {
    let fail = |e: rb_verify::VerifyError| Failure::new(1, e.to_string());
    if !(args.all || args.loss_gates || args.config.is_some()) {
        return Err(Failure::new(2, "say what to check: --all, --config FILE or --loss-gates"));
    }
    let mut report = Report::default();
    if args.all {
        report.extend("operations", verify_operations());
        report.extend("model", verify_variants(args.seed).map_err(fail)?);
    }
    if args.all || args.loss_gates {
        report.extend("gates", loss_gates(args.seed).map_err(fail)?);
    }
    if let Some(path) = &args.config {
        let mut config = rb_train::config::load(path, &[])?.model;
        if config.vocab_size == 0 {
            // The tokenizer would give it; the size does not matter to these checks.
            config.vocab_size = 257;
        }
        report.extend("config", verify_config(&config, args.seed).map_err(fail)?);
    }
    println!("{report}");
    if let Some(path) = &args.json {
        let text = serde_json::to_string_pretty(&report).map_err(|e| Failure::new(1, e.to_string()))?;
        std::fs::write(path, text).map_err(|e| Failure::new(1, format!("{}: {e}", path.display())))?;
    }
    match report.refusal() {
        None => Ok(()),
        Some(reason) => Err(Failure::new(3, reason)),
    }
}
