//! Reductions of one axis on a GPU: a tensor is seen as `[outer, n, inner]`, and `n` goes.

use rb_cuda::{Arg, Gpu, Kernel, Launch, kernel};
use rb_tensor::{DType, Tensor};

use super::packs;
use crate::{Beta, Result, cuda};

const SUM_ROWS: Kernel = kernel!("sum_rows");
const SUM_COLUMNS: Kernel = kernel!("sum_columns");

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
    let by_rows = inner == 1 && n > SHORT_ROW;
    let (most, least) = if by_rows { ROW_SEGMENTS } else { COLUMN_SEGMENTS };
    let parts = if n <= 4 * least { 1 } else { (most / outputs).clamp(1, n.div_ceil(least)) };
    let segment = n.div_ceil(parts).max(1);
    let parts = n.div_ceil(segment).max(1);
    if parts > 1 {
        let partial = cuda::output(gpu, &[outer, parts, inner].into(), DType::F32)?;
        segments(gpu, x, view, (parts, segment), &partial, Beta::Overwrite, 1.0)?;
        return sum(gpu, &partial, (outer, parts, inner), y, beta, divisor);
    }
    segments(gpu, x, view, (parts, segment), y, beta, divisor)
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
    let launch = if inner == 1 && n > SHORT_ROW {
        Launch::for_items(&SUM_ROWS, outer * parts * 32, 256)
    } else {
        let width = packs::width(&[x], &[inner])?;
        Launch::for_items(&SUM_COLUMNS, outer * parts * (inner / width), 256).define("VEC", width)
    };
    let by_rows = inner == 1 && n > SHORT_ROW;
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
