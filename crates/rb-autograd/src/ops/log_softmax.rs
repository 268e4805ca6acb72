//! Logarithm of the softmax over one axis.
//!
//! - **Computes** `y = x - max - ln(sum(exp(x - max)))` along the axis.
//! - **Shapes** `x [..]` -> `y [..]`, any axis; -1 is the last.
//! - **Dtypes** any float type; sums in that type.
//! - **Backward** `dx = dy - exp(y) * sum(dy)` along the axis; 0 where all of `y` is negative infinity.
//! - **Saves** `y` (shared).
//! - **Kernels** `softmax_fwd`, `softmax_bwd` with `LOG`.
//! - **Errors** `ShapeError` if `x` has no such axis.
//! - **Source** PyTorch `torch.log_softmax`, which gives NaN where all is negative infinity; here that stays
//!   negative infinity.

use rb_cuda::Gpu;
use rb_tensor::{Shape, Tensor, rules};

use super::shared::softmax::{self as engine, axis_cases};
use super::shared::softmax_cuda;
use crate::host;
use crate::testing::Case;
use crate::{Float, GradSinks, Op, Result, Var, apply, saved};

/// Logarithm of the softmax of `x` over `axis` (-1 is the last).
pub fn log_softmax<'t>(x: &Var<'t>, axis: isize) -> Result<Var<'t>> {
    apply(LogSoftmax { axis: rules::axis(LogSoftmax::NAME, x.shape(), axis)? }, &[x])
}

struct LogSoftmax {
    axis: usize,
}

saved!(
    struct LogSoftmaxSaved { y }
);

impl Op for LogSoftmax {
    const NAME: &'static str = "log_softmax";
    type Saved = LogSoftmaxSaved;

    fn out_shape(&self, inputs: &[&Shape]) -> Result<Shape> {
        rules::axis(Self::NAME, inputs[0], self.axis as isize)?;
        Ok(inputs[0].clone())
    }

    fn host_forward<T: Float>(&self, inputs: &[Tensor], out: &Shape) -> Result<(Tensor, LogSoftmaxSaved)> {
        let (_, n, inner) = out.split_at_axis(self.axis);
        let mut y = inputs[0].to_vec::<T>()?;
        host::par_rows(&mut y, n * inner, |_, y| {
            if inner == 1 {
                let shift = engine::shift(engine::max(y));
                let log_sum = log(engine::exp_sum(y, shift));
                y.iter_mut().for_each(|y| *y = *y - shift - log_sum);
                return;
            }
            let shift = engine::column_shifts(y, inner);
            let mut log_sum = vec![T::ZERO; inner];
            for row in y.chunks_exact(inner) {
                for ((&y, &shift), sum) in row.iter().zip(&shift).zip(&mut log_sum) {
                    *sum += (y - shift).exp();
                }
            }
            log_sum.iter_mut().for_each(|s| *s = log(*s));
            for row in y.chunks_exact_mut(inner) {
                let terms = row.iter_mut().zip(&shift).zip(&log_sum);
                terms.for_each(|((y, &shift), &log_sum)| *y = *y - shift - log_sum);
            }
        });
        let y = Tensor::from_vec(y, out.clone())?;
        Ok((y.clone(), LogSoftmaxSaved { y }))
    }

    fn host_backward<T: Float>(
        &self,
        saved: LogSoftmaxSaved,
        dy: Tensor,
        grads: &mut GradSinks<'_>,
    ) -> Result<()> {
        let (_, n, inner) = dy.shape().split_at_axis(self.axis);
        let y = saved.y.as_slice::<T>()?;
        let block = n * inner;
        let differentiate = |i: usize, dx: &mut [T]| {
            let y = &y[i * block..][..block];
            if inner == 1 {
                if y.iter().all(|&y| y == T::NEG_INFINITY) {
                    dx.fill(T::ZERO);
                }
                let sum = host::sum(dx);
                dx.iter_mut().zip(y).for_each(|(d, &y)| *d -= y.exp() * sum);
                return;
            }
            let mut hidden = vec![true; inner];
            let mut sum = vec![T::ZERO; inner];
            for (dx, y) in dx.chunks_exact(inner).zip(y.chunks_exact(inner)) {
                for (((hidden, sum), &d), &y) in hidden.iter_mut().zip(&mut sum).zip(dx).zip(y) {
                    *hidden &= y == T::NEG_INFINITY;
                    *sum += d;
                }
            }
            for (dx, y) in dx.chunks_exact_mut(inner).zip(y.chunks_exact(inner)) {
                for (((d, &y), &sum), &hidden) in dx.iter_mut().zip(y).zip(&sum).zip(&hidden) {
                    *d = if hidden { T::ZERO } else { *d - y.exp() * sum };
                }
            }
        };
        grads.add(0, host::update::<T>(dy, |dx| host::par_rows(dx, block, differentiate))?)
    }

    fn cuda_forward(&self, gpu: Gpu, inputs: &[Tensor], _out: &Shape) -> Result<(Tensor, LogSoftmaxSaved)> {
        let y = softmax_cuda::forward(gpu, &inputs[0], self.axis, true)?;
        Ok((y.clone(), LogSoftmaxSaved { y }))
    }

    fn cuda_backward(
        &self,
        gpu: Gpu,
        saved: LogSoftmaxSaved,
        dy: Tensor,
        grads: &mut GradSinks<'_>,
    ) -> Result<()> {
        grads.add(0, softmax_cuda::backward(gpu, &saved.y, dy, self.axis, true)?)
    }
}

/// The logarithm, or 0 for the sum of no probability: the row is negative infinity already.
fn log<T: Float>(sum: T) -> T {
    if sum == T::ZERO { T::ZERO } else { sum.ln() }
}

/// Cases for gradient checks and device comparisons.
pub fn cases() -> Vec<Case> {
    axis_cases(log_softmax)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::shared::softmax::differentiated;

    #[test]
    fn shape_rule() {
        let rule = |x: &[usize], axis| LogSoftmax { axis }.out_shape(&[&x.into()]);
        assert_eq!(rule(&[2, 0, 3], 1).unwrap().dims(), &[2, 0, 3]);
        let message = rule(&[2, 3], 2).unwrap_err().to_string();
        assert_eq!(message, "log_softmax: x has shape [2, 3], expected an axis 2");
        let message = differentiated(log_softmax, &[0.0; 6], &[2, 3], -3, &[0.0; 6]).unwrap_err().to_string();
        assert_eq!(message, "log_softmax: x has shape [2, 3], expected an axis -3");
    }

    #[test]
    fn gradcheck() {
        crate::testing::check_op("log_softmax").unwrap();
    }

    #[test]
    fn golden() {
        for case in crate::golden::load("log_softmax") {
            let axis = case.number("axis") as isize;
            crate::golden::check(&case, |v| log_softmax(&v[0], axis), 1e-12);
        }
    }

    #[test]
    fn hidden_rows_have_no_gradient_and_large_scores_are_finite() {
        const HIDDEN: f32 = f32::NEG_INFINITY;
        let x = [[HIDDEN; 2], [HIDDEN, 7.0], [7.0, HIDDEN], [1e4, -1e4], [-1e4; 2]];
        let half = -std::f32::consts::LN_2;
        let want = [[HIDDEN; 2], [HIDDEN, 0.0], [0.0, HIDDEN], [0.0, -2e4], [half; 2]];
        let dy: Vec<f32> = (0..10).map(|i| i as f32 - 2.5).collect();
        let transpose = |x: &[f32]| (0..10).map(|i| x[i % 5 * 2 + i / 5]).collect::<Vec<f32>>();
        let (y, dx) = differentiated(log_softmax, x.as_flattened(), &[5, 2], -1, &dy).unwrap();
        let (yt, dxt) =
            differentiated(log_softmax, &transpose(x.as_flattened()), &[2, 5], 0, &transpose(&dy)).unwrap();
        assert_eq!(y, want.as_flattened());
        assert_eq!(yt, transpose(&y));
        assert_eq!(dx[..2], [0.0; 2]);
        assert_eq!(dxt, transpose(&dx));
        assert!(dx.iter().all(|d| d.is_finite()));
    }
}
