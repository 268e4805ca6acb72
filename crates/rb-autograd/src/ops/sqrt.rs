//! Elementwise square root.
//!
//! - **Computes** `y = sqrt(x)`: NaN below 0.
//! - **Shapes** `x [..]` -> `y [..]`.
//! - **Dtypes** any float type.
//! - **Backward** `dx = dy / (2 y)`: infinite at 0 as in PyTorch, NaN where `dy` is 0 too.
//! - **Saves** `y` (shared).
//! - **Kernels** `unary_fwd`, `unary_bwd`.
//! - **Errors** none of its own: every shape is good.
//! - **Source** PyTorch `torch.sqrt`.

use rb_cuda::Gpu;
use rb_tensor::{Shape, Tensor};

use super::shared::elementwise;
use super::shared::elementwise_cuda::{self, Slope};
use crate::testing::{Case, Fill};
use crate::{Float, GradSinks, Op, Result, Var, apply, saved};

/// The square root of `x`.
pub fn sqrt<'t>(x: &Var<'t>) -> Result<Var<'t>> {
    apply(Sqrt, &[x])
}

struct Sqrt;

saved!(
    struct SqrtSaved { y }
);

impl Op for Sqrt {
    const NAME: &'static str = "sqrt";
    type Saved = SqrtSaved;

    fn out_shape(&self, inputs: &[&Shape]) -> Result<Shape> {
        Ok(inputs[0].clone())
    }

    fn host_forward<T: Float>(&self, inputs: &[Tensor], _out: &Shape) -> Result<(Tensor, SqrtSaved)> {
        let y = elementwise::map::<T>(&inputs[0], T::sqrt)?;
        Ok((y.clone(), SqrtSaved { y }))
    }

    fn host_backward<T: Float>(&self, saved: SqrtSaved, dy: Tensor, grads: &mut GradSinks<'_>) -> Result<()> {
        let dx = elementwise::chain::<T>(dy, &saved.y, |dy, y| dy / (y + y))?;
        grads.add(0, dx)
    }

    fn cuda_forward(&self, gpu: Gpu, inputs: &[Tensor], _out: &Shape) -> Result<(Tensor, SqrtSaved)> {
        let y = elementwise_cuda::map(gpu, &inputs[0], FUNCTION, [0.0; 2])?;
        Ok((y.clone(), SqrtSaved { y }))
    }

    fn cuda_backward(
        &self,
        gpu: Gpu,
        saved: SqrtSaved,
        dy: Tensor,
        grads: &mut GradSinks<'_>,
    ) -> Result<()> {
        let dx = elementwise_cuda::chain(gpu, dy, &saved.y, &SLOPE)?;
        grads.add(0, dx)
    }
}

/// Bodies of C functions.
const FUNCTION: &str = "return sqrtf(x);";
const SLOPE: Slope = Slope::OfOutput("return dy / (y + y);");

/// Cases for gradient checks and device comparisons.
pub fn cases() -> Vec<Case> {
    elementwise::cases(Fill::Uniform(0.2, 3.0), sqrt)
}

#[cfg(test)]
mod tests {
    use rb_tensor::DType;

    use super::*;
    use crate::ops::shared::elementwise::checks;

    #[test]
    fn shape_rule() {
        for shape in [&[][..], &[3, 0], &[2, 3]] {
            assert_eq!(Sqrt.out_shape(&[&shape.into()]).unwrap().dims(), shape);
        }
    }

    #[test]
    fn gradcheck() {
        crate::testing::check_op("sqrt").unwrap();
    }

    #[test]
    fn edges() {
        for dtype in [DType::F32, DType::F64] {
            let (y, dx) = checks::derivative(sqrt, &[0.0, 4.0, f64::INFINITY], dtype);
            assert_eq!(y, [0.0, 2.0, f64::INFINITY], "{dtype}");
            assert_eq!(dx, [f64::INFINITY, 0.25, 0.0], "{dtype}");
            assert!(checks::derivative(sqrt, &[-1.0], dtype).0[0].is_nan());
        }
    }
}
