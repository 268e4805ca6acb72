//! Elementwise sigmoid-weighted linear unit (swish).
//!
//! - **Computes** `y = x / (1 + e^-x)`. Infinity at infinity; NaN at negative infinity, as in PyTorch (the
//!   limit is 0).
//! - **Shapes** `x [..]` -> `y [..]`.
//! - **Dtypes** any float type.
//! - **Backward** with `s = 1 / (1 + e^-x)`: `dx = dy * s * (1 + x * (1 - s))`; NaN at the infinities, as in
//!   PyTorch.
//! - **Saves** `x` (shared).
//! - **Kernels** `unary_fwd`, `unary_bwd`.
//! - **Errors** none of its own: every shape is good.
//! - **Source** PyTorch `torch.nn.functional.silu`; arXiv:1702.03118.

use rb_cuda::Gpu;
use rb_tensor::{Shape, Tensor};

use super::shared::elementwise;
use super::shared::elementwise_cuda::{self, Slope};
use crate::testing::{Case, Fill};
use crate::{Float, GradSinks, Op, Result, Var, apply, saved};

/// `x / (1 + e^-x)`.
pub fn silu<'t>(x: &Var<'t>) -> Result<Var<'t>> {
    apply(Silu, &[x])
}

struct Silu;

saved!(
    struct SiluSaved { x }
);

impl Op for Silu {
    const NAME: &'static str = "silu";
    type Saved = SiluSaved;

    fn out_shape(&self, inputs: &[&Shape]) -> Result<Shape> {
        Ok(inputs[0].clone())
    }

    fn host_forward<T: Float>(&self, inputs: &[Tensor], _out: &Shape) -> Result<(Tensor, SiluSaved)> {
        let y = elementwise::map::<T>(&inputs[0], |x| x * x.sigmoid())?;
        Ok((y, SiluSaved { x: inputs[0].clone() }))
    }

    fn host_backward<T: Float>(&self, saved: SiluSaved, dy: Tensor, grads: &mut GradSinks<'_>) -> Result<()> {
        let dx = elementwise::chain::<T>(dy, &saved.x, |dy, x| dy * slope(x))?;
        grads.add(0, dx)
    }

    fn cuda_forward(&self, gpu: Gpu, inputs: &[Tensor], _out: &Shape) -> Result<(Tensor, SiluSaved)> {
        let y = elementwise_cuda::map(gpu, &inputs[0], FUNCTION, [0.0; 2])?;
        Ok((y, SiluSaved { x: inputs[0].clone() }))
    }

    fn cuda_backward(
        &self,
        gpu: Gpu,
        saved: SiluSaved,
        dy: Tensor,
        grads: &mut GradSinks<'_>,
    ) -> Result<()> {
        let dx = elementwise_cuda::chain(gpu, dy, &saved.x, &SLOPE)?;
        grads.add(0, dx)
    }
}

/// Bodies of C functions.
const FUNCTION: &str = "return x * (1.0f / (1.0f + expf(-x)));";
const SLOPE: Slope = Slope::OfInput("\
    const float s = 1.0f / (1.0f + expf(-x)); \
    return dy * (s * (1.0f + x * (1.0f - s)));");

#[inline(always)]
fn slope<T: Float>(x: T) -> T {
    let s = x.sigmoid();
    s * (T::ONE + x * (T::ONE - s))
}

/// Cases for gradient checks and device comparisons.
pub fn cases() -> Vec<Case> {
    elementwise::cases(Fill::Normal, silu)
}

#[cfg(test)]
mod tests {
    use rb_tensor::DType;

    use super::*;
    use crate::ops::shared::elementwise::checks;

    #[test]
    fn shape_rule() {
        for shape in [&[][..], &[3, 0], &[2, 3]] {
            assert_eq!(Silu.out_shape(&[&shape.into()]).unwrap().dims(), shape);
        }
    }

    #[test]
    fn gradcheck() {
        crate::testing::check_op("silu").unwrap();
    }

    #[test]
    fn golden() {
        for case in crate::golden::load("silu") {
            crate::golden::check_each(&case, |v| silu(&v[0]), 1e-12);
        }
    }

    #[test]
    fn extremes() {
        checks::extremes(silu);
    }

    #[test]
    fn infinities() {
        for dtype in [DType::F32, DType::F64] {
            let (y, dx) = checks::derivative(silu, &[f64::NEG_INFINITY, f64::INFINITY], dtype);
            assert!(y[0].is_nan() && y[1] == f64::INFINITY, "{y:?} in {dtype}");
            assert!(dx.iter().all(|d| d.is_nan()), "{dx:?} in {dtype}");
        }
    }
}
