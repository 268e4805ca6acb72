//! Elementwise functions of one input, and their backward in the buffer of the upstream gradient.

use rb_tensor::Tensor;

use crate::host;
use crate::testing::{Case, Fill};
use crate::{Float, Result, Var};

/// Elements that are handed to one inner loop: long beside its start, short beside a cache.
const ROW: usize = 1024;

/// `f(x)` at every element.
pub fn map<T: Float>(x: &Tensor, f: impl Fn(T) -> T + Sync) -> Result<Tensor> {
    Ok(Tensor::from_vec(host::par_map(x.as_slice::<T>()?, f), x.shape().clone())?)
}

/// As [`map`], in the buffer of `x` where nobody else holds it.
pub fn map_in_place<T: Float>(mut x: Tensor, f: impl Fn(T) -> T + Sync) -> Result<Tensor> {
    match x.as_mut_slice::<T>() {
        Some(values) => {
            host::par_rows(values, ROW, |_, row| row.iter_mut().for_each(|v| *v = f(*v)));
            Ok(x)
        }
        None => map(&x, f),
    }
}

/// `f(dy, saved)` at every element, in the buffer of `dy` where nobody else holds it.
pub fn chain<T: Float>(mut dy: Tensor, saved: &Tensor, f: impl Fn(T, T) -> T + Sync) -> Result<Tensor> {
    let values = saved.as_slice::<T>()?;
    if let Some(dy_values) = dy.as_mut_slice::<T>() {
        host::par_update(dy_values, values, f);
        return Ok(dy);
    }
    Ok(Tensor::from_vec(host::par_zip(dy.as_slice::<T>()?, values, f), dy.shape().clone())?)
}

/// Cases of a function of one input: a scalar, odd sizes, several tasks of the thread pool, nothing at all.
pub fn cases(fill: Fill, op: for<'t> fn(&Var<'t>) -> Result<Var<'t>>) -> Vec<Case> {
    let shapes: [&[usize]; 7] = [&[], &[1], &[31], &[2, 3, 33], &[5, 1000], &[3, 16_400], &[4, 0]];
    shapes.into_iter().map(|s| Case::new(format!("{s:?}"), [(s.into(), fill)], move |v| op(&v[0]))).collect()
}

#[cfg(test)]
pub mod checks {
    use rb_tensor::{DType, Tensor};

    use crate::testing::{Case, Outcome};
    use crate::{Result, Var};

    type Unary = for<'t> fn(&Var<'t>) -> Result<Var<'t>>;

    /// Outputs and derivatives at `x`, computed in `dtype` and widened.
    pub fn derivative(op: Unary, x: &[f64], dtype: DType) -> (Vec<f64>, Vec<f64>) {
        let x = Tensor::from_vec(x.to_vec(), [x.len()]).unwrap().to_dtype(dtype).unwrap();
        let ones = Tensor::from_vec(vec![1.0f64; x.numel()], x.shape()).unwrap();
        let Outcome { y, dx } = Case::normal("", &[], move |v| op(&v[0])).run(&[x], Some(&ones)).unwrap();
        let wide = |t: &Tensor| t.to_dtype(DType::F64).unwrap().to_vec::<f64>().unwrap();
        (wide(&y), wide(dx[0].as_ref().unwrap()))
    }

    /// At values where a careless formula overflows or cancels, f32 and f64 are finite and agree to a few
    /// roundings of f32. That f64 is right there is what the golden case `specials` shows.
    pub fn extremes(op: Unary) {
        let x = [0.0, -0.0, 1e-30, -1e-30, 88.0, -88.0, 104.0, -104.0, 1e4, -1e4, 3e38, -3e38];
        let x = x.map(|v| f64::from(v as f32));
        let (fast, truth) = (derivative(op, &x, DType::F32), derivative(op, &x, DType::F64));
        for (what, fast, truth) in [("y", fast.0, truth.0), ("dx", fast.1, truth.1)] {
            for ((x, f), t) in x.iter().zip(fast).zip(truth) {
                let close = f.is_finite() && (f - t).abs() <= 1e-6 * t.abs().max(1e-30);
                // A result below the normal range of f32 may be flushed to zero or lose digits.
                assert!(
                    close || (t.abs() < 2e-38 && f.abs() < 2e-38),
                    "{what} at {x:e}: {f:e} in f32, {t:e} in f64"
                );
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use rb_tensor::DType;

    use super::*;
    use crate::ops;

    #[test]
    fn nan_propagates() {
        let unary: [for<'t> fn(&Var<'t>) -> Result<Var<'t>>; 10] = [
            ops::exp,
            ops::log,
            ops::sqrt,
            ops::tanh,
            ops::sigmoid,
            ops::silu,
            ops::gelu_erf,
            ops::gelu_tanh,
            ops::relu,
            |x| ops::scale(x, 2.0, 1.0),
        ];
        for (i, op) in unary.into_iter().enumerate() {
            for dtype in [DType::F32, DType::F64] {
                let (y, _) = checks::derivative(op, &[1.0, f64::NAN, 1.0], dtype);
                let nan: Vec<bool> = y.into_iter().map(f64::is_nan).collect();
                assert_eq!(nan, [false, true, false], "function {i} in {dtype}");
            }
        }
    }

    #[test]
    fn a_shared_upstream_gradient_is_left_alone() {
        let dy = Tensor::from_vec(vec![1.0f32, 2.0], [2]).unwrap();
        let saved = Tensor::from_vec(vec![3.0f32, 4.0], [2]).unwrap();
        let kept = dy.clone();
        let dx = chain::<f32>(dy, &saved, |d, s| d * s).unwrap();
        assert_eq!(
            (dx.to_vec::<f32>().unwrap(), kept.to_vec::<f32>().unwrap()),
            (vec![3.0, 8.0], vec![1.0, 2.0])
        );
        let buffer = dx.buffer_id();
        assert_eq!(map_in_place::<f32>(dx, |d| -d).unwrap().buffer_id(), buffer, "an unshared one is reused");
    }
}
