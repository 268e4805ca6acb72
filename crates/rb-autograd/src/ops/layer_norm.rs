//! Layer normalisation over the last axis.
//!
//! - **Computes** `y = (x - mean) * rstd * weight + bias`, `rstd = 1/sqrt(var + eps)`: `var` divides by `C` and is
//!   summed in a second pass, about the mean; `eps` is inside the root.
//! - **Shapes** `x [.., C]`, `weight [C]`, optional `bias [C]` -> `y [.., C]`.
//! - **Dtypes** all of one float type; sums in that type. On a GPU `x` may have another one than `weight` and `bias`
//!   (an fp32 residual stream), and `y` has that of `weight`; sums in fp32.
//! - **Backward** with `g = dy*weight`, `xhat = (x-mean)*rstd`: `dx = rstd*(g - mean(g) - xhat*mean(g*xhat))`,
//!   `dweight = sum(dy*xhat)`, `dbias = sum(dy)` over rows.
//! - **Saves** `x` and `weight` (shared), `mean [..]` and `rstd [..]`.
//! - **Kernels** `layer_norm_fwd`, `layer_norm_bwd`, `layer_norm_bwd_params` with `sum_columns`.
//! - **Errors** `ShapeError` if `weight` or `bias` is not `[C]` or `C` is 0.
//! - **Source** arXiv:1607.06450; PyTorch `torch.nn.functional.layer_norm`.

use rb_cuda::{Arg, Gpu, Kernel, Launch, kernel};
use rb_tensor::{DType, Shape, ShapeError, Tensor};

use super::shared::{packs, reduce_cuda};
use crate::{cuda, host};
use crate::testing::Case;
use crate::{Float, GradSinks, Op, Result, Var, apply, saved};

/// Layer norm of each row of `x`, scaled by `weight` and shifted by `bias`.
pub fn layer_norm<'t>(x: &Var<'t>, weight: &Var<'t>, bias: Option<&Var<'t>>, eps: f64) -> Result<Var<'t>> {
    match bias {
        Some(bias) => apply(LayerNorm { eps }, &[x, weight, bias]),
        None => apply(LayerNorm { eps }, &[x, weight]),
    }
}

struct LayerNorm {
    eps: f64,
}

saved!(
    struct LayerNormSaved { x, weight, mean, rstd }
);

impl Op for LayerNorm {
    const NAME: &'static str = "layer_norm";
    const MIXED_DTYPES: bool = true;
    type Saved = LayerNormSaved;

    fn out_shape(&self, inputs: &[&Shape]) -> Result<Shape> {
        let x = inputs[0];
        for (argument, shape) in ["weight", "bias"].into_iter().zip(&inputs[1..]) {
            if x.rank() == 0 || x.last() == 0 || shape.dims() != [x.last()] {
                let expected = format!("[{}] (last axis of x {x}, at least 1)", x.last());
                return Err(ShapeError::new(Self::NAME, argument, shape, expected).into());
            }
        }
        Ok(x.clone())
    }

    fn out_dtype(&self, inputs: &[Tensor]) -> DType {
        inputs[1].dtype()
    }

    fn host_forward<T: Float>(&self, inputs: &[Tensor], out: &Shape) -> Result<(Tensor, LayerNormSaved)> {
        let (x, weight) = (inputs[0].as_slice::<T>()?, inputs[1].as_slice::<T>()?);
        let bias = inputs.get(2).map(Tensor::as_slice::<T>).transpose()?;
        let (rows, c) = (out.rows(), out.last());
        let (eps, count) = (T::from_f64(self.eps), T::from_f64(c as f64));
        let mut mean = vec![T::ZERO; rows];
        let mut rstd = vec![T::ZERO; rows];
        host::par_row_pairs(&mut mean, &mut rstd, 1, c, |r, mean, rstd| {
            let x = &x[r * c..][..c];
            let m = host::sum(x) / count;
            let var = sum_of(x, x, |a, b| (a - m) * (b - m)) / count;
            (mean[0], rstd[0]) = (m, T::ONE / (var + eps).sqrt());
        });
        let mut y = vec![T::ZERO; x.len()];
        host::par_rows(&mut y, c, |r, y| {
            let (mean, rstd) = (mean[r], rstd[r]);
            for ((y, &x), &w) in y.iter_mut().zip(&x[r * c..][..c]).zip(weight) {
                *y = (x - mean) * rstd * w;
            }
            if let Some(bias) = bias {
                y.iter_mut().zip(bias).for_each(|(y, &b)| *y += b);
            }
        });
        let (mean, rstd) = (Tensor::from_vec(mean, [rows])?, Tensor::from_vec(rstd, [rows])?);
        let saved = LayerNormSaved { x: inputs[0].clone(), weight: inputs[1].clone(), mean, rstd };
        Ok((Tensor::from_vec(y, out.clone())?, saved))
    }

    fn host_backward<T: Float>(
        &self,
        saved: LayerNormSaved,
        dy: Tensor,
        grads: &mut GradSinks<'_>,
    ) -> Result<()> {
        let (rows, c) = (dy.shape().rows(), dy.shape().last());
        let (x, weight) = (saved.x.as_slice::<T>()?, saved.weight.as_slice::<T>()?);
        let (mean, rstd) = (saved.mean.as_slice::<T>()?, saved.rstd.as_slice::<T>()?);
        let dys = dy.as_slice::<T>()?;
        if grads.wanted(0) {
            let count = T::from_f64(c as f64);
            let mut dx = vec![T::ZERO; x.len()];
            host::par_rows(&mut dx, c, |r, dx| {
                let (x, dy, mean, rstd) = (&x[r * c..][..c], &dys[r * c..][..c], mean[r], rstd[r]);
                for ((g, &dy), &w) in dx.iter_mut().zip(dy).zip(weight) {
                    *g = dy * w;
                }
                let mean_g = host::sum(dx) / count;
                let slope = sum_of(dx, x, |g, x| g * (x - mean)) * rstd / count;
                for (g, &x) in dx.iter_mut().zip(x) {
                    *g = rstd * (*g - mean_g - (x - mean) * rstd * slope);
                }
            });
            grads.add(0, Tensor::from_vec(dx, dy.shape().clone())?)?;
        }
        if grads.wanted(1) {
            let dw = host::par_column_sums(rows, c, |r, acc: &mut [T]| {
                let (mean, rstd) = (mean[r], rstd[r]);
                for ((a, &x), &dy) in acc.iter_mut().zip(&x[r * c..][..c]).zip(&dys[r * c..][..c]) {
                    *a += dy * (x - mean) * rstd;
                }
            });
            grads.write::<T>(1, |dst, beta| host::store(dst, &dw, beta))?;
        }
        if grads.wanted(2) {
            let db = host::par_column_sums(rows, c, |r, acc: &mut [T]| {
                acc.iter_mut().zip(&dys[r * c..][..c]).for_each(|(a, &dy)| *a += dy);
            });
            grads.write::<T>(2, |dst, beta| host::store(dst, &db, beta))?;
        }
        Ok(())
    }

    fn cuda_forward(&self, gpu: Gpu, inputs: &[Tensor], out: &Shape) -> Result<(Tensor, LayerNormSaved)> {
        let (x, weight, bias) = (&inputs[0], &inputs[1], inputs.get(2));
        let (rows, c) = (out.rows(), out.last());
        let y = cuda::output(gpu, out, weight.dtype())?;
        let mean = cuda::output(gpu, &[rows].into(), DType::F32)?;
        let rstd = cuda::output(gpu, &[rows].into(), DType::F32)?;
        let mut places = vec![x, weight, &y];
        if let Some(bias) = bias {
            bias.expect_dtype(Self::NAME, "bias", weight.dtype())?;
            places.push(bias);
        }
        if rows > 0 {
            let launch = row_launch(&LAYER_NORM_FWD, rows, c)
                .define("TX", x.dtype().cuda_name())
                .define("TY", y.dtype().cuda_name())
                .define("VEC", packs::width(&places, &[c])?)
                .define("BIAS", u8::from(bias.is_some()))
                .arg(x.arg()?)
                .arg(weight.arg()?)
                .arg(bias.map_or(Ok(Arg::Null), Tensor::arg)?)
                .arg(y.arg()?)
                .arg(mean.arg()?)
                .arg(rstd.arg()?)
                .arg(Arg::F32(self.eps as f32))
                .arg(Arg::I64(rows as i64));
            cuda::launch_on(gpu, launch)?;
        }
        Ok((y, LayerNormSaved { x: x.clone(), weight: weight.clone(), mean, rstd }))
    }

    fn cuda_backward(
        &self,
        gpu: Gpu,
        saved: LayerNormSaved,
        dy: Tensor,
        grads: &mut GradSinks<'_>,
    ) -> Result<()> {
        // First, because the gradient of x may take the buffer of `dy`.
        if grads.wanted(1) || grads.wanted(2) {
            params_backward(gpu, &saved, &dy, grads)?;
        }
        if !grads.wanted(0) {
            return Ok(());
        }
        let LayerNormSaved { x, weight, mean, rstd } = &saved;
        let (rows, c) = (dy.shape().rows(), dy.shape().last());
        let in_place = dy.is_unshared() && dy.dtype() == x.dtype();
        let dx = if in_place { dy.clone() } else { cuda::output(gpu, x.shape(), x.dtype())? };
        if rows > 0 {
            let launch = row_launch(&LAYER_NORM_BWD, rows, c)
                .define("TX", x.dtype().cuda_name())
                .define("TY", dy.dtype().cuda_name())
                .define("VEC", packs::width(&[x, weight, &dy, &dx], &[c])?)
                .arg(x.arg()?)
                .arg(weight.arg()?)
                .arg(mean.arg()?)
                .arg(rstd.arg()?)
                .arg(dy.arg()?)
                .arg(dx.arg()?)
                .arg(Arg::I64(rows as i64));
            cuda::launch_on(gpu, launch)?;
        }
        grads.add(0, dx)
    }
}

const LAYER_NORM_FWD: Kernel = kernel!("layer_norm_fwd");
const LAYER_NORM_BWD: Kernel = kernel!("layer_norm_bwd");
const LAYER_NORM_BWD_PARAMS: Kernel = kernel!("layer_norm_bwd_params");

/// A launch in which a warp, or a whole block, holds a row in registers: 32 values a thread up to 32768 columns,
/// where the largest block ends; longer rows go to local memory in part.
fn row_launch<'a>(kernel: &Kernel, rows: usize, c: usize) -> Launch<'a> {
    let (lanes, block) = match c {
        0..=1024 => (32, 256),
        1025..=8192 => (256, 256),
        _ => (1024, 1024),
    };
    Launch::for_items(kernel, rows * lanes as usize, block)
        .define("C", c)
        .define("LANES", lanes)
        .define("BLOCK", block)
}

/// Gradients of weight and bias on a GPU: sums of segments of rows, then their sums.
fn params_backward(
    gpu: Gpu,
    LayerNormSaved { x, mean, rstd, .. }: &LayerNormSaved,
    dy: &Tensor,
    grads: &mut GradSinks<'_>,
) -> Result<()> {
    let (rows, c) = (dy.shape().rows(), dy.shape().last());
    let (parts, segment) = reduce_cuda::cut_columns(rows, c);
    let partial = || cuda::output(gpu, &[parts, c].into(), DType::F32);
    let (dweight, dbias) = (partial()?, partial()?);
    let width = packs::width(&[x, dy], &[c])?;
    let launch = Launch::for_items(&LAYER_NORM_BWD_PARAMS, parts * (c / width), 256)
        .define("TX", x.dtype().cuda_name())
        .define("TY", dy.dtype().cuda_name())
        .define("VEC", width)
        .define("C", c)
        .arg(x.arg()?)
        .arg(mean.arg()?)
        .arg(rstd.arg()?)
        .arg(dy.arg()?)
        .arg(dweight.arg()?)
        .arg(dbias.arg()?)
        .arg(Arg::I64(rows as i64))
        .arg(Arg::I64(parts as i64))
        .arg(Arg::I64(segment as i64));
    cuda::launch_on(gpu, launch)?;
    for (i, partial) in [(1, &dweight), (2, &dbias)] {
        grads.write_cuda(gpu, i, |dst, beta| {
            reduce_cuda::sum(gpu, partial, (1, parts, c), dst, beta, 1.0)
        })?;
    }
    Ok(())
}

/// The sum of `f(a, b)` over pairs, in eight interleaved partial sums so that it vectorises.
fn sum_of<T: Float>(a: &[T], b: &[T], f: impl Fn(T, T) -> T) -> T {
    const LANES: usize = 8;
    let mut acc = [T::ZERO; LANES];
    let (a_chunks, a_tail) = a.as_chunks::<LANES>();
    let (b_chunks, b_tail) = b.as_chunks::<LANES>();
    for (a, b) in a_chunks.iter().zip(b_chunks) {
        for lane in 0..LANES {
            acc[lane] += f(a[lane], b[lane]);
        }
    }
    let tail: T = a_tail.iter().zip(b_tail).map(|(&a, &b)| f(a, b)).sum();
    acc.into_iter().sum::<T>() + tail
}

/// Cases for gradient checks and device comparisons.
pub fn cases() -> Vec<Case> {
    let case = |shape: &[usize]| {
        let c = [shape[shape.len() - 1]];
        Case::normal(format!("{shape:?}"), &[shape, &c, &c], |v| layer_norm(&v[0], &v[1], Some(&v[2]), 1e-5))
    };
    vec![
        case(&[1, 1]),
        case(&[3, 7]),
        case(&[2, 3, 33]),
        case(&[5, 1000]),
        Case::normal("no bias", &[&[4, 31], &[31]], |v| layer_norm(&v[0], &v[1], None, 1e-5)),
        Case::normal("large eps", &[&[4, 5], &[5], &[5]], |v| layer_norm(&v[0], &v[1], Some(&v[2]), 0.5)),
        Case::normal("no rows", &[&[0, 5], &[5], &[5]], |v| layer_norm(&v[0], &v[1], Some(&v[2]), 1e-5)),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::shared::arena_check;

    #[test]
    fn shape_rule() {
        let rule = |x: &[usize], w: &[usize], b: &[usize]| {
            LayerNorm { eps: 1e-5 }.out_shape(&[&x.into(), &w.into(), &b.into()])
        };
        assert_eq!(rule(&[2, 3], &[3], &[3]).unwrap().dims(), &[2, 3]);
        let message = rule(&[2, 3], &[2], &[3]).unwrap_err().to_string();
        assert_eq!(
            message,
            "layer_norm: weight has shape [2], expected [3] (last axis of x [2, 3], at least 1)"
        );
        let message = rule(&[2, 3], &[3], &[1, 3]).unwrap_err().to_string();
        assert_eq!(
            message,
            "layer_norm: bias has shape [1, 3], expected [3] (last axis of x [2, 3], at least 1)"
        );
        assert!(rule(&[2, 0], &[0], &[0]).is_err());
    }

    #[test]
    fn gradcheck() {
        crate::testing::check_op("layer_norm").unwrap();
    }

    #[test]
    fn golden() {
        for case in crate::golden::load("layer_norm") {
            let eps = case.number("eps");
            // A mean of rounded values is off by an ulp, which a variance of 1e-6 or 0 about 1 magnifies.
            let tolerance = if case.name.contains("tiny_variance_offset") { 1e-10 } else { 1e-12 };
            crate::golden::check(&case, |v| layer_norm(&v[0], &v[1], Some(&v[2]), eps), tolerance);
        }
    }

    #[test]
    fn arena() {
        arena_check::check(&[&[3, 5], &[5], &[5]], |v| layer_norm(&v[0], &v[1], Some(&v[2]), 1e-5));
    }

    /// A variance from sums of squares would be 0 or negative here.
    #[test]
    fn a_large_mean_keeps_the_variance() {
        let params = crate::ParamStore::empty();
        let tape = crate::Tape::inference(&params);
        let x = tape.constant(Tensor::from_vec(vec![4095.0f32, 4096.0, 4097.0, 4096.0], [1, 4]).unwrap());
        let ones = tape.constant(Tensor::from_vec(vec![1f32; 4], [4]).unwrap());
        let y = layer_norm(&x, &ones, None, 0.0).unwrap().detach().to_vec::<f32>().unwrap();
        let root = std::f32::consts::SQRT_2;
        y.iter().zip([-root, 0.0, root, 0.0]).for_each(|(y, want)| assert!((y - want).abs() < 1e-6, "{y}"));
    }
}
