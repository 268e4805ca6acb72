//! Elementwise multiplication by a number, and addition of one.
//!
//! - **Computes** `y = factor * x + offset`, with one rounding.
//! - **Shapes** `x [..]` -> `y [..]`.
//! - **Dtypes** any float type; `factor` and `offset` are rounded to it first.
//! - **Backward** `dx = factor * dy`.
//! - **Saves** nothing.
//! - **Kernels** `unary_fwd`, both ways.
//! - **Errors** none of its own: every shape is good.
//! - **Source** PyTorch `x * factor + offset`.

use rb_cuda::Gpu;
use rb_tensor::{Shape, Tensor};

use super::shared::{elementwise, elementwise_cuda};
use crate::testing::{Case, Fill};
use crate::{Float, GradSinks, Op, Result, Var, apply};

/// `factor * x + offset`.
pub fn scale<'t>(x: &Var<'t>, factor: f64, offset: f64) -> Result<Var<'t>> {
    apply(Scale { factor, offset }, &[x])
}

struct Scale {
    factor: f64,
    offset: f64,
}

impl Op for Scale {
    const NAME: &'static str = "scale";
    type Saved = ();

    fn out_shape(&self, inputs: &[&Shape]) -> Result<Shape> {
        Ok(inputs[0].clone())
    }

    fn host_forward<T: Float>(&self, inputs: &[Tensor], _out: &Shape) -> Result<(Tensor, ())> {
        let (factor, offset) = (T::from_f64(self.factor), T::from_f64(self.offset));
        Ok((elementwise::map::<T>(&inputs[0], |x| x.mul_add(factor, offset))?, ()))
    }

    fn host_backward<T: Float>(&self, (): (), dy: Tensor, grads: &mut GradSinks<'_>) -> Result<()> {
        let factor = T::from_f64(self.factor);
        let dx = elementwise::map_in_place::<T>(dy, |dy| dy * factor)?;
        grads.add(0, dx)
    }

    fn cuda_forward(&self, gpu: Gpu, inputs: &[Tensor], _out: &Shape) -> Result<(Tensor, ())> {
        let numbers = [self.factor as f32, self.offset as f32];
        Ok((elementwise_cuda::map(gpu, &inputs[0], "return fmaf(x, p, q);", numbers)?, ()))
    }

    fn cuda_backward(&self, gpu: Gpu, (): (), dy: Tensor, grads: &mut GradSinks<'_>) -> Result<()> {
        let factor = [self.factor as f32, 0.0];
        let dx = elementwise_cuda::map_in_place(gpu, dy, "return x * p;", factor)?;
        grads.add(0, dx)
    }
}

/// Cases for gradient checks and device comparisons.
pub fn cases() -> Vec<Case> {
    let mut cases = elementwise::cases(Fill::Normal, |x| scale(x, -0.75, 1.5));
    cases.push(Case::normal("factor 0", &[&[3, 5]], |v| scale(&v[0], 0.0, 1.0)));
    cases
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shape_rule() {
        let rule = |x: &[usize]| Scale { factor: 2.0, offset: 0.0 }.out_shape(&[&x.into()]);
        for shape in [&[][..], &[3, 0], &[2, 3]] {
            assert_eq!(rule(shape).unwrap().dims(), shape);
        }
    }

    #[test]
    fn gradcheck() {
        crate::testing::check_op("scale").unwrap();
    }
}
