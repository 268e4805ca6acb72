//! Building blocks of host operations: parallel loops with fixed partitions and matrix products.
//!
//! Every partition depends on sizes alone, never on the number of threads, so results have the same bits
//! on one thread and on many.

use std::any::TypeId;

use gemm::Parallelism;
use rayon::prelude::*;
use rb_tensor::Tensor;

use crate::{Beta, Float, Result};

/// Elements that one parallel task handles at least: small enough to balance, large enough to pay for itself.
const TASK_ELEMENTS: usize = 16 * 1024;

/// Work (multiply-adds) below which a matrix product stays on the calling thread.
const PARALLEL_PRODUCT: usize = 64 * 64 * 64;

/// Calls `f(i, part)` for each `len` elements of `y`, in parallel. What rayon makes of a loop is many times the size of
/// most of what is called in it, so it is compiled once for an element type and not once for a caller.
fn par_parts<T: Send>(y: &mut [T], len: usize, f: &(dyn Fn(usize, &mut [T]) + Sync)) {
    y.par_chunks_mut(len).enumerate().for_each(|(i, part)| f(i, part));
}

/// Calls `f(row_index, row)` for each row of `row_len` elements of `y`, in parallel.
pub fn par_rows<T: Float>(y: &mut [T], row_len: usize, f: impl Fn(usize, &mut [T]) + Sync) {
    par_row_groups(y, row_len, row_len, f);
}

/// As [`par_rows`], where a row of `y` stands for `work` elements of something larger.
pub fn par_row_groups<T: Float>(
    y: &mut [T],
    row_len: usize,
    work: usize,
    f: impl Fn(usize, &mut [T]) + Sync,
) {
    if y.is_empty() || row_len == 0 {
        return;
    }
    let rows = (TASK_ELEMENTS / work.max(1)).max(1);
    par_parts(y, rows * row_len, &|task, part| {
        for (i, row) in part.chunks_mut(row_len).enumerate() {
            f(task * rows + i, row);
        }
    });
}

/// Calls `f(first_row, rows)` for blocks of at least `min_rows` whole rows of `y`, in parallel.
pub fn par_row_blocks<T: Float>(
    y: &mut [T],
    row_len: usize,
    min_rows: usize,
    f: impl Fn(usize, &mut [T]) + Sync,
) {
    if y.is_empty() || row_len == 0 {
        return;
    }
    let rows = (TASK_ELEMENTS / row_len).max(min_rows).max(1);
    par_parts(y, rows * row_len, &|task, block| f(task * rows, block));
}

/// As [`par_row_groups`], for equally long rows of two buffers at once.
pub fn par_row_pairs<A: Send, B: Send>(
    a: &mut [A],
    b: &mut [B],
    row_len: usize,
    work: usize,
    f: impl Fn(usize, &mut [A], &mut [B]) + Sync,
) {
    debug_assert_eq!(a.len(), b.len());
    if a.is_empty() || row_len == 0 {
        return;
    }
    let rows = (TASK_ELEMENTS / work.max(1)).max(1);
    let mut parts: Vec<_> = a.chunks_mut(rows * row_len).zip(b.chunks_mut(rows * row_len)).collect();
    par_parts(&mut parts, 1, &|task, part| {
        for (a, b) in part {
            for (i, (a, b)) in a.chunks_mut(row_len).zip(b.chunks_mut(row_len)).enumerate() {
                f(task * rows + i, a, b);
            }
        }
    });
}

/// `f(x)` of each element, in parallel.
pub fn par_map<T: Float>(x: &[T], f: impl Fn(T) -> T + Sync) -> Vec<T> {
    let mut y = vec![T::ZERO; x.len()];
    par_update(&mut y, x, |_, x| f(x));
    y
}

/// `f(a, b)` of each pair of elements of two equally long slices, in parallel.
pub fn par_zip<T: Float>(a: &[T], b: &[T], f: impl Fn(T, T) -> T + Sync) -> Vec<T> {
    debug_assert_eq!(a.len(), b.len());
    let mut y = vec![T::ZERO; a.len()];
    par_parts(&mut y, TASK_ELEMENTS, &|task, y| {
        let start = task * TASK_ELEMENTS;
        for (y, (&a, &b)) in y.iter_mut().zip(a[start..].iter().zip(&b[start..])) {
            *y = f(a, b);
        }
    });
    y
}

/// `y[i] = f(y[i], x[i])` in place, in parallel.
pub fn par_update<T: Float>(y: &mut [T], x: &[T], f: impl Fn(T, T) -> T + Sync) {
    debug_assert_eq!(y.len(), x.len());
    par_parts(y, TASK_ELEMENTS, &|task, y| {
        for (y, &x) in y.iter_mut().zip(&x[task * TASK_ELEMENTS..]) {
            *y = f(*y, x);
        }
    });
}

/// Lets `f` overwrite the values of `x`: in place where nobody else holds its buffer, else in a copy.
pub fn update<T: Float>(mut x: Tensor, f: impl FnOnce(&mut [T])) -> Result<Tensor> {
    if let Some(values) = x.as_mut_slice::<T>() {
        f(values);
        return Ok(x);
    }
    let mut values = x.to_vec::<T>()?;
    f(&mut values);
    Ok(Tensor::from_vec(values, x.shape().clone())?)
}

/// Stores (`Beta::Overwrite`) or adds (`Beta::Accumulate`) `x` into `y`.
pub fn store<T: Float>(y: &mut [T], x: &[T], beta: Beta) {
    match beta {
        Beta::Overwrite => y.copy_from_slice(x),
        Beta::Accumulate => par_update(y, x, |y, x| y + x),
    }
}

/// Inner product in eight interleaved partial sums: vectorises, and rounds less than one running sum.
pub fn dot<T: Float>(a: &[T], b: &[T]) -> T {
    const LANES: usize = 8;
    let mut acc = [T::ZERO; LANES];
    let (a_chunks, a_tail) = a.as_chunks::<LANES>();
    let (b_chunks, b_tail) = b.as_chunks::<LANES>();
    for (a, b) in a_chunks.iter().zip(b_chunks) {
        for lane in 0..LANES {
            acc[lane] = a[lane].mul_add(b[lane], acc[lane]);
        }
    }
    let tail: T = a_tail.iter().zip(b_tail).map(|(&a, &b)| a * b).sum();
    let [a0, a1, a2, a3, a4, a5, a6, a7] = acc;
    ((a0 + a4) + (a2 + a6)) + ((a1 + a5) + (a3 + a7)) + tail
}

/// Sum in sixteen interleaved partial sums: vectorises, and rounds less than one running sum.
pub fn sum<T: Float>(x: &[T]) -> T {
    const LANES: usize = 16;
    let mut acc = [T::ZERO; LANES];
    let (chunks, tail) = x.as_chunks::<LANES>();
    for chunk in chunks {
        for lane in 0..LANES {
            acc[lane] += chunk[lane];
        }
    }
    let mut half = LANES / 2;
    while half > 0 {
        for lane in 0..half {
            acc[lane] += acc[lane + half];
        }
        half /= 2;
    }
    acc[0] + tail.iter().copied().sum::<T>()
}

/// As [`sum`], over fixed chunks in parallel, added in order.
pub fn par_sum<T: Float>(x: &[T]) -> T {
    let partial: Vec<T> = x.par_chunks(TASK_ELEMENTS).map(sum).collect();
    sum(&partial)
}

/// Sums of squares in f64 over fixed chunks, added in order: the same bits on any number of threads.
pub fn sum_of_squares<T: Float>(x: &[T]) -> f64 {
    let partial: Vec<f64> =
        x.par_chunks(TASK_ELEMENTS).map(|c| c.iter().map(|v| v.to_f64() * v.to_f64()).sum()).collect();
    partial.iter().sum()
}

/// Column sums of `rows x cols` values produced row by row: `f(row, acc)` adds row `row` into `acc`.
/// Rows are grouped by size alone and groups are added in order.
pub fn par_column_sums<T: Float>(rows: usize, cols: usize, f: impl Fn(usize, &mut [T]) + Sync) -> Vec<T> {
    if rows == 0 || cols == 0 {
        return vec![T::ZERO; cols];
    }
    // At most 64 groups, so that partial sums stay small beside the input.
    let group = (TASK_ELEMENTS / cols).max(1).max(rows.div_ceil(64));
    let mut partial: Vec<Vec<T>> = vec![Vec::new(); rows.div_ceil(group)];
    par_parts(&mut partial, 1, &|g, acc| {
        acc[0] = vec![T::ZERO; cols];
        for row in g * group..((g + 1) * group).min(rows) {
            f(row, &mut acc[0]);
        }
    });
    let mut total = vec![T::ZERO; cols];
    for acc in partial {
        for (t, a) in total.iter_mut().zip(acc) {
            *t += a;
        }
    }
    total
}

/// A matrix that is read: `data[r * row_stride + c * col_stride]`.
#[derive(Clone, Copy)]
pub struct Mat<'a, T> {
    data: &'a [T],
    rows: usize,
    cols: usize,
    row_stride: usize,
    col_stride: usize,
}

impl<'a, T: Float> Mat<'a, T> {
    /// A contiguous row-major matrix.
    pub fn new(data: &'a [T], rows: usize, cols: usize) -> Self {
        Mat::strided(data, rows, cols, cols, 1)
    }

    /// A matrix with any strides, in elements.
    pub fn strided(data: &'a [T], rows: usize, cols: usize, row_stride: usize, col_stride: usize) -> Self {
        assert!(fits(data.len(), rows, cols, row_stride, col_stride), "matrix leaves its slice");
        Mat { data, rows, cols, row_stride, col_stride }
    }

    /// The transpose, without moving data.
    pub fn t(self) -> Self {
        Mat {
            data: self.data,
            rows: self.cols,
            cols: self.rows,
            row_stride: self.col_stride,
            col_stride: self.row_stride,
        }
    }
}

/// A matrix that is written.
pub struct MatMut<'a, T> {
    data: &'a mut [T],
    rows: usize,
    cols: usize,
    row_stride: usize,
}

impl<'a, T: Float> MatMut<'a, T> {
    /// A contiguous row-major matrix.
    pub fn new(data: &'a mut [T], rows: usize, cols: usize) -> Self {
        MatMut::strided(data, rows, cols, cols)
    }

    /// A row-major matrix whose rows are `row_stride` elements apart.
    pub fn strided(data: &'a mut [T], rows: usize, cols: usize, row_stride: usize) -> Self {
        assert!(row_stride >= cols || rows <= 1, "rows overlap");
        assert!(fits(data.len(), rows, cols, row_stride, 1), "matrix leaves its slice");
        MatMut { data, rows, cols, row_stride }
    }
}

fn fits(len: usize, rows: usize, cols: usize, row_stride: usize, col_stride: usize) -> bool {
    rows == 0 || cols == 0 || (rows - 1) * row_stride + (cols - 1) * col_stride < len
}

/// `c = a b` or `c += a b`, on all threads where the product is large.
pub fn matmul<T: Float>(a: Mat<'_, T>, b: Mat<'_, T>, c: MatMut<'_, T>, beta: Beta) {
    let threads =
        if a.rows * a.cols * b.cols >= PARALLEL_PRODUCT { Parallelism::Rayon(0) } else { Parallelism::None };
    product(a, b, c, T::ONE, beta, threads);
}

/// `c = alpha a b` (or `+=`) on the calling thread: for use inside a parallel loop.
pub fn matmul_local<T: Float>(a: Mat<'_, T>, b: Mat<'_, T>, c: MatMut<'_, T>, alpha: T, beta: Beta) {
    product(a, b, c, alpha, beta, Parallelism::None);
}

fn product<T: Float>(
    a: Mat<'_, T>,
    b: Mat<'_, T>,
    c: MatMut<'_, T>,
    alpha: T,
    beta: Beta,
    threads: Parallelism,
) {
    debug_assert!(TypeId::of::<T>() == TypeId::of::<f32>() || TypeId::of::<T>() == TypeId::of::<f64>());
    assert!(a.cols == b.rows && a.rows == c.rows && b.cols == c.cols, "matrix sizes disagree");
    if c.rows == 0 || c.cols == 0 {
        return;
    }
    if a.cols == 0 {
        if beta == Beta::Overwrite {
            for r in 0..c.rows {
                c.data[r * c.row_stride..r * c.row_stride + c.cols].fill(T::ZERO);
            }
        }
        return;
    }
    // SAFETY: `Mat::strided` and `MatMut::strided` checked that every addressed element lies in its slice,
    // the sizes agree (asserted above), `c` is uniquely borrowed, and `gemm` is defined for f32 and f64,
    // the only implementors of `Float`.
    unsafe {
        gemm::gemm(
            c.rows,
            c.cols,
            a.cols,
            c.data.as_mut_ptr(),
            1,
            c.row_stride as isize,
            beta == Beta::Accumulate,
            a.data.as_ptr(),
            a.col_stride as isize,
            a.row_stride as isize,
            b.data.as_ptr(),
            b.col_stride as isize,
            b.row_stride as isize,
            T::ONE,
            alpha,
            false,
            false,
            false,
            threads,
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rb_tensor::Rng;

    #[test]
    fn products_of_odd_sizes_match_the_triple_loop() {
        let mut rng = Rng::new(3);
        for (m, n, k) in [(1, 1, 1), (3, 5, 7), (1, 33, 31), (65, 17, 129), (2, 3, 0)] {
            let a: Vec<f64> = (0..m * k).map(|_| rng.normal()).collect();
            let b: Vec<f64> = (0..n * k).map(|_| rng.normal()).collect();
            let mut c: Vec<f64> = (0..m * n).map(|_| rng.normal()).collect();
            let expected: Vec<f64> = (0..m * n)
                .map(|i| c[i] + (0..k).map(|l| a[i / n * k + l] * b[i % n * k + l]).sum::<f64>())
                .collect();
            matmul(Mat::new(&a, m, k), Mat::new(&b, n, k).t(), MatMut::new(&mut c, m, n), Beta::Accumulate);
            for (x, y) in c.iter().zip(&expected) {
                assert!((x - y).abs() < 1e-12 * (k as f64 + 1.0), "{x} {y}");
            }
        }
    }

    /// Large enough for all threads, and with nothing to sum over: rows apart from each other keep what is between.
    #[test]
    fn large_and_empty_products() {
        let (m, n, k) = (70, 66, 65);
        assert!(m * n * k >= PARALLEL_PRODUCT);
        let value = |i: usize| (i * 7 % 13) as f64 - 6.0;
        let (a, b): (Vec<f64>, Vec<f64>) = ((0..m * k).map(value).collect(), (0..k * n).map(value).collect());
        let mut c = vec![f64::NAN; m * n];
        matmul(Mat::new(&a, m, k), Mat::new(&b, k, n), MatMut::new(&mut c, m, n), Beta::Overwrite);
        for (i, c) in c.iter().enumerate() {
            assert_eq!(*c, (0..k).map(|l| a[i / n * k + l] * b[l * n + i % n]).sum::<f64>(), "{i}");
        }
        let mut c = [5.0f64; 11];
        let [a, b] = [(3, 0), (0, 3)].map(|(rows, cols)| Mat::new(&[], rows, cols));
        matmul(a, b, MatMut::strided(&mut c, 3, 3, 4), Beta::Accumulate);
        assert_eq!(c, [5.0; 11]);
        matmul(a, b, MatMut::strided(&mut c, 3, 3, 4), Beta::Overwrite);
        assert_eq!(c, [0.0, 0.0, 0.0, 5.0, 0.0, 0.0, 0.0, 5.0, 0.0, 0.0, 0.0]);
    }

    #[test]
    fn blocks_of_rows_of_one_element() {
        let mut y = vec![0.0f64; TASK_ELEMENTS + 5];
        par_row_blocks(&mut y, 1, 1, |first, rows| {
            rows.iter_mut().enumerate().for_each(|(i, y)| *y = (first + i) as f64);
        });
        assert!(y.iter().enumerate().all(|(i, &y)| y == i as f64));
    }

    #[test]
    fn column_sums_cover_every_row_once() {
        let sums = par_column_sums::<f64>(1000, 3, |row, acc| acc.iter_mut().for_each(|a| *a += row as f64));
        assert_eq!(sums, [499_500.0; 3]);
        assert_eq!(par_column_sums::<f64>(0, 2, |_, _| ()), [0.0; 2]);
    }
}
