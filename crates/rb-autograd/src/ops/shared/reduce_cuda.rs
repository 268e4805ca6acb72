//! Reductions of one axis on a GPU: a tensor is seen as `[outer, n, inner]`, and `n` goes.

use rb_cuda::{Arg, Gpu, Kernel, Launch, kernel};
use rb_tensor::{DType, Tensor};

use super::packs;
use crate::{Beta, Result, cuda};

const SUM_ROWS: Kernel = kernel!("sum_rows");
const SUM_COLUMNS: Kernel = kernel!("sum_columns");
const SPREAD: Kernel = kernel!("spread");

/// Rows up to this length are summed by one thread each.
const SHORT_ROW: usize = 8;
/// Warps for sums of rows, and the shortest segment that is worth one.
const ROW_SEGMENTS: (usize, usize) = (1 << 14, 1024);
/// Sums in flight for sums of columns, and the shortest segment that is worth one.
const COLUMN_SEGMENTS: (usize, usize) = (1 << 19, 16);

/// `y = beta * y + sum(x) / divisor` over `n`, for `y` of `outer * inner` elements. Long axes are cut into
/// segments by sizes alone; their sums, in f32, are summed in turn.
pub fn sum(
    gpu: Gpu,
    x: &Tensor,
    view: (usize, usize, usize),
    y: &Tensor,
    beta: Beta,
    divisor: f32,
) -> Result<()> {
    let (outer, n, inner) = view;
    debug_assert_eq!((x.numel(), y.numel()), (outer * n * inner, outer * inner), "sum: lengths");
    let outputs = outer * inner;
    if outputs == 0 {
        return Ok(());
    }
    let (parts, segment) = cut(n, outputs, if by_rows(n, inner) { ROW_SEGMENTS } else { COLUMN_SEGMENTS });
    if parts > 1 {
        let partial = cuda::output(gpu, &[outer, parts, inner].into(), DType::F32)?;
        segments(gpu, x, view, (parts, segment), &partial, Beta::Overwrite, 1.0)?;
        return sum(gpu, &partial, (outer, parts, inner), y, beta, divisor);
    }
    segments(gpu, x, view, (parts, segment), y, beta, divisor)
}

/// Whether a warp sums a segment, or a thread.
fn by_rows(n: usize, inner: usize) -> bool {
    inner == 1 && n > SHORT_ROW
}

/// Into how many segments of which length `n` is cut, for `outputs` sums.
fn cut(n: usize, outputs: usize, (most, least): (usize, usize)) -> (usize, usize) {
    let parts = if n <= 4 * least { 1 } else { (most / outputs).clamp(1, n.div_ceil(least)) };
    let segment = n.div_ceil(parts).max(1);
    (n.div_ceil(segment).max(1), segment)
}

/// How to cut `rows` rows whose `columns` columns are summed.
pub fn cut_columns(rows: usize, columns: usize) -> (usize, usize) {
    cut(rows, columns, COLUMN_SEGMENTS)
}

/// One kernel: `y[o, p, i]` is the sum of segment `p`.
fn segments(
    gpu: Gpu,
    x: &Tensor,
    (outer, n, inner): (usize, usize, usize),
    (parts, segment): (usize, usize),
    y: &Tensor,
    beta: Beta,
    divisor: f32,
) -> Result<()> {
    let by_rows = by_rows(n, inner);
    let launch = if by_rows {
        Launch::for_items(&SUM_ROWS, outer * parts * 32, 256)
    } else {
        let width = packs::width(&[x], &[inner])?;
        Launch::for_items(&SUM_COLUMNS, outer * parts * (inner / width), 256).define("VEC", width)
    };
    let mut launch = launch
        .define("TX", x.dtype().cuda_name())
        .define("TY", y.dtype().cuda_name())
        .define("BETA", beta.define())
        .arg(x.arg()?)
        .arg(y.arg()?)
        .arg(Arg::I64(outer as i64))
        .arg(Arg::I64(n as i64));
    if !by_rows {
        launch = launch.arg(Arg::I64(inner as i64));
    }
    let launch = launch.arg(Arg::I64(parts as i64)).arg(Arg::I64(segment as i64)).arg(Arg::F32(divisor));
    cuda::launch_on(gpu, launch)
}

/// The backward of a sum times `factor`: `dx[o, .., i] = beta * dx[o, .., i] + factor * dy[o, i]`.
pub fn spread(
    gpu: Gpu,
    dy: &Tensor,
    (n, inner): (usize, usize),
    dx: &Tensor,
    beta: Beta,
    factor: f32,
) -> Result<()> {
    let count = dx.numel();
    if count == 0 {
        return Ok(());
    }
    let width = if inner == 1 { packs::width(&[dx], &[n])? } else { packs::width(&[dy, dx], &[inner])? };
    let launch = Launch::for_items(&SPREAD, count / width, 256)
        .define("TX", dy.dtype().cuda_name())
        .define("TY", dx.dtype().cuda_name())
        .define("VEC", width)
        .define("BETA", beta.define())
        .define("N", n)
        .define("INNER", inner)
        .arg(dy.arg()?)
        .arg(dx.arg()?)
        .arg(Arg::F32(factor))
        .arg(Arg::I64(count as i64));
    cuda::launch_on(gpu, launch)
}

/// Threads that share a line of `n` elements that are `inner` apart, for kernels over lines in blocks of 256:
/// one where neighbouring threads have neighbouring lines, else a warp or the block.
pub fn lanes(n: usize, inner: usize) -> usize {
    match n {
        _ if inner > 1 || n <= SHORT_ROW => 1,
        0..=1024 => 32,
        _ => 256,
    }
}
