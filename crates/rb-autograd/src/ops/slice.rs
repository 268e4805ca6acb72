//! A range of one axis.
//!
//! - **Computes** `y = x[.., start..start + len, ..]` along `axis`.
//! - **Shapes** `x [.., N, ..]` -> `[.., len, ..]`.
//! - **Dtypes** any float type.
//! - **Backward** `dx` is `dy` in the range and zero elsewhere.
//! - **Saves** nothing.
//! - **Errors** `ShapeError` for an axis that does not exist or a range that leaves it.
//! - **Source** PyTorch `torch.narrow`.

use rb_tensor::{Shape, ShapeError, Tensor, rules};

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
        let (before, n, after) = inputs[0].shape().split_at_axis(self.axis);
        let x = inputs[0].as_slice::<T>()?;
        let mut y = Vec::with_capacity(out.numel());
        for b in 0..before {
            let row = (b * n + self.start) * after;
            y.extend_from_slice(&x[row..row + self.len * after]);
        }
        Ok((Tensor::from_vec(y, out.clone())?, ()))
    }

    fn host_backward<T: Float>(&self, (): (), dy: Tensor, grads: &mut GradSinks<'_>) -> Result<()> {
        let (before, n, after) = grads.shape(0).split_at_axis(self.axis);
        let dy = dy.as_slice::<T>()?;
        let width = self.len * after;
        grads.write::<T>(0, |dx, beta| {
            if beta == Beta::Overwrite {
                dx.fill(T::ZERO);
            }
            for b in 0..before {
                let row = (b * n + self.start) * after;
                let (dst, src) = (&mut dx[row..row + width], &dy[b * width..][..width]);
                dst.iter_mut().zip(src).for_each(|(d, &g)| *d += g);
            }
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
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shape_rule() {
        let rule = |start, len| Slice { axis: 1, start, len }.out_shape(&[&[2, 6].into()]);
        assert_eq!(rule(2, 4).unwrap().dims(), &[2, 4]);
        let message = rule(3, 4).unwrap_err().to_string();
        assert_eq!(message, "slice: x has shape [2, 6], expected at least 7 elements in axis 1");
        assert!(rule(usize::MAX, 2).is_err());
    }

    #[test]
    fn gradcheck() {
        crate::testing::check_op("slice").unwrap();
    }
}
