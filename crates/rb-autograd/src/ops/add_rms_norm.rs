//! Sum of a residual stream and a branch, and its RMS norm, in one pass over both.
//!
//! - **Computes** `h = x + branch`, `y = h * rstd * weight`, `rstd = 1/sqrt(mean(h^2) + eps)`: the bits of `add`, then
//!   `rms_norm`, which this is on the host.
//! - **Shapes** `x [.., C]`, `branch [.., C]`, `weight [C]` -> `h [.., C]`, `y [.., C]`.
//! - **Dtypes** as `add` and `rms_norm`.
//! - **Backward** as `rms_norm`, then `dx = dh` and `dbranch = dh`, which on a GPU the first pass has converted already.
//! - **Saves** as `rms_norm`, of `h`.
//! - **Kernels** `rms_norm_fwd`, `rms_norm_bwd`, `column_sum` or `column_sum_many`; `accumulate` where the element types are not fp32 and bf16.
//! - **Errors** `ShapeError` if `branch` has another shape than `x`, and those of `rms_norm`.
//! - **Source** arXiv:1910.07467.

use std::sync::{Arc, Mutex, PoisonError};

use rb_cuda::Gpu;
use rb_tensor::{DType, Shape, ShapeError, Tensor};

use super::add::Add;
use super::rms_norm::{self, RmsNorm, RmsNormSaved};
use crate::testing::Case;
use crate::{Float, GradSinks, Op, Result, Var, apply, cuda};

/// `h = x + branch` and the RMS norm of each row of `h`, scaled by `weight`, in element type `dtype` (on the host that of
/// `x`).
pub fn add_rms_norm<'t>(
    x: &Var<'t>,
    branch: &Var<'t>,
    weight: &Var<'t>,
    eps: f64,
    dtype: DType,
) -> Result<(Var<'t>, Var<'t>)> {
    let norm = || RmsNorm { eps, dtype };
    norm().out_shape(&[x.shape(), weight.shape()])?;
    let link = Arc::new(Link::default());
    let sum = Sum { weight: weight.detach(), norm: norm(), link: link.clone() };
    let h = apply(sum, &[x, branch])?;
    // Nothing else may come between the two: the gradient of `h` is complete when the norm's backward has run.
    let y = apply(Normed { norm: norm(), link }, &[&h, weight])?;
    Ok((h, y))
}

/// What the two halves tell each other on a GPU.
#[derive(Default)]
struct Link {
    /// `y` and `rstd`, from the sum's forward.
    normed: Mutex<Option<(Tensor, Tensor)>>,
    /// The buffer that holds the gradient of `h`, and its bf16 copy, from the norm's backward.
    narrow: Mutex<Option<(usize, Tensor)>>,
}

fn take<T>(slot: &Mutex<Option<T>>) -> Option<T> {
    slot.lock().unwrap_or_else(PoisonError::into_inner).take()
}

fn put<T>(slot: &Mutex<Option<T>>, value: T) {
    *slot.lock().unwrap_or_else(PoisonError::into_inner) = Some(value);
}

/// `h = x + branch`; on a GPU the norm of `h` is a by-product.
struct Sum {
    weight: Tensor,
    norm: RmsNorm,
    link: Arc<Link>,
}

impl Op for Sum {
    const NAME: &'static str = "add_rms_norm";
    const MIXED_DTYPES: bool = true;
    type Saved = ();

    fn out_shape(&self, inputs: &[&Shape]) -> Result<Shape> {
        let (x, branch) = (inputs[0], inputs[1]);
        if x != branch {
            return Err(ShapeError::new(Self::NAME, "branch", branch, format!("{x}, that of x")).into());
        }
        Ok(x.clone())
    }

    fn host_forward<T: Float>(&self, inputs: &[Tensor], out: &Shape) -> Result<(Tensor, ())> {
        Add.host_forward::<T>(inputs, out)
    }

    fn host_backward<T: Float>(&self, (): (), dy: Tensor, grads: &mut GradSinks<'_>) -> Result<()> {
        Add.host_backward::<T>((), dy, grads)
    }

    fn cuda_forward(&self, gpu: Gpu, inputs: &[Tensor], out: &Shape) -> Result<(Tensor, ())> {
        let (x, branch) = (&inputs[0], &inputs[1]);
        let h = cuda::output(gpu, out, x.dtype())?;
        put(&self.link.normed, self.norm.normalise(gpu, x, Some((branch, &h)), &self.weight)?);
        Ok((h, ()))
    }

    fn cuda_backward(&self, gpu: Gpu, (): (), dy: Tensor, grads: &mut GradSinks<'_>) -> Result<()> {
        match take(&self.link.narrow) {
            Some((buffer, narrow)) if buffer == dy.buffer_id() && grads.dtype(1) == narrow.dtype() => {
                grads.add(0, dy)?;
                grads.add(1, narrow)
            }
            _ => Add.cuda_backward(gpu, (), dy, grads),
        }
    }
}

/// The norm of a sum; on a GPU its forward is done already.
struct Normed {
    norm: RmsNorm,
    link: Arc<Link>,
}

impl Op for Normed {
    const NAME: &'static str = "add_rms_norm";
    const MIXED_DTYPES: bool = true;
    type Saved = RmsNormSaved;

    fn out_shape(&self, inputs: &[&Shape]) -> Result<Shape> {
        self.norm.out_shape(inputs)
    }

    fn host_forward<T: Float>(&self, inputs: &[Tensor], out: &Shape) -> Result<(Tensor, RmsNormSaved)> {
        self.norm.host_forward::<T>(inputs, out)
    }

    fn host_backward<T: Float>(&self, saved: RmsNormSaved, dy: Tensor, grads: &mut GradSinks<'_>) -> Result<()> {
        self.norm.host_backward::<T>(saved, dy, grads)
    }

    fn cuda_forward(&self, gpu: Gpu, inputs: &[Tensor], out: &Shape) -> Result<(Tensor, RmsNormSaved)> {
        match take(&self.link.normed) {
            Some((y, rstd)) => Ok((y, RmsNormSaved { x: inputs[0].clone(), weight: inputs[1].clone(), rstd })),
            None => self.norm.cuda_forward(gpu, inputs, out),
        }
    }

    fn cuda_backward(
        &self,
        gpu: Gpu,
        saved: RmsNormSaved,
        dy: Tensor,
        grads: &mut GradSinks<'_>,
    ) -> Result<()> {
        rms_norm::differentiate(gpu, &saved, &dy, grads, |dx| {
            // Also where the stream is bf16 itself: the branch's gradient is then read beside, while this one is added to.
            if dy.dtype() != DType::BF16 {
                return Ok(None);
            }
            let narrow = cuda::output(gpu, dx.shape(), DType::BF16)?;
            put(&self.link.narrow, (dx.buffer_id(), narrow.clone()));
            Ok(Some(narrow))
        })
    }
}

/// Cases for gradient checks and device comparisons.
pub fn cases() -> Vec<Case> {
    let both = |name: &str, shapes: &[&[usize]]| {
        Case::normal(name, shapes, |v| {
            let (h, y) = add_rms_norm(&v[0], &v[1], &v[2], 1e-6, v[0].dtype())?;
            super::add(&h, &y)
        })
    };
    vec![
        both("one column", &[&[1, 1], &[1, 1], &[1]]),
        both("rank 3", &[&[2, 3, 33], &[2, 3, 33], &[33]]),
        both("aligned", &[&[9, 64], &[9, 64], &[64]]),
        both("a block a row", &[&[3, 1500], &[3, 1500], &[1500]]),
        Case::normal("the norm alone", &[&[5, 12], &[5, 12], &[12]], |v| {
            Ok(add_rms_norm(&v[0], &v[1], &v[2], 1e-6, v[0].dtype())?.1)
        }),
        Case::normal("the sum alone", &[&[5, 12], &[5, 12]], |v| {
            let weight = v[0].tape().constant(Tensor::filled([12], 1.0, v[0].device())?.to_dtype(v[0].dtype())?);
            Ok(add_rms_norm(&v[0], &v[1], &weight, 1e-6, v[0].dtype())?.0)
        }),
        Case::normal("as a residual stream", &[&[3, 72], &[3, 72], &[72]], |v| {
            let (h, y) = add_rms_norm(&v[0], &v[1], &v[2], 1e-6, v[1].dtype())?;
            // As narrow as the norm's result, whose rounding is most of the error.
            super::cast(&super::add(&h, &y)?, v[1].dtype())
        }),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops;
    use rb_tensor::Rng;

    #[test]
    fn shape_rule() {
        let params = crate::ParamStore::empty();
        let tape = crate::Tape::new(&params);
        let ones = |shape: &[usize]| tape.leaf(Tensor::filled(shape, 1.0, rb_tensor::Device::Cpu).unwrap());
        let rule = |branch: &[usize], weight: &[usize]| {
            add_rms_norm(&ones(&[2, 3]), &ones(branch), &ones(weight), 1e-6, DType::F32).map(|(h, _)| h.shape().clone())
        };
        assert_eq!(rule(&[2, 3], &[3]).unwrap().dims(), &[2, 3]);
        let message = rule(&[3], &[3]).unwrap_err().to_string();
        assert_eq!(message, "add_rms_norm: branch has shape [3], expected [2, 3], that of x");
        assert!(rule(&[2, 3], &[2]).is_err());
    }

    #[test]
    fn gradcheck() {
        crate::testing::check_op("add_rms_norm").unwrap();
    }

    /// The bits of the two operations that it stands for, both outputs and all gradients.
    #[test]
    fn equals_a_sum_and_a_norm() {
        let fill = |shape: &[usize], seed| {
            crate::testing::random(&shape.into(), crate::testing::Fill::Normal, &mut Rng::new(seed)).unwrap()
        };
        let inputs = [fill(&[4, 9], 1), fill(&[4, 9], 2), fill(&[9], 3)];
        let dy = fill(&[4, 9], 4);
        let one = Case::normal("one pass", &[], |v| {
            let (h, y) = add_rms_norm(&v[0], &v[1], &v[2], 1e-6, DType::F64)?;
            ops::mul(&h, &y)
        });
        let two = Case::normal("two operations", &[], |v| {
            let h = ops::add(&v[0], &v[1])?;
            ops::mul(&h, &ops::rms_norm(&h, &v[2], 1e-6)?)
        });
        let (one, two) = (one.run(&inputs, Some(&dy)).unwrap(), two.run(&inputs, Some(&dy)).unwrap());
        assert_eq!(one.y.as_bytes().unwrap(), two.y.as_bytes().unwrap());
        for (a, b) in one.dx.iter().zip(&two.dx) {
            assert_eq!(a.as_ref().unwrap().as_bytes().unwrap(), b.as_ref().unwrap().as_bytes().unwrap());
        }
    }
}
