//! A range of one axis.
//!
//! - **Computes** `y = x[.., start..start + len, ..]` along `axis`.
//! - **Shapes** `x [.., N, ..]` -> `[.., len, ..]`.
//! - **Dtypes** any float type.
//! - **Backward** `dx` is `dy` in the range and zero elsewhere.
//! - **Saves** nothing; a range of axis 0 shares the buffer.
//! - **Kernels** `copy_rows`; none for a range of axis 0 forward.
//! - **Errors** `ShapeError` for an axis that does not exist or a range that leaves it.
//! - **Source** PyTorch `torch.narrow`.

use rb_cuda::Gpu;
use rb_tensor::{Shape, ShapeError, Tensor, rules};

use super::shared::rows_cuda::{self, Columns};
use crate::{cuda, host};
use crate::testing::Case;
use crate::{Beta, Float, GradSinks, Op, Result, Var, apply};

/// Elements `start..start + len` of `axis`, which may count from the end (-1 is the last).
pub fn slice<'t>(x: &Var<'t>, axis: isize, start: usize, len: usize) -> Result<Var<'t>> {
    let axis = rules::axis("slice", x.shape(), axis)?;
    apply(Slice { axis, start, len }, &[x])
}

struct Slice {
    axis: usize,
    start: usize,
    len: usize,
}

impl Op for Slice {
    const NAME: &'static str = "slice";
    type Saved = ();

    fn out_shape(&self, inputs: &[&Shape]) -> Result<Shape> {
        let x = inputs[0];
        if self.start.checked_add(self.len).is_none_or(|end| end > x[self.axis]) {
            let end = self.start.saturating_add(self.len);
            let expected = format!("at least {end} elements in axis {}", self.axis);
            return Err(ShapeError::new(Self::NAME, "x", x, expected).into());
        }
        let mut dims = x.to_vec();
        dims[self.axis] = self.len;
        Ok(dims.into())
    }

    fn host_forward<T: Float>(&self, inputs: &[Tensor], out: &Shape) -> Result<(Tensor, ())> {
        if self.axis == 0 {
            return Ok((inputs[0].narrow(self.start, self.len)?, ()));
        }
        let (_, n, inner) = inputs[0].shape().split_at_axis(self.axis);
        let x = inputs[0].as_slice::<T>()?;
        let (start, width) = (self.start * inner, self.len * inner);
        let mut y = vec![T::ZERO; out.numel()];
        host::par_rows(&mut y, width, |row, y| y.copy_from_slice(&x[row * n * inner + start..][..width]));
        Ok((Tensor::from_vec(y, out.clone())?, ()))
    }

    fn host_backward<T: Float>(&self, (): (), dy: Tensor, grads: &mut GradSinks<'_>) -> Result<()> {
        let (_, n, inner) = grads.shape(0).split_at_axis(self.axis);
        let dy = dy.as_slice::<T>()?;
        let (start, width) = (self.start * inner, self.len * inner);
        grads.write::<T>(0, |dx, beta| {
            host::par_rows(dx, n * inner, |row, dx| {
                if beta == Beta::Overwrite {
                    // An arena of gradients holds the last step's values, not zeros.
                    dx.fill(T::ZERO);
                }
                let dy = &dy[row * width..][..width];
                dx[start..start + width].iter_mut().zip(dy).for_each(|(x, &d)| *x += d);
            });
        })
    }

    fn cuda_forward(&self, gpu: Gpu, inputs: &[Tensor], out: &Shape) -> Result<(Tensor, ())> {
        if self.axis == 0 {
            return Ok((inputs[0].narrow(self.start, self.len)?, ()));
        }
        let (rows, n, inner) = inputs[0].shape().split_at_axis(self.axis);
        let (start, width) = (self.start * inner, self.len * inner);
        let y = cuda::output(gpu, out, inputs[0].dtype())?;
        let from = Columns { tensor: &inputs[0], start, stride: n * inner };
        let to = Columns { tensor: &y, start: 0, stride: width };
        rows_cuda::copy(gpu, (rows, width), from, to, Beta::Overwrite)?;
        Ok((y, ()))
    }

    fn cuda_backward(&self, gpu: Gpu, (): (), dy: Tensor, grads: &mut GradSinks<'_>) -> Result<()> {
        let (rows, n, inner) = grads.shape(0).split_at_axis(self.axis);
        let (start, width) = (self.start * inner, self.len * inner);
        grads.write_cuda(gpu, 0, |dx, beta| {
            if beta == Beta::Overwrite && self.len < n {
                rows_cuda::zero(gpu, dx)?;
            }
            let from = Columns { tensor: &dy, start: 0, stride: width };
            let to = Columns { tensor: dx, start, stride: n * inner };
            rows_cuda::copy(gpu, (rows, width), from, to, beta)
        })
    }
}

/// Cases for gradient checks and device comparisons.
pub fn cases() -> Vec<Case> {
    vec![
        Case::normal("first axis", &[&[5, 3]], |v| slice(&v[0], 0, 1, 3)),
        Case::normal("middle axis", &[&[2, 7, 3]], |v| slice(&v[0], 1, 2, 4)),
        Case::normal("last axis", &[&[31, 33]], |v| slice(&v[0], -1, 32, 1)),
        Case::normal("two slices of one input", &[&[3, 8]], |v| {
            super::add(&slice(&v[0], 1, 0, 5)?, &slice(&v[0], 1, 2, 5)?)
        }),
        Case::normal("nothing", &[&[3, 2]], |v| slice(&v[0], 1, 2, 0)),
        Case::normal("nothing of axis 0", &[&[3, 2]], |v| slice(&v[0], 0, 3, 0)),
        Case::normal("of an empty tensor", &[&[0, 4]], |v| slice(&v[0], 1, 1, 2)),
        Case::normal("everything", &[&[31]], |v| slice(&v[0], -1, 0, 31)),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::shared::{arena_check, reduce::axis_message};

    #[test]
    fn shape_rule() {
        let rule = |start, len| Slice { axis: 1, start, len }.out_shape(&[&[2, 6].into()]);
        assert_eq!(rule(2, 4).unwrap().dims(), &[2, 4]);
        let message = rule(3, 4).unwrap_err().to_string();
        assert_eq!(message, "slice: x has shape [2, 6], expected at least 7 elements in axis 1");
        assert!(rule(usize::MAX, 2).is_err());
        assert_eq!(axis_message(|x| slice(x, 2, 0, 1)), "slice: x has shape [2, 6], expected an axis 2");
    }

    #[test]
    fn gradcheck() {
        crate::testing::check_op("slice").unwrap();
    }

    #[test]
    fn arena() {
        arena_check::check(&[&[3, 8]], |v| slice(&v[0], 1, 2, 5));
        arena_check::check(&[&[5, 3]], |v| slice(&v[0], 0, 1, 2));
        arena_check::check(&[&[3, 8]], |v| {
            super::super::add(&slice(&v[0], 1, 0, 5)?, &slice(&v[0], 1, 2, 5)?)
        });
    }
}
