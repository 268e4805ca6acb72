//! Elementwise functions of two inputs that broadcast on a GPU, and the sums that undo a broadcast; the
//! functions are expressions of C.

use rb_cuda::{Arg, Gpu, Kernel, Launch, kernel};
use rb_tensor::{DType, Shape, Tensor};

use super::broadcast::{Axis, merged};
use super::{elementwise_cuda, packs, reduce_cuda};
use crate::{Beta, GradSinks, Result, cuda};

const BINARY: Kernel = kernel!("binary");

/// `formula`, an expression in `a` and `b`, at every element of `out`, the shape that `a` and `b` broadcast
/// to.
pub fn map2(gpu: Gpu, a: &Tensor, b: &Tensor, out: &Shape, dtype: DType, formula: &str) -> Result<Tensor> {
    let y = cuda::output(gpu, out, dtype)?;
    map2_into(gpu, a, b, &y, formula)?;
    Ok(y)
}

/// As [`map2`], in the buffer of `y`, which is `a` in the formula, where nobody else holds it and it is of the
/// element type `dtype`.
pub fn update(gpu: Gpu, y: Tensor, b: &Tensor, dtype: DType, formula: &str) -> Result<Tensor> {
    if !y.is_unshared() || y.dtype() != dtype {
        return map2(gpu, &y, b, y.shape(), dtype, formula);
    }
    map2_into(gpu, &y, b, &y, formula)?;
    Ok(y)
}

fn map2_into(gpu: Gpu, a: &Tensor, b: &Tensor, y: &Tensor, formula: &str) -> Result<()> {
    let n = y.numel();
    if n == 0 {
        return Ok(());
    }
    let mut axes = merged(y.shape(), [a.shape(), b.shape()]);
    let row = axes.pop().unwrap_or(Axis { size: 1, strides: [0; 2] });
    let mut in_packs = vec![y];
    in_packs.extend([a, b].into_iter().zip(row.strides).filter(|(_, stride)| *stride == 1).map(|(t, _)| t));
    let lengths: &[usize] = if axes.is_empty() { &[] } else { &[row.size] };
    let width = packs::width(&in_packs, lengths)?;
    axes.push(row);
    let launch = Launch::for_items(&BINARY, n.div_ceil(width), 256)
        .define("TA", a.dtype().cuda_name())
        .define("TB", b.dtype().cuda_name())
        .define("TY", y.dtype().cuda_name())
        .define("VEC", width)
        .define("RANK", axes.len())
        .define("SIZES", inner_sizes(axes.iter().map(|axis| axis.size)))
        .define("A_STRIDES", list(axes.iter().map(|axis| axis.strides[0])))
        .define("B_STRIDES", list(axes.iter().map(|axis| axis.strides[1])))
        .define("FORMULA", formula)
        .arg(a.arg()?)
        .arg(b.arg()?)
        .arg(y.arg()?)
        .arg(Arg::I64(n as i64));
    cuda::launch_on(gpu, launch)
}

/// Numbers as the content of an array of C.
pub fn list(numbers: impl Iterator<Item = usize>) -> String {
    numbers.map(|n| n.to_string()).collect::<Vec<_>>().join(", ")
}

/// As [`list`], with 0 for the first: kernels do not need the outermost size, and one kernel serves every
/// batch size.
pub fn inner_sizes(sizes: impl Iterator<Item = usize>) -> String {
    list(sizes.enumerate().map(|(k, size)| if k == 0 { 0 } else { size }))
}

/// The element type for values whose sum, or which themselves, are the gradient of input `i`: f32 where a sum
/// follows, so that only the sum is rounded.
pub fn gradient_dtype(grads: &GradSinks<'_>, i: usize, out: &Shape) -> DType {
    if grads.shape(i) == out { grads.dtype(i) } else { DType::F32 }
}

/// Gives input `i` the gradient `d`, or its negative, summed over the axes along which the input was broadcast
/// to the shape of `d`. Shares `d` where that is it already.
pub fn give(gpu: Gpu, grads: &mut GradSinks<'_>, i: usize, d: Tensor, negative: bool) -> Result<()> {
    if !grads.wanted(i) {
        return Ok(());
    }
    let to = grads.shape(i).clone();
    if d.numel() != to.numel() {
        let divisor = if negative { -1.0 } else { 1.0 };
        return grads.write_cuda(gpu, i, |dst, beta| sum_to(gpu, &d, dst, beta, divisor));
    }
    let d = if negative { elementwise_cuda::map_in_place(gpu, d, "return -x;", [0.0; 2])? } else { d };
    if d.dtype() == grads.dtype(i) {
        return grads.add(i, d.reshape(to)?);
    }
    grads.write_cuda(gpu, i, |dst, beta| cuda::accumulate(dst, &d, beta))
}

/// `y = beta * y + sum(x) / divisor` over the axes along which the shape of `y` is broadcast to that of `x`; there
/// is at least one.
fn sum_to(gpu: Gpu, x: &Tensor, y: &Tensor, beta: Beta, divisor: f32) -> Result<()> {
    let axes = merged(x.shape(), [y.shape()]);
    let mut sizes: Vec<usize> = axes.iter().map(|axis| axis.size).collect();
    let mut sums = x.clone();
    let mut summed: Vec<usize> = (0..axes.len()).filter(|&k| axes[k].strides == [0]).collect();
    let last = summed.pop();
    let view = |sizes: &[usize], k: usize| -> (usize, usize, usize) {
        (sizes[..k].iter().product(), sizes[k], sizes[k + 1..].iter().product())
    };
    for k in summed {
        let (outer, n, inner) = view(&sizes, k);
        let partial = cuda::output(gpu, &[outer, inner].into(), DType::F32)?;
        reduce_cuda::sum(gpu, &sums, (outer, n, inner), &partial, Beta::Overwrite, 1.0)?;
        sums = partial;
        sizes[k] = 1;
    }
    match last {
        Some(k) => reduce_cuda::sum(gpu, &sums, view(&sizes, k), y, beta, divisor),
        None => cuda::accumulate(y, &sums, beta),
    }
}
