//! Scaled dot-product attention with grouped key and value heads.
//!
//! - **Computes** `y = softmax(q k^T * scale) v` for each head; query head `h` uses key head `h / (Hq/Hkv)`.
//!   Options: scores `c tanh(q k^T * scale / c)`; at most the last `window` keys of those that the mask shows.
//! - **Shapes** `q [B, T, Hq, D]`, `k` and `v [B, S, Hkv, D]` with `Hq % Hkv == 0` -> `y [B, T, Hq, D]`.
//! - **Dtypes** all of one float type; the softmax is computed in that type, the maximum subtracted.
//! - **Backward** with `p = exp(q k^T * scale - lse)`, `ds = p*(dy v^T - sum(dy*y))*scale`: `dq = ds k`,
//!   `dk = ds^T q`, `dv = p^T dy`, the last two summed over the heads of a group; with a cap `ds` has the factor
//!   `1 - tanh^2` too.
//! - **Saves** `q`, `k`, `v` and `y` (shared), `lse [B, T, Hq]`; never a `[T, S]` matrix.
//! - **Errors** `ShapeError` for `k`, `v` or `mask` of another shape or a number of heads that is no
//!   multiple; `IndexOutOfRange` for a range outside `0..=S`; `Argument` for a cap that is not above 0 or a
//!   window of 0. A query that sees no key gets 0 and gives gradient 0.
//! - **Kernels** `attention_fwd`, `attention_delta`, `attention_bwd_kv`, `attention_bwd_q` for heads of at most 256;
//!   `attention_mma_fwd`, `attention_mma_bwd_kv`, `attention_mma_bwd_q` for bf16 heads of 32, 64, 96 or 128;
//!   `attention_wgmma_fwd`, `attention_wgmma_bwd_q`, `attention_wgmma_bwd_kv` for bf16 heads of 64 or 128 without
//!   options on Hopper; `attention/select.rs` chooses.
//! - **Source** arXiv:1706.03762; arXiv:2205.14135 (no saved matrix); arXiv:2305.13245 (grouped heads);
//!   arXiv:2310.06825 (window); arXiv:2408.00118 (cap);
//!   PyTorch `scaled_dot_product_attention`, which aligns a causal mask at the start where `T != S`.

pub(crate) mod cuda;
mod options;
mod select;
mod wgmma;

use rayon::prelude::*;
use rb_cuda::Gpu;
use rb_planted::{Defect, active};
use rb_tensor::{DType, Device, Shape, ShapeError, Tensor};

use super::shared::attention::{self as engine, BackwardInputs, Heads, Problem};
use crate::testing::Case;
use crate::{AutogradError, Float, GradSinks, Op, Result, Var, apply, saved};

pub use options::AttentionOptions;
pub use select::{AttentionPath, mma_reason};
pub use wgmma::wgmma_reason;

/// Which keys each query may see.
#[derive(Clone, Debug)]
pub enum AttentionMask {
    /// Query `t` sees keys `0..=S - T + t`: the last query is aligned with the last key.
    Causal,
    /// Every query sees every key.
    Full,
    /// Query `t` of batch row `b` sees keys `start..end`, given as i32 `[B, T, 2]`; none if `end <= start`.
    Ranges(Tensor),
}

impl AttentionMask {
    /// Causal attention inside packed documents, for `T == S`: `doc_start [B, T]` (i32) holds the position
    /// where the document of each token starts. A token whose start lies behind it sees nothing (padding).
    ///
    /// # Errors
    /// `doc_start` that is not i32 `[B, T]`.
    pub fn documents(doc_start: &Tensor) -> Result<AttentionMask> {
        let shape = doc_start.shape();
        if shape.rank() != 2 {
            return Err(ShapeError::new(Attention::NAME, "doc_start", shape, "[B, T]").into());
        }
        if active(Defect::DocumentMaskIgnored) {
            return Ok(AttentionMask::Causal);
        }
        let doc_start = doc_start.to_device(Device::Cpu)?;
        let starts = doc_start.as_slice::<i32>()?;
        let positions = (0..shape[1] as i32).cycle();
        let ranges: Vec<i32> = starts.iter().zip(positions).flat_map(|(&s, t)| [s, t + 1]).collect();
        Ok(AttentionMask::Ranges(Tensor::from_vec(ranges, [shape[0], shape[1], 2])?))
    }

    /// The same mask on `device`. Ranges are checked when they leave the host; one that is bad gives NaN on a GPU.
    ///
    /// # Errors
    /// A range that is not i32 or leaves `0..=keys`.
    pub fn on(&self, op: &'static str, device: Device, keys: usize) -> Result<AttentionMask> {
        let AttentionMask::Ranges(ranges) = self else { return Ok(self.clone()) };
        if ranges.device() == Device::Cpu && device != Device::Cpu {
            ranges.expect_dtype(op, "mask", DType::I32)?;
            AttentionMask::check_values(op, ranges.as_slice()?, keys)?;
        }
        Ok(AttentionMask::Ranges(ranges.to_device(device)?))
    }

    /// Checks that ranges stay in `0..=keys`.
    pub(crate) fn check_values(op: &'static str, ranges: &[i32], keys: usize) -> Result<()> {
        let bad = |&x: &i32| usize::try_from(x).map_or(true, |x| x > keys);
        let Some(position) = ranges.iter().position(bad) else { return Ok(()) };
        let (index, bound) = (i64::from(ranges[position]), keys + 1);
        Err(AutogradError::IndexOutOfRange { op, argument: "mask", position, index, bound })
    }

    /// Checks type and shape for queries `[B, T]`.
    pub(crate) fn check(&self, op: &'static str, batch: usize, queries: usize) -> Result<()> {
        let AttentionMask::Ranges(ranges) = self else { return Ok(()) };
        ranges.expect_dtype(op, "mask", DType::I32)?;
        if ranges.shape().dims() != [batch, queries, 2] {
            let expected = format!("[{batch}, {queries}, 2] (start and end for each query)");
            return Err(ShapeError::new(op, "mask", ranges.shape(), expected).into());
        }
        Ok(())
    }
}

/// Attention of `q [B, T, Hq, D]` over `k` and `v [B, S, Hkv, D]`; `options` may be the scale alone.
pub fn attention<'t>(
    q: &Var<'t>,
    k: &Var<'t>,
    v: &Var<'t>,
    mask: &AttentionMask,
    options: impl Into<AttentionOptions>,
) -> Result<Var<'t>> {
    let keys = k.shape().dims().get(1).copied().unwrap_or(0);
    let mask = mask.on(Attention::NAME, q.value.device(), keys)?;
    apply(Attention { mask, options: options.into() }, &[q, k, v])
}

struct Attention {
    mask: AttentionMask,
    options: AttentionOptions,
}

saved!(
    struct AttentionSaved { q, k, v, y, lse }
);

impl Attention {
    fn problem(&self, q: &Tensor, k: &Tensor) -> Result<Problem<'_>> {
        let (q, k) = (q.shape(), k.shape());
        Problem::new(Self::NAME, q, k[1], q[2], k[2], &self.mask, self.options)
    }
}

impl Op for Attention {
    const NAME: &'static str = "attention";
    type Saved = AttentionSaved;

    fn out_shape(&self, inputs: &[&Shape]) -> Result<Shape> {
        let (q, k, v) = (inputs[0], inputs[1], inputs[2]);
        if q.rank() != 4 || q[2] == 0 {
            return Err(ShapeError::new(Self::NAME, "q", q, "[B, T, Hq, D] with at least one head").into());
        }
        if k.rank() != 4 || k[0] != q[0] || k[3] != q[3] {
            let expected = format!("[{}, S, Hkv, {}] for q {q}", q[0], q[3]);
            return Err(ShapeError::new(Self::NAME, "k", k, expected).into());
        }
        if v != k {
            return Err(ShapeError::new(Self::NAME, "v", v, format!("{k} as k")).into());
        }
        if k[2] == 0 || !q[2].is_multiple_of(k[2]) {
            let expected = format!("a number of heads (axis 2) that divides the {} of q {q}", q[2]);
            return Err(ShapeError::new(Self::NAME, "k", k, expected).into());
        }
        self.options.check(Self::NAME)?;
        self.mask.check(Self::NAME, q[0], q[1])?;
        Ok(q.clone())
    }

    fn host_forward<T: Float>(&self, inputs: &[Tensor], out: &Shape) -> Result<(Tensor, AttentionSaved)> {
        let (q, k, v) = (&inputs[0], &inputs[1], &inputs[2]);
        let p = self.problem(q, k)?;
        let (y, lse) = engine::forward::<T>(&p, Heads::new(q, 0)?, Heads::new(k, 0)?, Heads::new(v, 0)?);
        let y = Tensor::from_vec(y, out.clone())?;
        let lse = Tensor::from_vec(lse, [p.batch, p.queries, p.num_heads])?;
        let saved = AttentionSaved { q: q.clone(), k: k.clone(), v: v.clone(), y: y.clone(), lse };
        Ok((y, saved))
    }

    fn host_backward<T: Float>(
        &self,
        saved: AttentionSaved,
        dy: Tensor,
        grads: &mut GradSinks<'_>,
    ) -> Result<()> {
        let AttentionSaved { q, k, v, y, lse } = &saved;
        let p = self.problem(q, k)?;
        let inputs = BackwardInputs::<T> {
            q: Heads::new(q, 0)?,
            k: Heads::new(k, 0)?,
            v: Heads::new(v, 0)?,
            out: Heads::new(y, 0)?,
            dy: Heads::new(&dy, 0)?,
            lse: lse.as_slice()?,
        };
        let mut dq = vec![T::ZERO; q.numel()];
        let mut dk = vec![T::ZERO; k.numel()];
        let mut dv = vec![T::ZERO; v.numel()];
        // Batch rows are chunks of all three; an empty one has nothing to store.
        let q_row = (q.numel() / p.batch.max(1)).max(1);
        let k_row = (k.numel() / p.batch.max(1)).max(1);
        let rows = dq.par_chunks_mut(q_row).zip(dk.par_chunks_mut(k_row).zip(dv.par_chunks_mut(k_row)));
        rows.enumerate().for_each(|(b, (dq, (dk, dv)))| {
            for head in engine::backward(&p, &inputs, b) {
                head.store_dq(&p, dq, p.num_heads, 0);
                head.store_dk(&p, dk, p.num_kv_heads, 0);
                head.store_dv(&p, dv, p.num_kv_heads, 0);
            }
        });
        grads.add(0, Tensor::from_vec(dq, q.shape().clone())?)?;
        grads.add(1, Tensor::from_vec(dk, k.shape().clone())?)?;
        grads.add(2, Tensor::from_vec(dv, v.shape().clone())?)
    }

    fn cuda_forward(&self, gpu: Gpu, inputs: &[Tensor], out: &Shape) -> Result<(Tensor, AttentionSaved)> {
        let (q, k, v) = (&inputs[0], &inputs[1], &inputs[2]);
        let p = cuda::Problem::new(Self::NAME, q.shape(), k.shape()[1], k.shape()[2], &self.mask, self.options)?;
        let (y, lse) = p.forward(gpu, [q, k, v].map(cuda::Heads::all), out)?;
        let saved = AttentionSaved { q: q.clone(), k: k.clone(), v: v.clone(), y: y.clone(), lse };
        Ok((y, saved))
    }

    fn cuda_backward(
        &self,
        gpu: Gpu,
        saved: AttentionSaved,
        dy: Tensor,
        grads: &mut GradSinks<'_>,
    ) -> Result<()> {
        let AttentionSaved { q, k, v, y, lse } = &saved;
        let p = cuda::Problem::new(Self::NAME, q.shape(), k.shape()[1], k.shape()[2], &self.mask, self.options)?;
        let dx = |x: &Tensor| crate::cuda::output(gpu, x.shape(), x.dtype());
        let (dq, dk, dv) = (dx(q)?, dx(k)?, dx(v)?);
        let inputs = [q, k, v].map(cuda::Heads::all);
        p.backward(gpu, inputs, [y, &dy, lse], [&dq, &dk, &dv].map(cuda::Heads::all))?;
        grads.add(0, dq)?;
        grads.add(1, dk)?;
        grads.add(2, dv)
    }
}

/// Masks that tests run attention with, for `T == S`: name and ranges.
pub(crate) fn test_masks(batch: usize, t: usize) -> Vec<(&'static str, AttentionMask)> {
    let ranges = |f: &dyn Fn(usize, usize) -> (usize, usize)| {
        let pairs = (0..batch).flat_map(|b| (0..t).map(move |i| (b, i)));
        let values: Vec<i32> = pairs.map(|(b, i)| f(b, i)).flat_map(|(s, e)| [s as i32, e as i32]).collect();
        // INVARIANT: the iterator above yields batch * t pairs.
        AttentionMask::Ranges(Tensor::from_vec(values, [batch, t, 2]).expect("two values a query"))
    };
    vec![
        ("causal", AttentionMask::Causal),
        ("full", AttentionMask::Full),
        // Documents of length 5, then 3 + b; the last one ends with the row.
        ("documents", ranges(&|b, i| (if i < 5 { 0 } else { 5 + (i - 5) / (3 + b) * (3 + b) }, i + 1))),
        ("window", ranges(&|_, i| (i.saturating_sub(3), i + 1))),
        // Queries 0, 3, 6, .. see nothing, in two ways; key 0 is hidden from all but the last.
        ("empty ranges", ranges(&|b, i| if i % 3 == 0 { (i.min(b), 0) } else { (1, i + 1) })),
        ("all empty", ranges(&|_, _| (0, 0))),
    ]
}

/// Cases for gradient checks and device comparisons.
pub fn cases() -> Vec<Case> {
    let case = |name: String, [b, t, s, h, kv, d]: [usize; 6], mask: AttentionMask| {
        let (q, k) = ([b, t, h, d], [b, s, kv, d]);
        Case::normal(name, &[&q, &k, &k], move |v| {
            attention(&v[0], &v[1], &v[2], &mask, (d as f64).powf(-0.5))
        })
    };
    let mut cases = option_cases();
    for (t, h, kv, d) in [(1, 4, 2, 3), (2, 3, 3, 4), (7, 4, 1, 5), (33, 6, 2, 8), (67, 2, 1, 32)] {
        for (name, mask) in test_masks(2, t) {
            cases.push(case(format!("{name}, T {t}, heads {h}/{kv}"), [2, t, t, h, kv, d], mask));
        }
    }
    for (t, h, kv) in [(65, 2, 2), (129, 3, 1), (130, 4, 1)] {
        cases.push(case(
            format!("causal, T {t}, heads {h}/{kv}"),
            [1, t, t, h, kv, 4],
            AttentionMask::Causal,
        ));
    }
    cases.push(case("causal, T 3, S 7".into(), [2, 3, 7, 2, 1, 4], AttentionMask::Causal));
    cases.push(case("causal, T 7, S 3".into(), [2, 7, 3, 2, 1, 4], AttentionMask::Causal));
    cases.push(case("full, T 3, S 7".into(), [1, 3, 7, 2, 2, 4], AttentionMask::Full));
    cases.push(case("causal, T 70, S 133, D 64".into(), [1, 70, 133, 2, 1, 64], AttentionMask::Causal));
    cases
}

/// Caps and windows, alone and together; the scale is large enough for a cap of 2 to bend most scores.
fn option_cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for [t, h, kv, d] in [[35, 4, 2, 5], [130, 3, 1, 64]] {
        for (softcap, window, mask) in [(Some(2.0), None, 0), (None, Some(6), 0), (Some(3.0), Some(40), 2)] {
            let (name, mask) = test_masks(1, t).swap_remove(mask);
            let options = AttentionOptions { scale: 2.0 * (d as f64).powf(-0.5), softcap, window };
            let name = format!("{name}, T {t}, heads {h}/{kv}, D {d}, cap {softcap:?}, window {window:?}");
            let (q, k) = ([1, t, h, d], [1, t, kv, d]);
            cases.push(Case::normal(name, &[&q, &k, &k], move |v| {
                attention(&v[0], &v[1], &v[2], &mask, options)
            }));
        }
    }
    cases
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ParamStore;
    use crate::testing::{Fill, Outcome, random};
    use rb_tensor::Rng;
    use std::ops::Range;

    fn normal(shape: &[usize], seed: u64) -> Tensor {
        random(&shape.into(), Fill::Normal, &mut Rng::new(seed)).unwrap()
    }

    fn case(mask: &AttentionMask, options: impl Into<AttentionOptions>) -> Case {
        let (mask, options) = (mask.clone(), options.into());
        Case::normal("test", &[], move |v| attention(&v[0], &v[1], &v[2], &mask, options))
    }

    fn close(what: &str, got: &[f64], want: &[f64]) {
        assert_eq!(got.len(), want.len(), "{what}");
        for (i, (g, w)) in got.iter().zip(want).enumerate() {
            assert!((g - w).abs() <= 1e-12 * w.abs().max(1.0), "{what}[{i}]: {g:e}, expected {w:e}");
        }
    }

    fn values(t: &Tensor) -> &[f64] {
        t.as_slice().unwrap()
    }

    /// The keys a query sees, from the words of the mask's documentation.
    fn sees(mask: &AttentionMask, [t, s]: [usize; 2], b: usize, i: usize) -> Range<usize> {
        match mask {
            AttentionMask::Causal => 0..(s + i + 1).saturating_sub(t),
            AttentionMask::Full => 0..s,
            AttentionMask::Ranges(ranges) => {
                let pair = &ranges.as_slice::<i32>().unwrap()[2 * (b * t + i)..][..2];
                pair[0] as usize..pair[1] as usize
            }
        }
    }

    /// `y`, `dq`, `dk`, `dv` by the formula, one score at a time.
    fn reference(x: &[Tensor], dy: &Tensor, mask: &AttentionMask, options: AttentionOptions) -> [Vec<f64>; 4] {
        let AttentionOptions { scale, softcap, window } = options;
        let ([_, t, h, d], [_, s, kv, _]) = (dims(&x[0]), dims(&x[1]));
        let (q, k, v, dy) = (values(&x[0]), values(&x[1]), values(&x[2]), values(dy));
        let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
        let add = |a: &mut [f64], b: &[f64], f: f64| a.iter_mut().zip(b).for_each(|(a, b)| *a += f * b);
        let mut out = [vec![0.0; q.len()], vec![0.0; q.len()], vec![0.0; k.len()], vec![0.0; k.len()]];
        for query in 0..q.len() / d {
            let (b, i, head) = (query / (t * h), query / h % t, query % h);
            let row = query * d..(query + 1) * d;
            let keys = sees(mask, [t, s], b, i);
            let keys = window.map_or(keys.clone(), |w| keys.start.max(keys.end.saturating_sub(w))..keys.end);
            let at = |j: usize| {
                let key = (b * s + j) * kv + head / (h / kv);
                key * d..(key + 1) * d
            };
            let tanh = |j: usize, cap: f64| (scale * dot(&q[row.clone()], &k[at(j)]) / cap).tanh();
            let score = |j| match softcap {
                None => scale * dot(&q[row.clone()], &k[at(j)]),
                Some(cap) => cap * tanh(j, cap),
            };
            let e: Vec<f64> = keys.clone().map(|j| score(j).exp()).collect();
            let sum: f64 = e.iter().sum();
            for (j, e) in keys.clone().zip(&e) {
                add(&mut out[0][row.clone()], &v[at(j)], e / sum);
            }
            let delta = dot(&out[0][row.clone()], &dy[row.clone()]);
            for (j, e) in keys.zip(&e) {
                let (p, dp) = (e / sum, dot(&dy[row.clone()], &v[at(j)]));
                let slope = softcap.map_or(1.0, |cap| 1.0 - tanh(j, cap).powi(2));
                let ds = p * (dp - delta) * slope * scale;
                add(&mut out[1][row.clone()], &k[at(j)], ds);
                add(&mut out[2][at(j)], &q[row.clone()], ds);
                add(&mut out[3][at(j)], &dy[row.clone()], p);
            }
        }
        out
    }

    fn dims(t: &Tensor) -> [usize; 4] {
        t.shape().dims().try_into().unwrap()
    }

    fn compare(
        what: &str,
        x: &[Tensor],
        mask: &AttentionMask,
        options: impl Into<AttentionOptions>,
    ) -> Outcome {
        let (dy, options) = (normal(x[0].shape(), 9), options.into());
        let got = case(mask, options).run(x, Some(&dy)).unwrap();
        let want = reference(x, &dy, mask, options);
        close(&format!("{what}: y"), values(&got.y), &want[0]);
        for ((name, got), want) in ["dq", "dk", "dv"].iter().zip(&got.dx).zip(&want[1..]) {
            close(&format!("{what}: {name}"), values(got.as_ref().unwrap()), want);
        }
        got
    }

    fn inputs(b: usize, t: usize, s: usize, h: usize, kv: usize, d: usize) -> [Tensor; 3] {
        [normal(&[b, t, h, d], 1), normal(&[b, s, kv, d], 2), normal(&[b, s, kv, d], 3)]
    }

    #[test]
    fn shape_rule() {
        let rule = |q: &[usize], k: &[usize], v: &[usize]| {
            let op = Attention { mask: AttentionMask::Causal, options: 1.0.into() };
            op.out_shape(&[&q.into(), &k.into(), &v.into()]).map_err(|e| e.to_string())
        };
        let k = [2, 5, 2, 4];
        assert_eq!(rule(&[2, 3, 6, 4], &k, &k).unwrap().dims(), &[2, 3, 6, 4]);
        let message = rule(&[3, 6, 4], &k, &k).unwrap_err();
        assert_eq!(
            message,
            "attention: q has shape [3, 6, 4], expected [B, T, Hq, D] with at least one head"
        );
        let message = rule(&[2, 3, 6, 8], &k, &k).unwrap_err();
        assert_eq!(
            message,
            "attention: k has shape [2, 5, 2, 4], expected [2, S, Hkv, 8] for q [2, 3, 6, 8]"
        );
        let message = rule(&[2, 3, 6, 4], &k, &[2, 5, 1, 4]).unwrap_err();
        assert_eq!(message, "attention: v has shape [2, 5, 1, 4], expected [2, 5, 2, 4] as k");
        let message = rule(&[2, 3, 5, 4], &k, &k).unwrap_err();
        let expected = "a number of heads (axis 2) that divides the 5 of q [2, 3, 5, 4]";
        assert_eq!(message, format!("attention: k has shape [2, 5, 2, 4], expected {expected}"));
    }

    #[test]
    fn masks_are_checked() {
        let error = |mask: Tensor| {
            let result = case(&AttentionMask::Ranges(mask), 1.0).run(&inputs(1, 2, 3, 1, 1, 2), None);
            result.err().map(|e| e.to_string()).unwrap()
        };
        for (position, index) in [(0, -1), (3, 4)] {
            let mut ranges = vec![0, 1, 2, 3];
            ranges[position] = index;
            let message = error(Tensor::from_vec(ranges, [1, 2, 2]).unwrap());
            assert_eq!(message, format!("attention: mask[{position}] is {index}, expected 0..4"));
        }
        let message = error(Tensor::from_vec(vec![0i32; 4], [2, 2]).unwrap());
        let expected = "[1, 2, 2] (start and end for each query)";
        assert_eq!(message, format!("attention: mask has shape [2, 2], expected {expected}"));
        let message = error(Tensor::from_vec(vec![0f32; 4], [1, 2, 2]).unwrap());
        assert_eq!(message, "attention: mask is f32, expected i32");
        let message = AttentionMask::documents(&Tensor::from_vec(vec![0i32], [1]).unwrap()).unwrap_err();
        assert_eq!(message.to_string(), "attention: doc_start has shape [1], expected [B, T]");
    }

    #[test]
    fn gradcheck() {
        crate::testing::check_op("attention").unwrap();
    }

    #[test]
    fn golden() {
        for case in crate::golden::load("attention") {
            let [b, t, h, _] = dims(case.tensor("in0"));
            let mask = match case.tensors.get("mask") {
                Some(mask) => {
                    let rows = mask.as_slice::<i32>().unwrap().chunks(t);
                    let ranges: Vec<i32> = rows
                        .flat_map(|row| {
                            let start = row.iter().position(|&m| m == 1).unwrap_or(0);
                            let len = row.iter().filter(|m| **m == 1).count();
                            assert!(
                                row[start..start + len].iter().all(|&m| m == 1),
                                "{} has gaps",
                                case.name
                            );
                            [start as i32, (start + len) as i32]
                        })
                        .collect();
                    AttentionMask::Ranges(Tensor::from_vec(ranges, [b, t, 2]).unwrap())
                }
                None if case.attrs["causal"].as_bool().unwrap() => AttentionMask::Causal,
                None => AttentionMask::Full,
            };
            let scale = case.number("scale");
            // Scores of magnitude 100 make their exponentials that much less exact.
            let tolerance = if case.name == "causal_sharp" { 1e-10 } else { 1e-12 };
            crate::golden::check(&case, |v| attention(&v[0], &v[1], &v[2], &mask, scale), tolerance);
            if let Some(want) = case.tensors.get("lse") {
                let x: Vec<Tensor> = (0..3).map(|i| case.tensor(&format!("in{i}")).clone()).collect();
                let shape = x[0].shape().clone();
                let (_, saved) = Attention { mask, options: scale.into() }.host_forward::<f64>(&x, &shape).unwrap();
                let (got, want) = (values(&saved.lse), values(want));
                let transposed: Vec<f64> =
                    (0..got.len()).map(|i| want[(i / (t * h) * h + i % h) * t + i / h % t]).collect();
                close(&format!("{} lse", case.name), got, &transposed);
            }
        }
    }

    #[test]
    fn odd_lengths_match_the_formula() {
        for t in [1, 2, 7, 63, 65, 127, 129, 255, 257] {
            for (name, mask) in test_masks(2, t) {
                compare(&format!("{name}, T {t}"), &inputs(2, t, t, 4, 2, 4), &mask, 0.5);
            }
        }
    }

    /// Later queries of a block see earlier keys, and fewer of the last.
    #[test]
    fn ranges_in_any_order_match_the_formula() {
        for t in [3, 40, 70] {
            let pairs = (0..t as i32).flat_map(|i| [t as i32 - 1 - i, t as i32 - i / 2]);
            let mask = AttentionMask::Ranges(Tensor::from_vec(pairs.collect(), [1, t, 2]).unwrap());
            compare(&format!("falling ranges, T {t}"), &inputs(1, t, t, 4, 2, 4), &mask, 0.5);
        }
    }

    #[test]
    fn caps_and_windows_match_the_formula() {
        for t in [1, 5, 40, 65, 130] {
            for (softcap, window) in
                [(Some(1.5), None), (Some(50.0), None), (None, Some(1)), (None, Some(9)), (Some(1.5), Some(33))]
            {
                for (name, mask) in test_masks(2, t) {
                    let options = AttentionOptions { scale: 0.9, softcap, window };
                    let what = format!("{name}, T {t}, cap {softcap:?}, window {window:?}");
                    compare(&what, &inputs(2, t, t, 4, 2, 4), &mask, options);
                }
            }
        }
        for (t, s) in [(3, 50), (50, 3)] {
            let options = AttentionOptions { scale: 0.5, softcap: None, window: Some(7) };
            compare(&format!("T {t}, S {s}"), &inputs(1, t, s, 2, 1, 4), &AttentionMask::Causal, options);
        }
    }

    #[test]
    fn options_are_checked() {
        let error = |softcap, window| {
            let options = AttentionOptions { scale: 1.0, softcap, window };
            let result = case(&AttentionMask::Causal, options).run(&inputs(1, 2, 2, 1, 1, 2), None);
            result.err().map(|e| e.to_string()).unwrap()
        };
        assert_eq!(error(Some(0.0), None), "attention: softcap is 0, expected a finite number above 0");
        assert!(error(Some(f64::NAN), None).contains("softcap is NaN"));
        assert_eq!(error(None, Some(0)), "attention: window is 0, expected at least 1");
    }

    #[test]
    fn head_sizes_groups_and_unequal_lengths_match_the_formula() {
        for (h, kv, d) in [(1, 1, 1), (6, 2, 32), (2, 1, 33), (3, 3, 16), (8, 2, 80), (97, 1, 2), (200, 2, 1)]
        {
            compare(
                &format!("heads {h}/{kv}, D {d}"),
                &inputs(1, 35, 35, h, kv, d),
                &AttentionMask::Causal,
                0.2,
            );
        }
        for (t, s) in [(1, 40), (3, 50), (50, 3), (100, 33), (600, 20), (1030, 5)] {
            for mask in [AttentionMask::Causal, AttentionMask::Full] {
                compare(&format!("T {t}, S {s}"), &inputs(1, t, s, 4, 2, 5), &mask, 0.5);
            }
        }
    }

    /// Every length up to a few tiles and lengths at tile ends up to 300, in f32: queries without keys give 0, nothing
    /// is NaN.
    #[test]
    fn no_length_gives_nan() {
        for t in (1..=70).chain([95, 96, 97, 127, 128, 129, 159, 161, 191, 193, 255, 256, 257, 300]) {
            let x = inputs(2, t, t, 2, 1, 3).map(|x| x.to_dtype(DType::F32).unwrap());
            let dy = normal(x[0].shape(), 9).to_dtype(DType::F32).unwrap();
            for (name, mask) in test_masks(2, t) {
                let got = case(&mask, 0.6).run(&x, Some(&dy)).unwrap();
                let dx = got.dx.into_iter().map(Option::unwrap);
                for values in std::iter::once(got.y.clone()).chain(dx.clone()) {
                    assert!(values.as_slice::<f32>().unwrap().iter().all(|x| x.is_finite()), "{name}, T {t}");
                }
                let dq = dx.clone().next().unwrap();
                for query in 0..2 * t {
                    if sees(&mask, [t, t], query / t, query % t).is_empty() {
                        for values in [&got.y, &dq] {
                            assert_eq!(
                                values.as_slice::<f32>().unwrap()[query * 6..][..6],
                                [0.0; 6],
                                "{name}, T {t}"
                            );
                        }
                    }
                }
            }
        }
    }

    /// Two rows of packed documents, one of which ends exactly at T, against each document alone.
    #[test]
    fn packed_documents_are_separate() {
        let (t, h, kv, d) = (37, 4, 2, 3);
        let documents: [&[usize]; 2] = [&[5, 1, 31], &[20, 9]]; // 8 tokens of padding end the second row.
        let mut starts = Vec::new();
        for lengths in documents {
            let mut start = 0;
            for &len in lengths {
                starts.extend(std::iter::repeat_n(start as i32, len));
                start += len;
            }
            starts.extend((start as i32..t as i32).map(|i| i + 1));
        }
        let mask = AttentionMask::documents(&Tensor::from_vec(starts, [2, t]).unwrap()).unwrap();
        let x = inputs(2, t, t, h, kv, d);
        let dy = normal(x[0].shape(), 9);
        let all = case(&mask, 0.5).run(&x, Some(&dy)).unwrap();
        for (b, lengths) in documents.iter().enumerate() {
            let mut start = 0;
            for &len in *lengths {
                let part = |x: &Tensor| {
                    let row: usize = x.shape()[2..].iter().product();
                    let part = x.narrow(b, 1).unwrap().reshape([t, row]).unwrap().narrow(start, len).unwrap();
                    part.reshape([1, len, x.shape()[2], d]).unwrap()
                };
                let alone = case(&AttentionMask::Causal, 0.5)
                    .run(&x.clone().map(|x| part(&x)), Some(&part(&dy)))
                    .unwrap();
                close("y", values(&part(&all.y)), values(&alone.y));
                for (all, alone) in all.dx.iter().zip(&alone.dx) {
                    close("dx", values(&part(all.as_ref().unwrap())), values(alone.as_ref().unwrap()));
                }
                start += len;
            }
            let tail = values(&all.y)[(b * t + start) * h * d..(b + 1) * t * h * d].iter();
            assert!(tail.clone().all(|&y| y == 0.0), "padding sees nothing");
        }
    }

    #[test]
    fn grouped_heads_equal_repeated_keys_and_values() {
        for (h, kv) in [(4, 2), (4, 1), (6, 2)] {
            let (t, d, group) = (19, 5, h / kv);
            let x = inputs(2, t, t, h, kv, d);
            let repeat = |x: &Tensor| {
                let rows = values(x).chunks(d).flat_map(|row| row.repeat(group)).collect();
                Tensor::from_vec::<f64>(rows, [2, t, h, d]).unwrap()
            };
            let dy = normal(x[0].shape(), 9);
            let grouped = case(&AttentionMask::Causal, 0.4).run(&x, Some(&dy)).unwrap();
            let repeated = [x[0].clone(), repeat(&x[1]), repeat(&x[2])];
            let plain = case(&AttentionMask::Causal, 0.4).run(&repeated, Some(&dy)).unwrap();
            close("y", values(&grouped.y), values(&plain.y));
            for i in 1..3 {
                let plain = values(plain.dx[i].as_ref().unwrap()).chunks(d * group);
                let sums: Vec<f64> = plain
                    .flat_map(|g| (0..d).map(|j| g.iter().skip(j).step_by(d).sum()).collect::<Vec<f64>>())
                    .collect();
                close("dk or dv", values(grouped.dx[i].as_ref().unwrap()), &sums);
            }
        }
    }

    #[test]
    fn nothing_to_see_is_an_empty_result() {
        for (b, t, s) in [(0, 3, 3), (2, 0, 3), (2, 3, 0)] {
            let x = inputs(b, t, s, 2, 1, 4);
            let dy = normal(x[0].shape(), 9);
            let got = case(&AttentionMask::Causal, 1.0).run(&x, Some(&dy)).unwrap();
            for (x, dx) in x.iter().zip(&got.dx) {
                assert_eq!(values(dx.as_ref().unwrap()), vec![0.0; x.numel()]);
            }
            assert_eq!(values(&got.y), vec![0.0; x[0].numel()]);
        }
    }

    #[test]
    fn any_number_of_threads_gives_the_same_bits() {
        let x = inputs(3, 77, 77, 6, 2, 16).map(|x| x.to_dtype(DType::F32).unwrap());
        let dy = normal(x[0].shape(), 9).to_dtype(DType::F32).unwrap();
        let run = |threads: usize| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            let got = pool.install(|| case(&AttentionMask::Causal, 0.25).run(&x, Some(&dy)).unwrap());
            let dx = got.dx.iter().flat_map(|t| t.as_ref().unwrap().as_bytes().unwrap().to_vec());
            got.y.as_bytes().unwrap().iter().copied().chain(dx).collect::<Vec<u8>>()
        };
        let one = run(1);
        assert!(one == run(3) && one == run(5));
    }

    #[test]
    fn no_score_matrix_is_saved() {
        let (t, h, d) = (256, 2, 4);
        let params = ParamStore::empty();
        let tape = crate::Tape::new(&params);
        let [q, k, v] = inputs(1, t, t, h, h, d).map(|x| tape.leaf(x));
        attention(&q, &k, &v, &AttentionMask::Causal, 1.0).unwrap();
        assert_eq!(tape.saved_bytes(), 8 * (4 * t * h * d + t * h));
    }
}
