//! Attention on a GPU against f64 on the host: every path, lengths around tile ends, groups, head sizes, masks and
//! scores of every size, with at most twice the error of a naive bf16 run.

use std::collections::BTreeMap;
use std::ops::Range;

use half::bf16;
use rayon::prelude::*;
use rb_autograd::ops;
use rb_autograd::ops::attention::{AttentionMask, AttentionOptions, AttentionPath, mma_reason, wgmma_reason};
use rb_autograd::ops::attention_packed::DeviceAttention;
use rb_autograd::testing::{Case, Fill, random};
use rb_cuda::{Gpu, GpuOptions, Unit};
use rb_tensor::{DType, Device, Rng, Tensor};

use crate::{Check, Report, Result};

/// Runs of which every bit must be equal.
const REPEATS: usize = 20;

/// Roundings of fp32 that a sum may add to what a naive run shows, as part of a typical value: a naive run of one
/// key has no error at all.
const FLOOR: f64 = 1.0 / 16384.0;

/// Which keys a query sees, by name, for one length.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Mask {
    Causal,
    Full,
    /// Documents of 40 tokens.
    Documents,
    /// Every third query sees nothing.
    Holes,
    /// No query sees anything.
    Nothing,
}

/// How queries are drawn.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Scores {
    /// Standard normal.
    Normal,
    /// 64 times that: one key takes all of the softmax.
    Extreme,
    /// All zero: every key counts the same.
    Equal,
}

/// One attention.
#[derive(Clone, Copy, Debug)]
struct Shape {
    batch: usize,
    len: usize,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    mask: Mask,
    scores: Scores,
    softcap: Option<f64>,
    window: Option<usize>,
}

impl Shape {
    fn new(batch: usize, len: usize, [heads, kv_heads]: [usize; 2], head_dim: usize) -> Shape {
        let (mask, scores) = (Mask::Causal, Scores::Normal);
        Shape { batch, len, heads, kv_heads, head_dim, mask, scores, softcap: None, window: None }
    }

    fn name(&self) -> String {
        let mut name = format!(
            "batch {}, T {}, heads {}/{}, D {}, {:?} mask, {:?} scores",
            self.batch, self.len, self.heads, self.kv_heads, self.head_dim, self.mask, self.scores
        );
        if let Some(cap) = self.softcap {
            name += &format!(", cap {cap}");
        }
        if let Some(window) = self.window {
            name += &format!(", window {window}");
        }
        name
    }

    fn options(&self) -> AttentionOptions {
        let scale = (self.head_dim as f64).powf(-0.5);
        AttentionOptions { scale, softcap: self.softcap, window: self.window }
    }

    /// The keys that query `t` sees, before the window.
    fn shown(&self, t: usize) -> Range<usize> {
        match self.mask {
            Mask::Causal => 0..t + 1,
            Mask::Full => 0..self.len,
            Mask::Documents => t / 40 * 40..t + 1,
            Mask::Holes if t.is_multiple_of(3) => t..t,
            Mask::Holes => t.saturating_sub(70)..t + 1,
            Mask::Nothing => 0..0,
        }
    }

    fn visible(&self, t: usize) -> Range<usize> {
        let shown = self.shown(t);
        let start = self.window.map_or(0, |window| shown.end.saturating_sub(window));
        shown.start.max(start)..shown.end
    }

    fn mask(&self) -> Result<AttentionMask> {
        Ok(match self.mask {
            Mask::Causal => AttentionMask::Causal,
            Mask::Full => AttentionMask::Full,
            _ => {
                let row = (0..self.len).map(|t| self.shown(t)).flat_map(|r| [r.start as i32, r.end as i32]);
                let row: Vec<i32> = row.collect();
                AttentionMask::Ranges(Tensor::from_vec(row.repeat(self.batch), [self.batch, self.len, 2])?)
            }
        })
    }

    fn all_heads(&self) -> usize {
        self.heads + 2 * self.kv_heads
    }

    /// `qkv` and the gradient of the output, in bf16 on the host.
    fn inputs(&self, seed: u64) -> Result<[Tensor; 2]> {
        let mut rng = Rng::new(seed).fork(&self.name());
        let (all, width) = (self.all_heads() * self.head_dim, self.heads * self.head_dim);
        let qkv_shape = [self.batch, self.len, self.all_heads(), self.head_dim];
        let mut qkv = random(&qkv_shape.into(), Fill::Normal, &mut rng)?.to_vec::<f64>()?;
        let factor = match self.scores {
            Scores::Normal => 1.0,
            Scores::Extreme => 64.0,
            Scores::Equal => 0.0,
        };
        qkv.chunks_mut(all).for_each(|token| token[..width].iter_mut().for_each(|x| *x *= factor));
        let dy = random(&[self.batch, self.len, self.heads, self.head_dim].into(), Fill::Normal, &mut rng)?;
        Ok([Tensor::from_vec(qkv, qkv_shape)?.to_dtype(DType::BF16)?, dy.to_dtype(DType::BF16)?])
    }
}

/// The shapes of the comparison; `quick` takes a few of each kind.
fn shapes(quick: bool) -> Vec<Shape> {
    const RATIOS: [[usize; 2]; 5] = [[2, 2], [4, 2], [3, 1], [4, 1], [12, 1]];
    const HEADS: [usize; 4] = [32, 64, 96, 128];
    let mut list = Vec::new();
    let lengths: &[usize] = if quick {
        &[1, 7, 65, 257]
    } else {
        &[1, 2, 7, 63, 64, 65, 127, 128, 129, 255, 257, 512, 1000, 1024, 2048, 4096]
    };
    for (i, &len) in lengths.iter().enumerate() {
        // Long rows take few heads: the host needs their square.
        let ratio = if len > 512 { [1, 1] } else { RATIOS[i % 5] };
        list.push(Shape::new(1, len, ratio, 64));
        if !quick && len <= 257 {
            list.extend(HEADS.map(|d| Shape::new(2, len, RATIOS[(i + d / 32) % 5], d)));
        }
    }
    for (i, d) in HEADS.into_iter().enumerate() {
        let base = Shape::new(1, 257, [3, 1], d);
        let masks = [Mask::Full, Mask::Documents, Mask::Holes, Mask::Nothing];
        if quick {
            list.push(Shape { mask: masks[i], ..base });
            continue;
        }
        list.extend(RATIOS.map(|ratio| Shape::new(1, 129, ratio, d)));
        list.extend(masks.map(|mask| Shape { mask, ..base }));
        list.push(Shape { window: Some(100), ..base });
        list.push(Shape { window: Some(30), mask: Mask::Documents, ..base });
        list.push(Shape { softcap: Some(2.0), ..base });
        list.push(Shape { softcap: Some(30.0), window: Some(1), scores: Scores::Extreme, ..base });
        list.push(Shape { scores: Scores::Extreme, ..base });
        list.push(Shape { scores: Scores::Equal, ..base });
        // Enough blocks for the tiles of a full card, on short rows.
        for (batch, mask) in
            [(12, Mask::Causal), (24, Mask::Causal), (64, Mask::Causal), (64, Mask::Documents)]
        {
            list.push(Shape { mask, ..Shape::new(batch, 65, [12, 4], d) });
        }
        list.push(Shape::new(64, 65, [12, 12], d));
    }
    if quick {
        list.push(Shape::new(64, 65, [12, 12], 64));
        list.push(Shape { softcap: Some(2.0), window: Some(100), ..Shape::new(1, 257, [3, 1], 64) });
    }
    list
}

/// The paths of a card for a shape.
fn paths(gpu: Gpu, shape: &Shape) -> Vec<AttentionPath> {
    let capability = gpu.info().capability;
    let has = |path: &AttentionPath| match path {
        AttentionPath::Plain => true,
        AttentionPath::Mma => mma_reason(capability, shape.head_dim).is_none(),
        AttentionPath::Wgmma => {
            wgmma_reason(capability, shape.head_dim, shape.len, &shape.options()).is_none()
        }
    };
    AttentionPath::ALL.into_iter().filter(has).collect()
}

/// The tensor core kernels with the sizes that idle and full cards take, under the masks and options that need most
/// registers, on a card of this capability.
pub(crate) fn tile_units(capability: (u32, u32)) -> Result<Vec<Unit>> {
    let gpu = Gpu::dry(capability, &GpuOptions::default());
    let zeros = |shape: &Shape, heads| {
        Tensor::zeros([shape.batch, shape.len, heads, shape.head_dim], DType::BF16, Device::Cuda(gpu))
    };
    for d in [32, 64, 96, 128] {
        // About 0.1, 2, 4 and 12 blocks of keys to a multiprocessor.
        for batch in [1, 40, 64, 200] {
            let documents = Shape { mask: Mask::Documents, ..Shape::new(batch, 65, [12, 4], d) };
            for shape in [documents, Shape { softcap: Some(30.0), window: Some(30), ..documents }] {
                if paths(gpu, &shape).contains(&AttentionPath::Mma) {
                    let (qkv, dy) = (zeros(&shape, shape.all_heads())?, zeros(&shape, shape.heads)?);
                    enqueue(&shape, AttentionPath::Mma, &qkv, &dy)?;
                }
            }
        }
        // Hopper's kernels have a variant of their own for each mask and for gradients that are turned back. Few
        // blocks, so many that the blocks of a cluster would find no room, more than multiprocessors, and long rows;
        // a head of keys for three of queries and for one.
        const WGMMA: [(usize, usize, [usize; 2]); 5] =
            [(1, 65, [12, 4]), (20, 65, [12, 4]), (40, 65, [12, 4]), (40, 65, [12, 12]), (1, 8200, [12, 4])];
        for (batch, len, heads) in WGMMA {
            for mask in [Mask::Documents, Mask::Causal, Mask::Full] {
                let shape = Shape { mask, ..Shape::new(batch, len, heads, d) };
                if !paths(gpu, &shape).contains(&AttentionPath::Wgmma) {
                    continue;
                }
                let (qkv, dy) = (zeros(&shape, shape.all_heads())?, zeros(&shape, shape.heads)?);
                let (mask, path) = (shape.mask()?, Some(AttentionPath::Wgmma));
                let attention =
                    || DeviceAttention::new(&qkv, shape.heads, shape.kv_heads, &mask, shape.options(), path);
                let angles = Tensor::zeros([batch, shape.len, d / 2, 2], DType::F32, Device::Cuda(gpu))?;
                for attention in [attention()?, attention()?.turned_by(angles)] {
                    let [y, lse] = attention.forward()?;
                    attention.backward([&y, &lse], &dy)?;
                }
            }
        }
    }
    Ok(gpu.units())
}

/// The kernels of the comparison on a card of this capability, found on a dry run.
fn units(capability: (u32, u32), quick: bool) -> Result<Vec<Unit>> {
    let gpu = Gpu::dry(capability, &GpuOptions::default());
    for shape in shapes(quick) {
        for path in paths(gpu, &shape) {
            run(gpu, &shape, path, &shape.inputs(0)?)?;
        }
    }
    Ok(gpu.units())
}

/// Output, gradient of `qkv` and `lse`, on the GPU that holds the inputs.
fn enqueue(shape: &Shape, path: AttentionPath, qkv: &Tensor, dy: &Tensor) -> Result<[Tensor; 3]> {
    let attention =
        DeviceAttention::new(qkv, shape.heads, shape.kv_heads, &shape.mask()?, shape.options(), Some(path))?;
    let [y, lse] = attention.forward()?;
    let dqkv = attention.backward([&y, &lse], dy)?;
    Ok([y, dqkv, lse])
}

/// The same of inputs on the host, to the host.
fn run(gpu: Gpu, shape: &Shape, path: AttentionPath, [qkv, dy]: &[Tensor; 2]) -> Result<[Tensor; 3]> {
    let device = Device::Cuda(gpu);
    let [y, dqkv, lse] = enqueue(shape, path, &qkv.to_device(device)?, &dy.to_device(device)?)?;
    Ok([y.to_device(Device::Cpu)?, dqkv.to_device(Device::Cpu)?, lse.to_device(Device::Cpu)?])
}

/// All shapes on all paths of a card; one check for each path, one for rows that see nothing, one for repeated runs.
///
/// # Errors
/// What fails to run; a result that is wrong is in the report.
pub fn verify_attention(gpu: Gpu, seed: u64, quick: bool) -> Result<Report> {
    let units = units(gpu.info().capability, quick)?;
    gpu.prepare(&units).map_err(rb_tensor::TensorError::from)?;
    let mut results: BTreeMap<AttentionPath, PathResult> = BTreeMap::new();
    for shape in shapes(quick) {
        let inputs = shape.inputs(seed)?;
        let truth = on_host(&shape, &inputs)?;
        let naive = naive(&shape, &inputs, |x| bf16::from_f32(x).to_f32())?;
        for path in paths(gpu, &shape) {
            let before = gpu.launches().get(path.forward_kernel()).copied().unwrap_or(0);
            let got = run(gpu, &shape, path, &inputs)?;
            let result = results.entry(path).or_default();
            let ran = gpu.launches().get(path.forward_kernel()).copied().unwrap_or(0) > before;
            if !ran && !gpu.is_dry() {
                result.fail(&shape, format!("{} was not launched", path.forward_kernel()));
            }
            result.compare(&shape, &inputs, split(&shape, &got[0], &got[1])?, &truth, &naive)?;
            result.empty_rows(&shape, &got)?;
        }
    }
    let mut report = Report::default();
    for (path, result) in results {
        report.push(result.check(path));
        report.push(repeats(gpu, path, seed)?);
    }
    Ok(report)
}

/// `y`, `dq`, `dk`, `dv`.
type Parts = [Vec<f64>; 4];

/// What one path did on all shapes.
#[derive(Default)]
struct PathResult {
    comparisons: usize,
    hidden_rows: usize,
    worst: (f64, String),
    failures: Vec<String>,
}

impl PathResult {
    fn fail(&mut self, shape: &Shape, what: String) {
        self.failures.push(format!("{}: {what}", shape.name()));
    }

    fn compare(
        &mut self,
        shape: &Shape,
        [qkv, dy]: &[Tensor; 2],
        got: Parts,
        truth: &Parts,
        naive: &Parts,
    ) -> Result<()> {
        let (d, all) = (shape.head_dim, shape.all_heads());
        let qkv = qkv.to_vec::<bf16>()?;
        let heads = |range: Range<usize>| {
            let tokens = qkv.chunks(all * d).flat_map(|x| x[range.start * d..range.end * d].to_vec());
            rms(&tokens.map(|x| x.to_f64()).collect::<Vec<f64>>())
        };
        let (h, g) = (shape.heads, shape.kv_heads);
        let (q, k, v) = (heads(0..h), heads(h..h + g), heads(h + g..all));
        let dy = rms(&dy.to_dtype(DType::F64)?.to_vec::<f64>()?);
        // Typical values of each part where the softmax has one key.
        let ds = dy * v * (d as f64).sqrt() * shape.options().scale;
        let typical = [v, ds * k, ds * q, dy];
        for (i, what) in ["y", "dq", "dk", "dv"].iter().enumerate() {
            self.comparisons += 1;
            let off = |x: &[f64]| -> Vec<f64> { x.iter().zip(&truth[i]).map(|(x, t)| x - t).collect() };
            let (mine, other) = (off(&got[i]), off(&naive[i]));
            for (of, mine, other) in
                [("root mean square", rms(&mine), rms(&other)), ("largest", largest(&mine), largest(&other))]
            {
                let budget = 2.0 * other + FLOOR * typical[i];
                // No error is no part of any budget, of none too.
                let part = if mine == 0.0 { 0.0 } else { mine / budget };
                if part.is_nan() || part > 1.0 {
                    self.fail(shape, format!("{of} error of {what} {mine:.2e}, allowed {budget:.2e}"));
                }
                if part > self.worst.0 {
                    self.worst = (part, format!("{of} error of {what}, {}", shape.name()));
                }
            }
        }
        Ok(())
    }

    /// A query that sees nothing has zero output, zero gradient and a log-sum-exp of negative infinity.
    fn empty_rows(&mut self, shape: &Shape, [y, dqkv, lse]: &[Tensor; 3]) -> Result<()> {
        let (y, dqkv, lse) = (y.to_vec::<bf16>()?, dqkv.to_vec::<bf16>()?, lse.to_vec::<f32>()?);
        let (width, all) = (shape.heads * shape.head_dim, shape.all_heads() * shape.head_dim);
        for row in 0..shape.batch * shape.len {
            if !shape.visible(row % shape.len).is_empty() {
                continue;
            }
            self.hidden_rows += 1;
            let zero = |x: &bf16| x.to_f32() == 0.0;
            let good = y[row * width..][..width].iter().all(zero)
                && dqkv[row * all..][..width].iter().all(zero)
                && lse[row * shape.heads..][..shape.heads].iter().all(|&x| x == f32::NEG_INFINITY);
            if !good {
                self.fail(shape, format!("query {row} sees nothing and is not zero"));
                break;
            }
        }
        Ok(())
    }

    fn check(self, path: AttentionPath) -> Check {
        let detail = if self.failures.is_empty() {
            format!(
                "{} comparisons, {} rows that see nothing; worst {:.2} of the budget: {}",
                self.comparisons, self.hidden_rows, self.worst.0, self.worst.1
            )
        } else {
            let shown: Vec<&str> = self.failures.iter().take(6).map(String::as_str).collect();
            format!("{} failures: {}", self.failures.len(), shown.join(" | "))
        };
        let good = self.failures.is_empty() && self.comparisons > 0;
        Check::new(format!("device: attention, {} kernels, against f64", path.name()), good, detail)
    }
}

fn rms(x: &[f64]) -> f64 {
    (x.iter().map(|x| x * x).sum::<f64>() / x.len().max(1) as f64).sqrt()
}

/// NaN counts as infinite.
fn largest(x: &[f64]) -> f64 {
    x.iter().map(|x| if x.is_nan() { f64::INFINITY } else { x.abs() }).fold(0.0, f64::max)
}

/// The same bits, twenty times.
fn repeats(gpu: Gpu, path: AttentionPath, seed: u64) -> Result<Check> {
    let base = Shape::new(4, 257, [12, 4], 64);
    let shapes = [base, Shape { head_dim: 128, mask: Mask::Documents, ..base }, Shape { batch: 40, ..base }];
    let mut other = Vec::new();
    for shape in shapes {
        let inputs = shape.inputs(seed)?;
        let first = run(gpu, &shape, path, &inputs)?;
        for _ in 1..REPEATS {
            for (a, b) in first.iter().zip(&run(gpu, &shape, path, &inputs)?) {
                if a.as_bytes()? != b.as_bytes()? {
                    other.push(shape.name());
                }
            }
        }
    }
    let detail = match other.first() {
        None => format!("{} shapes, {REPEATS} runs each: same bits", shapes.len()),
        Some(name) => format!("other bits: {name}"),
    };
    let name = format!("device: attention, {} kernels, repeats bit for bit", path.name());
    Ok(Check::new(name, other.is_empty(), detail))
}

/// The parts of an output and a gradient of `qkv`.
fn split(shape: &Shape, y: &Tensor, dqkv: &Tensor) -> Result<Parts> {
    let (d, h, g) = (shape.head_dim, shape.heads, shape.kv_heads);
    let all = dqkv.to_dtype(DType::F64)?.to_vec::<f64>()?;
    let heads = |range: Range<usize>| -> Vec<f64> {
        let tokens = all.chunks(shape.all_heads() * d);
        tokens.flat_map(|x| &x[range.start * d..range.end * d]).copied().collect()
    };
    Ok([y.to_dtype(DType::F64)?.to_vec()?, heads(0..h), heads(h..h + g), heads(h + g..h + 2 * g)])
}

/// The truth: the host's attention in f64.
fn on_host(shape: &Shape, [qkv, dy]: &[Tensor; 2]) -> Result<Parts> {
    let (mask, options, h, g) = (shape.mask()?, shape.options(), shape.heads, shape.kv_heads);
    let case = Case::normal("attention", &[], move |v| ops::attention_packed(&v[0], h, g, &mask, options));
    let outcome = case.run(&[qkv.to_dtype(DType::F64)?], Some(&dy.to_dtype(DType::F64)?))?;
    // INVARIANT: backward gives a gradient for each input or an error.
    let dqkv = outcome.dx.into_iter().flatten().next().expect("a gradient of the only input");
    split(shape, &outcome.y, &dqkv)
}

/// The formula one query at a time in f32, with `round` after every step that a run of single operations would
/// write to memory: scores, probabilities, output, their gradients.
fn naive(shape: &Shape, [qkv, dy]: &[Tensor; 2], round: fn(f32) -> f32) -> Result<Parts> {
    let (d, group) = (shape.head_dim, shape.heads / shape.kv_heads);
    let (qkv, dy) = (qkv.to_dtype(DType::F32)?.to_vec::<f32>()?, dy.to_dtype(DType::F32)?.to_vec::<f32>()?);
    let scale = shape.options().scale as f32;
    let at = |b: usize, t: usize, head: usize| ((b * shape.len + t) * shape.all_heads() + head) * d;
    let jobs: Vec<(usize, usize)> =
        (0..shape.batch).flat_map(|b| (0..shape.kv_heads).map(move |kv| (b, kv))).collect();
    let done: Vec<_> = jobs
        .par_iter()
        .map(|&(b, kv)| {
            let key = |s: usize| &qkv[at(b, s, shape.heads + kv)..][..d];
            let value = |s: usize| &qkv[at(b, s, shape.heads + shape.kv_heads + kv)..][..d];
            let mut out = [
                vec![0f32; shape.len * group * d],
                vec![0f32; shape.len * group * d],
                vec![0f32; shape.len * d],
                vec![0f32; shape.len * d],
            ];
            for row in 0..shape.len * group {
                let (t, head) = (row / group, kv * group + row % group);
                let (q, keys) = (&qkv[at(b, t, head)..][..d], shape.visible(t));
                let dy = &dy[((b * shape.len + t) * shape.heads + head) * d..][..d];
                let mut scores: Vec<f32> = keys.clone().map(|s| round(dot(q, key(s)) * scale)).collect();
                let mut slopes = vec![1f32; scores.len()];
                if let Some(cap) = shape.softcap.map(|cap| cap as f32) {
                    for (score, slope) in scores.iter_mut().zip(&mut slopes) {
                        let bend = round((*score / cap).tanh());
                        (*score, *slope) = (round(cap * bend), round(1.0 - bend * bend));
                    }
                }
                let top = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                let sum: f32 = scores.iter().map(|s| (s - top).exp()).sum();
                let probs: Vec<f32> = scores.iter().map(|s| round((s - top).exp() / sum)).collect();
                let y = &mut out[0][row * d..][..d];
                keys.clone().zip(&probs).for_each(|(s, &p)| add(y, value(s), p));
                y.iter_mut().for_each(|x| *x = round(*x));
                let dp: Vec<f32> = keys.clone().map(|s| round(dot(dy, value(s)))).collect();
                // From the output as it was written, as every run does that does not keep the probabilities.
                let delta = dot(dy, y);
                for (i, s) in keys.enumerate() {
                    let ds = round(round(probs[i] * (dp[i] - delta)) * slopes[i]) * scale;
                    add(&mut out[1][row * d..][..d], key(s), ds);
                    add(&mut out[2][s * d..][..d], q, ds);
                    add(&mut out[3][s * d..][..d], dy, probs[i]);
                }
            }
            out
        })
        .collect();
    let widths = [shape.heads, shape.heads, shape.kv_heads, shape.kv_heads];
    let mut parts: Parts = widths.map(|heads| vec![0.0; shape.batch * shape.len * heads * d]);
    for (&(b, kv), out) in jobs.iter().zip(&done) {
        for (i, heads) in widths.into_iter().enumerate() {
            let block = heads / shape.kv_heads * d;
            for (t, row) in out[i].chunks(block).enumerate() {
                let to = &mut parts[i][((b * shape.len + t) * heads) * d + kv * block..][..block];
                to.iter_mut().zip(row).for_each(|(to, &x)| *to = f64::from(round(x)));
            }
        }
    }
    Ok(parts)
}

/// Eight sums at once, so that the compiler makes vectors of them.
fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut sums = [0f32; 8];
    for (a, b) in a.chunks_exact(8).zip(b.chunks_exact(8)) {
        for i in 0..8 {
            sums[i] = a[i].mul_add(b[i], sums[i]);
        }
    }
    sums.iter().sum()
}

fn add(to: &mut [f32], x: &[f32], factor: f32) {
    to.iter_mut().zip(x).for_each(|(to, &x)| *to += factor * x);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Causal, with gradients that are turned back, three query heads to a key head: what pretraining takes.
    #[test]
    fn every_set_of_wgmma_tiles_is_compiled_ahead() {
        let units = tile_units((9, 0)).unwrap();
        let sets = |kernel: &str, d: usize| {
            let of = |unit: &Unit, name: &str| {
                let start = format!("#define {name} ");
                unit.defines.lines().find_map(|line| line.strip_prefix(&start)).unwrap_or("-").to_string()
            };
            let mine = |unit: &&Unit| {
                let is = |name, value: &str| [value, "-"].contains(&of(unit, name).as_str());
                unit.name == kernel
                    && is("D", &d.to_string())
                    && is("KV_HEADS", "4")
                    && is("MASK", "1")
                    && is("TURN", "1")
            };
            let sizes =
                |unit: &Unit| ["WORKERS", "KEYS", "TEAM", "SPLIT"].map(|name| of(unit, name)).join(" ");
            units.iter().filter(mine).map(sizes).collect::<std::collections::BTreeSet<_>>()
        };
        let expected = |list: &[&str]| list.iter().map(ToString::to_string).collect();
        assert_eq!(sets("attention_wgmma_fwd", 64), expected(&["1 64 - -", "3 128 - -"]));
        assert_eq!(sets("attention_wgmma_fwd", 128), expected(&["1 128 - -", "2 128 - -", "3 64 - -"]));
        assert_eq!(sets("attention_wgmma_bwd_q", 64), expected(&["2 64 2 -", "3 64 1 -"]));
        assert_eq!(sets("attention_wgmma_bwd_q", 128), expected(&["1 64 1 -", "2 128 1 -", "3 64 1 -"]));
        for d in [64, 128] {
            assert_eq!(sets("attention_wgmma_bwd_kv", d), expected(&["2 64 1 1", "2 64 2 1", "2 64 2 3"]));
        }
        assert!(tile_units((8, 0)).unwrap().iter().all(|unit| !unit.name.contains("wgmma")));
    }

    fn small() -> Vec<Shape> {
        shapes(true).into_iter().filter(|s| s.batch * s.len * s.heads < 1000).collect()
    }

    /// Without rounding the naive run is the formula: it means something as a measure of bf16.
    #[test]
    fn the_naive_run_is_right() {
        for shape in small() {
            let inputs = shape.inputs(3).unwrap();
            let truth = on_host(&shape, &inputs).unwrap();
            let exact = naive(&shape, &inputs, |x| x).unwrap();
            for (i, (x, t)) in exact.iter().zip(&truth).enumerate() {
                let off: Vec<f64> = x.iter().zip(t).map(|(x, t)| x - t).collect();
                assert!(largest(&off) < 1e-3 * largest(t).max(1.0), "part {i} of {}", shape.name());
            }
        }
    }

    /// The comparison takes a naive run, and refuses one with a wrong factor, a lost row or a NaN.
    #[test]
    fn what_is_wrong_is_refused() {
        let shape = Shape::new(1, 65, [3, 1], 32);
        let inputs = shape.inputs(5).unwrap();
        let truth = on_host(&shape, &inputs).unwrap();
        let rounded = naive(&shape, &inputs, |x| bf16::from_f32(x).to_f32()).unwrap();
        let verdict = |change: &dyn Fn(&mut Parts)| {
            let (mut result, mut got) = (PathResult::default(), rounded.clone());
            change(&mut got);
            result.compare(&shape, &inputs, got, &truth, &rounded).unwrap();
            result.check(AttentionPath::Mma).passed
        };
        assert!(verdict(&|_| ()));
        for part in 0..4 {
            assert!(!verdict(&|x| x[part].iter_mut().for_each(|x| *x *= 1.02)), "factor, part {part}");
            assert!(!verdict(&|x| x[part][64 * 32..].iter_mut().for_each(|x| *x = 0.0)), "row, part {part}");
            assert!(!verdict(&|x| x[part][7] = f64::NAN), "NaN, part {part}");
        }
    }

    #[test]
    fn every_tile_is_listed_for_compilation() {
        let count = |capability, name: &str| {
            tile_units(capability).unwrap().iter().filter(|unit| unit.name == name).count()
        };
        // With and without options. Two tiles of queries for each head size, but one for their gradient with heads of
        // 96 and 128; of keys two, three and four, two with a cap where heads are of 32 or 64.
        assert_eq!(count((12, 0), "attention_mma_fwd"), 2 * 8);
        assert_eq!(count((12, 0), "attention_mma_bwd_q"), 2 * 6);
        assert_eq!(count((12, 0), "attention_mma_bwd_kv"), (2 + 4 + 3 + 3) + (1 + 2 + 3 + 3));
        // No options, and heads of 64 and 128 alone.
        // Two blocks under two masks each, but one of keys for heads of 128 with documents.
        assert_eq!(count((9, 0), "attention_wgmma_fwd"), 2 * 4);
        assert_eq!(count((9, 0), "attention_wgmma_bwd_q"), 2 * 4);
        assert_eq!(count((9, 0), "attention_wgmma_bwd_kv"), 4 + 3);
    }

    #[test]
    fn every_path_of_a_card_is_compared_and_runs_its_kernel() {
        let shape = Shape::new(1, 65, [3, 1], 64);
        for (capability, count) in [((8, 6), 2), ((9, 0), 3)] {
            let gpu = Gpu::dry(capability, &GpuOptions::default());
            assert_eq!(paths(gpu, &shape).len(), count);
            for path in paths(gpu, &shape) {
                run(gpu, &shape, path, &shape.inputs(0).unwrap()).unwrap();
                assert_eq!(gpu.launches().get(path.forward_kernel()), Some(&1), "{}", path.name());
            }
        }
    }
}
