//! Row kernels of softmax: maximum, shifted exponential and sum, in fixed lanes so that they vectorise and
//! add in the same order everywhere; and what operations over one axis share.

#[cfg(test)]
use rb_tensor::Tensor;

use crate::testing::Case;
use crate::{Float, Result, Var};
#[cfg(test)]
use crate::{GradStore, ParamStore, Tape};

/// Independent partial results a row is folded into: two AVX2 registers of f32.
const LANES: usize = 16;

/// The largest value of a row; NaN if any is, negative infinity for an empty row.
pub fn max<T: Float>(row: &[T]) -> T {
    let (chunks, tail) = row.as_chunks::<LANES>();
    let mut acc = [T::NEG_INFINITY; LANES];
    for chunk in chunks {
        for lane in 0..LANES {
            acc[lane] = acc[lane].max(chunk[lane]);
        }
    }
    acc.iter().chain(tail).fold(T::NEG_INFINITY, |m, &x| m.max(x))
}

/// What to subtract before `exp`: the maximum, or 0 for a row of negative infinities, whose exponentials
/// are then 0 and not NaN.
pub fn shift<T: Float>(max: T) -> T {
    if max == T::NEG_INFINITY { T::ZERO } else { max }
}

/// Replaces `row` by `e^(row - shift)` and returns the sum.
pub fn exp_in_place<T: Float>(row: &mut [T], shift: T) -> T {
    let (chunks, tail) = row.as_chunks_mut::<LANES>();
    let mut acc = [T::ZERO; LANES];
    for chunk in chunks {
        for lane in 0..LANES {
            let e = (chunk[lane] - shift).exp();
            chunk[lane] = e;
            acc[lane] += e;
        }
    }
    let mut sum = T::ZERO;
    for x in tail {
        *x = (*x - shift).exp();
        sum += *x;
    }
    fold(acc) + sum
}

/// The sum of `e^(row - shift)`.
pub fn exp_sum<T: Float>(row: &[T], shift: T) -> T {
    let (chunks, tail) = row.as_chunks::<LANES>();
    let mut acc = [T::ZERO; LANES];
    for chunk in chunks {
        for lane in 0..LANES {
            acc[lane] += (chunk[lane] - shift).exp();
        }
    }
    fold(acc) + tail.iter().map(|&x| (x - shift).exp()).sum()
}

/// The sum of a row.
pub fn sum<T: Float>(row: &[T]) -> T {
    let (chunks, tail) = row.as_chunks::<LANES>();
    let mut acc = [T::ZERO; LANES];
    for chunk in chunks {
        for lane in 0..LANES {
            acc[lane] += chunk[lane];
        }
    }
    fold(acc) + tail.iter().copied().sum()
}

/// The lanes' sum, in halves.
fn fold<T: Float>(mut acc: [T; LANES]) -> T {
    let mut half = LANES / 2;
    while half > 0 {
        for lane in 0..half {
            acc[lane] += acc[lane + half];
        }
        half /= 2;
    }
    acc[0]
}

/// The [`shift`] of each column of a block `[n, inner]`.
pub fn column_shifts<T: Float>(block: &[T], inner: usize) -> Vec<T> {
    let mut max = vec![T::NEG_INFINITY; inner];
    for row in block.chunks_exact(inner) {
        max.iter_mut().zip(row).for_each(|(m, &x)| *m = m.max(x));
    }
    max.iter_mut().for_each(|m| *m = shift(*m));
    max
}

/// An operation over one axis.
type AxisOp = for<'t> fn(&Var<'t>, isize) -> Result<Var<'t>>;

/// Cases of an operation over one axis: every axis of odd shapes, one element, none.
pub fn axis_cases(op: AxisOp) -> Vec<Case> {
    let case = |shape: &[usize], axis: isize| {
        Case::normal(format!("{shape:?}, axis {axis}"), &[shape], move |v| op(&v[0], axis))
    };
    vec![
        case(&[1], 0),
        case(&[3, 31], -1),
        case(&[2, 3, 33], 2),
        case(&[3, 1000], 1),
        case(&[7, 5], 0),
        case(&[2, 17, 3], 1),
        case(&[2, 3, 0], 2),
        case(&[4, 1, 3], 1),
    ]
}

/// Output and gradient of an operation over one axis in f32.
#[cfg(test)]
pub fn differentiated(
    op: AxisOp,
    x: &[f32],
    shape: &[usize],
    axis: isize,
    dy: &[f32],
) -> Result<(Vec<f32>, Vec<f32>)> {
    let params = ParamStore::empty();
    let tape = Tape::new(&params);
    let x = tape.leaf(Tensor::from_vec(x.to_vec(), shape)?);
    let y = op(&x, axis)?;
    let dy = Tensor::from_vec(dy.to_vec(), shape)?;
    let grads = tape.backward_from(&y, dy, &mut GradStore::new(&params)?)?;
    let dx = grads.get(&x).expect("a leaf that needs a gradient").to_vec()?;
    Ok((y.detach().to_vec()?, dx))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_of_every_length_match_the_plain_loop() {
        for n in 0..70 {
            let row: Vec<f64> = (0..n).map(|i| ((i * 37 % 11) as f64 - 5.0) * 0.3).collect();
            let top = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            assert_eq!(max(&row), top);
            let exps: Vec<f64> = row.iter().map(|x| (x - 0.25).exp()).collect();
            let total: f64 = exps.iter().sum();
            let mut copy = row.clone();
            assert!((exp_in_place(&mut copy, 0.25) - total).abs() <= 1e-14 * total);
            assert_eq!(copy, exps);
            assert!((exp_sum(&row, 0.25) - total).abs() <= 1e-14 * total);
            assert!((sum(&row) - row.iter().sum::<f64>()).abs() < 1e-13);
        }
    }

    #[test]
    fn nan_and_infinities() {
        let mut row = vec![f32::NEG_INFINITY; 33];
        assert_eq!(shift(max(&row)), 0.0);
        assert_eq!(exp_in_place(&mut row, 0.0), 0.0);
        row[32] = f32::NAN;
        assert!(max(&row).is_nan());
        row[32] = 1.0;
        row[3] = f32::NAN;
        assert!(max(&row).is_nan());
    }
}
