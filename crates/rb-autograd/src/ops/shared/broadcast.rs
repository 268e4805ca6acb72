//! Elementwise functions of two inputs that broadcast, and the sums that undo a broadcast.

use rb_tensor::{Shape, Tensor};

use crate::host;
use crate::{Float, Result};

/// `f(a, b)` at every element of `out`, the shape that `a` and `b` broadcast to.
pub fn map2<T: Float>(a: &Tensor, b: &Tensor, out: &Shape, f: impl Fn(T, T) -> T + Sync) -> Result<Tensor> {
    let (xs, ys) = (a.as_slice::<T>()?, b.as_slice::<T>()?);
    if a.shape() == out && b.shape() == out {
        return Ok(Tensor::from_vec(host::par_zip(xs, ys, f), out.clone())?);
    }
    let mut z = vec![T::ZERO; out.numel()];
    let (sa, sb) = (Strides::new(a.shape(), out), Strides::new(b.shape(), out));
    host::par_rows(&mut z, out.last(), |row, z| {
        let (x, y) = (&xs[sa.row_start(row)..], &ys[sb.row_start(row)..]);
        match (sa.last, sb.last) {
            (1, 1) => z.iter_mut().zip(x.iter().zip(y)).for_each(|(z, (&x, &y))| *z = f(x, y)),
            (1, _) => z.iter_mut().zip(x).for_each(|(z, &x)| *z = f(x, y[0])),
            (_, 1) => z.iter_mut().zip(y).for_each(|(z, &y)| *z = f(x[0], y)),
            _ => z.fill(f(x[0], y[0])),
        }
    });
    Ok(Tensor::from_vec(z, out.clone())?)
}

/// Sums `x` over the axes along which `to` was broadcast to the shape of `x`. Shares `x` if there are none.
pub fn sum_to<T: Float>(x: Tensor, to: &Shape) -> Result<Tensor> {
    let from = x.shape().clone();
    if &from == to {
        return Ok(x);
    }
    let xs = x.as_slice::<T>()?;
    let cols = from.last();
    let strides = Strides::new(to, &from);
    if is_suffix(to, &from) {
        // The common case of a bias: every row of `to.numel()` elements is added up.
        let width = to.numel();
        let rows = from.numel().checked_div(width).unwrap_or(0);
        let sums = host::par_column_sums(rows, width, |r, acc: &mut [T]| {
            acc.iter_mut().zip(&xs[r * width..][..width]).for_each(|(a, &x)| *a += x);
        });
        return Ok(Tensor::from_vec(sums, to.clone())?);
    }
    // Rows in order on one thread: fixed order of additions.
    let mut sums = vec![T::ZERO; to.numel()];
    if from.numel() > 0 {
        for (row, x) in xs.chunks(cols).enumerate() {
            let sum = &mut sums[strides.row_start(row)..];
            match strides.last {
                1 => sum.iter_mut().zip(x).for_each(|(s, &x)| *s += x),
                _ => sum[0] += x.iter().copied().sum::<T>(),
            }
        }
    }
    Ok(Tensor::from_vec(sums, to.clone())?)
}

/// Whether `to` without leading ones is the end of `from`.
fn is_suffix(to: &Shape, from: &Shape) -> bool {
    let ones = to.iter().take_while(|&&d| d == 1).count();
    let core = &to[ones..];
    !core.is_empty() && from.ends_with(core)
}

/// How an input walks while the output is walked row by row: stride 0 along broadcast axes.
struct Strides {
    /// (size of the output's axis, stride of the input) for all axes but the last.
    axes: Vec<(usize, usize)>,
    /// Stride along the last axis: 0 or 1.
    last: usize,
}

impl Strides {
    fn new(input: &Shape, out: &Shape) -> Strides {
        let lead = out.rank() - input.rank();
        let mut stride = 1;
        let mut axes = vec![(0, 0); out.rank()];
        for i in (0..out.rank()).rev() {
            let size = if i < lead { 1 } else { input[i - lead] };
            axes[i] = (out[i], if size == 1 { 0 } else { stride });
            stride *= size;
        }
        let last = axes.pop().map_or(0, |(_, s)| s);
        Strides { axes, last }
    }

    fn row_start(&self, mut row: usize) -> usize {
        let mut start = 0;
        for &(size, stride) in self.axes.iter().rev() {
            start += row % size * stride;
            row /= size;
        }
        start
    }
}

/// Shapes that exercise broadcasting in every position.
pub fn shapes() -> Vec<[&'static [usize]; 2]> {
    vec![
        [&[3, 5], &[3, 5]],
        [&[2, 3, 5], &[5]],
        [&[2, 3, 5], &[3, 1]],
        [&[2, 3, 5], &[2, 1, 1]],
        [&[1], &[4, 31]],
        [&[5, 1], &[1, 7]],
        [&[], &[2, 3]],
        [&[2, 1, 4], &[3, 1]],
        [&[33, 31], &[]],
    ]
}
