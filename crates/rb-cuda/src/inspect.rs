//! What kernels take of a card, for every architecture, without a card.

use std::collections::BTreeMap;
use std::fmt;

use crate::compile::in_parallel;
use crate::kernel::Unit;
use crate::{Compiler, Result};

/// What one kernel takes on one architecture.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Resources {
    /// Registers of a thread.
    pub registers: usize,
    /// Static shared memory of a block, in bytes.
    pub shared_bytes: usize,
    /// Stack of a thread, in bytes: arrays that are indexed at run time, and spills.
    pub stack_bytes: usize,
    /// Registers written to memory and read again for want of room, in bytes of a thread, stores and loads.
    pub spill_bytes: usize,
    /// Warnings of the compiler.
    pub warnings: usize,
    /// Whether each `wgmma` product waits for the one before, which costs a fifth of such a kernel's speed and changes
    /// no result: the assembler found too few registers, or could not prove that they are free.
    pub products_wait: bool,
}

impl Resources {
    /// Reads what the assembler says when it is asked to be verbose.
    pub(crate) fn parse(log: &str) -> Option<Resources> {
        let mut found = Resources::default();
        let mut seen = false;
        for line in log.lines() {
            if let Some(used) = line.split_once("Used ").map(|(_, rest)| rest) {
                seen = true;
                found.registers = number_before(used, " registers")?;
                found.shared_bytes = number_before(used, " bytes smem").unwrap_or(0);
            } else if line.contains(" bytes stack frame") {
                // One line for the kernel and for each function that is called, not inlined.
                found.stack_bytes += number_before(line, " bytes stack frame").unwrap_or(0);
                found.spill_bytes += number_before(line, " bytes spill stores").unwrap_or(0);
                found.spill_bytes += number_before(line, " bytes spill loads").unwrap_or(0);
            } else if line.contains("wgmma") && line.contains("serialized") {
                found.products_wait = true;
            } else if line.contains("warning") {
                found.warnings += 1;
            }
        }
        seen.then_some(found)
    }
}

/// The number that ends right before `word`.
fn number_before(text: &str, word: &str) -> Option<usize> {
    let before = &text[..text.find(word)?];
    before.rsplit(|c: char| !c.is_ascii_digit()).next()?.parse().ok()
}

/// What [`inspect_kernels`] found; prints as a table.
#[derive(Debug)]
pub struct KernelReport {
    archs: Vec<String>,
    rows: BTreeMap<Unit, Vec<Option<Result<Resources>>>>,
}

/// Compiles kernels for architectures such as `sm_90a`, on all cores. `units` gives the kernels that run on a
/// compute capability: `(9, 0)` for `sm_90a`.
pub fn inspect_kernels(
    compiler: &Compiler,
    archs: &[&str],
    units: &dyn Fn((u32, u32)) -> Vec<Unit>,
) -> KernelReport {
    let mut work: Vec<(usize, Unit)> = Vec::new();
    for (at, arch) in archs.iter().enumerate() {
        let mut list = units(capability(arch));
        list.sort();
        list.dedup();
        work.extend(list.into_iter().map(|unit| (at, unit)));
    }
    // Failures are results here, so that one does not hide the others.
    let results = in_parallel(&work, |(at, unit)| Ok(compiler.inspect(unit, archs[*at])));
    let mut rows: BTreeMap<Unit, Vec<Option<Result<Resources>>>> = BTreeMap::new();
    for ((at, unit), result) in work.into_iter().zip(results.into_iter().flatten()) {
        rows.entry(unit).or_insert_with(|| vec![None; archs.len()])[at] = Some(result);
    }
    KernelReport { archs: archs.iter().map(ToString::to_string).collect(), rows }
}

/// `(12, 0)` of `sm_120`, `(9, 0)` of `sm_90a`.
fn capability(arch: &str) -> (u32, u32) {
    let digits: String = arch.chars().filter(char::is_ascii_digit).collect();
    let number: u32 = digits.parse().unwrap_or(0);
    (number / 10, number % 10)
}

impl KernelReport {
    /// Compilations.
    pub fn len(&self) -> usize {
        self.rows.values().flatten().flatten().count()
    }

    /// Whether there was no kernel.
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// Why the kernels are not good: errors, spills of kernels that are not in `may_spill`, and products that wait in
    /// kernels that are not in `may_wait`.
    pub fn problems(&self, may_spill: &[&str], may_wait: &[&str]) -> Vec<String> {
        let mut problems = Vec::new();
        for (unit, results) in &self.rows {
            for (arch, result) in self.archs.iter().zip(results) {
                match result {
                    Some(Err(error)) => problems.push(error.to_string()),
                    Some(Ok(found)) if found.spill_bytes > 0 && !may_spill.contains(&unit.name) => {
                        problems.push(format!(
                            "kernel {} with {} spills {} bytes for {arch}",
                            unit.name,
                            constants(unit),
                            found.spill_bytes
                        ));
                    }
                    Some(Ok(found)) if found.products_wait && !may_wait.contains(&unit.name) => {
                        problems.push(format!(
                            "kernel {} with {} waits after each of its products for {arch}",
                            unit.name,
                            constants(unit)
                        ));
                    }
                    _ => {}
                }
            }
        }
        problems
    }
}

fn constants(unit: &Unit) -> String {
    let list: Vec<String> =
        unit.defines.lines().map(|line| line.trim_start_matches("#define ").replacen(' ', "=", 1)).collect();
    if list.is_empty() { "no constants".into() } else { list.join(" ") }
}

impl fmt::Display for KernelReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let width = self.rows.keys().map(|unit| unit.name.len()).max().unwrap_or(0).max("kernel".len());
        write!(f, "{:width$}", "kernel")?;
        for arch in &self.archs {
            write!(f, " {arch:>8}")?;
        }
        writeln!(f, " {:>8} {:>8} {:>8}  constants", "shared", "stack", "spills")?;
        for (unit, results) in &self.rows {
            write!(f, "{:width$}", unit.name)?;
            for result in results {
                let text = match result {
                    None => "-".to_string(),
                    Some(Err(_)) => "error".to_string(),
                    Some(Ok(found)) => found.registers.to_string(),
                };
                write!(f, " {text:>8}")?;
            }
            let good = || results.iter().flatten().flatten();
            let most = |of: &dyn Fn(&Resources) -> usize| good().map(of).max().unwrap_or(0);
            write!(
                f,
                " {:>8} {:>8} {:>8}  {}",
                most(&|r| r.shared_bytes),
                most(&|r| r.stack_bytes),
                most(&|r| r.spill_bytes),
                constants(unit)
            )?;
            if good().any(|r| r.products_wait) {
                write!(f, "  (products wait)")?;
            }
            match most(&|r| r.warnings) {
                0 => writeln!(f)?,
                count => writeln!(f, "  ({count} warnings)")?,
            }
        }
        writeln!(
            f,
            "registers by architecture; static shared memory, stack and spills in bytes, the most of all"
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::{Kernel, Launch};

    #[test]
    fn the_verbose_log_is_read() {
        let log = "ptxas info    : 0 bytes gmem\n\
            ptxas info    : Compiling entry function 'k' for 'sm_80'\n\
            ptxas info    : Function properties for k\n\
            ptxas         .     2912 bytes stack frame, 2648 bytes spill stores, 3264 bytes spill loads\n\
            ptxas info    : Used 32 registers, used 1 barriers, 2912 bytes cumulative stack size, 400 bytes smem, \
            364 bytes cmem[0]\nk.cu(1): warning #177-D: unused\n";
        let expected = Resources {
            registers: 32,
            shared_bytes: 400,
            stack_bytes: 2912,
            spill_bytes: 5912,
            warnings: 1,
            products_wait: false,
        };
        assert_eq!(Resources::parse(log), Some(expected));
        let waiting = "ptxas info    : (C7511) Potential Performance Loss: wgmma.mma_async instructions are \
            serialized due to insufficient register resources for the wgmma pipeline in the function 'k'\n";
        let seen = Resources::parse(&format!("{waiting}{log}")).unwrap();
        assert_eq!(seen, Resources { products_wait: true, ..expected });
        assert_eq!(Resources::parse("k.cu(1): warning"), None);
        assert_eq!((capability("sm_90a"), capability("sm_120")), ((9, 0), (12, 0)));
    }

    #[test]
    fn products_that_wait_are_a_problem_unless_they_are_on_the_list() {
        let kernel = Kernel { name: "slow", source: "" };
        let unit = Launch::new(&kernel, [1; 3], [32, 1, 1]).define("N", 2).unit().clone();
        let found = Resources { registers: 168, products_wait: true, ..Resources::default() };
        let rows = BTreeMap::from([(unit, vec![Some(Ok(found))])]);
        let report = KernelReport { archs: vec!["sm_90a".into()], rows };
        let expected = "kernel slow with N=2 waits after each of its products for sm_90a";
        assert_eq!(report.problems(&["slow"], &["other"]), [expected]);
        assert!(report.problems(&[], &["slow"]).is_empty());
        assert!(report.to_string().contains("(products wait)"));
    }

    #[test]
    fn a_report_shows_spills_and_errors() {
        let compiler = match Compiler::find() {
            Ok(compiler) => compiler,
            Err(error) => return println!("skipped: {error}"),
        };
        let greedy = Kernel {
            name: "greedy",
            source: "extern \"C\" __global__ __launch_bounds__(1024) void greedy(float* y) {\n\
                float a[N];\n#pragma unroll\nfor (int i = 0; i < N; i++) a[i] = y[i * 32 + threadIdx.x];\n__syncthreads();\n\
                #pragma unroll\nfor (int i = 0; i < N; i++) y[i * 32 + threadIdx.x] = a[N - 1 - i] * a[i];\n}\n",
        };
        let unit = |n: &str| Launch::new(&greedy, [1; 3], [32, 1, 1]).define("N", n).unit().clone();
        let archs = ["sm_80", "sm_90a"];
        let units = |capability| {
            let mut units = vec![unit("2"), unit("200"), unit("2")];
            if capability == (9, 0) {
                units.push(unit("wrong"));
            }
            units
        };
        let report = inspect_kernels(&compiler, &archs, &units);
        assert_eq!(report.len(), 5);
        let problems = report.problems(&[], &[]);
        assert_eq!(problems.len(), 3, "{problems:#?}");
        assert!(problems[0].contains("N=200 spills"), "{problems:#?}");
        assert!(problems[2].contains("does not compile"), "{problems:#?}");
        assert_eq!(report.problems(&["greedy"], &[]).len(), 1);
        let table = report.to_string();
        println!("{table}");
        assert!(table.contains("greedy") && table.contains("error") && table.contains("N=200"), "{table}");
    }
}
