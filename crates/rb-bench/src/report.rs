//! What a benchmark tells: numbers for people and for programs.

use std::path::Path;

use rb_nn::{LlamaConfig, flops_per_token};
use rb_train::{Result, TrainError};
use rb_verify::Pass;
use serde::Serialize;

use crate::args::Args;
use crate::profile::Profile;

/// How floating-point operations are counted.
pub const FLOP_FORMULA: &str = "6 N + 6 L T H D a token: N elements of all matrices, causal attention";

/// Everything that one run found.
///
/// It cannot be made without a [`Pass`]: the losses it is about are finite and fall.
#[derive(Debug, Serialize)]
pub struct Report {
    /// Proof of the gate.
    #[serde(skip)]
    pub _pass: Pass,
    /// Tokens of a step by the median time of a step.
    pub tokens_per_s: f64,
    /// Median time of a timed step.
    pub step_ms: f64,
    /// Mean time of the timed steps.
    pub step_ms_mean: f64,
    /// Each timed step, in order.
    pub step_ms_all: Vec<f64>,
    /// Elements of all parameters.
    pub params: usize,
    /// See [`FLOP_FORMULA`].
    pub flops_per_token: f64,
    /// The formula in words.
    pub flops_formula: &'static str,
    /// 10^12 floating-point operations a second.
    pub tflops: f64,
    /// Part of the peak, where that is known.
    pub mfu: Option<f64>,
    /// The peak that it is a part of.
    pub mfu_peak_tflops: Option<f64>,
    /// Loss of the first step.
    pub loss_first: f64,
    /// Loss of the last step.
    pub loss_last: f64,
    /// Losses of all steps.
    pub losses: Vec<f64>,
    /// From the start of the program to the first step's loss.
    pub start_to_first_step_s: f64,
    /// Only on a GPU.
    pub gpu: Option<GpuReport>,
    /// Memory of the process.
    pub resident_mib: Option<f64>,
    /// `fp32` or `bf16`.
    pub precision: &'static str,
    /// Where the tokens come from.
    pub data: String,
    /// Distinct batches.
    pub batches: usize,
    /// Sizes.
    pub shape: Shape,
    /// Timed steps.
    pub steps: usize,
    /// Steps before them.
    pub warm_up: usize,
    /// Learning rate.
    pub lr: f64,
    /// Threads of the host.
    pub threads: usize,
    /// Version of this program.
    pub version: &'static str,
    /// How it was called.
    pub command: Vec<String>,
}

/// What a GPU adds.
#[derive(Debug, Serialize)]
pub struct GpuReport {
    /// Product name.
    pub card: String,
    /// Compute capability.
    pub capability: String,
    /// Names and versions of the libraries.
    pub libraries: Vec<String>,
    /// Element type of the residual stream.
    pub residual: &'static str,
    /// Element type of the gradients of parameters.
    pub gradients: &'static str,
    /// How the fp32 weights are kept.
    pub master_weights: &'static str,
    /// Most that tensors took in a timed step.
    pub peak_mib: f64,
    /// What the dry run of the step expected.
    pub planned_peak_mib: f64,
    /// Taken from the driver.
    pub reserved_mib: f64,
    /// Most that may be taken.
    pub budget_mib: f64,
    /// Tensors at the peak, by holder.
    pub peak_holders_mib: Vec<(&'static str, f64)>,
    /// Launches of a step, products included.
    pub launches_per_step: u64,
    /// The same by kernel.
    pub launches_by_kernel: Vec<(&'static str, u64)>,
    /// Kernels compiled before the first step.
    pub kernels_compiled: usize,
    /// Kernels that came from the cache on disk.
    pub kernels_cached: usize,
    /// Time that made them ready, in parallel.
    pub kernels_ms: f64,
    /// The search for algorithms, if asked for.
    pub tuning: Option<Tuned>,
    /// Nodes of the captured step; nothing where steps were launched piece by piece.
    pub graph_nodes: Option<usize>,
    /// Where the time of a step goes, if asked for.
    pub profile: Option<Profile>,
}

/// What the search for algorithms of products did.
#[derive(Debug, Serialize)]
pub struct Tuned {
    /// Products that were searched for now.
    pub searched: usize,
    /// Products whose choice was known.
    pub known: usize,
    /// Time of the search.
    pub seconds: f64,
    /// Microseconds of all products together: the library's first guesses, then the choices.
    pub first_guess_us: f64,
    /// See above.
    pub best_us: f64,
}

/// Sizes of a benchmark.
#[derive(Debug, Serialize)]
#[allow(missing_docs)]
pub struct Shape {
    pub d_model: usize,
    pub n_layers: usize,
    pub n_heads: usize,
    pub n_kv_heads: usize,
    pub head_dim: usize,
    pub d_ff: usize,
    pub vocab: usize,
    pub vocab_padded: usize,
    pub seq_len: usize,
    pub batch_size: usize,
}

impl Shape {
    /// The sizes of a command line.
    pub fn new(args: &Args, config: &LlamaConfig) -> Shape {
        Shape {
            d_model: args.d_model,
            n_layers: args.n_layers,
            n_heads: args.n_heads,
            n_kv_heads: args.n_kv_heads,
            head_dim: args.head_dim,
            d_ff: args.d_ff,
            vocab: args.vocab,
            vocab_padded: config.padded_vocab_size(),
            seq_len: args.seq_len,
            batch_size: args.batch_size,
        }
    }
}

impl Report {
    /// Lines for people.
    pub fn lines(&self) -> Vec<String> {
        let mut lines = vec![
            format!(
                "speed: {:.0} tokens/s, {:.2} ms a step (median of {}, {:.2} to {:.2})",
                self.tokens_per_s,
                self.step_ms,
                self.steps,
                self.step_ms_all.iter().copied().fold(f64::INFINITY, f64::min),
                self.step_ms_all.iter().copied().fold(0.0, f64::max)
            ),
            match self.gpu {
                Some(_) => format!("arithmetic: {:.1} TFLOP/s ({FLOP_FORMULA})", self.tflops),
                None => format!("arithmetic: {:.1} GFLOP/s ({FLOP_FORMULA})", self.tflops * 1e3),
            },
        ];
        if let Some(gpu) = &self.gpu {
            lines.push(match (self.mfu, self.mfu_peak_tflops) {
                (Some(mfu), Some(peak)) => {
                    format!("MFU: {:.2}% of {peak} TFLOP/s, the dense bf16 peak of {}", mfu * 100.0, gpu.card)
                }
                _ if self.precision == "fp32" => "MFU: none, the known peaks are of bf16".into(),
                _ => format!("MFU: none, the peak of {} is not known", gpu.card),
            });
            lines.push(format!(
                "memory: {:.1} MiB at the peak (planned {:.1}), {:.1} taken from the driver of {:.1} allowed",
                gpu.peak_mib, gpu.planned_peak_mib, gpu.reserved_mib, gpu.budget_mib
            ));
            let how = match gpu.graph_nodes {
                Some(nodes) => format!("captured once, a graph of {nodes} nodes"),
                None => "piece by piece".into(),
            };
            lines.push(format!("launches: {} a step, {how}", gpu.launches_per_step));
            lines.extend(gpu.profile.iter().flat_map(Profile::lines));
            let start = if gpu.kernels_compiled > 0 { "cold" } else { "warm" };
            lines.push(format!(
                "start to first step: {:.2} s ({start}: {} kernels compiled, {} from the cache)",
                self.start_to_first_step_s, gpu.kernels_compiled, gpu.kernels_cached
            ));
            if let Some(tuned) = &gpu.tuning {
                lines.push(format!(
                    "products: {} searched in {:.1} s, {} known; {:.1} us together, {:.1} by the first guesses",
                    tuned.searched, tuned.seconds, tuned.known, tuned.best_us, tuned.first_guess_us
                ));
            }
        } else {
            if let Some(mib) = self.resident_mib {
                lines.push(format!("memory: {mib:.1} MiB resident"));
            }
            lines.push(format!("start to first step: {:.2} s", self.start_to_first_step_s));
        }
        lines.push(format!(
            "loss: {:.4} -> {:.4} over {} steps on {} ({} batches)",
            self.loss_first,
            self.loss_last,
            self.losses.len(),
            self.data,
            self.batches
        ));
        lines
    }
}

/// Rates of arithmetic for a time of a step.
pub fn rates(config: &LlamaConfig, args: &Args, step_s: f64) -> (f64, f64, f64) {
    let tokens_per_s = args.step_tokens() as f64 / step_s;
    let flops = flops_per_token(config, args.seq_len);
    (tokens_per_s, flops, tokens_per_s * flops / 1e12)
}

/// Dense bf16 peak of a card in 10^12 operations a second, by its product name.
///
/// **Source** NVIDIA's data sheets of H100 SXM and H200 SXM, without sparsity. Cards of the same names with
/// other clocks, and slices of a card, are not known.
pub fn bf16_peak_tflops(card: &str) -> Option<f64> {
    let words: Vec<&str> = card.split_whitespace().collect();
    let has = |word: &str| words.contains(&word);
    let known = (has("H100") || has("H200")) && !["PCIe", "NVL", "MIG"].into_iter().any(has);
    known.then_some(989.4)
}

/// The middle value, or the mean of the middle two.
pub fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    match sorted.len() {
        0 => f64::NAN,
        n if n.is_multiple_of(2) => (sorted[n / 2 - 1] + sorted[n / 2]) / 2.0,
        n => sorted[n / 2],
    }
}

/// Writes all results where `--json` says: to a file, or for `-` as one line of the output; nowhere if left out.
///
/// # Errors
/// A file that cannot be written.
pub fn write_json(path: Option<&Path>, report: &impl Serialize) -> Result<()> {
    let unwritten =
        |error: serde_json::Error| TrainError::Config { origin: "--json".into(), reason: error.to_string() };
    match path {
        None => {}
        Some(path) if path == Path::new("-") => {
            println!("{}", serde_json::to_string(report).map_err(unwritten)?);
        }
        Some(path) => {
            let text = serde_json::to_string_pretty(report).map_err(unwritten)?;
            rb_data::atomic::write(path, text.as_bytes())?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn peaks_of_known_cards_only() {
        for card in ["NVIDIA H200", "NVIDIA H100 80GB HBM3"] {
            assert_eq!(bf16_peak_tflops(card), Some(989.4), "{card}");
        }
        for card in ["NVIDIA H100 PCIe", "NVIDIA H200 NVL", "NVIDIA H200 MIG 1g.18gb", "NVIDIA L4", ""] {
            assert_eq!(bf16_peak_tflops(card), None, "{card}");
        }
    }

    #[test]
    fn medians() {
        assert_eq!(median(&[3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]), 2.5);
        assert!(median(&[]).is_nan());
    }
}
