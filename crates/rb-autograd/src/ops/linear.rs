//! Linear map over the last axis.
//!
//! - **Computes** `y = x weight^T + bias`.
//! - **Shapes** `x [.., K]`, `weight [N, K]`, optional `bias [N]` -> `y [.., N]`.
//! - **Dtypes** all of one float type.
//! - **Backward** `dx = dy weight`, `dweight = dy^T x`, `dbias = sum(dy)` over rows.
//! - **Saves** `x` and `weight` (both shared).
//! - **Kernels** cuBLASLt or `product_wgmma`; `add_bias`, `column_sum` where there is a bias.
//! - **Errors** `ShapeError` if `weight` is not `[N, K]` or `bias` not `[N]`.
//! - **Source** PyTorch `torch.nn.functional.linear`.

use rb_cuda::{Arg, Gpu, Kernel, Launch, kernel};
use rb_tensor::{Shape, ShapeError, Tensor};

use crate::cuda::{self, Product};
use crate::host::{self, Mat, MatMut};
use crate::testing::Case;
use crate::{Beta, Float, GradSinks, Op, Result, Var, apply, saved};

/// `x weight^T + bias`, with `weight [out, in]` as PyTorch stores it.
pub fn linear<'t>(x: &Var<'t>, weight: &Var<'t>, bias: Option<&Var<'t>>) -> Result<Var<'t>> {
    match bias {
        Some(bias) => apply(Linear, &[x, weight, bias]),
        None => apply(Linear, &[x, weight]),
    }
}

struct Linear;

saved!(
    struct LinearSaved { x, weight }
);

impl Op for Linear {
    const NAME: &'static str = "linear";
    /// A bias may be fp32 beside bf16 products.
    const MIXED_DTYPES: bool = true;
    type Saved = LinearSaved;

    fn out_shape(&self, inputs: &[&Shape]) -> Result<Shape> {
        let (x, weight) = (inputs[0], inputs[1]);
        if x.rank() == 0 || weight.rank() != 2 || weight[1] != x.last() {
            let expected = format!("[out, {}] for x {x}", x.last());
            return Err(ShapeError::new(Self::NAME, "weight", weight, expected).into());
        }
        if let Some(bias) = inputs.get(2)
            && bias.dims() != [weight[0]]
        {
            let expected = format!("[{}] for weight {weight}", weight[0]);
            return Err(ShapeError::new(Self::NAME, "bias", bias, expected).into());
        }
        Ok(x.with_last(weight[0]))
    }

    fn host_forward<T: Float>(&self, inputs: &[Tensor], out: &Shape) -> Result<(Tensor, LinearSaved)> {
        let (x, weight) = (&inputs[0], &inputs[1]);
        let (n, k, m) = (weight.shape()[0], weight.shape()[1], out.rows());
        let mut y = vec![T::ZERO; out.numel()];
        let (xs, w) = (x.as_slice::<T>()?, weight.as_slice::<T>()?);
        if m == 1 {
            // One token of a generation: the time is that of reading the weights, which all threads share.
            host::par_row_groups(&mut y, 1, k, |row, y| y[0] = host::dot(xs, &w[row * k..][..k]));
        } else {
            let y = MatMut::new(&mut y, m, n);
            host::matmul(Mat::new(xs, m, k), Mat::new(w, n, k).t(), y, Beta::Overwrite);
        }
        if let Some(bias) = inputs.get(2) {
            let bias = bias.as_slice::<T>()?;
            host::par_rows(&mut y, n, |_, row| row.iter_mut().zip(bias).for_each(|(y, &b)| *y += b));
        }
        let saved = LinearSaved { x: x.clone(), weight: weight.clone() };
        Ok((Tensor::from_vec(y, out.clone())?, saved))
    }

    fn host_backward<T: Float>(&self, saved: LinearSaved, dy: Tensor, grads: &mut GradSinks<'_>) -> Result<()> {
        let LinearSaved { x, weight } = &saved;
        let (n, k, m) = (weight.shape()[0], weight.shape()[1], dy.shape().rows());
        let g = Mat::new(dy.as_slice::<T>()?, m, n);
        let w = Mat::new(weight.as_slice::<T>()?, n, k);
        let xs = Mat::new(x.as_slice::<T>()?, m, k);
        grads.write::<T>(0, |dx, beta| host::matmul(g, w, MatMut::new(dx, m, k), beta))?;
        grads.write::<T>(1, |dw, beta| host::matmul(g.t(), xs, MatMut::new(dw, n, k), beta))?;
        if grads.wanted(2) {
            let dy = dy.as_slice::<T>()?;
            let db = host::par_column_sums(m, n, |row, acc: &mut [T]| {
                acc.iter_mut().zip(&dy[row * n..][..n]).for_each(|(a, &d)| *a += d);
            });
            grads.write::<T>(2, |dst, beta| host::store(dst, &db, beta))?;
        }
        Ok(())
    }

    fn cuda_forward(&self, gpu: Gpu, inputs: &[Tensor], out: &Shape) -> Result<(Tensor, LinearSaved)> {
        let (x, weight) = (&inputs[0], &inputs[1]);
        let (n, k, m) = (weight.shape()[0], weight.shape()[1], out.rows());
        let y = cuda::output(gpu, out, x.dtype())?;
        Product::new(m, n, k).b_transposed().run(gpu, x, weight, &y, Beta::Overwrite)?;
        if let Some(bias) = inputs.get(2)
            && out.numel() > 0
        {
            let launch = Launch::for_items(&ADD_BIAS, out.numel(), 256)
                .define("T", y.dtype().cuda_name())
                .define("TB", bias.dtype().cuda_name())
                .define("C", n)
                .arg(bias.arg()?)
                .arg(y.arg()?)
                .arg(Arg::I64(out.numel() as i64));
            cuda::launch_on(gpu, launch)?;
        }
        Ok((y, LinearSaved { x: x.clone(), weight: weight.clone() }))
    }

    fn cuda_backward(
        &self,
        gpu: Gpu,
        saved: LinearSaved,
        dy: Tensor,
        grads: &mut GradSinks<'_>,
    ) -> Result<()> {
        let LinearSaved { x, weight } = &saved;
        let (n, k, m) = (weight.shape()[0], weight.shape()[1], dy.shape().rows());
        let weights = |grads: &mut GradSinks<'_>| {
            grads.write_cuda(gpu, 1, |dw, beta| {
                Product::new(n, k, m).a_transposed().run(gpu, &dy, x, dw, beta)
            })?;
            grads.write_cuda(gpu, 2, |db, beta| cuda::column_sums(gpu, &dy, m, n, db, beta))
        };
        // Nothing in the backward pass waits for a parameter's gradient.
        if m <= cuda::BESIDE_ROWS && grads.goes_to_store(1) {
            gpu.beside(dy.size_bytes() + x.size_bytes(), (dy.clone(), x.clone()), || weights(grads))?;
        } else {
            weights(grads)?;
        }
        grads.write_cuda(gpu, 0, |dx, beta| Product::new(m, k, n).run(gpu, &dy, weight, dx, beta))
    }
}

const ADD_BIAS: Kernel = kernel!("add_bias");

/// Cases for gradient checks and device comparisons.
pub fn cases() -> Vec<Case> {
    let bias = |name: &str, shapes: &[&[usize]]| Case::normal(name, shapes, |v| linear(&v[0], &v[1], Some(&v[2])));
    vec![
        Case::normal("plain", &[&[3, 5], &[7, 5]], |v| linear(&v[0], &v[1], None)),
        Case::normal("rank 3", &[&[2, 3, 33], &[31, 33]], |v| linear(&v[0], &v[1], None)),
        bias("bias", &[&[4, 9], &[3, 9], &[3]]),
        bias("one row", &[&[1], &[1, 1], &[1]]),
        Case::normal("same input twice", &[&[5, 5]], |v| linear(&v[0], &v[0], None)),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shape_rule() {
        let rule = |s: &[&[usize]]| {
            let shapes: Vec<Shape> = s.iter().map(|&d| d.into()).collect();
            Linear.out_shape(&shapes.iter().collect::<Vec<_>>())
        };
        assert_eq!(rule(&[&[2, 3, 4], &[5, 4], &[5]]).unwrap().dims(), &[2, 3, 5]);
        let message = rule(&[&[2, 4], &[5, 3]]).unwrap_err().to_string();
        assert_eq!(message, "linear: weight has shape [5, 3], expected [out, 4] for x [2, 4]");
        let message = rule(&[&[2, 4], &[5, 4], &[4]]).unwrap_err().to_string();
        assert_eq!(message, "linear: bias has shape [4], expected [5] for weight [5, 4]");
    }

    #[test]
    fn gradcheck() {
        crate::testing::check_op("linear").unwrap();
    }
}
