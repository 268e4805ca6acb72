//! Axes in another order.
//!
//! - **Computes** `y[i_axes[0], i_axes[1], ..] = x[i_0, i_1, ..]`: axis `k` of `y` is axis `axes[k]` of `x`.
//! - **Shapes** `x [N_0, N_1, ..]` -> `y [N_axes[0], N_axes[1], ..]`.
//! - **Dtypes** any float type.
//! - **Backward** `dx` is `dy` permuted by the inverse of `axes`.
//! - **Saves** nothing.
//! - **Kernels** `permute`, `permute_tiles`; none where no element moves.
//! - **Errors** `Argument` if `axes` does not name each axis of `x` once.
//! - **Source** PyTorch `torch.permute`, made contiguous.

use rb_cuda::Gpu;
use rb_tensor::{Shape, Tensor};

use super::shared::rows_cuda;
use crate::{cuda, host};
use crate::testing::Case;
use crate::{AutogradError, Float, GradSinks, Op, Result, Var, apply};

/// `x` with its axes in the order of `axes`: `permute(x, &[1, 0])` transposes a matrix.
pub fn permute<'t>(x: &Var<'t>, axes: &[usize]) -> Result<Var<'t>> {
    apply(Permute { axes: axes.to_vec() }, &[x])
}

struct Permute {
    axes: Vec<usize>,
}

impl Op for Permute {
    const NAME: &'static str = "permute";
    type Saved = ();

    fn out_shape(&self, inputs: &[&Shape]) -> Result<Shape> {
        let x = inputs[0];
        let mut sorted = self.axes.clone();
        sorted.sort_unstable();
        if !sorted.iter().copied().eq(0..x.rank()) {
            return Err(AutogradError::Argument {
                op: Self::NAME,
                argument: "axes",
                got: format!("{:?}", self.axes),
                expected: format!("each axis of x {x} once"),
            });
        }
        Ok(self.axes.iter().map(|&a| x[a]).collect::<Vec<_>>().into())
    }

    fn host_forward<T: Float>(&self, inputs: &[Tensor], out: &Shape) -> Result<(Tensor, ())> {
        let y = permuted::<T>(&inputs[0], &self.axes)?;
        debug_assert_eq!(y.shape(), out);
        Ok((y, ()))
    }

    fn host_backward<T: Float>(&self, (): (), dy: Tensor, grads: &mut GradSinks<'_>) -> Result<()> {
        grads.add(0, permuted::<T>(&dy, &inverse(&self.axes))?)
    }

    fn cuda_forward(&self, gpu: Gpu, inputs: &[Tensor], _out: &Shape) -> Result<(Tensor, ())> {
        Ok((permuted_cuda(gpu, &inputs[0], &self.axes)?, ()))
    }

    fn cuda_backward(&self, gpu: Gpu, (): (), dy: Tensor, grads: &mut GradSinks<'_>) -> Result<()> {
        grads.add(0, permuted_cuda(gpu, &dy, &inverse(&self.axes))?)
    }
}

/// The order of axes that undoes `axes`.
fn inverse(axes: &[usize]) -> Vec<usize> {
    let mut inverse = vec![0; axes.len()];
    axes.iter().enumerate().for_each(|(k, &a)| inverse[a] = k);
    inverse
}

fn permuted_cuda(gpu: Gpu, x: &Tensor, axes: &[usize]) -> Result<Tensor> {
    let shape = x.shape();
    let out: Shape = axes.iter().map(|&a| shape[a]).collect::<Vec<_>>().into();
    let walk = walk(shape, axes);
    if out.numel() == 0 || matches!(walk[..], [] | [(_, 1)]) {
        return Ok(x.reshape(out)?);
    }
    let y = cuda::output(gpu, &out, x.dtype())?;
    rows_cuda::permute(gpu, x, &y, &walk)?;
    Ok(y)
}

/// Rows and columns of the result that are transposed together: 16 neighbours fill a cache line of f32, and 8
/// lines fit the ways of a first-level cache set even when they are a power of two apart.
const TILE: (usize, usize) = (16, 8);

fn permuted<T: Float>(x: &Tensor, axes: &[usize]) -> Result<Tensor> {
    let shape = x.shape();
    let out: Shape = axes.iter().map(|&a| shape[a]).collect::<Vec<_>>().into();
    let mut walk = walk(shape, axes);
    let (row_len, row_stride) = walk.pop().unwrap_or((1, 1));
    if walk.is_empty() && row_stride == 1 {
        return Ok(x.reshape(out)?);
    }
    let xs = x.as_slice::<T>()?;
    let mut y = vec![T::ZERO; out.numel()];
    let start = |mut row: usize| {
        let mut start = 0;
        for &(size, stride) in walk.iter().rev() {
            start += row % size * stride;
            row /= size;
        }
        start
    };
    if row_stride == 1 {
        host::par_rows(&mut y, row_len, |row, y| y.copy_from_slice(&xs[start(row)..][..row_len]));
        return Ok(Tensor::from_vec(y, out)?);
    }
    host::par_row_blocks(&mut y, row_len, TILE.0, |first, block| {
        let starts: Vec<usize> = (0..block.len() / row_len).map(|r| start(first + r)).collect();
        for (rows, starts) in block.chunks_mut(TILE.0 * row_len).zip(starts.chunks(TILE.0)) {
            for col in (0..row_len).step_by(TILE.1) {
                let end = (col + TILE.1).min(row_len);
                for (row, &start) in rows.chunks_exact_mut(row_len).zip(starts) {
                    let column = xs[start + col * row_stride..].iter().step_by(row_stride);
                    row[col..end].iter_mut().zip(column).for_each(|(y, &x)| *y = x);
                }
            }
        }
    });
    Ok(Tensor::from_vec(y, out)?)
}

/// Size and input stride of the result's axes, without those of size 1; neighbours that the input walks as
/// one are merged.
fn walk(shape: &Shape, axes: &[usize]) -> Vec<(usize, usize)> {
    let mut walk: Vec<(usize, usize)> = Vec::new();
    for &axis in axes.iter().filter(|&&a| shape[a] != 1) {
        let (_, size, stride) = shape.split_at_axis(axis);
        match walk.last_mut() {
            Some(last) if last.1 == size * stride => *last = (last.0 * size, stride),
            _ => walk.push((size, stride)),
        }
    }
    walk
}

/// Cases for gradient checks and device comparisons.
pub fn cases() -> Vec<Case> {
    let case = |shape: &[usize], axes: &'static [usize]| {
        Case::normal(format!("{shape:?} by {axes:?}"), &[shape], move |v| permute(&v[0], axes))
    };
    vec![
        case(&[], &[]),
        case(&[7], &[0]),
        case(&[31, 33], &[1, 0]),
        case(&[130, 257], &[1, 0]),
        case(&[2, 3, 4, 5], &[0, 2, 1, 3]),
        case(&[2, 3, 4, 5], &[3, 1, 0, 2]),
        case(&[2, 3, 4, 5], &[2, 3, 0, 1]),
        case(&[2, 3, 4], &[0, 1, 2]),
        case(&[1, 5, 1, 3], &[2, 3, 0, 1]),
        case(&[3, 0, 2], &[2, 1, 0]),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shape_rule() {
        let rule = |axes: &[usize]| Permute { axes: axes.to_vec() }.out_shape(&[&[2, 3, 4].into()]);
        assert_eq!(rule(&[2, 0, 1]).unwrap().dims(), &[4, 2, 3]);
        let message = rule(&[0, 1, 1]).unwrap_err().to_string();
        assert_eq!(message, "permute: axes is [0, 1, 1], expected each axis of x [2, 3, 4] once");
        assert!(rule(&[0, 1]).is_err());
        assert!(rule(&[0, 1, 3]).is_err());
    }

    #[test]
    fn gradcheck() {
        crate::testing::check_op("permute").unwrap();
    }

    #[test]
    fn elements_arrive_where_the_formula_says() {
        let x = Tensor::from_vec((0..24).map(f64::from).collect(), [2, 3, 4]).unwrap();
        let y = permuted::<f64>(&x, &[2, 0, 1]).unwrap();
        assert_eq!(y.shape().dims(), [4, 2, 3]);
        for (i, y) in y.to_vec::<f64>().unwrap().into_iter().enumerate() {
            let (a, b, c) = (i / 6, i / 3 % 2, i % 3);
            assert_eq!(y, (b * 12 + c * 4 + a) as f64);
        }
        // With the last axis in place, with whole tiles and parts of them, and with axes of one element.
        for (shape, axes) in [
            ([2, 3, 4], [1, 0, 2]),
            ([40, 3, 37], [2, 1, 0]),
            ([40, 3, 37], [1, 2, 0]),
            ([5, 1, 7], [2, 1, 0]),
        ] {
            let n: usize = shape.iter().product();
            let x = Tensor::from_vec((0..n as u32).map(f64::from).collect(), shape).unwrap();
            let strides = [shape[1] * shape[2], shape[2], 1];
            let [a, b, c] = axes.map(|axis| (shape[axis], strides[axis]));
            let y = permuted::<f64>(&x, &axes).unwrap().to_vec::<f64>().unwrap();
            for (i, y) in y.into_iter().enumerate() {
                let place = i / (b.0 * c.0) % a.0 * a.1 + i / c.0 % b.0 * b.1 + i % c.0 * c.1;
                assert_eq!(y, place as f64, "{shape:?} {axes:?} [{i}]");
            }
        }
        assert_eq!(permuted::<f64>(&x, &[0, 1, 2]).unwrap().buffer_id(), x.buffer_id(), "nothing to move");
    }
}
