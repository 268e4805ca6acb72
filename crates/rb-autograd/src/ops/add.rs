//! Elementwise sum.
//!
//! - **Computes** `y = a + b`.
//! - **Shapes** `a [..]`, `b [..]` -> the shape both broadcast to (axes aligned at the end, sizes equal or
//!   1).
//! - **Dtypes** both of one float type; on a GPU `b` may have another one (an fp32 residual stream plus a bf16
//!   branch), and `y` has that of `a`.
//! - **Backward** `da = dy`, `db = dy`; each summed over the axes along which its input was broadcast.
//! - **Saves** nothing.
//! - **Kernels** `binary`; `sum_rows` and `sum_columns` where an input is broadcast.
//! - **Errors** `ShapeError` if the shapes do not broadcast.
//! - **Source** PyTorch `torch.add`.

use rb_cuda::Gpu;
use rb_tensor::{Shape, Tensor, rules};

use super::shared::{broadcast, broadcast_cuda};
use crate::testing::Case;
use crate::{Float, GradSinks, Op, Result, Var, apply};

/// `a + b`, with broadcasting.
pub fn add<'t>(a: &Var<'t>, b: &Var<'t>) -> Result<Var<'t>> {
    apply(Add, &[a, b])
}

pub(super) struct Add;

impl Op for Add {
    const NAME: &'static str = "add";
    const MIXED_DTYPES: bool = true;
    type Saved = ();

    fn out_shape(&self, inputs: &[&Shape]) -> Result<Shape> {
        Ok(rules::broadcast(Self::NAME, inputs[0], inputs[1])?)
    }

    fn host_forward<T: Float>(&self, inputs: &[Tensor], out: &Shape) -> Result<(Tensor, ())> {
        let y = broadcast::map2::<T>(&inputs[0], &inputs[1], out, |a, b| a + b)?;
        Ok((y, ()))
    }

    fn host_backward<T: Float>(&self, (): (), dy: Tensor, grads: &mut GradSinks<'_>) -> Result<()> {
        for i in 0..2 {
            if grads.wanted(i) {
                let d = broadcast::sum_to::<T>(dy.clone(), grads.shape(i))?;
                grads.add(i, d)?;
            }
        }
        Ok(())
    }

    fn cuda_forward(&self, gpu: Gpu, inputs: &[Tensor], out: &Shape) -> Result<(Tensor, ())> {
        let (a, b) = (&inputs[0], &inputs[1]);
        let y = broadcast_cuda::map2(gpu, a, b, out, a.dtype(), "a + b")?;
        Ok((y, ()))
    }

    fn cuda_backward(
        &self,
        gpu: Gpu,
        (): (),
        dy: Tensor,
        grads: &mut GradSinks<'_>,
    ) -> Result<()> {
        broadcast_cuda::give(gpu, grads, 0, dy.clone(), false)?;
        broadcast_cuda::give(gpu, grads, 1, dy, false)
    }
}

/// Cases for gradient checks and device comparisons.
pub fn cases() -> Vec<Case> {
    let case = |s: [&'static [usize]; 2]| Case::normal(format!("{s:?}"), &s, |v| add(&v[0], &v[1]));
    broadcast::shapes()
        .into_iter()
        .map(case)
        .chain([Case::normal("itself", &[&[3, 4]], |v| add(&v[0], &v[0]))])
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shape_rule() {
        let rule = |a: &[usize], b: &[usize]| Add.out_shape(&[&a.into(), &b.into()]);
        assert_eq!(rule(&[2, 1, 3], &[4, 1]).unwrap().dims(), &[2, 4, 3]);
        let message = rule(&[2, 3], &[4]).unwrap_err().to_string();
        assert_eq!(message, "add: b has shape [4], expected a shape that broadcasts with a [2, 3]");
    }

    #[test]
    fn gradcheck() {
        crate::testing::check_op("add").unwrap();
    }

    #[test]
    fn golden() {
        for case in crate::golden::load("add") {
            crate::golden::check(&case, |v| add(&v[0], &v[1]), 1e-12);
        }
    }
}
