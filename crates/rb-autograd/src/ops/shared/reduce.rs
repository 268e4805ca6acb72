//! Reductions of one axis: a tensor is seen as `[outer, n, inner]`, and `n` goes.
//!
//! How the work is cut depends on sizes alone, and partial results are added in order.

use crate::host;
use crate::testing::{Case, Fill};
use crate::{Beta, Float, Result, Var};

/// Elements of `[n, inner]` from which one block is worth all threads.
const LARGE_BLOCK: usize = 64 * 1024;

/// Sums over `n`.
pub fn sum<T: Float>(x: &[T], (outer, n, inner): (usize, usize, usize)) -> Vec<T> {
    let mut y = vec![T::ZERO; outer * inner];
    let block = n * inner;
    if y.is_empty() || block == 0 {
        return y;
    }
    if block >= LARGE_BLOCK {
        for (y, x) in y.chunks_mut(inner).zip(x.chunks(block)) {
            if inner == 1 {
                y[0] = host::par_sum(x);
            } else {
                let sums = host::par_column_sums(n, inner, |r, acc: &mut [T]| add_row(acc, &x[r * inner..]));
                y.copy_from_slice(&sums);
            }
        }
    } else {
        host::par_row_groups(&mut y, inner, block, |o, y| {
            let x = &x[o * block..][..block];
            if inner == 1 {
                y[0] = host::sum(x);
            } else {
                x.chunks_exact(inner).for_each(|row| add_row(y, row));
            }
        });
    }
    y
}

fn add_row<T: Float>(acc: &mut [T], row: &[T]) {
    acc.iter_mut().zip(row).for_each(|(a, &x)| *a += x);
}

/// The backward of a sum times `factor`: `dx[o, .., i] = factor * dy[o, i]`, stored or added.
pub fn spread<T: Float>(dx: &mut [T], dy: &[T], (n, inner): (usize, usize), factor: T, beta: Beta) {
    if inner == 1 {
        return host::par_rows(dx, n, |o, dx| {
            let d = dy[o] * factor;
            match beta {
                Beta::Overwrite => dx.fill(d),
                Beta::Accumulate => dx.iter_mut().for_each(|x| *x += d),
            }
        });
    }
    host::par_rows(dx, inner, |row, dx| {
        let dy = &dy[row / n * inner..][..inner];
        match beta {
            Beta::Overwrite => dx.iter_mut().zip(dy).for_each(|(x, &d)| *x = d * factor),
            Beta::Accumulate => dx.iter_mut().zip(dy).for_each(|(x, &d)| *x += d * factor),
        }
    });
}

/// Maxima over `n`, which is at least 1, and the position of the first of them. NaN is larger than all.
pub fn max<T: Float>(x: &[T], (outer, n, inner): (usize, usize, usize)) -> (Vec<T>, Vec<i32>) {
    let block = n * inner;
    let mut y = vec![T::ZERO; outer * inner];
    let mut index = vec![0i32; outer * inner];
    host::par_row_pairs(&mut y, &mut index, inner, block, |o, y, index| {
        let x = &x[o * block..][..block];
        if inner == 1 {
            (y[0], index[0]) = first_max(x);
            return;
        }
        y.copy_from_slice(&x[..inner]);
        for (k, row) in x.chunks_exact(inner).enumerate().skip(1) {
            for ((y, index), &x) in y.iter_mut().zip(index.iter_mut()).zip(row) {
                if x > *y || (is_nan(x) && !is_nan(*y)) {
                    (*y, *index) = (x, k as i32);
                }
            }
        }
    });
    (y, index)
}

/// Two passes, of which the first vectorises: the value in eight lanes, then its first place.
fn first_max<T: Float>(x: &[T]) -> (T, i32) {
    const LANES: usize = 8;
    let (chunks, tail) = x.as_chunks::<LANES>();
    let mut lanes = [T::NEG_INFINITY; LANES];
    for chunk in chunks {
        for lane in 0..LANES {
            lanes[lane] = lanes[lane].max(chunk[lane]);
        }
    }
    let best = lanes.into_iter().chain(tail.iter().copied()).fold(T::NEG_INFINITY, T::max);
    let found =
        if is_nan(best) { x.iter().position(|&v| is_nan(v)) } else { x.iter().position(|&v| v == best) };
    // The value itself, so that -0 and 0, which are equal, are not exchanged.
    let index = found.unwrap_or(0);
    (x[index], index as i32)
}

fn is_nan<T: Float>(x: T) -> bool {
    x.partial_cmp(&x).is_none()
}

/// Cases of a reduction: every axis of odd sizes, axes of one element, and large ones.
pub fn cases(fill: Fill, op: for<'t> fn(&Var<'t>, isize, bool) -> Result<Var<'t>>) -> Vec<Case> {
    let shapes: [(&[usize], isize); 10] = [
        (&[1], 0),
        (&[5, 33], -1),
        (&[31, 4], 0),
        (&[2, 7, 3], 1),
        (&[2, 7, 3], -3),
        (&[4, 1, 3], 1),
        (&[0, 3], 1),
        (&[3, 5, 0], 1),
        (&[2, 1000], 1),
        (&[3001, 33], 0),
    ];
    let both = shapes.into_iter().flat_map(|(shape, axis)| [(shape, axis, false), (shape, axis, true)]);
    let case = |(shape, axis, keep): (&[usize], isize, bool)| {
        let name = format!("{shape:?} axis {axis}{}", if keep { " kept" } else { "" });
        Case::new(name, [(shape.into(), fill)], move |v| op(&v[0], axis, keep))
    };
    both.map(case).collect()
}

/// What `op` says of a `[2, 6]` input.
#[cfg(test)]
pub fn axis_message(op: impl for<'t> Fn(&Var<'t>) -> Result<Var<'t>>) -> String {
    let params = crate::ParamStore::empty();
    let tape = crate::Tape::new(&params);
    let x = tape.leaf(rb_tensor::Tensor::from_vec(vec![0f32; 12], [2, 6]).unwrap());
    op(&x).unwrap_err().to_string()
}

#[cfg(test)]
mod tests {
    use rb_tensor::Rng;

    use super::*;

    #[test]
    fn sums_match_the_obvious_loop_on_any_number_of_threads() {
        let mut rng = Rng::new(5);
        for view in [
            (1, 1, 1),
            (3, 7, 5),
            (2, 70_001, 1),
            (1, 3001, 33),
            (2, 0, 3),
            (0, 3, 2),
            (1000, 31, 1),
            (2, 5, 16_400),
        ] {
            let (outer, n, inner) = view;
            let x: Vec<f32> = (0..outer * n * inner).map(|_| rng.normal() as f32).collect();
            let run = |threads| {
                rayon::ThreadPoolBuilder::new()
                    .num_threads(threads)
                    .build()
                    .unwrap()
                    .install(|| sum(&x, view))
            };
            let y = run(1);
            assert_eq!(y, run(5), "{view:?}");
            for (i, &y) in y.iter().enumerate() {
                let terms = || (0..n).map(|k| f64::from(x[(i / inner * n + k) * inner + i % inner]));
                let (exact, size): (f64, f64) = (terms().sum(), terms().map(f64::abs).sum());
                assert!((f64::from(y) - exact).abs() <= 1e-6 * size, "{view:?} [{i}]: {y} {exact}");
            }
        }
    }

    #[test]
    fn maxima_are_the_first_and_nan_wins() {
        let nan = f32::NAN;
        let x = [1.0, 3.0, 3.0, 2.0, nan, 5.0, nan, 0.0, -0.0, 0.0, -1.0, -2.0];
        let (y, index) = max(&x, (3, 4, 1));
        assert_eq!(index, [1, 0, 0]);
        assert!(y[0] == 3.0 && y[1].is_nan() && y[2].is_sign_negative());
        let (y, index) = max(&x, (1, 6, 2));
        assert_eq!(index, [2, 2]);
        assert!(y[0].is_nan() && y[1] == 5.0);
        let long: Vec<f32> = (0..1000).map(|i| ((i * 7) % 990) as f32).collect();
        assert_eq!(first_max(&long), (989.0, long.iter().position(|&v| v == 989.0).unwrap() as i32));
        assert_eq!(first_max(&[f32::NEG_INFINITY; 9]).1, 0);
    }
}
