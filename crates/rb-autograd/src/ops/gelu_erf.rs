//! Elementwise Gaussian error linear unit, exact.
//!
//! - **Computes** `y = x * cdf(x)`, `cdf(x) = (1 + erf(x / sqrt(2))) / 2`. Infinity at infinity; NaN at
//!   negative infinity, as in PyTorch (the limit is 0).
//! - **Shapes** `x [..]` -> `y [..]`.
//! - **Dtypes** any float type.
//! - **Backward** `dx = dy * (cdf(x) + x * pdf(x))`, `pdf(x) = e^(-x^2 / 2) / sqrt(2 pi)`; NaN at the
//!   infinities, as in PyTorch.
//! - **Saves** `x` (shared).
//! - **Kernels** `unary_fwd`, `unary_bwd`.
//! - **Errors** none of its own: every shape is good.
//! - **Source** PyTorch `torch.nn.functional.gelu(approximate="none")`; arXiv:1606.08415.

use std::f64::consts::{FRAC_1_SQRT_2, FRAC_2_SQRT_PI};

use rb_cuda::Gpu;
use rb_tensor::{Shape, Tensor};

use super::shared::elementwise;
use super::shared::elementwise_cuda::{self, Slope};
use crate::testing::{Case, Fill};
use crate::{Float, GradSinks, Op, Result, Var, apply, saved};

/// `x` times the normal distribution function of `x`.
pub fn gelu_erf<'t>(x: &Var<'t>) -> Result<Var<'t>> {
    apply(GeluErf, &[x])
}

struct GeluErf;

saved!(
    struct GeluErfSaved { x }
);

impl Op for GeluErf {
    const NAME: &'static str = "gelu_erf";
    type Saved = GeluErfSaved;

    fn out_shape(&self, inputs: &[&Shape]) -> Result<Shape> {
        Ok(inputs[0].clone())
    }

    fn host_forward<T: Float>(&self, inputs: &[Tensor], _out: &Shape) -> Result<(Tensor, GeluErfSaved)> {
        let y = elementwise::map::<T>(&inputs[0], |x| x * cdf(x))?;
        Ok((y, GeluErfSaved { x: inputs[0].clone() }))
    }

    fn host_backward<T: Float>(
        &self,
        saved: GeluErfSaved,
        dy: Tensor,
        grads: &mut GradSinks<'_>,
    ) -> Result<()> {
        let dx = elementwise::chain::<T>(dy, &saved.x, |dy, x| dy * slope(x))?;
        grads.add(0, dx)
    }

    fn cuda_forward(&self, gpu: Gpu, inputs: &[Tensor], _out: &Shape) -> Result<(Tensor, GeluErfSaved)> {
        let y = elementwise_cuda::map(gpu, &inputs[0], FUNCTION, [0.0; 2])?;
        Ok((y, GeluErfSaved { x: inputs[0].clone() }))
    }

    fn cuda_backward(
        &self,
        gpu: Gpu,
        saved: GeluErfSaved,
        dy: Tensor,
        grads: &mut GradSinks<'_>,
    ) -> Result<()> {
        let dx = elementwise_cuda::chain(gpu, dy, &saved.x, &SLOPE)?;
        grads.add(0, dx)
    }
}

/// Bodies of C functions.
const FUNCTION: &str = "return x * (0.5f + 0.5f * erff(x * 0.70710678f));";
const SLOPE: Slope = Slope::OfInput("\
    const float cdf = 0.5f + 0.5f * erff(x * 0.70710678f), pdf = 0.39894228f * expf(-0.5f * x * x); \
    return dy * (cdf + x * pdf);");

#[inline(always)]
fn cdf<T: Float>(x: T) -> T {
    let half = T::from_f64(0.5);
    half + half * (x * T::from_f64(FRAC_1_SQRT_2)).erf()
}

#[inline(always)]
fn slope<T: Float>(x: T) -> T {
    // 1 / sqrt(2 pi)
    let pdf = T::from_f64(0.5 * FRAC_1_SQRT_2 * FRAC_2_SQRT_PI) * (T::from_f64(-0.5) * x * x).exp();
    cdf(x) + x * pdf
}

/// Cases for gradient checks and device comparisons.
pub fn cases() -> Vec<Case> {
    elementwise::cases(Fill::Normal, gelu_erf)
}

#[cfg(test)]
mod tests {
    use rb_tensor::DType;

    use super::*;
    use crate::ops::shared::elementwise::checks;

    #[test]
    fn shape_rule() {
        for shape in [&[][..], &[3, 0], &[2, 3]] {
            assert_eq!(GeluErf.out_shape(&[&shape.into()]).unwrap().dims(), shape);
        }
    }

    #[test]
    fn gradcheck() {
        crate::testing::check_op("gelu_erf").unwrap();
    }

    #[test]
    fn golden() {
        for case in crate::golden::load("gelu_erf") {
            crate::golden::check_each(&case, |v| gelu_erf(&v[0]), 1e-12);
        }
    }

    #[test]
    fn extremes() {
        checks::extremes(gelu_erf);
    }

    #[test]
    fn infinities() {
        for dtype in [DType::F32, DType::F64] {
            let (y, dx) = checks::derivative(gelu_erf, &[f64::NEG_INFINITY, f64::INFINITY], dtype);
            assert!(y[0].is_nan() && y[1] == f64::INFINITY, "{y:?} in {dtype}");
            assert!(dx.iter().all(|d| d.is_nan()), "{dx:?} in {dtype}");
        }
    }
}
