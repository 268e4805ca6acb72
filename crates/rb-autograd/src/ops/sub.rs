//! Elementwise difference.
//!
//! - **Computes** `y = a - b`.
//! - **Shapes** `a [..]`, `b [..]` -> the shape both broadcast to (axes aligned at the end, sizes equal or
//!   1).
//! - **Dtypes** both of one float type.
//! - **Backward** `da = dy`, `db = -dy`; each summed over the axes along which its input was broadcast.
//! - **Saves** nothing.
//! - **Kernels** `binary`; `sum_rows` and `sum_columns` where an input is broadcast, `unary_fwd` where not.
//! - **Errors** `ShapeError` if the shapes do not broadcast.
//! - **Source** PyTorch `torch.sub`.

use rb_cuda::Gpu;
use rb_tensor::{Shape, Tensor, rules};

use super::shared::{broadcast, broadcast_cuda, elementwise};
use crate::testing::Case;
use crate::{Float, GradSinks, Op, Result, Var, apply};

/// `a - b`, with broadcasting.
pub fn sub<'t>(a: &Var<'t>, b: &Var<'t>) -> Result<Var<'t>> {
    apply(Sub, &[a, b])
}

struct Sub;

impl Op for Sub {
    const NAME: &'static str = "sub";
    type Saved = ();

    fn out_shape(&self, inputs: &[&Shape]) -> Result<Shape> {
        Ok(rules::broadcast(Self::NAME, inputs[0], inputs[1])?)
    }

    fn host_forward<T: Float>(&self, inputs: &[Tensor], out: &Shape) -> Result<(Tensor, ())> {
        let y = broadcast::map2::<T>(&inputs[0], &inputs[1], out, |a, b| a - b)?;
        Ok((y, ()))
    }

    fn host_backward<T: Float>(&self, (): (), dy: Tensor, grads: &mut GradSinks<'_>) -> Result<()> {
        if grads.wanted(0) {
            let da = broadcast::sum_to::<T>(dy.clone(), grads.shape(0))?;
            grads.add(0, da)?;
        }
        if grads.wanted(1) {
            let sums = broadcast::sum_to::<T>(dy, grads.shape(1))?;
            let db = elementwise::map_in_place::<T>(sums, |d| -d)?;
            grads.add(1, db)?;
        }
        Ok(())
    }

    fn cuda_forward(&self, gpu: Gpu, inputs: &[Tensor], out: &Shape) -> Result<(Tensor, ())> {
        let (a, b) = (&inputs[0], &inputs[1]);
        let y = broadcast_cuda::map2(gpu, a, b, out, a.dtype(), "a - b")?;
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
        broadcast_cuda::give(gpu, grads, 1, dy, true)
    }
}

/// Cases for gradient checks and device comparisons.
pub fn cases() -> Vec<Case> {
    let case = |s: [&'static [usize]; 2]| Case::normal(format!("{s:?}"), &s, |v| sub(&v[0], &v[1]));
    broadcast::shapes()
        .into_iter()
        .map(case)
        .chain([Case::normal("itself", &[&[3, 4]], |v| sub(&v[0], &v[0]))])
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shape_rule() {
        let rule = |a: &[usize], b: &[usize]| Sub.out_shape(&[&a.into(), &b.into()]);
        assert_eq!(rule(&[2, 1, 3], &[4, 1]).unwrap().dims(), &[2, 4, 3]);
        let message = rule(&[2, 3], &[4]).unwrap_err().to_string();
        assert_eq!(message, "sub: b has shape [4], expected a shape that broadcasts with a [2, 3]");
    }

    #[test]
    fn gradcheck() {
        crate::testing::check_op("sub").unwrap();
    }
}
