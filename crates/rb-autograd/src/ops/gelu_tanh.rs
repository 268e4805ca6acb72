//! Elementwise Gaussian error linear unit, by the hyperbolic tangent (`gelu_new` of GPT-2).
//!
//! - **Computes** `y = x * (1 + tanh(u)) / 2`, `u = sqrt(2/pi) * (x + 0.044715 x^3)`, as `x * s` with
//!   `s = 1 / (1 + e^(-2u))`, which is the same number without cancellation. Infinity at infinity; NaN at
//!   negative infinity, as in PyTorch (the limit is 0).
//! - **Shapes** `x [..]` -> `y [..]`.
//! - **Dtypes** any float type.
//! - **Backward** `dx = dy * (s + x * s * (1 - s) * 2u')`, `2u' = 2 sqrt(2/pi) * (1 + 3 * 0.044715 x^2)`; 0
//!   and `dy` at the infinities (NaN in PyTorch).
//! - **Saves** `x` (shared).
//! - **Kernels** `unary_fwd`, `unary_bwd`.
//! - **Errors** none of its own: every shape is good.
//! - **Source** PyTorch `torch.nn.functional.gelu(approximate="tanh")`; arXiv:1606.08415.

use rb_cuda::Gpu;
use rb_tensor::{Shape, Tensor};

use super::shared::elementwise;
use super::shared::elementwise_cuda::{self, Slope};
use crate::testing::{Case, Fill};
use crate::{Float, GradSinks, Op, Result, Var, apply, saved};

/// The approximation of `gelu_erf` that GPT-2 uses.
pub fn gelu_tanh<'t>(x: &Var<'t>) -> Result<Var<'t>> {
    apply(GeluTanh, &[x])
}

struct GeluTanh;

saved!(
    struct GeluTanhSaved { x }
);

impl Op for GeluTanh {
    const NAME: &'static str = "gelu_tanh";
    type Saved = GeluTanhSaved;

    fn out_shape(&self, inputs: &[&Shape]) -> Result<Shape> {
        Ok(inputs[0].clone())
    }

    fn host_forward<T: Float>(&self, inputs: &[Tensor], _out: &Shape) -> Result<(Tensor, GeluTanhSaved)> {
        let y = elementwise::map::<T>(&inputs[0], |x| x * gate(x))?;
        Ok((y, GeluTanhSaved { x: inputs[0].clone() }))
    }

    fn host_backward<T: Float>(
        &self,
        saved: GeluTanhSaved,
        dy: Tensor,
        grads: &mut GradSinks<'_>,
    ) -> Result<()> {
        let dx = elementwise::chain::<T>(dy, &saved.x, |dy, x| dy * slope(x))?;
        grads.add(0, dx)
    }

    fn cuda_forward(&self, gpu: Gpu, inputs: &[Tensor], _out: &Shape) -> Result<(Tensor, GeluTanhSaved)> {
        let y = elementwise_cuda::map(gpu, &inputs[0], FUNCTION, [0.0; 2])?;
        Ok((y, GeluTanhSaved { x: inputs[0].clone() }))
    }

    fn cuda_backward(
        &self,
        gpu: Gpu,
        saved: GeluTanhSaved,
        dy: Tensor,
        grads: &mut GradSinks<'_>,
    ) -> Result<()> {
        let dx = elementwise_cuda::chain(gpu, dy, &saved.x, &SLOPE)?;
        grads.add(0, dx)
    }
}

/// Bodies of C functions.
const FUNCTION: &str = "return x * (1.0f / (1.0f + expf(-1.5957691f * x * (1.0f + 0.044715f * x * x))));";
const SLOPE: Slope = Slope::OfInput("\
    if (x > 100.0f) x = 100.0f; if (x < -100.0f) x = -100.0f; \
    const float s = 1.0f / (1.0f + expf(-1.5957691f * x * (1.0f + 0.044715f * x * x))); \
    return dy * (s + x * s * (1.0f - s) * (1.5957691f * (1.0f + 3.0f * 0.044715f * x * x)));");

const CUBIC: f64 = 0.044715; // arXiv:1606.08415, section 2
const TWO_SQRT_2_OVER_PI: f64 = 1.595_769_121_605_730_7;

/// `(1 + tanh(u)) / 2`.
#[inline(always)]
fn gate<T: Float>(x: T) -> T {
    let cubic = T::from_f64(CUBIC) * x * x;
    (T::from_f64(TWO_SQRT_2_OVER_PI) * x * (T::ONE + cubic)).sigmoid()
}

#[inline(always)]
fn slope<T: Float>(x: T) -> T {
    // The slope is exactly 0 or 1 from 100 on, and the powers below stay finite up to there.
    let end = T::from_f64(100.0);
    let x = if x > end { end } else { x };
    let x = if x < -end { -end } else { x };
    let s = gate(x);
    let inner = T::from_f64(TWO_SQRT_2_OVER_PI) * (T::ONE + T::from_f64(3.0 * CUBIC) * x * x);
    s + x * s * (T::ONE - s) * inner
}

/// Cases for gradient checks and device comparisons.
pub fn cases() -> Vec<Case> {
    elementwise::cases(Fill::Normal, gelu_tanh)
}

#[cfg(test)]
mod tests {
    use rb_tensor::DType;

    use super::*;
    use crate::ops::shared::elementwise::checks;

    #[test]
    fn shape_rule() {
        for shape in [&[][..], &[3, 0], &[2, 3]] {
            assert_eq!(GeluTanh.out_shape(&[&shape.into()]).unwrap().dims(), shape);
        }
    }

    #[test]
    fn gradcheck() {
        crate::testing::check_op("gelu_tanh").unwrap();
    }

    #[test]
    fn golden() {
        for case in crate::golden::load("gelu_tanh") {
            crate::golden::check_each(&case, |v| gelu_tanh(&v[0]), 1e-12);
        }
    }

    #[test]
    fn extremes() {
        checks::extremes(gelu_tanh);
    }

    #[test]
    fn infinities() {
        for dtype in [DType::F32, DType::F64] {
            let (y, dx) = checks::derivative(gelu_tanh, &[f64::NEG_INFINITY, f64::INFINITY], dtype);
            assert!(y[0].is_nan() && y[1] == f64::INFINITY, "{y:?} in {dtype}");
            assert!(dx == [0.0, 1.0], "{dx:?} in {dtype}");
        }
    }
}
