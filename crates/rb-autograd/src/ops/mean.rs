//! Mean over one axis.
//!
//! - **Computes** `y = sum(x) / N` along `axis`.
//! - **Shapes** `x [.., N, ..]` -> `y [.., ..]`, or `[.., 1, ..]` with `keep`.
//! - **Dtypes** any float type; sums are accumulated in it, in many partial sums.
//! - **Backward** `dx = dy / N` at every element of the axis.
//! - **Saves** nothing.
//! - **Kernels** `sum_rows` or `sum_columns`, `spread`.
//! - **Errors** `ShapeError` for an axis that does not exist or has no elements.
//! - **Source** PyTorch `torch.mean`, which gives NaN for an axis of no elements.

use rb_cuda::Gpu;
use rb_tensor::{Shape, ShapeError, Tensor, rules};

use super::shared::{reduce, reduce_cuda};
use crate::testing::{Case, Fill};
use crate::{Beta, Float, GradSinks, Op, Result, Var, apply, cuda};

/// The mean over `axis`, which may count from the end (-1 is the last); the axis stays with size 1 if `keep`.
pub fn mean<'t>(x: &Var<'t>, axis: isize, keep: bool) -> Result<Var<'t>> {
    let axis = rules::axis("mean", x.shape(), axis)?;
    apply(Mean { axis, keep }, &[x])
}

struct Mean {
    axis: usize,
    keep: bool,
}

impl Op for Mean {
    const NAME: &'static str = "mean";
    type Saved = ();

    fn out_shape(&self, inputs: &[&Shape]) -> Result<Shape> {
        if inputs[0][self.axis] == 0 {
            let expected = format!("at least 1 element in axis {}", self.axis);
            return Err(ShapeError::new(Self::NAME, "x", inputs[0], expected).into());
        }
        Ok(rules::reduced(inputs[0], self.axis, self.keep))
    }

    fn host_forward<T: Float>(&self, inputs: &[Tensor], out: &Shape) -> Result<(Tensor, ())> {
        let (outer, n, inner) = inputs[0].shape().split_at_axis(self.axis);
        let mut mean = reduce::sum(inputs[0].as_slice::<T>()?, (outer, n, inner));
        let count = T::from_f64(n as f64);
        mean.iter_mut().for_each(|y| *y = *y / count);
        Ok((Tensor::from_vec(mean, out.clone())?, ()))
    }

    fn host_backward<T: Float>(&self, (): (), dy: Tensor, grads: &mut GradSinks<'_>) -> Result<()> {
        let (_, n, inner) = grads.shape(0).split_at_axis(self.axis);
        let dy = dy.as_slice::<T>()?;
        let factor = T::from_f64(1.0 / n as f64);
        grads.write::<T>(0, |dx, beta| reduce::spread(dx, dy, (n, inner), factor, beta))
    }

    fn cuda_forward(&self, gpu: Gpu, inputs: &[Tensor], out: &Shape) -> Result<(Tensor, ())> {
        let view = inputs[0].shape().split_at_axis(self.axis);
        let y = cuda::output(gpu, out, inputs[0].dtype())?;
        reduce_cuda::sum(gpu, &inputs[0], view, &y, Beta::Overwrite, view.1 as f32)?;
        Ok((y, ()))
    }

    fn cuda_backward(&self, gpu: Gpu, (): (), dy: Tensor, grads: &mut GradSinks<'_>) -> Result<()> {
        let (_, n, inner) = grads.shape(0).split_at_axis(self.axis);
        let factor = (1.0 / n as f64) as f32;
        grads.write_cuda(gpu, 0, |dx, beta| reduce_cuda::spread(gpu, &dy, (n, inner), dx, beta, factor))
    }
}

/// Cases for gradient checks and device comparisons.
pub fn cases() -> Vec<Case> {
    let mut cases = reduce::cases(Fill::Normal, mean);
    cases.push(Case::normal("used twice", &[&[3, 5]], |v| super::sub(&v[0], &mean(&v[0], 1, true)?)));
    cases
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::shared::{arena_check, reduce::axis_message};

    #[test]
    fn shape_rule() {
        let rule = |x: &[usize], keep| Mean { axis: 1, keep }.out_shape(&[&x.into()]);
        assert_eq!(rule(&[0, 3, 4], false).unwrap().dims(), &[0, 4]);
        assert_eq!(rule(&[2, 3, 4], true).unwrap().dims(), &[2, 1, 4]);
        let message = rule(&[2, 0], false).unwrap_err().to_string();
        assert_eq!(message, "mean: x has shape [2, 0], expected at least 1 element in axis 1");
        assert_eq!(axis_message(|x| mean(x, 2, false)), "mean: x has shape [2, 6], expected an axis 2");
    }

    #[test]
    fn gradcheck() {
        crate::testing::check_op("mean").unwrap();
    }

    #[test]
    fn golden() {
        for case in crate::golden::load("mean") {
            let keep = case.attrs["keepdim"].as_bool().unwrap();
            // A mean over several axes is a mean of means: from the last axis on, so that numbers stay valid.
            let mut axes: Vec<isize> =
                case.attrs["axes"].as_array().unwrap().iter().map(|a| a.as_i64().unwrap() as isize).collect();
            axes.sort();
            let axes = || axes.iter().rev();
            crate::golden::check(&case, |v| axes().try_fold(v[0].clone(), |x, &a| mean(&x, a, keep)), 1e-12);
        }
    }

    #[test]
    fn arena() {
        arena_check::check(&[&[3, 5, 7]], |v| mean(&v[0], 1, false));
        arena_check::check(&[&[3, 5]], |v| mean(&v[0], -1, true));
    }
}
