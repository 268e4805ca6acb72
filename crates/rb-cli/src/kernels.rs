//! `rb kernels`: compiles every kernel for every architecture, without a GPU. `cargo xtask kernels` runs it.

use rb_cuda::{Compiler, inspect_kernels, own_units};

use crate::Failure;
use crate::cli::KernelsArgs;

/// Kernels whose spills are known and cost less than what would avoid them, each with the measurement in
/// `docs/log.md` that says so.
const MAY_SPILL: &[&str] = &[];

pub(crate) fn run(args: &KernelsArgs) -> Result<(), Failure> {
    let compiler = Compiler::find().map_err(|e| Failure::new(1, e.to_string()))?;
    let library = compiler.library();
    println!("{} {} ({})", library.name, library.version, library.path.display());
    let archs: Vec<&str> = args.arch.iter().map(String::as_str).collect();
    let report = inspect_kernels(&compiler, &archs, &|capability| {
        let mut units = rb_verify::kernel_units(capability);
        units.extend(own_units());
        units
    });
    print!("{report}");
    let problems = report.problems(MAY_SPILL);
    println!("{} compilations, {} problems", report.len(), problems.len());
    if problems.is_empty() {
        return Ok(());
    }
    Err(Failure::new(1, format!("kernels:\n{}", problems.join("\n"))))
}
