//! `rb kernels`: compiles every kernel for every architecture, without a GPU. `cargo xtask kernels` runs it.

use std::collections::BTreeMap;

use rb_cuda::{Compiler, Unit, inspect_kernels, own_units};

use crate::Failure;
use crate::cli::KernelsArgs;

/// Kernels whose spills are known and cost less than what would avoid them, each with the measurement in
/// `docs/log.md` that says so.
const MAY_SPILL: &[&str] = &[];

/// Kernels whose `wgmma` products may wait for each other, likewise.
const MAY_WAIT: &[&str] = &[];

pub(crate) fn run(args: &KernelsArgs) -> Result<(), Failure> {
    let compiler = Compiler::find().map_err(|e| Failure::new(1, e.to_string()))?;
    let library = compiler.library();
    println!("{} {} ({})", library.name, library.version, library.path.display());
    let archs: Vec<&str> = args.arch.iter().map(String::as_str).collect();
    let report = inspect_kernels(&compiler, &archs, &|capability| {
        let mut units = rb_verify::kernel_units(capability);
        units.extend(own_units());
        // Another formula of the same types takes nothing else of another card of the same age.
        let formulas = capability != (8, 6) && capability != (8, 9);
        if args.quick { representatives(units, formulas) } else { units }
    });
    print!("{report}");
    let problems = report.problems(MAY_SPILL, MAY_WAIT);
    println!("{} compilations, {} problems", report.len(), problems.len());
    if problems.is_empty() {
        return Ok(());
    }
    Err(Failure::new(1, format!("kernels:\n{}", problems.join("\n"))))
}

/// One unit of each kernel for every combination of the constants that are not numbers, and not formulas unless
/// `formulas`; the same one each time.
fn representatives(units: Vec<Unit>, formulas: bool) -> Vec<Unit> {
    let mut chosen: BTreeMap<(&str, String), Unit> = BTreeMap::new();
    for unit in units {
        let counts = |line: &&str| !is_number(line) && (formulas || !is_formula(line));
        let words = unit.defines.lines().filter(counts).collect::<Vec<_>>().join("\n");
        let slot = chosen.entry((unit.name, words)).or_insert_with(|| unit.clone());
        if unit > *slot {
            *slot = unit;
        }
    }
    chosen.into_values().collect()
}

/// Whether the line `#define NAME VALUE` has numbers as its value, such as `8`, `1e-5f` or `4, 31`.
fn is_number(line: &str) -> bool {
    let value = line.splitn(3, ' ').nth(2).unwrap_or("");
    value.chars().all(|c| c.is_ascii_digit() || ",. -+()efLlu".contains(c))
        && value.chars().any(|c| c.is_ascii_digit())
}

/// Whether the line `#define NAME VALUE` is what an elementwise kernel computes.
fn is_formula(line: &str) -> bool {
    line.starts_with("#define BODY ") || line.starts_with("#define FORMULA ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kernel_and_combination_of_types_stays() {
        let all = rb_verify::kernel_units((9, 0));
        let few = representatives(all.clone(), true);
        let fewer = representatives(all.clone(), false);
        let names = |units: &[Unit]| units.iter().map(|u| u.name).collect::<std::collections::BTreeSet<_>>();
        assert_eq!(names(&few), names(&all));
        assert_eq!(names(&fewer), names(&all));
        assert!(few.len() * 2 < all.len(), "{} of {}", few.len(), all.len());
        assert!(fewer.len() < few.len() && fewer.iter().all(|unit| few.contains(unit)));
        let types = |unit: &Unit| unit.defines.contains("bf16");
        assert!(few.iter().any(types) && !few.iter().all(types));
        let mut backwards = all;
        backwards.reverse();
        assert_eq!(representatives(backwards, true), few);
    }

    #[test]
    fn numbers_are_told_from_types_and_formulas() {
        for line in ["#define N 8", "#define EPS 1e-5f", "#define SIZES 4, 31", "#define SEED 0ull"] {
            assert!(is_number(line), "{line}");
        }
        for line in ["#define T bf16", "#define T float", "#define F a + 1.0f", "#define X"] {
            assert!(!is_number(line), "{line}");
        }
    }
}
