//! Sum over one axis.
//!
//! - **Computes** `y = sum(x)` along `axis`; 0 over an axis of no elements.
//! - **Shapes** `x [.., N, ..]` -> `y [.., ..]`, or `[.., 1, ..]` with `keep`.
//! - **Dtypes** any float type; sums are accumulated in it, in many partial sums.
//! - **Backward** `dx = dy` at every element of the axis.
//! - **Saves** nothing.
//! - **Kernels** `sum_rows` or `sum_columns`, `spread`.
//! - **Errors** `ShapeError` for an axis that does not exist.
//! - **Source** PyTorch `torch.sum`.

use rb_cuda::Gpu;
use rb_tensor::{Shape, Tensor, rules};

use super::shared::{reduce, reduce_cuda};
use crate::testing::{Case, Fill};
use crate::{Beta, Float, GradSinks, Op, Result, Var, apply, cuda};

/// The sum over `axis`, which may count from the end (-1 is the last); the axis stays with size 1 if `keep`.
pub fn sum<'t>(x: &Var<'t>, axis: isize, keep: bool) -> Result<Var<'t>> {
    let axis = rules::axis("sum", x.shape(), axis)?;
    apply(Sum { axis, keep }, &[x])
}

struct Sum {
    axis: usize,
    keep: bool,
}

impl Op for Sum {
    const NAME: &'static str = "sum";
    type Saved = ();

    fn out_shape(&self, inputs: &[&Shape]) -> Result<Shape> {
        Ok(rules::reduced(inputs[0], self.axis, self.keep))
    }

    fn host_forward<T: Float>(&self, inputs: &[Tensor], out: &Shape) -> Result<(Tensor, ())> {
        let sums = reduce::sum(inputs[0].as_slice::<T>()?, inputs[0].shape().split_at_axis(self.axis));
        Ok((Tensor::from_vec(sums, out.clone())?, ()))
    }

    fn host_backward<T: Float>(&self, (): (), dy: Tensor, grads: &mut GradSinks<'_>) -> Result<()> {
        let (_, n, inner) = grads.shape(0).split_at_axis(self.axis);
        let dy = dy.as_slice::<T>()?;
        grads.write::<T>(0, |dx, beta| reduce::spread(dx, dy, (n, inner), T::ONE, beta))
    }

    fn cuda_forward(&self, gpu: Gpu, inputs: &[Tensor], out: &Shape) -> Result<(Tensor, ())> {
        let view = inputs[0].shape().split_at_axis(self.axis);
        let y = cuda::output(gpu, out, inputs[0].dtype())?;
        reduce_cuda::sum(gpu, &inputs[0], view, &y, Beta::Overwrite, 1.0)?;
        Ok((y, ()))
    }

    fn cuda_backward(&self, gpu: Gpu, (): (), dy: Tensor, grads: &mut GradSinks<'_>) -> Result<()> {
        let (_, n, inner) = grads.shape(0).split_at_axis(self.axis);
        grads.write_cuda(gpu, 0, |dx, beta| reduce_cuda::spread(gpu, &dy, (n, inner), dx, beta, 1.0))
    }
}

/// Cases for gradient checks and device comparisons.
pub fn cases() -> Vec<Case> {
    let mut cases = reduce::cases(Fill::Normal, sum);
    cases.push(Case::normal("no elements", &[&[3, 0]], |v| sum(&v[0], 1, false)));
    cases.push(Case::normal("used twice", &[&[3, 5]], |v| super::add(&v[0], &sum(&v[0], 1, true)?)));
    cases
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::shared::{arena_check, reduce::axis_message};

    #[test]
    fn shape_rule() {
        let rule = |keep| Sum { axis: 1, keep }.out_shape(&[&[2, 0, 4].into()]);
        assert_eq!(rule(false).unwrap().dims(), &[2, 4]);
        assert_eq!(rule(true).unwrap().dims(), &[2, 1, 4]);
        assert_eq!(axis_message(|x| sum(x, 2, false)), "sum: x has shape [2, 6], expected an axis 2");
        assert_eq!(axis_message(|x| sum(x, -3, false)), "sum: x has shape [2, 6], expected an axis -3");
    }

    #[test]
    fn gradcheck() {
        crate::testing::check_op("sum").unwrap();
    }

    #[test]
    fn arena() {
        arena_check::check(&[&[3, 5, 7]], |v| sum(&v[0], 1, false));
        arena_check::check(&[&[3, 5]], |v| sum(&v[0], -1, true));
    }
}
