//! Elementwise rectifier.
//!
//! - **Computes** `y = max(x, 0)`; NaN stays.
//! - **Shapes** `x [..]` -> `y [..]`.
//! - **Dtypes** any float type.
//! - **Backward** `dx = dy` where `y` is not 0, else 0: the gradient at 0 is 0.
//! - **Saves** `y` (shared).
//! - **Kernels** `unary_fwd`, `unary_bwd`.
//! - **Errors** none of its own: every shape is good.
//! - **Source** PyTorch `torch.relu`.

use rb_cuda::Gpu;
use rb_tensor::{Shape, Tensor};

use super::shared::elementwise;
use super::shared::elementwise_cuda::{self, Slope};
use crate::testing::{Case, Fill};
use crate::{Float, GradSinks, Op, Result, Var, apply, saved};

/// The larger of `x` and 0.
pub fn relu<'t>(x: &Var<'t>) -> Result<Var<'t>> {
    apply(Relu, &[x])
}

struct Relu;

saved!(
    struct ReluSaved { y }
);

impl Op for Relu {
    const NAME: &'static str = "relu";
    type Saved = ReluSaved;

    fn out_shape(&self, inputs: &[&Shape]) -> Result<Shape> {
        Ok(inputs[0].clone())
    }

    fn host_forward<T: Float>(&self, inputs: &[Tensor], _out: &Shape) -> Result<(Tensor, ReluSaved)> {
        let y = elementwise::map::<T>(&inputs[0], |x| if x < T::ZERO { T::ZERO } else { x })?;
        Ok((y.clone(), ReluSaved { y }))
    }

    fn host_backward<T: Float>(&self, saved: ReluSaved, dy: Tensor, grads: &mut GradSinks<'_>) -> Result<()> {
        let dx = elementwise::chain::<T>(dy, &saved.y, |dy, y| if y == T::ZERO { T::ZERO } else { dy })?;
        grads.add(0, dx)
    }

    fn cuda_forward(&self, gpu: Gpu, inputs: &[Tensor], _out: &Shape) -> Result<(Tensor, ReluSaved)> {
        let y = elementwise_cuda::map(gpu, &inputs[0], FUNCTION, [0.0; 2])?;
        Ok((y.clone(), ReluSaved { y }))
    }

    fn cuda_backward(
        &self,
        gpu: Gpu,
        saved: ReluSaved,
        dy: Tensor,
        grads: &mut GradSinks<'_>,
    ) -> Result<()> {
        let dx = elementwise_cuda::chain(gpu, dy, &saved.y, &SLOPE)?;
        grads.add(0, dx)
    }
}

/// Bodies of C functions.
const FUNCTION: &str = "return x < 0.0f ? 0.0f : x;";
const SLOPE: Slope = Slope::OfOutput("return y == 0.0f ? 0.0f : dy;");

/// Cases for gradient checks and device comparisons.
pub fn cases() -> Vec<Case> {
    elementwise::cases(Fill::AwayFromZero, relu)
}

#[cfg(test)]
mod tests {
    use rb_tensor::DType;

    use super::*;
    use crate::ops::shared::elementwise::checks;

    #[test]
    fn shape_rule() {
        for shape in [&[][..], &[3, 0], &[2, 3]] {
            assert_eq!(Relu.out_shape(&[&shape.into()]).unwrap().dims(), shape);
        }
    }

    #[test]
    fn gradcheck() {
        crate::testing::check_op("relu").unwrap();
    }

    #[test]
    fn golden() {
        for case in crate::golden::load("relu") {
            crate::golden::check_each(&case, |v| relu(&v[0]), 1e-12);
        }
    }

    #[test]
    fn extremes() {
        checks::extremes(relu);
    }

    #[test]
    fn edges() {
        for dtype in [DType::F32, DType::F64] {
            let (y, dx) =
                checks::derivative(relu, &[f64::NEG_INFINITY, -1.0, -0.0, 0.0, 2.0, f64::INFINITY], dtype);
            assert_eq!(y, [0.0, 0.0, 0.0, 0.0, 2.0, f64::INFINITY], "{dtype}");
            assert_eq!(dx, [0.0, 0.0, 0.0, 0.0, 1.0, 1.0], "{dtype}");
        }
    }
}
