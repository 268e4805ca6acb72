//! Elementwise functions of two inputs that broadcast, and the sums that undo a broadcast.

use rb_tensor::{Shape, Tensor};

use super::reduce;
use crate::host;
use crate::{Float, Result};

/// `f(a, b)` at every element of `out`, the shape that `a` and `b` broadcast to.
pub fn map2<T: Float>(a: &Tensor, b: &Tensor, out: &Shape, f: impl Fn(T, T) -> T + Sync) -> Result<Tensor> {
    let (xs, ys) = (a.as_slice::<T>()?, b.as_slice::<T>()?);
    if a.shape() == out && b.shape() == out {
        return Ok(Tensor::from_vec(host::par_zip(xs, ys, f), out.clone())?);
    }
    let mut z = vec![T::ZERO; out.numel()];
    let walk = Walk::new(out, [a.shape(), b.shape()]);
    host::par_rows(&mut z, walk.row, |row, z| {
        let [x, y] = walk.starts(row);
        let (x, y) = (&xs[x..], &ys[y..]);
        match walk.row_strides {
            [1, 1] => z.iter_mut().zip(x.iter().zip(y)).for_each(|(z, (&x, &y))| *z = f(x, y)),
            [1, _] => {
                let y = y[0];
                z.iter_mut().zip(x).for_each(|(z, &x)| *z = f(x, y));
            }
            [_, 1] => {
                let x = x[0];
                z.iter_mut().zip(y).for_each(|(z, &y)| *z = f(x, y));
            }
            _ => z.fill(f(x[0], y[0])),
        }
    });
    Ok(Tensor::from_vec(z, out.clone())?)
}

/// `f(y, x)` at every element of `y`, to whose shape `x` broadcasts, in the buffer of `y` where nobody else
/// holds it.
pub fn update<T: Float>(mut y: Tensor, x: &Tensor, f: impl Fn(T, T) -> T + Sync) -> Result<Tensor> {
    let shape = y.shape().clone();
    let xs = x.as_slice::<T>()?;
    let Some(ys) = y.as_mut_slice::<T>() else { return map2(&y, x, &shape, f) };
    if x.shape() == &shape {
        host::par_update(ys, xs, f);
        return Ok(y);
    }
    let walk = Walk::new(&shape, [x.shape()]);
    host::par_rows(ys, walk.row, |row, y| {
        let x = &xs[walk.starts(row)[0]..];
        match walk.row_strides {
            [1] => y.iter_mut().zip(x).for_each(|(y, &x)| *y = f(*y, x)),
            _ => {
                let x = x[0];
                y.iter_mut().for_each(|y| *y = f(*y, x));
            }
        }
    });
    Ok(y)
}

/// Sums `x` over the axes along which `to` was broadcast to the shape of `x`. Shares `x` if there are none.
pub fn sum_to<T: Float>(x: Tensor, to: &Shape) -> Result<Tensor> {
    if x.shape() == to {
        return Ok(x);
    }
    let axes = merged(x.shape(), [to]);
    let mut sizes: Vec<usize> = axes.iter().map(|axis| axis.size).collect();
    let mut sums: Option<Vec<T>> = None;
    for (i, axis) in axes.iter().enumerate().filter(|(_, axis)| axis.strides == [0]) {
        let view = (sizes[..i].iter().product(), axis.size, sizes[i + 1..].iter().product());
        sums = Some(match &sums {
            Some(sums) => reduce::sum(sums, view),
            None => reduce::sum(x.as_slice::<T>()?, view),
        });
        sizes[i] = 1;
    }
    match sums {
        Some(sums) => Ok(Tensor::from_vec(sums, to.clone())?),
        None => Ok(x.reshape(to)?),
    }
}

/// Some axes of the output as one, and how the inputs walk along it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Axis<const N: usize> {
    /// Elements along it.
    pub size: usize,
    /// 0 where the input is broadcast.
    pub strides: [usize; N],
}

/// The axes of `out` without those of size 1, neighbours merged where every input walks them as one.
pub fn merged<const N: usize>(out: &Shape, inputs: [&Shape; N]) -> Vec<Axis<N>> {
    let mut next = [1; N];
    let mut axes: Vec<Axis<N>> = Vec::new(); // Innermost first.
    for (from_end, &size) in out.iter().rev().enumerate() {
        let mut strides = [0; N];
        for (i, input) in inputs.iter().enumerate() {
            let size = input.iter().rev().nth(from_end).copied().unwrap_or(1);
            strides[i] = if size == 1 { 0 } else { next[i] };
            next[i] *= size;
        }
        if size == 1 {
            continue;
        }
        match axes.last_mut() {
            Some(last) if (0..N).all(|i| strides[i] == last.strides[i] * last.size) => last.size *= size,
            _ => axes.push(Axis { size, strides }),
        }
    }
    axes.reverse();
    axes
}

/// A walk over the output row by row, a row being its last merged axis.
struct Walk<const N: usize> {
    outer: Vec<Axis<N>>,
    row: usize,
    /// 0 or 1 for each input.
    row_strides: [usize; N],
}

impl<const N: usize> Walk<N> {
    fn new(out: &Shape, inputs: [&Shape; N]) -> Walk<N> {
        let mut outer = merged(out, inputs);
        let row = outer.pop().unwrap_or(Axis { size: 1, strides: [0; N] });
        Walk { outer, row: row.size, row_strides: row.strides }
    }

    /// Where row `row` begins in each input.
    fn starts(&self, mut row: usize) -> [usize; N] {
        let mut starts = [0; N];
        for axis in self.outer.iter().rev() {
            let index = row % axis.size;
            row /= axis.size;
            for (start, stride) in starts.iter_mut().zip(axis.strides) {
                *start += index * stride;
            }
        }
        starts
    }
}

/// Shapes that exercise broadcasting in every position.
pub fn shapes() -> Vec<[&'static [usize]; 2]> {
    vec![
        [&[3, 5], &[3, 5]],
        [&[2, 3, 5], &[5]],
        [&[2, 3, 5], &[3, 1]],
        [&[2, 3, 5], &[2, 1, 1]],
        [&[2, 3, 5], &[2, 1, 5]],
        [&[1], &[4, 31]],
        [&[5, 1], &[1, 7]],
        [&[], &[2, 3]],
        [&[], &[]],
        [&[2, 1, 4], &[3, 1]],
        [&[33, 31], &[]],
        [&[1, 1], &[3, 1, 33]],
        [&[2, 1, 3, 1, 5], &[4, 1, 2, 1]],
        [&[70, 1000], &[1000]],
        [&[0, 3], &[1, 3]],
        [&[3, 1], &[3, 0]],
    ]
}

#[cfg(test)]
mod tests {
    use rb_tensor::{Rng, rules};

    use super::*;

    #[test]
    fn neighbours_merge() {
        let axes = |out: &[usize], a: &[usize], b: &[usize]| -> Vec<(usize, [usize; 2])> {
            merged(&out.into(), [&a.into(), &b.into()]).into_iter().map(|a| (a.size, a.strides)).collect()
        };
        assert_eq!(axes(&[2, 3, 5], &[2, 3, 5], &[5]), [(6, [5, 0]), (5, [1, 1])]);
        assert_eq!(axes(&[2, 3, 5], &[2, 3, 5], &[2, 3, 1]), [(6, [5, 1]), (5, [1, 0])]);
        assert_eq!(axes(&[2, 3, 5], &[2, 3, 5], &[2, 1, 5]), [(2, [15, 5]), (3, [5, 0]), (5, [1, 1])]);
        assert_eq!(axes(&[2, 3, 1], &[2, 3, 1], &[3, 1]), [(2, [3, 0]), (3, [1, 1])]);
        assert_eq!(axes(&[4, 5], &[], &[4, 5]), [(20, [0, 1])]);
        assert_eq!(axes(&[1, 1], &[1], &[]), []);
    }

    #[test]
    fn every_element_meets_its_partner() {
        let mut rng = Rng::new(1);
        let single: [&[usize]; 2] = [&[1], &[1, 1]];
        for [a, b] in shapes().into_iter().chain([single]) {
            let (a, b) = (Shape::from(a), Shape::from(b));
            let out = rules::broadcast("test", &a, &b).unwrap();
            let values =
                |s: &Shape, rng: &mut Rng| -> Vec<f64> { (0..s.numel()).map(|_| rng.normal()).collect() };
            let (av, bv) = (values(&a, &mut rng), values(&b, &mut rng));
            let place = |s: &Shape, mut flat: usize| {
                let (mut place, mut stride) = (0, 1);
                for (from_end, &size) in out.iter().rev().enumerate() {
                    if let Some(&own) = s.iter().rev().nth(from_end) {
                        place += if own == 1 { 0 } else { flat % size * stride };
                        stride *= own;
                    }
                    flat /= size;
                }
                place
            };
            let want: Vec<f64> =
                (0..out.numel()).map(|i| av[place(&a, i)] - 2.0 * bv[place(&b, i)]).collect();
            let (at, bt) = (Tensor::from_vec(av, &a).unwrap(), Tensor::from_vec(bv, &b).unwrap());
            let got = map2::<f64>(&at, &bt, &out, |a, b| a - 2.0 * b).unwrap();
            assert_eq!(got.to_vec::<f64>().unwrap(), want, "{a} {b}");
            if a == out {
                assert_eq!(
                    update::<f64>(at, &bt, |a, b| a - 2.0 * b).unwrap().to_vec::<f64>().unwrap(),
                    want
                );
            }
            let mut sums = vec![0.0; a.numel()];
            want.iter().enumerate().for_each(|(i, w)| sums[place(&a, i)] += w);
            let got = sum_to::<f64>(got, &a).unwrap().to_vec::<f64>().unwrap();
            assert!(got.iter().zip(&sums).all(|(g, s)| (g - s).abs() < 1e-9), "{a} {b}");
        }
    }
}
