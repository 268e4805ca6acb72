//! The same values with another shape.
//!
//! - **Computes** `y = x`, in row-major order.
//! - **Shapes** `x [..]` -> any shape with as many elements.
//! - **Dtypes** any float type.
//! - **Backward** `dx = dy` with the shape of `x`.
//! - **Saves** nothing; shares the buffer.
//! - **Kernels** none.
//! - **Errors** `ShapeError` if the numbers of elements differ.
//! - **Source** PyTorch `torch.reshape`.

use rb_cuda::Gpu;
use rb_tensor::{Shape, ShapeError, Tensor};

use crate::testing::Case;
use crate::{Float, GradSinks, Op, Result, Var, apply};

/// `x` as `shape`.
pub fn reshape<'t>(x: &Var<'t>, shape: impl Into<Shape>) -> Result<Var<'t>> {
    apply(Reshape { shape: shape.into() }, &[x])
}

struct Reshape {
    shape: Shape,
}

impl Op for Reshape {
    const NAME: &'static str = "reshape";
    const ANY_DTYPE: bool = true;
    type Saved = ();

    fn out_shape(&self, inputs: &[&Shape]) -> Result<Shape> {
        if self.shape.checked_numel(Self::NAME)? != inputs[0].numel() {
            let expected = format!("{} elements for {}", self.shape.numel(), self.shape);
            return Err(ShapeError::new(Self::NAME, "x", inputs[0], expected).into());
        }
        Ok(self.shape.clone())
    }

    fn host_forward<T: Float>(&self, inputs: &[Tensor], out: &Shape) -> Result<(Tensor, ())> {
        Ok((inputs[0].reshape(out)?, ()))
    }

    fn host_backward<T: Float>(&self, (): (), dy: Tensor, grads: &mut GradSinks<'_>) -> Result<()> {
        let dx = dy.reshape(grads.shape(0))?;
        grads.add(0, dx)
    }

    fn cuda_forward(&self, _gpu: Gpu, inputs: &[Tensor], out: &Shape) -> Result<(Tensor, ())> {
        Ok((inputs[0].reshape(out)?, ()))
    }

    fn cuda_backward(&self, _gpu: Gpu, (): (), dy: Tensor, grads: &mut GradSinks<'_>) -> Result<()> {
        let dx = dy.reshape(grads.shape(0))?;
        grads.add(0, dx)
    }
}

/// Cases for gradient checks and device comparisons.
pub fn cases() -> Vec<Case> {
    vec![
        Case::normal("split", &[&[3, 10]], |v| reshape(&v[0], [3, 2, 5])),
        Case::normal("to a row", &[&[1]], |v| reshape(&v[0], [1, 1])),
        Case::normal("empty", &[&[0, 3]], |v| reshape(&v[0], [0])),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shape_rule() {
        let rule = |to: &[usize]| Reshape { shape: to.into() }.out_shape(&[&[2, 6].into()]);
        assert_eq!(rule(&[3, 4]).unwrap().dims(), &[3, 4]);
        let message = rule(&[5]).unwrap_err().to_string();
        assert_eq!(message, "reshape: x has shape [2, 6], expected 5 elements for [5]");
    }

    #[test]
    fn gradcheck() {
        crate::testing::check_op("reshape").unwrap();
    }
}
