//! Elementwise hyperbolic tangent.
//!
//! - **Computes** `y = tanh(x)`.
//! - **Shapes** `x [..]` -> `y [..]`.
//! - **Dtypes** any float type.
//! - **Backward** `dx = dy * (1 - y^2)`.
//! - **Saves** `y` (shared) on the host, `x` (shared) on a GPU.
//! - **Kernels** `unary_fwd`, `unary_bwd`.
//! - **Errors** none of its own: every shape is good.
//! - **Source** PyTorch `torch.tanh`.

use rb_cuda::Gpu;
use rb_tensor::{Shape, Tensor};

use super::shared::elementwise;
use super::shared::elementwise_cuda::{self, Slope};
use crate::testing::{Case, Fill};
use crate::{Float, GradSinks, Op, Result, Var, apply, saved};

/// The hyperbolic tangent of `x`.
pub fn tanh<'t>(x: &Var<'t>) -> Result<Var<'t>> {
    apply(Tanh, &[x])
}

struct Tanh;

saved!(
    /// `y` on the host, `x` on a GPU: a bf16 output would have lost digits that the derivative needs.
    struct TanhSaved { value }
);

impl Op for Tanh {
    const NAME: &'static str = "tanh";
    type Saved = TanhSaved;

    fn out_shape(&self, inputs: &[&Shape]) -> Result<Shape> {
        Ok(inputs[0].clone())
    }

    fn host_forward<T: Float>(&self, inputs: &[Tensor], _out: &Shape) -> Result<(Tensor, TanhSaved)> {
        let y = elementwise::map::<T>(&inputs[0], T::tanh)?;
        Ok((y.clone(), TanhSaved { value: y }))
    }

    fn host_backward<T: Float>(&self, saved: TanhSaved, dy: Tensor, grads: &mut GradSinks<'_>) -> Result<()> {
        let dx = elementwise::chain::<T>(dy, &saved.value, |dy, y| dy * (T::ONE - y * y))?;
        grads.add(0, dx)
    }

    fn cuda_forward(&self, gpu: Gpu, inputs: &[Tensor], _out: &Shape) -> Result<(Tensor, TanhSaved)> {
        let y = elementwise_cuda::map(gpu, &inputs[0], FUNCTION, [0.0; 2])?;
        Ok((y, TanhSaved { value: inputs[0].clone() }))
    }

    fn cuda_backward(
        &self,
        gpu: Gpu,
        saved: TanhSaved,
        dy: Tensor,
        grads: &mut GradSinks<'_>,
    ) -> Result<()> {
        let dx = elementwise_cuda::chain(gpu, dy, &saved.value, &SLOPE)?;
        grads.add(0, dx)
    }
}

/// Bodies of C functions.
const FUNCTION: &str = "return tanhf(x);";
const SLOPE: Slope = Slope::OfInput("const float y = tanhf(x); return dy * ((1.0f - y) * (1.0f + y));");

/// Cases for gradient checks and device comparisons.
pub fn cases() -> Vec<Case> {
    elementwise::cases(Fill::Normal, tanh)
}

#[cfg(test)]
mod tests {
    use rb_tensor::DType;

    use super::*;
    use crate::ops::shared::elementwise::checks;

    #[test]
    fn shape_rule() {
        for shape in [&[][..], &[3, 0], &[2, 3]] {
            assert_eq!(Tanh.out_shape(&[&shape.into()]).unwrap().dims(), shape);
        }
    }

    #[test]
    fn gradcheck() {
        crate::testing::check_op("tanh").unwrap();
    }

    #[test]
    fn golden() {
        for case in crate::golden::load("tanh") {
            crate::golden::check_each(&case, |v| tanh(&v[0]), 1e-12);
        }
    }

    #[test]
    fn extremes() {
        checks::extremes(tanh);
    }

    #[test]
    fn infinities() {
        for dtype in [DType::F32, DType::F64] {
            let (y, dx) = checks::derivative(tanh, &[f64::NEG_INFINITY, f64::INFINITY], dtype);
            assert_eq!((y, dx), (vec![-1.0, 1.0], vec![0.0, 0.0]), "{dtype}");
        }
    }
}
