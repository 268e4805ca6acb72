//! Elementwise quotient, as IEEE 754 defines it (a zero divisor gives an infinity or NaN).
//!
//! - **Computes** `y = a / b`.
//! - **Shapes** `a [..]`, `b [..]` -> the shape both broadcast to (axes aligned at the end, sizes equal or
//!   1).
//! - **Dtypes** both of one float type.
//! - **Backward** `da = dy / b`, `db = -da * a / b`; each summed over the axes along which its input was
//!   broadcast.
//! - **Saves** `a` and `b` (both shared). Not `y`: in bf16 it is rounded, and the sum over a broadcast axis would add
//!   up what that lost.
//! - **Kernels** `binary`; `sum_rows` and `sum_columns` where an input is broadcast.
//! - **Errors** `ShapeError` if the shapes do not broadcast.
//! - **Source** PyTorch `torch.div`.

use rb_cuda::Gpu;
use rb_tensor::{DType, Shape, Tensor, rules};

use super::shared::{broadcast, broadcast_cuda};
use crate::testing::{Case, Fill};
use crate::{Float, GradSinks, Op, Result, Var, apply, saved};

/// `a / b`, with broadcasting.
pub fn div<'t>(a: &Var<'t>, b: &Var<'t>) -> Result<Var<'t>> {
    apply(Div, &[a, b])
}

struct Div;

saved!(
    struct DivSaved { a, b }
);

impl Op for Div {
    const NAME: &'static str = "div";
    type Saved = DivSaved;

    fn out_shape(&self, inputs: &[&Shape]) -> Result<Shape> {
        Ok(rules::broadcast(Self::NAME, inputs[0], inputs[1])?)
    }

    fn host_forward<T: Float>(&self, inputs: &[Tensor], out: &Shape) -> Result<(Tensor, DivSaved)> {
        let y = broadcast::map2::<T>(&inputs[0], &inputs[1], out, |a, b| a / b)?;
        Ok((y, DivSaved { a: inputs[0].clone(), b: inputs[1].clone() }))
    }

    fn host_backward<T: Float>(&self, saved: DivSaved, dy: Tensor, grads: &mut GradSinks<'_>) -> Result<()> {
        let da = broadcast::update::<T>(dy, &saved.b, |dy, b| dy / b)?;
        if grads.wanted(0) {
            let sums = broadcast::sum_to::<T>(da.clone(), grads.shape(0))?;
            grads.add(0, sums)?;
        }
        if grads.wanted(1) {
            let db = broadcast::update::<T>(da, &saved.a, |da, a| -(da * a))?;
            let db = broadcast::update::<T>(db, &saved.b, |db, b| db / b)?;
            let db = broadcast::sum_to::<T>(db, grads.shape(1))?;
            grads.add(1, db)?;
        }
        Ok(())
    }

    fn cuda_forward(&self, gpu: Gpu, inputs: &[Tensor], out: &Shape) -> Result<(Tensor, DivSaved)> {
        let (a, b) = (&inputs[0], &inputs[1]);
        let y = broadcast_cuda::map2(gpu, a, b, out, a.dtype(), "a / b")?;
        Ok((y, DivSaved { a: a.clone(), b: b.clone() }))
    }

    fn cuda_backward(
        &self,
        gpu: Gpu,
        saved: DivSaved,
        dy: Tensor,
        grads: &mut GradSinks<'_>,
    ) -> Result<()> {
        let da = broadcast_cuda::update(gpu, dy, &saved.b, DType::F32, "a / b")?;
        broadcast_cuda::give(gpu, grads, 0, da.clone(), false)?;
        if grads.wanted(1) {
            let db = broadcast_cuda::update(gpu, da, &saved.a, DType::F32, "-(a * b)")?;
            let db = broadcast_cuda::update(gpu, db, &saved.b, DType::F32, "a / b")?;
            broadcast_cuda::give(gpu, grads, 1, db, false)?;
        }
        Ok(())
    }
}

/// Cases for gradient checks and device comparisons.
pub fn cases() -> Vec<Case> {
    let case = |s: [&'static [usize]; 2]| {
        let fills = [Fill::Normal, Fill::Uniform(0.5, 2.0)];
        let inputs = s.into_iter().map(Shape::from).zip(fills);
        Case::new(format!("{s:?}"), inputs, |v| div(&v[0], &v[1]))
    };
    broadcast::shapes().into_iter().map(case).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shape_rule() {
        let rule = |a: &[usize], b: &[usize]| Div.out_shape(&[&a.into(), &b.into()]);
        assert_eq!(rule(&[2, 1, 3], &[4, 1]).unwrap().dims(), &[2, 4, 3]);
        let message = rule(&[2, 3], &[4]).unwrap_err().to_string();
        assert_eq!(message, "div: b has shape [4], expected a shape that broadcasts with a [2, 3]");
    }

    #[test]
    fn gradcheck() {
        crate::testing::check_op("div").unwrap();
    }

    #[test]
    fn golden() {
        for case in crate::golden::load("div") {
            crate::golden::check(&case, |v| div(&v[0], &v[1]), 1e-12);
        }
    }
}
