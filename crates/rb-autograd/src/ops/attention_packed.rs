//! Attention of queries, keys and values that lie in one tensor, as one matrix product makes them.
//!
//! - **Computes** what `attention` computes, with `q`, `k` and `v` ranges of heads of `qkv`.
//! - **Shapes** `qkv [B, T, Hq + 2*Hkv, D]`: all query heads, all key heads, all value heads; with
//!   `Hq % Hkv == 0` -> `y [B, T, Hq, D]`.
//! - **Dtypes** one float type, as `attention`.
//! - **Backward** as `attention`, into one dense `dqkv`.
//! - **Saves** `qkv` and `y` (shared), `lse [B, T, Hq]`.
//! - **Errors** `ShapeError` for another number of heads or a `mask` that is not `[B, T, 2]`; `Argument` if
//!   the heads do not form groups; `IndexOutOfRange` for a range outside `0..=T`.
//! - **Kernels** those of `attention`; [`rotated_attention`]: those of `rope`, too.
//! - **Source** as `attention`.

use std::sync::Arc;

use rayon::prelude::*;
use rb_cuda::Gpu;
use rb_tensor::{DType, Device, Shape, ShapeError, Tensor};

use super::attention::{AttentionMask, AttentionOptions, AttentionPath, cuda, test_masks};
use super::rope::{self, RopeTable, Undone, rope_consuming};
use super::shared::attention::{self as engine, BackwardInputs, Heads, Problem};
use crate::testing::Case;
use crate::{AutogradError, Float, GradSinks, Op, Result, Var, apply, saved};

/// Attention of `qkv [B, T, Hq + 2 Hkv, D]`, as `[B, T, Hq, D]`; `options` may be the scale alone.
pub fn attention_packed<'t>(
    qkv: &Var<'t>,
    num_heads: usize,
    num_kv_heads: usize,
    mask: &AttentionMask,
    options: impl Into<AttentionOptions>,
) -> Result<Var<'t>> {
    let keys = qkv.shape().dims().get(1).copied().unwrap_or(0);
    let mask = mask.on(AttentionPacked::NAME, qkv.value.device(), keys)?;
    apply(AttentionPacked::new(num_heads, num_kv_heads, mask, options.into()), &[qkv])
}

/// As [`attention_packed`] of `qkv` with its queries and keys turned by `positions`: `rope`, then this. On a GPU `qkv` is
/// turned where it is if nobody else holds it, and the gradients are turned back where they are made if the kernels can.
pub fn rotated_attention<'t>(
    qkv: Var<'t>,
    (positions, table): (&Tensor, &RopeTable),
    [num_heads, num_kv_heads]: [usize; 2],
    mask: &AttentionMask,
    options: impl Into<AttentionOptions>,
) -> Result<Var<'t>> {
    let keys = qkv.shape().dims().get(1).copied().unwrap_or(0);
    let mask = mask.on(AttentionPacked::NAME, qkv.value.device(), keys)?;
    let undone = Arc::new(Undone::default());
    let positions = rope::angles(&positions.to_device(qkv.value.device())?, table)?;
    let rotated = rope_consuming(qkv, &positions, table, num_heads + num_kv_heads, &undone)?;
    let turned = (positions.dtype() == DType::F32).then_some((positions, undone));
    // Nothing else may come between the two: all of the gradient of what was turned comes from here.
    let op =
        AttentionPacked { turned, ..AttentionPacked::new(num_heads, num_kv_heads, mask, options.into()) };
    apply(op, &[&rotated])
}

struct AttentionPacked {
    num_heads: usize,
    num_kv_heads: usize,
    mask: AttentionMask,
    options: AttentionOptions,
    /// The kernels on a GPU; chosen by card and shape if left out.
    path: Option<AttentionPath>,
    /// Angles by which queries and keys were turned on a GPU, and where to say that their gradients are turned back.
    turned: Option<(Tensor, Arc<Undone>)>,
}

saved!(
    struct AttentionPackedSaved { qkv, y, lse }
);

impl AttentionPacked {
    fn new(num_heads: usize, num_kv_heads: usize, mask: AttentionMask, options: AttentionOptions) -> Self {
        AttentionPacked { num_heads, num_kv_heads, mask, options, path: None, turned: None }
    }

    fn problem(&self, qkv: &Tensor) -> Result<Problem<'_>> {
        let (heads, kv_heads) = (self.num_heads, self.num_kv_heads);
        let shape = qkv.shape();
        Problem::new(Self::NAME, shape, shape[1], heads, kv_heads, &self.mask, self.options)
    }

    fn cuda_problem(&self, qkv: &Tensor) -> Result<cuda::Problem<'_>> {
        let shape = qkv.shape();
        let q = Shape::from([shape[0], shape[1], self.num_heads, shape[3]]);
        let p = cuda::Problem::new(Self::NAME, &q, shape[1], self.num_kv_heads, &self.mask, self.options)?;
        Ok(p.on_path(self.path))
    }

    /// Queries, keys and values on a GPU.
    fn cuda_heads<'a>(&self, qkv: &'a Tensor) -> [cuda::Heads<'a>; 3] {
        let (keys, values) = (self.num_heads, self.num_heads + self.num_kv_heads);
        [0, keys, values].map(|first| cuda::Heads { tensor: qkv, first })
    }

    /// Queries, keys and values.
    fn views<'a, T: Float>(&self, qkv: &'a Tensor) -> Result<[Heads<'a, T>; 3]> {
        let (keys, values) = (self.num_heads, self.num_heads + self.num_kv_heads);
        Ok([Heads::new(qkv, 0)?, Heads::new(qkv, keys)?, Heads::new(qkv, values)?])
    }
}

impl Op for AttentionPacked {
    const NAME: &'static str = "attention_packed";
    type Saved = AttentionPackedSaved;

    fn out_shape(&self, inputs: &[&Shape]) -> Result<Shape> {
        let (qkv, heads, kv_heads) = (inputs[0], self.num_heads, self.num_kv_heads);
        if heads == 0 || kv_heads == 0 || !heads.is_multiple_of(kv_heads) {
            return Err(AutogradError::Argument {
                op: Self::NAME,
                argument: "num_kv_heads",
                got: kv_heads.to_string(),
                expected: format!("a divisor of num_heads {heads}, both at least 1"),
            });
        }
        if qkv.rank() != 4 || qkv[2] != heads + 2 * kv_heads {
            let expected = format!("[B, T, {}, D] ({heads} + 2 * {kv_heads} heads)", heads + 2 * kv_heads);
            return Err(ShapeError::new(Self::NAME, "qkv", qkv, expected).into());
        }
        self.options.check(Self::NAME)?;
        self.mask.check(Self::NAME, qkv[0], qkv[1])?;
        Ok([qkv[0], qkv[1], heads, qkv[3]].into())
    }

    fn host_forward<T: Float>(
        &self,
        inputs: &[Tensor],
        out: &Shape,
    ) -> Result<(Tensor, AttentionPackedSaved)> {
        let qkv = &inputs[0];
        let p = self.problem(qkv)?;
        let [q, k, v] = self.views::<T>(qkv)?;
        let (y, lse) = engine::forward(&p, q, k, v);
        let y = Tensor::from_vec(y, out.clone())?;
        let lse = Tensor::from_vec(lse, [p.batch, p.queries, p.num_heads])?;
        let saved = AttentionPackedSaved { qkv: qkv.clone(), y: y.clone(), lse };
        Ok((y, saved))
    }

    fn host_backward<T: Float>(
        &self,
        saved: AttentionPackedSaved,
        dy: Tensor,
        grads: &mut GradSinks<'_>,
    ) -> Result<()> {
        let AttentionPackedSaved { qkv, y, lse } = &saved;
        let p = self.problem(qkv)?;
        let [q, k, v] = self.views::<T>(qkv)?;
        let (out, dy) = (Heads::new(y, 0)?, Heads::new(&dy, 0)?);
        let inputs = BackwardInputs { q, k, v, out, dy, lse: lse.as_slice()? };
        let mut dqkv = vec![T::ZERO; qkv.numel()];
        let (all, keys, values) = (qkv.shape()[2], p.num_heads, p.num_heads + p.num_kv_heads);
        let row = (p.queries * all * p.head_dim).max(1);
        dqkv.par_chunks_mut(row).enumerate().for_each(|(b, dqkv)| {
            for head in engine::backward(&p, &inputs, b) {
                head.store_dq(&p, dqkv, all, 0);
                head.store_dk(&p, dqkv, all, keys);
                head.store_dv(&p, dqkv, all, values);
            }
        });
        grads.add(0, Tensor::from_vec(dqkv, qkv.shape().clone())?)
    }

    fn cuda_forward(
        &self,
        gpu: Gpu,
        inputs: &[Tensor],
        out: &Shape,
    ) -> Result<(Tensor, AttentionPackedSaved)> {
        let qkv = &inputs[0];
        let (y, lse) = self.cuda_problem(qkv)?.forward(gpu, self.cuda_heads(qkv), out)?;
        let saved = AttentionPackedSaved { qkv: qkv.clone(), y: y.clone(), lse };
        Ok((y, saved))
    }

    fn cuda_backward(
        &self,
        gpu: Gpu,
        saved: AttentionPackedSaved,
        dy: Tensor,
        grads: &mut GradSinks<'_>,
    ) -> Result<()> {
        let AttentionPackedSaved { qkv, y, lse } = &saved;
        let dqkv = crate::cuda::output(gpu, qkv.shape(), qkv.dtype())?;
        let angles = self.turned.as_ref().map(|(angles, _)| angles);
        let p = cuda::Problem { angles, ..self.cuda_problem(qkv)? };
        let turned_back = p.backward(gpu, self.cuda_heads(qkv), [y, &dy, lse], self.cuda_heads(&dqkv))?;
        if let (true, Some((_, undone))) = (turned_back, &self.turned) {
            undone.set(&dqkv);
        }
        grads.add(0, dqkv)
    }
}

/// One attention on a GPU without a tape, by the chosen kernels or by one family of them: for checks and benchmarks.
pub struct DeviceAttention {
    op: AttentionPacked,
    gpu: Gpu,
    qkv: Tensor,
    out: Shape,
    angles: Option<Tensor>,
}

impl DeviceAttention {
    /// The attention of `qkv [B, T, Hq + 2 Hkv, D]`, which is on a GPU.
    ///
    /// # Errors
    /// Those of [`attention_packed`]; inputs on the host.
    pub fn new(
        qkv: &Tensor,
        num_heads: usize,
        num_kv_heads: usize,
        mask: &AttentionMask,
        options: impl Into<AttentionOptions>,
        path: Option<AttentionPath>,
    ) -> Result<DeviceAttention> {
        let Device::Cuda(gpu) = qkv.device() else {
            return Err(AutogradError::Argument {
                op: AttentionPacked::NAME,
                argument: "the device of qkv",
                got: qkv.device().to_string(),
                expected: "a GPU".into(),
            });
        };
        let mask = mask.on(AttentionPacked::NAME, qkv.device(), qkv.shape()[1])?;
        let op = AttentionPacked {
            path,
            ..AttentionPacked::new(num_heads, num_kv_heads, mask, options.into())
        };
        let out = op.out_shape(&[qkv.shape()])?;
        Ok(DeviceAttention { op, gpu, qkv: qkv.clone(), out, angles: None })
    }

    /// The same, whose gradients of queries and keys are turned back by `angles [B, T, D/2, 2]` (cosine, sine), f32 on
    /// that GPU, where the kernels can.
    pub fn turned_by(self, angles: Tensor) -> DeviceAttention {
        DeviceAttention { angles: Some(angles), ..self }
    }

    /// Output `[B, T, Hq, D]` and `lse [B, T, Hq]`, f32.
    ///
    /// # Errors
    /// A path that cannot compute this attention.
    pub fn forward(&self) -> Result<[Tensor; 2]> {
        let (y, lse) =
            self.op.cuda_problem(&self.qkv)?.forward(self.gpu, self.op.cuda_heads(&self.qkv), &self.out)?;
        Ok([y, lse])
    }

    /// The gradient of `qkv`, from what [`DeviceAttention::forward`] gave and the gradient of the output.
    ///
    /// # Errors
    /// As [`DeviceAttention::forward`].
    pub fn backward(&self, [y, lse]: [&Tensor; 2], dy: &Tensor) -> Result<Tensor> {
        let dqkv = crate::cuda::output(self.gpu, self.qkv.shape(), self.qkv.dtype())?;
        let (inputs, outputs) = (self.op.cuda_heads(&self.qkv), self.op.cuda_heads(&dqkv));
        let p = cuda::Problem { angles: self.angles.as_ref(), ..self.op.cuda_problem(&self.qkv)? };
        p.backward(self.gpu, inputs, [y, dy, lse], outputs)?;
        Ok(dqkv)
    }
}

/// Cases for gradient checks and device comparisons.
pub fn cases() -> Vec<Case> {
    let case = |name: String, [b, t, h, kv, d]: [usize; 5], mask: AttentionMask| {
        Case::normal(name, &[&[b, t, h + 2 * kv, d]], move |v| {
            attention_packed(&v[0], h, kv, &mask, (d as f64).powf(-0.5))
        })
    };
    let mut cases = Vec::new();
    for (t, h, kv, d) in [(1, 2, 1, 3), (7, 3, 3, 5), (33, 4, 1, 4)] {
        for (name, mask) in test_masks(2, t) {
            cases.push(case(format!("{name}, T {t}, heads {h}/{kv}"), [2, t, h, kv, d], mask));
        }
    }
    for (t, h, kv) in [(2, 6, 2), (65, 2, 2), (129, 3, 1), (130, 4, 2)] {
        cases.push(case(format!("causal, T {t}, heads {h}/{kv}"), [1, t, h, kv, 4], AttentionMask::Causal));
    }
    // Head sizes that tensor cores take on a GPU, and one that needs small tiles.
    for (t, h, kv, d) in [(65, 2, 2, 32), (67, 2, 1, 64), (70, 3, 1, 96), (130, 2, 1, 128), (35, 1, 1, 200)] {
        for (name, mask) in test_masks(1, t) {
            cases.push(case(format!("{name}, T {t}, heads {h}/{kv}, D {d}"), [1, t, h, kv, d], mask));
        }
    }
    // Turned by their positions, with every mask where there are few tokens.
    for (t, h, kv, d, all) in [(5, 2, 1, 6, true), (67, 2, 1, 64, true), (130, 3, 1, 64, false), (70, 2, 1, 128, false)] {
        let masks = if all { test_masks(2, t) } else { vec![("causal", AttentionMask::Causal)] };
        for (name, mask) in masks {
            let name = format!("turned, {name}, T {t}, heads {h}/{kv}, D {d}");
            let inv_freq = (0..d / 2).map(|i| 1e4f64.powf(-2.0 * i as f64 / d as f64)).collect();
            let table = RopeTable { inv_freq, attention_scaling: 1.25 };
            let shape: &[usize] = &[2, t, h + 2 * kv, d];
            cases.push(Case::normal(name, &[shape], move |v| {
                let positions = (0..2 * t).map(|i| (3 + i % t + i / t) as i32).collect();
                let positions = Tensor::from_vec(positions, [2, t])?;
                // A copy that nobody else holds, so that it is turned where it is.
                let qkv = super::scale(&v[0], 1.0, 0.0)?;
                rotated_attention(qkv, (&positions, &table), [h, kv], &mask, (d as f64).powf(-0.5))
            }));
        }
    }
    cases
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::attention;
    use crate::testing::{Fill, random};
    use rb_tensor::Rng;

    fn op(num_heads: usize, num_kv_heads: usize) -> AttentionPacked {
        AttentionPacked::new(num_heads, num_kv_heads, AttentionMask::Causal, 1.0.into())
    }

    #[test]
    fn shape_rule() {
        let rule = |h, kv, x: &[usize]| op(h, kv).out_shape(&[&x.into()]).map_err(|e| e.to_string());
        assert_eq!(rule(6, 2, &[2, 3, 10, 4]).unwrap().dims(), &[2, 3, 6, 4]);
        let message = rule(6, 2, &[2, 3, 9, 4]).unwrap_err();
        assert_eq!(
            message,
            "attention_packed: qkv has shape [2, 3, 9, 4], expected [B, T, 10, D] (6 + 2 * 2 heads)"
        );
        for (h, kv) in [(6, 4), (6, 0), (0, 1)] {
            let message = rule(h, kv, &[2, 3, h + 2 * kv, 4]).unwrap_err();
            let expected = format!("a divisor of num_heads {h}, both at least 1");
            assert_eq!(message, format!("attention_packed: num_kv_heads is {kv}, expected {expected}"));
        }
    }

    #[test]
    fn gradcheck() {
        crate::testing::check_op("attention_packed").unwrap();
    }

    #[test]
    fn no_tokens_have_gradients_of_no_elements() {
        let case = Case::normal("empty", &[&[2, 0, 4, 3]], |v| {
            attention_packed(&v[0], 2, 1, &AttentionMask::Causal, 1.0)
        });
        crate::testing::gradcheck("attention_packed", &case, 0).unwrap();
    }

    /// The same numbers as with separate inputs, which are checked against the formula and PyTorch.
    #[test]
    fn equals_separate_inputs() {
        for (t, h, kv, d) in [(1, 2, 1, 3), (35, 6, 2, 32), (129, 4, 4, 5)] {
            let all = h + 2 * kv;
            let fill =
                |shape: &[usize], seed| random(&shape.into(), Fill::Normal, &mut Rng::new(seed)).unwrap();
            let (qkv, dy) = (fill(&[2, t, all, d], 1), fill(&[2, t, h, d], 2));
            let heads = |x: &Tensor, first: usize, count: usize| {
                let tokens = x.as_slice::<f64>().unwrap().chunks(all * d);
                let values = tokens.flat_map(|x| &x[first * d..(first + count) * d]).copied().collect();
                Tensor::from_vec::<f64>(values, [2, t, count, d]).unwrap()
            };
            let split = |x: &Tensor| [heads(x, 0, h), heads(x, h, kv), heads(x, h + kv, kv)];
            for (name, mask) in test_masks(2, t) {
                let separate = {
                    let mask = mask.clone();
                    Case::normal("separate", &[], move |v| attention(&v[0], &v[1], &v[2], &mask, 0.3))
                };
                let packed = Case::normal("packed", &[], move |v| attention_packed(&v[0], h, kv, &mask, 0.3));
                let want = separate.run(&split(&qkv), Some(&dy)).unwrap();
                let got = packed.run(std::slice::from_ref(&qkv), Some(&dy)).unwrap();
                assert_eq!(got.y.as_bytes().unwrap(), want.y.as_bytes().unwrap(), "{name}, T {t}");
                let got = split(got.dx[0].as_ref().unwrap());
                for (got, want) in got.iter().zip(want.dx) {
                    assert_eq!(got.as_bytes().unwrap(), want.unwrap().as_bytes().unwrap(), "{name}, T {t}");
                }
            }
        }
    }
}
