//! [`Float`]: the element types that host operations are generic over.

use std::iter::Sum;
use std::ops::{Add, AddAssign, Div, Mul, MulAssign, Neg, Sub, SubAssign};

use rb_tensor::Elem;

/// `f32` (what trains) or `f64` (the truth).
pub trait Float:
    Elem
    + Copy
    + Add<Output = Self>
    + Sub<Output = Self>
    + Mul<Output = Self>
    + Div<Output = Self>
    + Neg<Output = Self>
    + AddAssign
    + SubAssign
    + MulAssign
    + Sum
{
    /// 0
    const ZERO: Self;
    /// 1
    const ONE: Self;
    /// Negative infinity: the identity of `max`.
    const NEG_INFINITY: Self;

    /// Nearest value of this type.
    fn from_f64(x: f64) -> Self;
    /// Exact widening.
    fn to_f64(self) -> f64;
    /// `self * a + b` with one rounding.
    fn mul_add(self, a: Self, b: Self) -> Self;
    /// e to the power of `self`. The f32 version is a polynomial that compilers vectorise, within 2 ulp.
    fn exp(self) -> Self;
    /// Natural logarithm.
    fn ln(self) -> Self;
    /// Square root.
    fn sqrt(self) -> Self;
    /// Hyperbolic tangent.
    fn tanh(self) -> Self;
    /// Error function.
    fn erf(self) -> Self;
    /// Magnitude.
    fn abs(self) -> Self;
    /// The larger one; NaN if either is NaN, so that a bad value is never hidden.
    fn max(self, other: Self) -> Self;
    /// Neither infinite nor NaN.
    fn is_finite(self) -> bool;

    /// `1 / (1 + e^-x)`, without overflow at either end.
    #[inline(always)]
    fn sigmoid(self) -> Self {
        Self::ONE / (Self::ONE + (-self).exp())
    }
}

macro_rules! common {
    ($t:ty) => {
        const ZERO: Self = 0.0;
        const ONE: Self = 1.0;
        const NEG_INFINITY: Self = <$t>::NEG_INFINITY;
        #[inline(always)]
        fn from_f64(x: f64) -> Self {
            x as $t
        }
        #[inline(always)]
        fn to_f64(self) -> f64 {
            f64::from(self)
        }
        #[inline(always)]
        fn mul_add(self, a: Self, b: Self) -> Self {
            <$t>::mul_add(self, a, b)
        }
        #[inline(always)]
        fn ln(self) -> Self {
            <$t>::ln(self)
        }
        #[inline(always)]
        fn sqrt(self) -> Self {
            <$t>::sqrt(self)
        }
        #[inline(always)]
        fn tanh(self) -> Self {
            <$t>::tanh(self)
        }
        #[inline(always)]
        fn abs(self) -> Self {
            <$t>::abs(self)
        }
        #[inline(always)]
        fn max(self, other: Self) -> Self {
            // A comparison with NaN is false, so NaN in `self` is kept by the first test and NaN in
            // `other` by the second.
            if self > other || self.is_nan() { self } else { other }
        }
        #[inline(always)]
        fn is_finite(self) -> bool {
            <$t>::is_finite(self)
        }
    };
}

impl Float for f32 {
    common!(f32);
    #[inline(always)]
    fn exp(self) -> f32 {
        exp_f32(self)
    }
    #[inline(always)]
    fn erf(self) -> f32 {
        libm::erff(self)
    }
}

impl Float for f64 {
    common!(f64);
    #[inline(always)]
    fn exp(self) -> f64 {
        f64::exp(self)
    }
    #[inline(always)]
    fn erf(self) -> f64 {
        libm::erf(self)
    }
}

/// e^x for f32 with no branches and no table.
///
/// `x = n ln2 + r` with `|r| <= ln2/2`; e^r by a degree-6 Taylor-like polynomial (the minimax coefficients
/// of Cephes `expf`), then a scale by 2^n in two steps so that results in the subnormal range are right.
#[inline(always)]
fn exp_f32(x: f32) -> f32 {
    const LOG2_E: f32 = std::f32::consts::LOG2_E;
    const LN2_HI: f32 = 0.693_359_4;
    const LN2_LO: f32 = -2.121_944_4e-4;
    let clamped = if x < -104.0 { -104.0 } else { x };
    let clamped = if clamped > 89.0 { 89.0 } else { clamped };
    let n = (clamped * LOG2_E).round_ties_even();
    let r = n.mul_add(-LN2_HI, clamped);
    let r = n.mul_add(-LN2_LO, r);
    let p = 1.987_569_1e-4f32;
    let p = p.mul_add(r, 1.398_199_9e-3);
    let p = p.mul_add(r, 8.333_452e-3);
    let p = p.mul_add(r, 4.166_579_6e-2);
    let p = p.mul_add(r, 1.666_666_5e-1);
    let p = p.mul_add(r, 0.5);
    let e = p.mul_add(r * r, r) + 1.0;
    // NaN converts to 0 here and is restored by the last line.
    let n = n as i32;
    let half = n >> 1;
    let scale = |k: i32| f32::from_bits(((k + 127) as u32) << 23);
    let y = e * scale(half) * scale(n - half);
    if x.is_nan() { x } else { y }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_within_two_ulp() {
        let mut worst = 0.0f64;
        for i in -104_000..=88_700 {
            let x = i as f32 * 1e-3;
            let exact = f64::from(x).exp();
            let ulp = f64::from(f32::from_bits((exact as f32).to_bits() + 1)) - f64::from(exact as f32);
            worst = worst.max((f64::from(Float::exp(x)) - exact).abs() / ulp);
        }
        assert!(worst <= 2.0, "{worst} ulp");
    }

    #[test]
    fn exp_edges() {
        assert_eq!(Float::exp(f32::NEG_INFINITY), 0.0);
        assert_eq!(Float::exp(f32::INFINITY), f32::INFINITY);
        assert_eq!(Float::exp(0.0f32), 1.0);
        assert!(Float::exp(f32::NAN).is_nan());
        assert_eq!(Float::exp(200.0f32), f32::INFINITY);
        assert_eq!(Float::exp(-200.0f32), 0.0);
    }

    #[test]
    fn max_keeps_nan() {
        assert!(Float::max(f32::NAN, 1.0).is_nan());
        assert!(Float::max(1.0, f32::NAN).is_nan());
        assert_eq!(Float::max(1.0, 2.0f64), 2.0);
    }

    #[test]
    fn sigmoid_has_no_overflow() {
        for (x, y) in [(-1e4f32, 0.0), (1e4, 1.0), (0.0, 0.5)] {
            assert_eq!(x.sigmoid(), y);
        }
    }
}
