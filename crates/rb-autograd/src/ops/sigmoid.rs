//! Elementwise logistic function.
//!
//! - **Computes** `y = 1 / (1 + e^-x)`: 0 and 1 at the infinities.
//! - **Shapes** `x [..]` -> `y [..]`.
//! - **Dtypes** any float type.
//! - **Backward** `dx = dy * y * (1 - y)`: 0 at the infinities.
//! - **Saves** `y` (shared) on the host, `x` (shared) on a GPU.
//! - **Kernels** `unary_fwd`, `unary_bwd`.
//! - **Errors** none of its own: every shape is good.
//! - **Source** PyTorch `torch.sigmoid`.

use rb_cuda::Gpu;
use rb_tensor::{Shape, Tensor};

use super::shared::elementwise;
use super::shared::elementwise_cuda::{self, Slope};
use crate::testing::{Case, Fill};
use crate::{Float, GradSinks, Op, Result, Var, apply, saved};

/// `1 / (1 + e^-x)`.
pub fn sigmoid<'t>(x: &Var<'t>) -> Result<Var<'t>> {
    apply(Sigmoid, &[x])
}

struct Sigmoid;

saved!(
    /// `y` on the host, `x` on a GPU: a bf16 output would have lost digits that the derivative needs.
    struct SigmoidSaved { value }
);

impl Op for Sigmoid {
    const NAME: &'static str = "sigmoid";
    type Saved = SigmoidSaved;

    fn out_shape(&self, inputs: &[&Shape]) -> Result<Shape> {
        Ok(inputs[0].clone())
    }

    fn host_forward<T: Float>(&self, inputs: &[Tensor], _out: &Shape) -> Result<(Tensor, SigmoidSaved)> {
        let y = elementwise::map::<T>(&inputs[0], T::sigmoid)?;
        Ok((y.clone(), SigmoidSaved { value: y }))
    }

    fn host_backward<T: Float>(
        &self,
        saved: SigmoidSaved,
        dy: Tensor,
        grads: &mut GradSinks<'_>,
    ) -> Result<()> {
        let dx = elementwise::chain::<T>(dy, &saved.value, |dy, y| dy * y * (T::ONE - y))?;
        grads.add(0, dx)
    }

    fn cuda_forward(&self, gpu: Gpu, inputs: &[Tensor], _out: &Shape) -> Result<(Tensor, SigmoidSaved)> {
        let y = elementwise_cuda::map(gpu, &inputs[0], FUNCTION, [0.0; 2])?;
        Ok((y, SigmoidSaved { value: inputs[0].clone() }))
    }

    fn cuda_backward(
        &self,
        gpu: Gpu,
        saved: SigmoidSaved,
        dy: Tensor,
        grads: &mut GradSinks<'_>,
    ) -> Result<()> {
        let dx = elementwise_cuda::chain(gpu, dy, &saved.value, &SLOPE)?;
        grads.add(0, dx)
    }
}

/// Bodies of C functions.
const FUNCTION: &str = "return 1.0f / (1.0f + expf(-x));";
const SLOPE: Slope = Slope::OfInput("const float s = 1.0f / (1.0f + expf(-x)); return dy * s * (1.0f / (1.0f + expf(x)));");

/// Cases for gradient checks and device comparisons.
pub fn cases() -> Vec<Case> {
    elementwise::cases(Fill::Normal, sigmoid)
}

#[cfg(test)]
mod tests {
    use rb_tensor::DType;

    use super::*;
    use crate::ops::shared::elementwise::checks;

    #[test]
    fn shape_rule() {
        for shape in [&[][..], &[3, 0], &[2, 3]] {
            assert_eq!(Sigmoid.out_shape(&[&shape.into()]).unwrap().dims(), shape);
        }
    }

    #[test]
    fn gradcheck() {
        crate::testing::check_op("sigmoid").unwrap();
    }

    #[test]
    fn golden() {
        for case in crate::golden::load("sigmoid") {
            crate::golden::check_each(&case, |v| sigmoid(&v[0]), 1e-12);
        }
    }

    #[test]
    fn extremes() {
        checks::extremes(sigmoid);
    }

    #[test]
    fn infinities() {
        for dtype in [DType::F32, DType::F64] {
            let (y, dx) = checks::derivative(sigmoid, &[f64::NEG_INFINITY, f64::INFINITY], dtype);
            assert_eq!((y, dx), (vec![0.0, 1.0], vec![0.0, 0.0]), "{dtype}");
        }
    }
}
