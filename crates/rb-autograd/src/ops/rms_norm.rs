//! Root-mean-square normalisation over the last axis.
//!
//! - **Computes** `y = x * rstd * weight`, `rstd = 1/sqrt(mean(x^2) + eps)`: `eps` is inside the root.
//! - **Shapes** `x [.., C]`, `weight [C]` -> `y [.., C]`.
//! - **Dtypes** all of one float type; the mean is accumulated in that type.
//! - **Backward** with `g = dy*weight`, `xhat = x*rstd`: `dx = rstd*(g - xhat*mean(g*xhat))`,
//!   `dweight = sum(dy*xhat)` over rows.
//! - **Saves** `x` and `weight` (shared), `rstd [..]`.
//! - **Kernels** `rms_norm_fwd`, `rms_norm_bwd`, `column_sum` or `column_sum_many`; on a GPU the types of `x`, `weight` and `y` may differ.
//! - **Errors** `ShapeError` if `weight` is not `[C]` or `C` is 0.
//! - **Source** arXiv:1910.07467; `LlamaRMSNorm` of transformers.

use rb_cuda::{Arg, Gpu, Kernel, Launch, kernel};
use rb_planted::{Defect, active};
use rb_tensor::{DType, Shape, ShapeError, Tensor};

use crate::{cuda, host};
use crate::testing::Case;
use crate::{Beta, Float, GradSinks, Op, Result, Var, apply, saved};

/// RMS norm of each row of `x`, scaled by `weight`.
pub fn rms_norm<'t>(x: &Var<'t>, weight: &Var<'t>, eps: f64) -> Result<Var<'t>> {
    rms_norm_as(x, weight, eps, x.dtype())
}

/// As [`rms_norm`], with `y` in element type `dtype`: on a GPU an fp32 residual stream and fp32 weights may give bf16
/// activations. On the host it must be the type of `x`.
pub fn rms_norm_as<'t>(x: &Var<'t>, weight: &Var<'t>, eps: f64, dtype: DType) -> Result<Var<'t>> {
    apply(RmsNorm { eps, dtype }, &[x, weight])
}

pub(super) struct RmsNorm {
    pub(super) eps: f64,
    /// Of the output on a GPU.
    pub(super) dtype: DType,
}

saved!(
    pub(super) struct RmsNormSaved { x, weight, rstd }
);

impl Op for RmsNorm {
    const NAME: &'static str = "rms_norm";
    const MIXED_DTYPES: bool = true;
    type Saved = RmsNormSaved;

    fn out_shape(&self, inputs: &[&Shape]) -> Result<Shape> {
        let (x, weight) = (inputs[0], inputs[1]);
        if x.rank() == 0 || x.last() == 0 || weight.dims() != [x.last()] {
            let expected = format!("[{}] (last axis of x {x}, at least 1)", x.last());
            return Err(ShapeError::new(Self::NAME, "weight", weight, expected).into());
        }
        Ok(x.clone())
    }

    fn host_forward<T: Float>(&self, inputs: &[Tensor], out: &Shape) -> Result<(Tensor, RmsNormSaved)> {
        let (x, weight) = (inputs[0].as_slice::<T>()?, inputs[1].as_slice::<T>()?);
        let (rows, c) = (out.rows(), out.last());
        let eps = T::from_f64(self.eps);
        let mut rstd = vec![T::ZERO; rows];
        host::par_rows(&mut rstd, 1, |r, rstd| {
            let sum: T = host::dot(&x[r * c..][..c], &x[r * c..][..c]);
            rstd[0] = T::ONE / (sum / T::from_f64(c as f64) + eps).sqrt();
        });
        let mut y = vec![T::ZERO; x.len()];
        host::par_rows(&mut y, c, |r, y| {
            for ((y, &x), &w) in y.iter_mut().zip(&x[r * c..][..c]).zip(weight) {
                *y = x * rstd[r] * w;
            }
        });
        if active(Defect::NanInOneRow) {
            y[x.len() - c..].fill(T::from_f64(f64::NAN));
        }
        let rstd = Tensor::from_vec(rstd, [rows])?;
        let saved = RmsNormSaved { x: inputs[0].clone(), weight: inputs[1].clone(), rstd };
        Ok((Tensor::from_vec(y, out.clone())?, saved))
    }

    fn host_backward<T: Float>(&self, saved: RmsNormSaved, dy: Tensor, grads: &mut GradSinks<'_>) -> Result<()> {
        let c = dy.shape().last();
        let rows = dy.shape().rows();
        let (x, weight) = (saved.x.as_slice::<T>()?, saved.weight.as_slice::<T>()?);
        let (rstd, dys) = (saved.rstd.as_slice::<T>()?, dy.as_slice::<T>()?);
        if grads.wanted(0) {
            let mut dx = vec![T::ZERO; x.len()];
            host::par_rows(&mut dx, c, |r, dx| {
                let (x, dy, rstd) = (&x[r * c..][..c], &dys[r * c..][..c], rstd[r]);
                for ((g, &dy), &w) in dx.iter_mut().zip(dy).zip(weight) {
                    *g = dy * w;
                }
                let mut mean = host::dot(dx, x) * rstd / T::from_f64(c as f64);
                if active(Defect::DetachedNormStatistic) {
                    mean = T::ZERO;
                }
                for (g, &x) in dx.iter_mut().zip(x) {
                    *g = rstd * (*g - x * rstd * mean);
                }
            });
            grads.add(0, Tensor::from_vec(dx, dy.shape().clone())?)?;
        }
        if grads.wanted(1) {
            let dw = host::par_column_sums(rows, c, |r, acc: &mut [T]| {
                for ((a, &x), &dy) in acc.iter_mut().zip(&x[r * c..][..c]).zip(&dys[r * c..][..c]) {
                    *a += dy * x * rstd[r];
                }
            });
            grads.write::<T>(1, |dst, beta| host::store(dst, &dw, beta))?;
        }
        Ok(())
    }

    fn cuda_forward(&self, gpu: Gpu, inputs: &[Tensor], _: &Shape) -> Result<(Tensor, RmsNormSaved)> {
        let (x, weight) = (&inputs[0], &inputs[1]);
        let (y, rstd) = self.normalise(gpu, x, None, weight)?;
        Ok((y, RmsNormSaved { x: x.clone(), weight: weight.clone(), rstd }))
    }

    fn cuda_backward(
        &self,
        gpu: Gpu,
        saved: RmsNormSaved,
        dy: Tensor,
        grads: &mut GradSinks<'_>,
    ) -> Result<()> {
        differentiate(gpu, &saved, &dy, grads, |_| Ok(None))
    }
}

impl RmsNorm {
    /// Enqueues forward on `x`, or on `x` plus a branch, whose sum it writes; gives `y` and `rstd`.
    pub(super) fn normalise(
        &self,
        gpu: Gpu,
        x: &Tensor,
        branch: Option<(&Tensor, &Tensor)>,
        weight: &Tensor,
    ) -> Result<(Tensor, Tensor)> {
        let rows = x.shape().rows();
        let y = cuda::output(gpu, x.shape(), self.dtype)?;
        let rstd = cuda::output(gpu, &[rows].into(), DType::F32)?;
        if x.numel() > 0 {
            let mut launch = launch(&RMS_NORM_FWD, x, weight, &y, rows, usize::MAX)?
                .define("ADD", u8::from(branch.is_some()))
                .arg(x.arg()?)
                .arg(weight.arg()?)
                .arg(y.arg()?)
                .arg(rstd.arg()?)
                .arg(Arg::I64(rows as i64))
                .arg(Arg::F32(self.eps as f32));
            let mut moved = x.size_bytes() + y.size_bytes();
            if let Some((branch, sum)) = branch {
                launch = launch.define("TB", branch.dtype().cuda_name()).arg(branch.arg()?).arg(sum.arg()?);
                moved += branch.size_bytes() + sum.size_bytes();
            }
            cuda::launch_on(gpu, launch.moves(moved))?;
        }
        Ok((y, rstd))
    }
}

/// Enqueues backward. `narrow` is asked, with the gradient of `x` that is about to be complete, for a bf16 tensor that
/// gets a copy of it.
pub(super) fn differentiate(
    gpu: Gpu,
    saved: &RmsNormSaved,
    dy: &Tensor,
    grads: &mut GradSinks<'_>,
    narrow: impl FnOnce(&Tensor) -> Result<Option<Tensor>>,
) -> Result<()> {
    let RmsNormSaved { x, weight, rstd } = saved;
    let (rows, c) = (dy.shape().rows(), dy.shape().last());
    let want_weight = grads.wanted(1);
    let blocks = rows.div_ceil(rows_per_block(c)).min(MAX_BLOCKS);
    let waiting = if want_weight && blocks > 0 { grads.partial_sums(gpu, 1, blocks, c)? } else { None };
    let summed_here = want_weight && waiting.is_none();
    let partial = match &waiting {
        Some(place) => place.clone(),
        None => cuda::output(gpu, &[if summed_here { blocks } else { 0 } * c].into(), DType::F32)?,
    };
    let run = |dx: Option<&Tensor>, beta: Beta| -> Result<()> {
        if dy.numel() == 0 {
            return Ok(());
        }
        let narrow = match dx {
            Some(dx) => narrow(dx)?,
            None => None,
        };
        let passes = if beta == Beta::Accumulate { 3 } else { 2 };
        let moved = dy.size_bytes() + passes * x.size_bytes();
        let mut launch = launch(&RMS_NORM_BWD, x, weight, dy, rows, MAX_BLOCKS)?
            .define("BETA", beta.define())
            .define("WANT_X", u8::from(dx.is_some()))
            .define("WANT_W", u8::from(want_weight))
            .define("NARROW", u8::from(narrow.is_some()))
            .arg(x.arg()?)
            .arg(weight.arg()?)
            .arg(dy.arg()?)
            .arg(rstd.arg()?)
            .arg(dx.map_or(Ok(Arg::Null), Tensor::arg)?)
            .arg(if want_weight { partial.arg()? } else { Arg::Null })
            .arg(Arg::I64(rows as i64));
        if let Some(narrow) = &narrow {
            launch = launch.arg(narrow.arg()?);
        }
        let narrow_bytes = narrow.as_ref().map_or(0, Tensor::size_bytes);
        cuda::launch_on(gpu, launch.moves(moved + narrow_bytes))
    };
    if grads.wanted(0) {
        grads.write_cuda(gpu, 0, |dx, beta| run(Some(dx), beta))?;
    } else {
        run(None, Beta::Overwrite)?;
    }
    if summed_here {
        return grads.write_cuda(gpu, 1, |dw, beta| cuda::column_sums(gpu, &partial, blocks, c, dw, beta));
    }
    Ok(())
}

const RMS_NORM_FWD: Kernel = kernel!("rms_norm_fwd");
const RMS_NORM_BWD: Kernel = kernel!("rms_norm_bwd");

/// Blocks of the backward kernel: two for each of the 132 multiprocessors of an H200, which is enough for other cards, and
/// few enough that partial sums stay small.
const MAX_BLOCKS: usize = 264;

/// A warp a row up to 1024 columns, whose partial sums fit in shared memory; a block a row above.
fn rows_per_block(columns: usize) -> usize {
    if columns <= 1024 { 8 } else { 1 }
}

fn launch<'a>(
    kernel: &Kernel,
    x: &Tensor,
    weight: &Tensor,
    y: &Tensor,
    rows: usize,
    max_blocks: usize,
) -> Result<Launch<'a>> {
    /// Columns whose values still fit in the registers of a block.
    const MAX_COLUMNS: usize = 16384;
    let c = weight.numel();
    if c > MAX_COLUMNS {
        let expected = format!("at most {MAX_COLUMNS} columns on a GPU");
        return Err(ShapeError::new(RmsNorm::NAME, "x", x.shape(), expected).into());
    }
    let per_block = rows_per_block(c);
    let blocks = rows.div_ceil(per_block).min(max_blocks);
    Ok(Launch::new(kernel, [blocks as u32, 1, 1], [256, 1, 1])
        .define("TX", x.dtype().cuda_name())
        .define("TW", weight.dtype().cuda_name())
        .define("TY", y.dtype().cuda_name())
        .define("C", c)
        .define("V", cuda::vector_width(c))
        .define("GROUP", 256 / per_block))
}

/// Cases for gradient checks and device comparisons.
pub fn cases() -> Vec<Case> {
    let case = |shapes: &[&[usize]]| {
        Case::normal(format!("{:?}", shapes[0]), shapes, |v| rms_norm(&v[0], &v[1], 1e-6))
    };
    vec![
        case(&[&[1, 1], &[1]]),
        case(&[&[3, 7], &[7]]),
        case(&[&[2, 3, 33], &[33]]),
        case(&[&[5, 1000], &[1000]]),
        Case::normal("as products compute", &[&[3, 70], &[70]], |v| {
            let dtype = if v[0].device().gpu().is_some() { DType::BF16 } else { v[0].dtype() };
            rms_norm_as(&v[0], &v[1], 1e-6, dtype)
        }),
        Case::normal("large eps", &[&[4, 5], &[5]], |v| rms_norm(&v[0], &v[1], 0.5)),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shape_rule() {
        let rule = |x: &[usize], w: &[usize]| RmsNorm { eps: 1e-6, dtype: DType::F32 }.out_shape(&[&x.into(), &w.into()]);
        assert_eq!(rule(&[2, 3], &[3]).unwrap().dims(), &[2, 3]);
        let message = rule(&[2, 3], &[2]).unwrap_err().to_string();
        assert_eq!(message, "rms_norm: weight has shape [2], expected [3] (last axis of x [2, 3], at least 1)");
        assert!(rule(&[2, 0], &[0]).is_err());
    }

    /// Between two linear maps, on whole, sliced and permuted input: every weight gets its gradient.
    #[test]
    fn gradients_pass_whatever_the_input_is_made_of() {
        use super::super::{linear, permute, slice};
        let shapes: &[&[usize]] = &[&[5, 6], &[5, 6], &[5], &[3, 5]];
        let net = |name: &str, middle: for<'t> fn(&Var<'t>) -> Result<Var<'t>>| {
            let case = Case::normal(name, shapes, move |v| {
                let normed = rms_norm(&middle(&linear(&v[0], &v[1], None)?)?, &v[2], 1e-6)?;
                linear(&normed, &v[3], None)
            });
            crate::testing::gradcheck("rms_norm", &case, 3).unwrap();
        };
        net("whole", |x| Ok(x.clone()));
        net("sliced", |x| slice(x, 0, 1, 3));
        net("permuted", |x| permute(x, &[1, 0]));
    }

    #[test]
    fn gradcheck() {
        crate::testing::check_op("rms_norm").unwrap();
    }

    #[test]
    fn golden() {
        for case in crate::golden::load("rms_norm") {
            let eps = case.number("eps");
            crate::golden::check(&case, |v| rms_norm(&v[0], &v[1], eps), 1e-12);
        }
    }
}
