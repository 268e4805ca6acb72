//! Elementwise exponential.
//!
//! - **Computes** `y = e^x`; infinite where that overflows.
//! - **Shapes** `x [..]` -> `y [..]`.
//! - **Dtypes** any float type.
//! - **Backward** `dx = dy * y`.
//! - **Saves** `y` (shared) on the host, `x` (shared) on a GPU.
//! - **Kernels** `unary_fwd`, `unary_bwd`.
//! - **Errors** none of its own: every shape is good.
//! - **Source** PyTorch `torch.exp`.

use rb_cuda::Gpu;
use rb_tensor::{Shape, Tensor};

use super::shared::elementwise;
use super::shared::elementwise_cuda::{self, Slope};
use crate::testing::{Case, Fill};
use crate::{Float, GradSinks, Op, Result, Var, apply, saved};

/// `e^x`.
pub fn exp<'t>(x: &Var<'t>) -> Result<Var<'t>> {
    apply(Exp, &[x])
}

struct Exp;

saved!(
    /// `y` on the host, `x` on a GPU: a bf16 output would have lost digits that the derivative needs.
    struct ExpSaved { value }
);

impl Op for Exp {
    const NAME: &'static str = "exp";
    type Saved = ExpSaved;

    fn out_shape(&self, inputs: &[&Shape]) -> Result<Shape> {
        Ok(inputs[0].clone())
    }

    fn host_forward<T: Float>(&self, inputs: &[Tensor], _out: &Shape) -> Result<(Tensor, ExpSaved)> {
        let y = elementwise::map::<T>(&inputs[0], T::exp)?;
        Ok((y.clone(), ExpSaved { value: y }))
    }

    fn host_backward<T: Float>(&self, saved: ExpSaved, dy: Tensor, grads: &mut GradSinks<'_>) -> Result<()> {
        let dx = elementwise::chain::<T>(dy, &saved.value, |dy, y| dy * y)?;
        grads.add(0, dx)
    }

    fn cuda_forward(&self, gpu: Gpu, inputs: &[Tensor], _out: &Shape) -> Result<(Tensor, ExpSaved)> {
        let y = elementwise_cuda::map(gpu, &inputs[0], FUNCTION, [0.0; 2])?;
        Ok((y, ExpSaved { value: inputs[0].clone() }))
    }

    fn cuda_backward(
        &self,
        gpu: Gpu,
        saved: ExpSaved,
        dy: Tensor,
        grads: &mut GradSinks<'_>,
    ) -> Result<()> {
        let dx = elementwise_cuda::chain(gpu, dy, &saved.value, &SLOPE)?;
        grads.add(0, dx)
    }
}

/// Bodies of C functions.
const FUNCTION: &str = "return expf(x);";
const SLOPE: Slope = Slope::OfInput("return dy * expf(x);");

/// Cases for gradient checks and device comparisons.
pub fn cases() -> Vec<Case> {
    elementwise::cases(Fill::Normal, exp)
}

#[cfg(test)]
mod tests {
    use rb_tensor::DType;

    use super::*;
    use crate::ops::shared::elementwise::checks;

    #[test]
    fn shape_rule() {
        for shape in [&[][..], &[3, 0], &[2, 3]] {
            assert_eq!(Exp.out_shape(&[&shape.into()]).unwrap().dims(), shape);
        }
    }

    #[test]
    fn gradcheck() {
        crate::testing::check_op("exp").unwrap();
    }

    #[test]
    fn edges() {
        for dtype in [DType::F32, DType::F64] {
            let (y, dx) =
                checks::derivative(exp, &[f64::NEG_INFINITY, -1e4, -0.0, 1e4, f64::INFINITY], dtype);
            let want = [0.0, 0.0, 1.0, f64::INFINITY, f64::INFINITY];
            assert_eq!((y, dx), (want.to_vec(), want.to_vec()), "{dtype}");
        }
    }
}
