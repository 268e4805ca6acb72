//! Maximum over one axis.
//!
//! - **Computes** `y = max(x)` along `axis`; NaN if there is a NaN.
//! - **Shapes** `x [.., N, ..]` -> `y [.., ..]`, or `[.., 1, ..]` with `keep`.
//! - **Dtypes** any float type.
//! - **Backward** `dx = dy` at the first maximum (the first NaN), 0 elsewhere.
//! - **Saves** the position of each maximum, 4 bytes an output.
//! - **Kernels** `max_fwd`, `max_bwd`.
//! - **Errors** `ShapeError` for an axis that does not exist, has no elements or more than `2^31 - 1`.
//! - **Source** PyTorch `torch.max(x, axis).values`; `torch.amax` differs: it shares `dy` between equal
//!   maxima.

use rb_cuda::{Arg, Gpu, Kernel, Launch, kernel};
use rb_tensor::{DType, Shape, ShapeError, Tensor, rules};

use super::shared::{reduce, reduce_cuda};
use crate::{cuda, host};
use crate::testing::{Case, Fill};
use crate::{Beta, Float, GradSinks, Op, Result, Var, apply, saved};

/// The maximum over `axis`, which may count from the end (-1 is the last); the axis stays with size 1 if
/// `keep`.
pub fn max<'t>(x: &Var<'t>, axis: isize, keep: bool) -> Result<Var<'t>> {
    let axis = rules::axis("max", x.shape(), axis)?;
    apply(Max { axis, keep }, &[x])
}

struct Max {
    axis: usize,
    keep: bool,
}

saved!(
    struct MaxSaved { index }
);

impl Op for Max {
    const NAME: &'static str = "max";
    type Saved = MaxSaved;

    fn out_shape(&self, inputs: &[&Shape]) -> Result<Shape> {
        if !(1..=i32::MAX as usize).contains(&inputs[0][self.axis]) {
            let expected = format!("1 to {} elements in axis {}", i32::MAX, self.axis);
            return Err(ShapeError::new(Self::NAME, "x", inputs[0], expected).into());
        }
        Ok(rules::reduced(inputs[0], self.axis, self.keep))
    }

    fn host_forward<T: Float>(&self, inputs: &[Tensor], out: &Shape) -> Result<(Tensor, MaxSaved)> {
        let x = inputs[0].as_slice::<T>()?;
        let (y, index) = reduce::max(x, inputs[0].shape().split_at_axis(self.axis));
        let index = Tensor::from_vec(index, out.clone())?;
        Ok((Tensor::from_vec(y, out.clone())?, MaxSaved { index }))
    }

    fn host_backward<T: Float>(&self, saved: MaxSaved, dy: Tensor, grads: &mut GradSinks<'_>) -> Result<()> {
        let (_, n, inner) = grads.shape(0).split_at_axis(self.axis);
        let (dy, index) = (dy.as_slice::<T>()?, saved.index.as_slice::<i32>()?);
        grads.write::<T>(0, |dx, beta| {
            host::par_rows(dx, n * inner, |o, dx| {
                if beta == Beta::Overwrite {
                    dx.fill(T::ZERO);
                }
                let (dy, index) = (&dy[o * inner..][..inner], &index[o * inner..][..inner]);
                for (i, (&d, &k)) in dy.iter().zip(index).enumerate() {
                    dx[k as usize * inner + i] += d;
                }
            });
        })
    }

    fn cuda_forward(&self, gpu: Gpu, inputs: &[Tensor], out: &Shape) -> Result<(Tensor, MaxSaved)> {
        let x = &inputs[0];
        let (outer, n, inner) = x.shape().split_at_axis(self.axis);
        let y = cuda::output(gpu, out, x.dtype())?;
        let index = cuda::output(gpu, out, DType::I32)?;
        if out.numel() > 0 {
            let lanes = reduce_cuda::lanes(n, inner);
            let launch = Launch::for_items(&MAX_FWD, outer * inner * lanes, 256)
                .define("T", x.dtype().cuda_name())
                .define("LANES", lanes)
                .arg(x.arg()?)
                .arg(y.arg()?)
                .arg(index.arg()?)
                .arg(Arg::I64((outer * inner) as i64))
                .arg(Arg::I64(n as i64))
                .arg(Arg::I64(inner as i64));
            cuda::launch_on(gpu, launch)?;
        }
        Ok((y, MaxSaved { index }))
    }

    fn cuda_backward(
        &self,
        gpu: Gpu,
        saved: MaxSaved,
        dy: Tensor,
        grads: &mut GradSinks<'_>,
    ) -> Result<()> {
        let (_, n, inner) = grads.shape(0).split_at_axis(self.axis);
        grads.write_cuda(gpu, 0, |dx, beta| {
            if dx.numel() == 0 {
                return Ok(());
            }
            let launch = Launch::for_items(&MAX_BWD, dx.numel(), 256)
                .define("TX", dy.dtype().cuda_name())
                .define("TY", dx.dtype().cuda_name())
                .define("BETA", beta.define())
                .define("N", n)
                .define("INNER", inner)
                .arg(dy.arg()?)
                .arg(saved.index.arg()?)
                .arg(dx.arg()?)
                .arg(Arg::I64(dx.numel() as i64));
            cuda::launch_on(gpu, launch)
        })
    }
}

const MAX_FWD: Kernel = kernel!("max_fwd");
const MAX_BWD: Kernel = kernel!("max_bwd");

/// Cases for gradient checks and device comparisons.
pub fn cases() -> Vec<Case> {
    let mut cases = reduce::cases(Fill::Distinct, max);
    cases.push(Case::normal("used twice", &[&[3, 5]], |v| super::sub(&v[0], &max(&v[0], 1, true)?)));
    cases
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::shared::{arena_check, reduce::axis_message};

    #[test]
    fn shape_rule() {
        let rule = |x: &[usize], keep| Max { axis: 1, keep }.out_shape(&[&x.into()]);
        assert_eq!(rule(&[0, 3, 4], false).unwrap().dims(), &[0, 4]);
        assert_eq!(rule(&[2, 3, 4], true).unwrap().dims(), &[2, 1, 4]);
        let message = rule(&[2, 0], false).unwrap_err().to_string();
        assert_eq!(message, "max: x has shape [2, 0], expected 1 to 2147483647 elements in axis 1");
        assert_eq!(axis_message(|x| max(x, 2, false)), "max: x has shape [2, 6], expected an axis 2");
    }

    #[test]
    fn gradcheck() {
        crate::testing::check_op("max").unwrap();
    }

    #[test]
    fn golden() {
        let mut compared = 0;
        for case in crate::golden::load("max") {
            let (axis, keep) = (case.number("axis") as isize, case.attrs["keepdim"].as_bool().unwrap());
            // `torch.amax` shares the gradient between ties; without ties it is the same function.
            if case.attrs["semantics"] == "max_with_index" || case.name.contains("no_ties") {
                crate::golden::check(&case, |v| max(&v[0], axis, keep), 1e-12);
                compared += 1;
            }
        }
        assert!(compared >= 12, "{compared} cases of max");
    }

    #[test]
    fn nan_gets_the_gradient() {
        let case = Case::normal("", &[], |v| max(&v[0], 1, false));
        let x = Tensor::from_vec(vec![1.0f32, f32::NAN, 9.0, f32::NAN], [1, 4]).unwrap();
        let outcome = case.run(&[x], Some(&Tensor::from_vec(vec![2.0f32], [1]).unwrap())).unwrap();
        assert!(outcome.y.item().unwrap().is_nan());
        assert_eq!(outcome.dx[0].as_ref().unwrap().to_vec::<f32>().unwrap(), [0.0, 2.0, 0.0, 0.0]);
    }

    #[test]
    fn arena() {
        arena_check::check(&[&[3, 5, 7]], |v| max(&v[0], 1, false));
        arena_check::check(&[&[3, 5]], |v| max(&v[0], -1, true));
    }
}
