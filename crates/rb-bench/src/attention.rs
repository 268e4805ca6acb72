//! `bench attention`: the speed of attention alone on a GPU, forward and backward, over batches, lengths and head
//! sizes. A speed is shown only where the result agrees with the plain kernels.

use std::path::PathBuf;

use clap::{Parser, ValueEnum};
use half::bf16;
use rb_autograd::ops::attention::{AttentionMask, AttentionPath};
use rb_autograd::ops::attention_packed::DeviceAttention;
use rb_cuda::{Gpu, GpuOptions};
use rb_tensor::{DType, Device, Rng, Tensor, TensorError};
use rb_train::{Result, TrainError};
use serde::Serialize;

use crate::report::write_json;

/// Times bf16 attention on the first GPU; no speed is shown where the result is not that of the plain kernels.
#[derive(Parser, Debug, Clone)]
#[command(name = "bench attention", version, max_term_width = 100)]
pub struct Args {
    /// Sequences of a call.
    #[arg(long, value_delimiter = ',', default_values_t = [1, 4, 16, 64])]
    pub batch: Vec<usize>,
    /// Tokens of a sequence.
    #[arg(long, value_delimiter = ',', default_values_t = [512, 1024, 2048, 4096, 8192])]
    pub seq_len: Vec<usize>,
    /// Width of a head.
    #[arg(long, value_delimiter = ',', default_values_t = [64, 128])]
    pub head_dim: Vec<usize>,
    /// Query heads.
    #[arg(long, default_value_t = 12)]
    pub n_heads: usize,
    /// Key and value heads.
    #[arg(long, default_value_t = 4)]
    pub n_kv_heads: usize,
    /// Every token sees all tokens, not only those before it.
    #[arg(long)]
    pub full: bool,
    /// The kernels to time; those that a model would take if left out.
    #[arg(long, value_enum)]
    pub path: Option<PathName>,
    /// Shapes of more tokens than this are left out.
    #[arg(long, default_value_t = 131_072)]
    pub max_tokens: usize,
    /// Timed calls of each shape, of which the median counts.
    #[arg(long, default_value_t = 20)]
    pub repeats: usize,
    /// Write all results to this file; without a name, as the last line of the output.
    #[arg(long, value_name = "FILE", num_args = 0..=1, default_missing_value = "-")]
    pub json: Option<PathBuf>,
}

/// Names of the families of kernels.
#[derive(ValueEnum, Debug, Clone, Copy, PartialEq, Eq)]
pub enum PathName {
    /// Without tensor cores.
    Plain,
    /// `mma.sync`.
    Mma,
    /// `wgmma`, on Hopper.
    Wgmma,
}

impl PathName {
    fn path(self) -> AttentionPath {
        match self {
            PathName::Plain => AttentionPath::Plain,
            PathName::Mma => AttentionPath::Mma,
            PathName::Wgmma => AttentionPath::Wgmma,
        }
    }
}

/// One shape.
#[derive(Debug, Serialize)]
pub struct Row {
    batch: usize,
    seq_len: usize,
    head_dim: usize,
    /// Kernel of the forward pass.
    kernel: &'static str,
    forward_ms: f64,
    backward_ms: f64,
    forward_tflops: f64,
    backward_tflops: f64,
    /// Largest relative error of output and gradients beside the plain kernels, root mean square.
    error: f64,
}

/// All shapes.
#[derive(Debug, Serialize)]
struct Report {
    card: String,
    libraries: Vec<String>,
    n_heads: usize,
    n_kv_heads: usize,
    mask: &'static str,
    /// How operations are counted.
    flops_formula: &'static str,
    rows: Vec<Row>,
    version: &'static str,
}

const FLOP_FORMULA: &str = "forward 4 B H T^2 D, half of it with a causal mask; backward 2.5 times that";

/// bf16 keeps eight bits; two kernels that round in different places stay well below this.
const TOLERANCE: f64 = 0.02;

/// Written between two calls, so that none finds its inputs in the cache: several times the largest cache.
const FLUSH_BYTES: usize = 512 << 20;

/// Runs the benchmark.
///
/// # Errors
/// Bad arguments, no GPU, and a result that differs from the plain kernels'.
pub fn bench(args: &Args) -> Result<()> {
    let refuse = |origin: &str, reason: String| Err(TrainError::Config { origin: origin.into(), reason });
    if args.repeats == 0 {
        return refuse("--repeats", "is 0; it must be at least 1".into());
    }
    for (flag, values) in
        [("--batch", &args.batch), ("--seq-len", &args.seq_len), ("--head-dim", &args.head_dim)]
    {
        if values.contains(&0) {
            return refuse(flag, "is 0; it must be at least 1".into());
        }
    }
    if args.n_kv_heads == 0 || !args.n_heads.is_multiple_of(args.n_kv_heads) || args.n_heads == 0 {
        return refuse("--n-kv-heads", format!("is {}; it must divide --n-heads", args.n_kv_heads));
    }
    let gpu = Gpu::open(0, &GpuOptions::default()).map_err(TensorError::from)?;
    let mut report = Report {
        card: gpu.info().name.clone(),
        libraries: gpu.libraries().iter().map(|l| format!("{} {}", l.name, l.version)).collect(),
        n_heads: args.n_heads,
        n_kv_heads: args.n_kv_heads,
        mask: if args.full { "full" } else { "causal" },
        flops_formula: FLOP_FORMULA,
        rows: Vec::new(),
        version: env!("CARGO_PKG_VERSION"),
    };
    println!(
        "{}, {} query and {} key heads, {} mask",
        report.card, args.n_heads, args.n_kv_heads, report.mask
    );
    println!("head  tokens  batch  forward ms  TFLOP/s  backward ms  TFLOP/s  kernel");
    for &head_dim in &args.head_dim {
        for &seq_len in &args.seq_len {
            for &batch in &args.batch {
                if batch.saturating_mul(seq_len) > args.max_tokens {
                    println!(
                        "{head_dim:4}  {seq_len:6}  {batch:5}  left out: more than {} tokens",
                        args.max_tokens
                    );
                    continue;
                }
                let row = time(args, gpu, [batch, seq_len, head_dim])?;
                println!(
                    "{head_dim:4}  {seq_len:6}  {batch:5}  {:10.4}  {:7.1}  {:11.4}  {:7.1}  {}",
                    row.forward_ms, row.forward_tflops, row.backward_ms, row.backward_tflops, row.kernel
                );
                report.rows.push(row);
            }
        }
    }
    write_json(args.json.as_deref(), &report)
}

/// Random bf16 values: a pool of a million that repeats with a prime period, so that no two rows are equal.
fn random(shape: [usize; 4], seed: u64, device: Device) -> Result<Tensor> {
    const PERIOD: usize = 1_000_003;
    let mut rng = Rng::new(seed);
    let pool: Vec<bf16> = (0..PERIOD).map(|_| bf16::from_f64(rng.normal())).collect();
    let values: Vec<bf16> = pool.iter().copied().cycle().take(shape.iter().product()).collect();
    Ok(Tensor::from_vec(values, shape)?.to_device(device)?)
}

fn time(args: &Args, gpu: Gpu, [batch, seq_len, head_dim]: [usize; 3]) -> Result<Row> {
    let device = Device::Cuda(gpu);
    let (h, g) = (args.n_heads, args.n_kv_heads);
    let qkv = random([batch, seq_len, h + 2 * g, head_dim], 1, device)?;
    let dy = random([batch, seq_len, h, head_dim], 2, device)?;
    let mask = if args.full { AttentionMask::Full } else { AttentionMask::Causal };
    let scale = (head_dim as f64).powf(-0.5);
    let wanted = args.path.map(PathName::path);
    let attention = DeviceAttention::new(&qkv, h, g, &mask, scale, wanted)?;
    let before = gpu.launches();
    let [y, lse] = attention.forward()?;
    let ran = |path: &AttentionPath| {
        let count = |launches: &std::collections::BTreeMap<&str, u64>| {
            launches.get(path.forward_kernel()).copied().unwrap_or(0)
        };
        count(&gpu.launches()) > count(&before)
    };
    let kernel = AttentionPath::ALL.into_iter().find(ran).map_or("none", AttentionPath::forward_kernel);
    let dqkv = attention.backward([&y, &lse], &dy)?;
    let error = {
        let (first, first_dy) = (qkv.narrow(0, 1)?, dy.narrow(0, 1)?);
        let plain = DeviceAttention::new(&first, h, g, &mask, scale, Some(AttentionPath::Plain))?;
        let [plain_y, plain_lse] = plain.forward()?;
        let plain_dqkv = plain.backward([&plain_y, &plain_lse], &first_dy)?;
        off(&y.narrow(0, 1)?, &plain_y)?.max(off(&dqkv.narrow(0, 1)?, &plain_dqkv)?)
    };
    drop(dqkv);
    if error.is_nan() || error > TOLERANCE {
        return Err(TrainError::Config {
            origin: format!("batch {batch}, {seq_len} tokens, heads of {head_dim}"),
            reason: format!(
                "{kernel} is off by {error:.1e} from the plain kernels, more than {TOLERANCE}: no speed is shown"
            ),
        });
    }
    let flush = gpu.alloc_for(FLUSH_BYTES, "benchmark").map_err(TensorError::from)?;
    let median = |work: &dyn Fn() -> Result<()>| -> Result<f64> {
        let mut all = Vec::new();
        for repeat in 0..args.repeats + 2 {
            // The card is still busy with this when the work is enqueued: the host's time does not count.
            gpu.memset(&flush, 0, FLUSH_BYTES, 0).map_err(TensorError::from)?;
            let mut failed = Ok(());
            let ms = gpu.elapsed_ms(|| {
                failed = work();
                Ok(())
            });
            failed?;
            if repeat >= 2 {
                all.push(ms.map_err(TensorError::from)?);
            }
        }
        all.sort_by(f64::total_cmp);
        Ok(all[all.len() / 2])
    };
    let forward_ms = median(&|| Ok(attention.forward().map(drop)?))?;
    let backward_ms = median(&|| Ok(attention.backward([&y, &lse], &dy).map(drop)?))?;
    let seen = if args.full { 1.0 } else { 0.5 };
    let flops = 4.0 * (batch * h * seq_len * seq_len * head_dim) as f64 * seen;
    let tflops = |flops: f64, ms: f64| flops / ms / 1e9;
    Ok(Row {
        batch,
        seq_len,
        head_dim,
        kernel,
        forward_ms,
        backward_ms,
        forward_tflops: tflops(flops, forward_ms),
        backward_tflops: tflops(2.5 * flops, backward_ms),
        error,
    })
}

/// Root mean square of the difference over that of the second.
fn off(x: &Tensor, reference: &Tensor) -> Result<f64> {
    let host = |t: &Tensor| -> Result<Vec<f32>> {
        Ok(t.to_device(Device::Cpu)?.to_dtype(DType::F32)?.to_vec::<f32>()?)
    };
    let (x, reference) = (host(x)?, host(reference)?);
    let square = |x: f32| f64::from(x).powi(2);
    let difference: f64 = x.iter().zip(&reference).map(|(a, b)| square(a - b)).sum();
    Ok((difference / reference.iter().copied().map(square).sum::<f64>()).sqrt())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bad_shapes_are_named() {
        let message = |line: &str| {
            let args = Args::try_parse_from(line.split_whitespace()).unwrap();
            bench(&args).unwrap_err().to_string()
        };
        assert!(message("attention --n-kv-heads 5").contains("--n-kv-heads"));
        assert!(message("attention --seq-len 512,0").contains("--seq-len"));
        assert!(message("attention --repeats 0").contains("--repeats"));
    }

    #[test]
    fn the_error_is_relative_and_keeps_nan() {
        let tensor = |x: f32| Tensor::from_vec(vec![x, 2.0], [2]).unwrap();
        assert_eq!(off(&tensor(1.0), &tensor(1.0)).unwrap(), 0.0);
        assert!((off(&tensor(2.0), &tensor(1.0)).unwrap() - 0.2f64.sqrt()).abs() < 1e-12);
        assert!(off(&tensor(f32::NAN), &tensor(1.0)).unwrap().is_nan());
    }
}
