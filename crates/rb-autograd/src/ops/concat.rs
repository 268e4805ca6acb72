//! Tensors joined along one axis.
//!
//! - **Computes** `y = [inputs[0], inputs[1], ..]` along `axis`.
//! - **Shapes** `inputs[i] [.., N_i, ..]`, equal but for `axis` -> `y [.., sum(N_i), ..]`.
//! - **Dtypes** all of one float type.
//! - **Backward** `dinputs[i]` is the range of `dy` that the input went to, whichever inputs are constants.
//! - **Saves** nothing.
//! - **Kernels** `copy_rows`.
//! - **Errors** `Argument` without inputs; `ShapeError` for an axis that does not exist or sizes that differ
//!   elsewhere.
//! - **Source** PyTorch `torch.cat`.

use rb_cuda::Gpu;
use rb_tensor::{Shape, ShapeError, Tensor, rules};

use super::shared::rows_cuda::{self, Columns};
use crate::{cuda, host};
use crate::testing::Case;
use crate::{AutogradError, Beta, Float, GradSinks, Op, Result, Var, apply};

/// `inputs` joined along `axis`, which may count from the end (-1 is the last).
pub fn concat<'t>(inputs: &[&Var<'t>], axis: isize) -> Result<Var<'t>> {
    let Some(first) = inputs.first() else {
        let (argument, got) = ("inputs", "an empty list".to_string());
        return Err(AutogradError::Argument { op: "concat", argument, got, expected: "at least one".into() });
    };
    let axis = rules::axis("concat", first.shape(), axis)?;
    apply(Concat { axis, count: inputs.len() }, inputs)
}

struct Concat {
    axis: usize,
    count: usize,
}

impl Op for Concat {
    const NAME: &'static str = "concat";
    type Saved = ();

    fn out_shape(&self, inputs: &[&Shape]) -> Result<Shape> {
        let axis = self.axis;
        let mut out = inputs[0].to_vec();
        for (i, shape) in inputs.iter().enumerate().skip(1) {
            let fits = shape.rank() == out.len() && (0..out.len()).all(|a| a == axis || shape[a] == out[a]);
            if !fits {
                let expected = format!("the shape of input 0, {}, but for axis {axis}", inputs[0]);
                return Err(ShapeError::new(Self::NAME, format!("input {i}"), *shape, expected).into());
            }
            out[axis] = out[axis].saturating_add(shape[axis]);
        }
        Ok(out.into())
    }

    fn host_forward<T: Float>(&self, inputs: &[Tensor], out: &Shape) -> Result<(Tensor, ())> {
        let (_, n, inner) = out.split_at_axis(self.axis);
        let parts: Vec<(&[T], usize)> = inputs
            .iter()
            .map(|x| Ok((x.as_slice::<T>()?, x.shape()[self.axis] * inner)))
            .collect::<Result<_>>()?;
        let mut y = vec![T::ZERO; out.numel()];
        host::par_rows(&mut y, n * inner, |row, mut y| {
            for &(x, width) in &parts {
                let (here, rest) = y.split_at_mut(width);
                here.copy_from_slice(&x[row * width..][..width]);
                y = rest;
            }
        });
        Ok((Tensor::from_vec(y, out.clone())?, ()))
    }

    fn host_backward<T: Float>(&self, (): (), dy: Tensor, grads: &mut GradSinks<'_>) -> Result<()> {
        let (_, n, inner) = dy.shape().split_at_axis(self.axis);
        let dy = dy.as_slice::<T>()?;
        let mut start = 0;
        for i in 0..self.count {
            let width = grads.shape(i)[self.axis] * inner;
            grads.write::<T>(i, |dx, beta| {
                host::par_rows(dx, width, |row, dx| {
                    let dy = &dy[row * n * inner + start..][..width];
                    match beta {
                        Beta::Overwrite => dx.copy_from_slice(dy),
                        Beta::Accumulate => dx.iter_mut().zip(dy).for_each(|(x, &d)| *x += d),
                    }
                });
            })?;
            start += width;
        }
        Ok(())
    }

    fn cuda_forward(&self, gpu: Gpu, inputs: &[Tensor], out: &Shape) -> Result<(Tensor, ())> {
        let (rows, n, inner) = out.split_at_axis(self.axis);
        let y = cuda::output(gpu, out, inputs[0].dtype())?;
        let mut start = 0;
        for x in inputs {
            let width = x.shape()[self.axis] * inner;
            let from = Columns { tensor: x, start: 0, stride: width };
            let to = Columns { tensor: &y, start, stride: n * inner };
            rows_cuda::copy(gpu, (rows, width), from, to, Beta::Overwrite)?;
            start += width;
        }
        Ok((y, ()))
    }

    fn cuda_backward(&self, gpu: Gpu, (): (), dy: Tensor, grads: &mut GradSinks<'_>) -> Result<()> {
        let (rows, n, inner) = dy.shape().split_at_axis(self.axis);
        let mut start = 0;
        for i in 0..self.count {
            let width = grads.shape(i)[self.axis] * inner;
            grads.write_cuda(gpu, i, |dx, beta| {
                let from = Columns { tensor: &dy, start, stride: n * inner };
                let to = Columns { tensor: dx, start: 0, stride: width };
                rows_cuda::copy(gpu, (rows, width), from, to, beta)
            })?;
            start += width;
        }
        Ok(())
    }
}

/// Cases for gradient checks and device comparisons.
pub fn cases() -> Vec<Case> {
    let case = |axis: isize, shapes: &[&[usize]]| {
        let name = format!("{shapes:?} axis {axis}");
        Case::normal(name, shapes, move |v| concat(&v.iter().collect::<Vec<_>>(), axis))
    };
    vec![
        case(0, &[&[1]]),
        case(0, &[&[3], &[1], &[5]]),
        case(-1, &[&[2, 31], &[2, 1], &[2, 33]]),
        case(1, &[&[2, 3, 5], &[2, 0, 5], &[2, 4, 5]]),
        case(0, &[&[2, 5], &[4, 5]]),
        case(-2, &[&[3, 1, 1], &[3, 2, 1]]),
        case(1, &[&[0, 3], &[0, 2]]),
        Case::normal("one input twice", &[&[3, 4]], |v| concat(&[&v[0], &v[0]], 1)),
        Case::normal("beside constants", &[&[3, 4], &[3, 1]], |v| {
            let value = Tensor::from_vec(vec![0.5f64; 6], [3, 2])?.to_dtype(v[0].dtype())?;
            let value = value.to_device(v[0].detach().device())?;
            let constant = v[0].tape().constant(value);
            concat(&[&constant, &v[0], &constant, &v[1], &v[0]], 1)
        }),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::shared::{arena_check, reduce::axis_message};

    #[test]
    fn shape_rule() {
        let rule = |axis, s: &[&[usize]]| {
            let shapes: Vec<Shape> = s.iter().map(|&d| d.into()).collect();
            Concat { axis, count: s.len() }.out_shape(&shapes.iter().collect::<Vec<_>>())
        };
        assert_eq!(rule(1, &[&[2, 3], &[2, 0], &[2, 4]]).unwrap().dims(), &[2, 7]);
        let message = rule(1, &[&[2, 3], &[2, 1], &[3, 3]]).unwrap_err().to_string();
        assert_eq!(
            message,
            "concat: input 2 has shape [3, 3], expected the shape of input 0, [2, 3], but for axis 1"
        );
        assert!(rule(0, &[&[2], &[2, 1]]).is_err());
        let message = axis_message(|x| concat(&[x], 2));
        assert_eq!(message, "concat: x has shape [2, 6], expected an axis 2");
        let message = axis_message(|_| concat(&[], 0));
        assert_eq!(message, "concat: inputs is an empty list, expected at least one");
    }

    #[test]
    fn gradcheck() {
        crate::testing::check_op("concat").unwrap();
    }

    #[test]
    fn golden() {
        for case in crate::golden::load("concat") {
            let axis = case.number("axis") as isize;
            crate::golden::check(&case, |v| concat(&v.iter().collect::<Vec<_>>(), axis), 1e-12);
        }
    }

    #[test]
    fn arena() {
        arena_check::check(&[&[3, 4], &[3, 5], &[3, 1]], |v| concat(&[&v[0], &v[1], &v[2]], 1));
        arena_check::check(&[&[3, 4]], |v| concat(&[&v[0], &v[0]], 0));
    }
}
