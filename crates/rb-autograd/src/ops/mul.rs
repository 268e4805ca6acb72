//! Elementwise product.
//!
//! - **Computes** `y = a * b`.
//! - **Shapes** `a [..]`, `b [..]` -> the shape both broadcast to (axes aligned at the end, sizes equal or
//!   1).
//! - **Dtypes** both of one float type.
//! - **Backward** `da = dy * b`, `db = dy * a`; each summed over the axes along which its input was
//!   broadcast.
//! - **Saves** `a` and `b` (shared).
//! - **Kernels** `binary`; `sum_rows` and `sum_columns` where an input is broadcast.
//! - **Errors** `ShapeError` if the shapes do not broadcast.
//! - **Source** PyTorch `torch.mul`.

use rb_cuda::Gpu;
use rb_tensor::{Shape, Tensor, rules};

use super::shared::{broadcast, broadcast_cuda};
use crate::testing::Case;
use crate::{Float, GradSinks, Op, Result, Var, apply, saved};

/// `a * b`, with broadcasting.
pub fn mul<'t>(a: &Var<'t>, b: &Var<'t>) -> Result<Var<'t>> {
    apply(Mul, &[a, b])
}

struct Mul;

saved!(
    struct MulSaved { a, b }
);

impl Op for Mul {
    const NAME: &'static str = "mul";
    type Saved = MulSaved;

    fn out_shape(&self, inputs: &[&Shape]) -> Result<Shape> {
        Ok(rules::broadcast(Self::NAME, inputs[0], inputs[1])?)
    }

    fn host_forward<T: Float>(&self, inputs: &[Tensor], out: &Shape) -> Result<(Tensor, MulSaved)> {
        let y = broadcast::map2::<T>(&inputs[0], &inputs[1], out, |a, b| a * b)?;
        Ok((y, MulSaved { a: inputs[0].clone(), b: inputs[1].clone() }))
    }

    fn host_backward<T: Float>(&self, saved: MulSaved, dy: Tensor, grads: &mut GradSinks<'_>) -> Result<()> {
        if grads.wanted(0) && grads.wanted(1) {
            let da = broadcast::map2::<T>(&dy, &saved.b, dy.shape(), |dy, b| dy * b)?;
            let da = broadcast::sum_to::<T>(da, grads.shape(0))?;
            grads.add(0, da)?;
        }
        // The last one goes into the buffer of `dy`.
        let (last, other) = if grads.wanted(1) { (1, &saved.a) } else { (0, &saved.b) };
        let d = broadcast::update::<T>(dy, other, |dy, x| dy * x)?;
        let d = broadcast::sum_to::<T>(d, grads.shape(last))?;
        grads.add(last, d)
    }

    fn cuda_forward(&self, gpu: Gpu, inputs: &[Tensor], out: &Shape) -> Result<(Tensor, MulSaved)> {
        let (a, b) = (&inputs[0], &inputs[1]);
        let y = broadcast_cuda::map2(gpu, a, b, out, a.dtype(), "a * b")?;
        Ok((y, MulSaved { a: a.clone(), b: b.clone() }))
    }

    fn cuda_backward(
        &self,
        gpu: Gpu,
        saved: MulSaved,
        dy: Tensor,
        grads: &mut GradSinks<'_>,
    ) -> Result<()> {
        let out = dy.shape().clone();
        if grads.wanted(0) && grads.wanted(1) {
            let dtype = broadcast_cuda::gradient_dtype(grads, 0, &out);
            let da = broadcast_cuda::map2(gpu, &dy, &saved.b, &out, dtype, "a * b")?;
            broadcast_cuda::give(gpu, grads, 0, da, false)?;
        }
        // The last one goes into the buffer of `dy`.
        let (last, other) = if grads.wanted(1) { (1, &saved.a) } else { (0, &saved.b) };
        let dtype = broadcast_cuda::gradient_dtype(grads, last, &out);
        let d = broadcast_cuda::update(gpu, dy, other, dtype, "a * b")?;
        broadcast_cuda::give(gpu, grads, last, d, false)
    }
}

/// Cases for gradient checks and device comparisons.
pub fn cases() -> Vec<Case> {
    let case = |s: [&'static [usize]; 2]| Case::normal(format!("{s:?}"), &s, |v| mul(&v[0], &v[1]));
    broadcast::shapes()
        .into_iter()
        .map(case)
        .chain([Case::normal("itself", &[&[3, 4]], |v| mul(&v[0], &v[0]))])
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shape_rule() {
        let rule = |a: &[usize], b: &[usize]| Mul.out_shape(&[&a.into(), &b.into()]);
        assert_eq!(rule(&[2, 1, 3], &[4, 1]).unwrap().dims(), &[2, 4, 3]);
        let message = rule(&[2, 3], &[4]).unwrap_err().to_string();
        assert_eq!(message, "mul: b has shape [4], expected a shape that broadcasts with a [2, 3]");
    }

    #[test]
    fn gradcheck() {
        crate::testing::check_op("mul").unwrap();
    }

    #[test]
    fn golden() {
        for case in crate::golden::load("mul") {
            crate::golden::check(&case, |v| mul(&v[0], &v[1]), 1e-12);
        }
    }
}
