//! Scaled dot-product attention with grouped key and value heads.
//!
//! - **Computes** `y = softmax(q k^T * scale) v` for each head; query head `h` uses key head `h / (Hq/Hkv)`.
//! - **Shapes** `q [B, T, Hq, D]`, `k` and `v [B, S, Hkv, D]` with `Hq % Hkv == 0` -> `y [B, T, Hq, D]`.
//! - **Dtypes** all of one float type; the softmax is computed in that type, the maximum subtracted.
//! - **Backward** with `p = exp(q k^T * scale - lse)`, `ds = p*(dy v^T - sum(dy*y))*scale`: `dq = ds k`,
//!   `dk = ds^T q`, `dv = p^T dy`, the last two summed over the heads of a group.
//! - **Saves** `q`, `k`, `v` and `y` (shared), `lse [B, T, Hq]`; never a `[T, S]` matrix.
//! - **Errors** `ShapeError` for `k`, `v` or `mask` of another shape or a number of heads that is no
//!   multiple; `IndexOutOfRange` for a range outside `0..=S`. A query that sees no key gets 0 and gives
//!   gradient 0.
//! - **Source** arXiv:1706.03762; arXiv:2205.14135 (no saved matrix); arXiv:2305.13245 (grouped heads);
//!   PyTorch `scaled_dot_product_attention`, which aligns a causal mask at the start where `T != S`.

use rayon::prelude::*;
use rb_tensor::{DType, Shape, ShapeError, Tensor};

use super::shared::attention::{self as engine, BackwardInputs, Heads, Problem};
use crate::testing::Case;
use crate::{Float, GradSinks, Op, Result, Var, apply, saved};

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
        let starts = doc_start.as_slice::<i32>()?;
        let positions = (0..shape[1] as i32).cycle();
        let ranges: Vec<i32> = starts.iter().zip(positions).flat_map(|(&s, t)| [s, t + 1]).collect();
        Ok(AttentionMask::Ranges(Tensor::from_vec(ranges, [shape[0], shape[1], 2])?))
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

/// Attention of `q [B, T, Hq, D]` over `k` and `v [B, S, Hkv, D]`.
pub fn attention<'t>(
    q: &Var<'t>,
    k: &Var<'t>,
    v: &Var<'t>,
    mask: &AttentionMask,
    scale: f64,
) -> Result<Var<'t>> {
    apply(Attention { mask: mask.clone(), scale }, &[q, k, v])
}

struct Attention {
    mask: AttentionMask,
    scale: f64,
}

saved!(
    struct AttentionSaved { q, k, v, y, lse }
);

impl Attention {
    fn problem(&self, q: &Tensor, k: &Tensor) -> Result<Problem<'_>> {
        let (q, k) = (q.shape(), k.shape());
        Problem::new(Self::NAME, q, k[1], q[2], k[2], &self.mask, self.scale)
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
    let mut cases = Vec::new();
    for (t, h, kv, d) in [(1, 4, 2, 3), (2, 3, 3, 4), (7, 4, 1, 5), (33, 6, 2, 8)] {
        for (name, mask) in test_masks(2, t) {
            cases.push(case(format!("{name}, T {t}, heads {h}/{kv}"), [2, t, t, h, kv, d], mask));
        }
    }
    for (t, h, kv) in [(65, 2, 2), (129, 3, 1), (130, 4, 1)] {
        cases.push(case(format!("causal, T {t}, heads {h}/{kv}"), [1, t, t, h, kv, 4], AttentionMask::Causal));
    }
    cases.push(case("causal, T 3, S 7".into(), [2, 3, 7, 2, 1, 4], AttentionMask::Causal));
    cases.push(case("causal, T 7, S 3".into(), [2, 7, 3, 2, 1, 4], AttentionMask::Causal));
    cases.push(case("full, T 3, S 7".into(), [1, 3, 7, 2, 2, 4], AttentionMask::Full));
    cases
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{GradStore, ParamStore, Tape};

    #[test]
    fn shape_rule() {
        let rule = |q: &[usize], k: &[usize], v: &[usize]| {
            let op = Attention { mask: AttentionMask::Causal, scale: 1.0 };
            op.out_shape(&[&q.into(), &k.into(), &v.into()]).map_err(|e| e.to_string())
        };
        assert_eq!(rule(&[2, 3, 4, 8], &[2, 5, 2, 8], &[2, 5, 2, 8]).unwrap().dims(), &[2, 3, 4, 8]);
        let heads = rule(&[2, 3, 4, 8], &[2, 3, 3, 8], &[2, 3, 3, 8]).unwrap_err();
        assert!(heads.starts_with("attention: k has shape [2, 3, 3, 8], expected a number of heads"), "{heads}");
        let width = rule(&[2, 3, 4, 8], &[2, 3, 2, 4], &[2, 3, 2, 4]).unwrap_err();
        assert_eq!(
            width,
            "attention: k has shape [2, 3, 2, 4], expected [2, S, Hkv, 8] for q [2, 3, 4, 8]"
        );
        assert!(rule(&[2, 3, 4, 8], &[2, 3, 2, 8], &[2, 4, 2, 8]).unwrap_err().contains("attention: v has shape"));
        assert!(rule(&[3, 4, 8], &[2, 3, 2, 8], &[2, 4, 2, 8]).unwrap_err().contains("attention: q has shape"));
    }

    #[test]
    fn gradcheck() {
        crate::testing::check_op("attention").unwrap();
    }

    /// Recorded masks are 0/1 for each pair; documents are runs, so each row of a mask is one range of keys.
    #[test]
    fn golden() {
        for case in crate::golden::load("attention") {
            let mask = match case.tensors.get("mask") {
                None if case.attrs["causal"].as_bool() == Some(true) => AttentionMask::Causal,
                None => AttentionMask::Full,
                Some(mask) => ranges(mask),
            };
            let scale = case.number("scale");
            crate::golden::check(&case, |v| attention(&v[0], &v[1], &v[2], &mask, scale), 1e-11);
        }
    }

    fn ranges(mask: &Tensor) -> AttentionMask {
        let (b, t, s) = (mask.shape()[0], mask.shape()[1], mask.shape()[2]);
        let values = mask.to_vec::<i32>().unwrap();
        let mut ranges = Vec::new();
        for row in values.chunks(s) {
            let start = row.iter().position(|&x| x == 1).unwrap_or(0);
            let end = row.iter().rposition(|&x| x == 1).map_or(0, |p| p + 1);
            assert!(row[start..end].iter().all(|&x| x == 1), "a mask row is not one range");
            ranges.extend([start as i32, end as i32]);
        }
        AttentionMask::Ranges(Tensor::from_vec(ranges, [b, t, 2]).unwrap())
    }

    fn run(q: &Tensor, kv: &Tensor, mask: &AttentionMask) -> (Vec<f32>, Vec<f32>) {
        let params = ParamStore::empty();
        let tape = Tape::new(&params);
        let (q, kv) = (tape.leaf(q.clone()), tape.leaf(kv.clone()));
        let y = attention(&q, &kv, &kv, mask, 0.5).unwrap();
        let dy = y.detach();
        let grads = tape.backward_from(&y, dy.clone(), &mut GradStore::new(&params).unwrap()).unwrap();
        (dy.to_vec().unwrap(), grads.get(&q).unwrap().to_vec().unwrap())
    }

    fn random(shape: [usize; 4], seed: u64) -> Tensor {
        let fill = crate::testing::Fill::Normal;
        crate::testing::random(&shape.into(), fill, &mut rb_tensor::Rng::new(seed)).unwrap().to_dtype(DType::F32)
    }

    /// Packed documents, two rows, one document ending exactly at T: as if each document were alone.
    #[test]
    fn packed_documents_equal_separate_ones() {
        let (q, kv) = (random([2, 6, 2, 4], 1), random([2, 6, 1, 4], 2));
        let starts = [[0, 0, 0, 3, 3, 3], [0, 1, 1, 1, 4, 4]];
        let flat: Vec<i32> = starts.concat();
        let mask = AttentionMask::documents(&Tensor::from_vec(flat, [2, 6]).unwrap()).unwrap();
        let (packed, dq) = run(&q, &kv, &mask);
        for (row, cuts) in [(0usize, vec![0usize, 3, 6]), (1, vec![0, 1, 4, 6])] {
            for cut in cuts.windows(2) {
                let piece = |x: &Tensor| {
                    let row = x.narrow(row, 1).unwrap();
                    let dims = [x.shape()[1], x.shape()[2], x.shape()[3]];
                    let rows = row.reshape(dims).unwrap().narrow(cut[0], cut[1] - cut[0]).unwrap();
                    rows.reshape([1, cut[1] - cut[0], dims[1], dims[2]]).unwrap()
                };
                let (alone, dq_alone) = run(&piece(&q), &piece(&kv), &AttentionMask::Causal);
                let place = (row * 6 + cut[0]) * 8..(row * 6 + cut[1]) * 8;
                for (a, b) in packed[place.clone()].iter().zip(&alone).chain(dq[place].iter().zip(&dq_alone)) {
                    assert!((a - b).abs() < 1e-5, "{a} {b}");
                }
            }
        }
    }

    #[test]
    fn every_length_is_finite() {
        for t in 1..=70 {
            let (y, dq) = run(&random([1, t, 2, 4], t as u64), &random([1, t, 1, 4], 9), &AttentionMask::Causal);
            assert!(y.iter().chain(&dq).all(|x| x.is_finite()), "T {t}");
        }
    }
}
