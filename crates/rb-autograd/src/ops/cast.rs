//! Values in another element type.
//!
//! - **Computes** `y = x` rounded to `dtype`, to nearest even.
//! - **Shapes** `x [..]` -> `y [..]`.
//! - **Dtypes** any float type to any float type; bf16 is a type that values are stored in.
//! - **Backward** `dx = dy` in the type of `x`: a cast never detaches.
//! - **Saves** nothing; shares the buffer of `x` if the type is the same.
//! - **Kernels** `convert`.
//! - **Errors** `DType` if `x` or the target is not a float type.
//! - **Source** PyTorch `Tensor.to`.

use rb_cuda::Gpu;
use rb_tensor::{DType, Shape, Tensor, TensorError};

use crate::testing::Case;
use crate::{Float, GradSinks, Op, Result, Saved, Var, apply};

/// `x` in the element type `dtype`.
pub fn cast<'t>(x: &Var<'t>, dtype: DType) -> Result<Var<'t>> {
    for (argument, got) in [("x", x.dtype()), ("dtype", dtype)] {
        if !got.is_float() {
            let (argument, expected) = (argument.into(), "a float type".into());
            return Err(TensorError::DType { op: Cast::NAME, argument, got, expected }.into());
        }
    }
    apply(Cast { dtype }, &[x])
}

struct Cast {
    dtype: DType,
}

/// The type to give the gradient back in.
struct CastSaved {
    from: DType,
}

impl Saved for CastSaved {
    fn tensors(&self) -> Vec<&Tensor> {
        Vec::new()
    }
}

impl Op for Cast {
    const NAME: &'static str = "cast";
    const ANY_DTYPE: bool = true;
    type Saved = CastSaved;

    fn out_shape(&self, inputs: &[&Shape]) -> Result<Shape> {
        Ok(inputs[0].clone())
    }

    fn out_dtype(&self, _inputs: &[Tensor]) -> DType {
        self.dtype
    }

    fn host_forward<T: Float>(&self, inputs: &[Tensor], _out: &Shape) -> Result<(Tensor, CastSaved)> {
        Ok((inputs[0].to_dtype(self.dtype)?, CastSaved { from: inputs[0].dtype() }))
    }

    fn host_backward<T: Float>(&self, saved: CastSaved, dy: Tensor, grads: &mut GradSinks<'_>) -> Result<()> {
        grads.add(0, dy.to_dtype(saved.from)?)
    }

    fn cuda_forward(&self, _gpu: Gpu, inputs: &[Tensor], _out: &Shape) -> Result<(Tensor, CastSaved)> {
        Ok((inputs[0].to_dtype(self.dtype)?, CastSaved { from: inputs[0].dtype() }))
    }

    fn cuda_backward(
        &self,
        _gpu: Gpu,
        saved: CastSaved,
        dy: Tensor,
        grads: &mut GradSinks<'_>,
    ) -> Result<()> {
        grads.add(0, dy.to_dtype(saved.from)?)
    }
}

/// Cases for gradient checks and device comparisons: outputs in f64, where differences can be taken; a check
/// in f32 really converts.
pub fn cases() -> Vec<Case> {
    let case = |shape: &[usize]| Case::normal(format!("{shape:?}"), &[shape], |v| cast(&v[0], DType::F64));
    vec![
        case(&[]),
        case(&[3, 31]),
        case(&[0, 2]),
        case(&[5, 1000]),
        Case::normal("to the same type", &[&[2, 33]], |v| cast(&v[0], v[0].dtype())),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::shared::{arena_check, reduce::axis_message};
    use crate::ops::{add, mul};

    #[test]
    fn shape_rule() {
        assert_eq!(Cast { dtype: DType::F64 }.out_shape(&[&[3, 0].into()]).unwrap().dims(), &[3, 0]);
        assert_eq!(axis_message(|x| cast(x, DType::I32)), "cast: dtype is i32, expected a float type");
        let ids = Tensor::from_vec(vec![1i32], [1]).unwrap();
        let message = axis_message(|x| cast(&x.tape().constant(ids.clone()), DType::F32));
        assert_eq!(message, "cast: x is i32, expected a float type");
    }

    #[test]
    fn gradcheck() {
        crate::testing::check_op("cast").unwrap();
    }

    /// burn#4069: the gradient passes through bf16 and arrives in f32, rounded to bf16 on the way.
    #[test]
    fn gradients_pass_through_bf16() {
        let x = Tensor::from_vec(vec![1.003f32, -2.0], [2]).unwrap();
        let dy = Tensor::from_vec(vec![0.5f32, 3.003], [2]).unwrap();
        let rounded = dy.to_dtype(DType::BF16).unwrap().to_dtype(DType::F32).unwrap();
        let there_and_back = Case::normal("", &[], |v| cast(&cast(&v[0], DType::BF16)?, DType::F32));
        let outcome = there_and_back.run(std::slice::from_ref(&x), Some(&dy)).unwrap();
        assert_eq!(outcome.y.as_bytes().unwrap(), x.to_dtype(DType::BF16).unwrap().to_dtype(DType::F32).unwrap().as_bytes().unwrap());
        let dx = outcome.dx[0].as_ref().unwrap();
        assert_eq!((dx.dtype(), dx.as_bytes().unwrap()), (DType::F32, rounded.as_bytes().unwrap()));
        // Ending in bf16, so that the upstream gradient is bf16.
        let outcome =
            Case::normal("", &[], |v| cast(&v[0], DType::BF16)).run(std::slice::from_ref(&x), Some(&dy)).unwrap();
        assert_eq!(outcome.dx[0].as_ref().unwrap().as_bytes().unwrap(), rounded.as_bytes().unwrap());
        // One bf16 value with two readers: their gradients are added.
        let twice = Case::normal("", &[], |v| {
            let small = cast(&v[0], DType::BF16)?;
            add(&cast(&small, DType::F32)?, &cast(&small, DType::F32)?)
        });
        let outcome = twice.run(std::slice::from_ref(&x), Some(&dy)).unwrap();
        let doubled: Vec<f32> = rounded.to_vec::<f32>().unwrap().iter().map(|d| 2.0 * d).collect();
        assert_eq!(outcome.dx[0].as_ref().unwrap().to_vec::<f32>().unwrap(), doubled);
        // f32 to f64 and back loses nothing.
        let wide = Case::normal("", &[], |v| {
            let wide = cast(&v[0], DType::F64)?;
            cast(&mul(&wide, &wide)?, DType::F32)
        });
        let dx = wide.run(&[x], Some(&dy)).unwrap().dx[0].as_ref().unwrap().to_vec::<f32>().unwrap();
        assert_eq!(dx, [1.003, -4.0 * 3.003]);
    }

    #[test]
    fn arena() {
        arena_check::check(&[&[5, 7]], |v| cast(&cast(&v[0], DType::F64)?, DType::F32));
    }
}
