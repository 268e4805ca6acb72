//! Softmax over one axis.
//!
//! - **Computes** `y = exp(x - max) / sum(exp(x - max))` along the axis; 0 where all of `x` is negative infinity.
//! - **Shapes** `x [..]` -> `y [..]`, any axis; -1 is the last.
//! - **Dtypes** any float type; sums in that type.
//! - **Backward** `dx = y * (dy - sum(dy * y))` along the axis.
//! - **Saves** `y` (shared).
//! - **Kernels** `softmax_fwd`, `softmax_bwd`.
//! - **Errors** `ShapeError` if `x` has no such axis.
//! - **Source** PyTorch `torch.softmax`, which gives NaN where all is negative infinity.

use rb_cuda::Gpu;
use rb_tensor::{Shape, Tensor, rules};

use super::shared::softmax::{self as engine, axis_cases};
use super::shared::softmax_cuda;
use crate::host;
use crate::testing::Case;
use crate::{Float, GradSinks, Op, Result, Var, apply, saved};

/// Softmax of `x` over `axis` (-1 is the last).
pub fn softmax<'t>(x: &Var<'t>, axis: isize) -> Result<Var<'t>> {
    apply(Softmax { axis: rules::axis(Softmax::NAME, x.shape(), axis)? }, &[x])
}

struct Softmax {
    axis: usize,
}

saved!(
    struct SoftmaxSaved { y }
);

impl Op for Softmax {
    const NAME: &'static str = "softmax";
    type Saved = SoftmaxSaved;

    fn out_shape(&self, inputs: &[&Shape]) -> Result<Shape> {
        rules::axis(Self::NAME, inputs[0], self.axis as isize)?;
        Ok(inputs[0].clone())
    }

    fn host_forward<T: Float>(&self, inputs: &[Tensor], out: &Shape) -> Result<(Tensor, SoftmaxSaved)> {
        let (_, n, inner) = out.split_at_axis(self.axis);
        let mut y = inputs[0].to_vec::<T>()?;
        host::par_rows(&mut y, n * inner, |_, y| {
            if inner == 1 {
                let shift = engine::shift(engine::max(y));
                let scale = reciprocal(engine::exp_in_place(y, shift));
                y.iter_mut().for_each(|y| *y *= scale);
                return;
            }
            let shift = engine::column_shifts(y, inner);
            let mut sum = vec![T::ZERO; inner];
            for row in y.chunks_exact_mut(inner) {
                for ((y, &shift), sum) in row.iter_mut().zip(&shift).zip(&mut sum) {
                    *y = (*y - shift).exp();
                    *sum += *y;
                }
            }
            sum.iter_mut().for_each(|s| *s = reciprocal(*s));
            for row in y.chunks_exact_mut(inner) {
                row.iter_mut().zip(&sum).for_each(|(y, &scale)| *y *= scale);
            }
        });
        let y = Tensor::from_vec(y, out.clone())?;
        Ok((y.clone(), SoftmaxSaved { y }))
    }

    fn host_backward<T: Float>(
        &self,
        saved: SoftmaxSaved,
        dy: Tensor,
        grads: &mut GradSinks<'_>,
    ) -> Result<()> {
        let (_, n, inner) = dy.shape().split_at_axis(self.axis);
        let y = saved.y.as_slice::<T>()?;
        let block = n * inner;
        let differentiate = |i: usize, dx: &mut [T]| {
            let y = &y[i * block..][..block];
            if inner == 1 {
                let sum = host::dot(dx, y);
                dx.iter_mut().zip(y).for_each(|(d, &y)| *d = y * (*d - sum));
                return;
            }
            let mut sum = vec![T::ZERO; inner];
            for (dx, y) in dx.chunks_exact(inner).zip(y.chunks_exact(inner)) {
                sum.iter_mut().zip(dx).zip(y).for_each(|((s, &d), &y)| *s += d * y);
            }
            for (dx, y) in dx.chunks_exact_mut(inner).zip(y.chunks_exact(inner)) {
                dx.iter_mut().zip(y).zip(&sum).for_each(|((d, &y), &s)| *d = y * (*d - s));
            }
        };
        grads.add(0, host::update::<T>(dy, |dx| host::par_rows(dx, block, differentiate))?)
    }

    fn cuda_forward(&self, gpu: Gpu, inputs: &[Tensor], _out: &Shape) -> Result<(Tensor, SoftmaxSaved)> {
        let y = softmax_cuda::forward(gpu, &inputs[0], self.axis, false)?;
        Ok((y.clone(), SoftmaxSaved { y }))
    }

    fn cuda_backward(
        &self,
        gpu: Gpu,
        saved: SoftmaxSaved,
        dy: Tensor,
        grads: &mut GradSinks<'_>,
    ) -> Result<()> {
        grads.add(0, softmax_cuda::backward(gpu, &saved.y, dy, self.axis, false)?)
    }
}

/// `1 / sum`, or 0 for the sum of no probability.
fn reciprocal<T: Float>(sum: T) -> T {
    if sum == T::ZERO { T::ZERO } else { T::ONE / sum }
}

/// Cases for gradient checks and device comparisons.
pub fn cases() -> Vec<Case> {
    axis_cases(softmax)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::shared::softmax::differentiated;

    #[test]
    fn shape_rule() {
        let rule = |x: &[usize], axis| Softmax { axis }.out_shape(&[&x.into()]);
        assert_eq!(rule(&[2, 0, 3], 1).unwrap().dims(), &[2, 0, 3]);
        let message = rule(&[2, 3], 2).unwrap_err().to_string();
        assert_eq!(message, "softmax: x has shape [2, 3], expected an axis 2");
        let message = differentiated(softmax, &[0.0; 6], &[2, 3], -3, &[0.0; 6]).unwrap_err().to_string();
        assert_eq!(message, "softmax: x has shape [2, 3], expected an axis -3");
    }

    #[test]
    fn gradcheck() {
        crate::testing::check_op("softmax").unwrap();
    }

    #[test]
    fn golden() {
        for case in crate::golden::load("softmax") {
            let axis = case.number("axis") as isize;
            crate::golden::check(&case, |v| softmax(&v[0], axis), 1e-12);
        }
    }

    #[test]
    fn hidden_rows_are_zero_and_large_scores_are_finite() {
        const HIDDEN: f32 = f32::NEG_INFINITY;
        // By rows: all hidden; half hidden; far apart; all the same and large.
        let x = [[HIDDEN; 3], [HIDDEN, 1.0, 1.0], [1e4, -1e4, 0.0], [-1e4; 3]];
        let third = 1.0 / 3.0;
        let want = [[0.0; 3], [0.0, 0.5, 0.5], [1.0, 0.0, 0.0], [third; 3]];
        let dy: Vec<f32> = (0..12).map(|i| i as f32 - 4.5).collect();
        let transpose = |x: &[f32]| (0..12).map(|i| x[i % 4 * 3 + i / 4]).collect::<Vec<f32>>();
        let (y, dx) = differentiated(softmax, x.as_flattened(), &[4, 3], -1, &dy).unwrap();
        let (yt, dxt) =
            differentiated(softmax, &transpose(x.as_flattened()), &[3, 4], 0, &transpose(&dy)).unwrap();
        assert_eq!(y, want.as_flattened());
        assert_eq!(yt, transpose(&y));
        assert_eq!(dx[..3], [0.0; 3]);
        assert!(dx.iter().chain(&dxt).all(|d| d.is_finite()));
        assert!(transpose(&dx).iter().zip(&dxt).all(|(a, b)| (a - b).abs() < 1e-6));
    }
}
