//! Elementwise natural logarithm.
//!
//! - **Computes** `y = ln(x)`: negative infinity at 0, NaN below.
//! - **Shapes** `x [..]` -> `y [..]`.
//! - **Dtypes** any float type.
//! - **Backward** `dx = dy / x`: infinite at 0.
//! - **Saves** `x` (shared).
//! - **Kernels** `unary_fwd`, `unary_bwd`.
//! - **Errors** none of its own: every shape is good.
//! - **Source** PyTorch `torch.log`.

use rb_cuda::Gpu;
use rb_tensor::{Shape, Tensor};

use super::shared::elementwise;
use super::shared::elementwise_cuda::{self, Slope};
use crate::testing::{Case, Fill};
use crate::{Float, GradSinks, Op, Result, Var, apply, saved};

/// The natural logarithm of `x`.
pub fn log<'t>(x: &Var<'t>) -> Result<Var<'t>> {
    apply(Log, &[x])
}

struct Log;

saved!(
    struct LogSaved { x }
);

impl Op for Log {
    const NAME: &'static str = "log";
    type Saved = LogSaved;

    fn out_shape(&self, inputs: &[&Shape]) -> Result<Shape> {
        Ok(inputs[0].clone())
    }

    fn host_forward<T: Float>(&self, inputs: &[Tensor], _out: &Shape) -> Result<(Tensor, LogSaved)> {
        let y = elementwise::map::<T>(&inputs[0], T::ln)?;
        Ok((y, LogSaved { x: inputs[0].clone() }))
    }

    fn host_backward<T: Float>(&self, saved: LogSaved, dy: Tensor, grads: &mut GradSinks<'_>) -> Result<()> {
        let dx = elementwise::chain::<T>(dy, &saved.x, |dy, x| dy / x)?;
        grads.add(0, dx)
    }

    fn cuda_forward(&self, gpu: Gpu, inputs: &[Tensor], _out: &Shape) -> Result<(Tensor, LogSaved)> {
        let y = elementwise_cuda::map(gpu, &inputs[0], FUNCTION, [0.0; 2])?;
        Ok((y, LogSaved { x: inputs[0].clone() }))
    }

    fn cuda_backward(
        &self,
        gpu: Gpu,
        saved: LogSaved,
        dy: Tensor,
        grads: &mut GradSinks<'_>,
    ) -> Result<()> {
        let dx = elementwise_cuda::chain(gpu, dy, &saved.x, &SLOPE)?;
        grads.add(0, dx)
    }
}

/// Bodies of C functions.
const FUNCTION: &str = "return logf(x);";
const SLOPE: Slope = Slope::OfInput("return dy / x;");

/// Cases for gradient checks and device comparisons.
pub fn cases() -> Vec<Case> {
    elementwise::cases(Fill::Uniform(0.2, 3.0), log)
}

#[cfg(test)]
mod tests {
    use rb_tensor::DType;

    use super::*;
    use crate::ops::shared::elementwise::checks;

    #[test]
    fn shape_rule() {
        for shape in [&[][..], &[3, 0], &[2, 3]] {
            assert_eq!(Log.out_shape(&[&shape.into()]).unwrap().dims(), shape);
        }
    }

    #[test]
    fn gradcheck() {
        crate::testing::check_op("log").unwrap();
    }

    #[test]
    fn edges() {
        for dtype in [DType::F32, DType::F64] {
            let (y, dx) = checks::derivative(log, &[0.0, 1.0, f64::INFINITY], dtype);
            assert_eq!(y, [f64::NEG_INFINITY, 0.0, f64::INFINITY], "{dtype}");
            assert_eq!(dx, [f64::INFINITY, 1.0, 0.0], "{dtype}");
            assert!(checks::derivative(log, &[-1.0], dtype).0[0].is_nan());
        }
    }
}
