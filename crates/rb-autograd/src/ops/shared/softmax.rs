//! Row kernels of softmax: maximum, shifted exponential and sum, in fixed lanes so that they vectorise and
//! add in the same order everywhere.

use crate::Float;

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
            acc[lane] = acc[lane] + acc[lane + half];
        }
        half /= 2;
    }
    acc[0]
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
