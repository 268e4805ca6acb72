//! Copies of blocks of columns between matrices on a GPU.

use rb_cuda::{Arg, Gpu, Kernel, Launch, kernel};
use rb_tensor::{Tensor, TensorError};

use super::{broadcast_cuda, packs};
use crate::{Beta, Result, cuda};

const COPY_ROWS: Kernel = kernel!("copy_rows");

/// Some columns of a matrix.
pub struct Columns<'a> {
    /// The matrix.
    pub tensor: &'a Tensor,
    /// The first of the columns.
    pub start: usize,
    /// All columns of the matrix.
    pub stride: usize,
}

/// `to = beta * to + from`, for `width` columns of `rows` rows.
pub fn copy(
    gpu: Gpu,
    (rows, width): (usize, usize),
    from: Columns<'_>,
    to: Columns<'_>,
    beta: Beta,
) -> Result<()> {
    if rows == 0 || width == 0 {
        return Ok(());
    }
    let several = rows > 1;
    let mut lengths = vec![width, from.start, to.start];
    if several {
        lengths.extend([from.stride, to.stride]);
    }
    let vector = packs::width(&[from.tensor, to.tensor], &lengths)?;
    let packs = rows * (width / vector);
    let launch = Launch::for_items(&COPY_ROWS, packs, 256)
        .define("TX", from.tensor.dtype().cuda_name())
        .define("TY", to.tensor.dtype().cuda_name())
        .define("VEC", vector)
        .define("BETA", beta.define())
        .define("ROWS", u8::from(several))
        // One row may be a whole batch; its length is no constant.
        .define("WIDTH", if several { width / vector } else { 1 })
        .arg(from.tensor.arg()?)
        .arg(to.tensor.arg()?)
        .arg(Arg::I64(packs as i64))
        .arg(Arg::I64(from.start as i64))
        .arg(Arg::I64(from.stride as i64))
        .arg(Arg::I64(to.start as i64))
        .arg(Arg::I64(to.stride as i64));
    cuda::launch_on(gpu, launch)
}

/// Fills a tensor with zeros.
pub fn zero(gpu: Gpu, tensor: &Tensor) -> Result<()> {
    let place = tensor.place()?;
    gpu.memset(place.buffer, place.offset_bytes, tensor.size_bytes(), 0)
        .map_err(|e| TensorError::from(e).into())
}

const PERMUTE: Kernel = kernel!("permute");
const PERMUTE_TILES: Kernel = kernel!("permute_tiles");

/// From this length on of both the last axis before and the last axis after, tiles are transposed.
const TILED: usize = 8;

/// Copies `x` to `y`, contiguous, whose axes have the sizes and distances in `x` that `walk` lists.
pub fn permute(gpu: Gpu, x: &Tensor, y: &Tensor, walk: &[(usize, usize)]) -> Result<()> {
    let n = y.numel();
    let Some((&(row_len, row_stride), outer)) = walk.split_last().filter(|_| n > 0) else {
        return copy(gpu, (1, n), whole(x), whole(y), Beta::Overwrite);
    };
    if let Some(q) = outer.iter().position(|&(size, stride)| stride == 1 && size >= TILED)
        && row_len >= TILED
    {
        return permute_tiles(gpu, x, y, walk, q);
    }
    let width = if row_stride == 1 {
        let lengths: Vec<usize> = outer.iter().map(|axis| axis.1).chain([row_len]).collect();
        packs::width(&[x, y], &lengths)?
    } else {
        1
    };
    let launch = Launch::for_items(&PERMUTE, n / width, 256)
        .define("T", x.dtype().cuda_name())
        .define("VEC", width)
        .define("RANK", walk.len())
        .define("SIZES", broadcast_cuda::inner_sizes(walk.iter().map(|axis| axis.0)))
        .define("STRIDES", broadcast_cuda::list(walk.iter().map(|axis| axis.1)))
        .arg(x.arg()?)
        .arg(y.arg()?)
        .arg(Arg::I64(n as i64));
    cuda::launch_on(gpu, launch)
}

/// As [`permute`], where axis `q` of the result is the last one of `x`.
fn permute_tiles(gpu: Gpu, x: &Tensor, y: &Tensor, walk: &[(usize, usize)], q: usize) -> Result<()> {
    let last = walk.len() - 1;
    let y_stride = |k: usize| -> usize { walk[k + 1..].iter().map(|axis| axis.0).product() };
    // Size, stride in x, stride in y; of one element where there is no other axis.
    let mut outer: Vec<[usize; 3]> =
        (0..last).filter(|&k| k != q).map(|k| [walk[k].0, walk[k].1, y_stride(k)]).collect();
    if outer.is_empty() {
        outer.push([1, 0, 0]);
    }
    let (q_size, (c_size, x_stride)) = (walk[q].0, walk[last]);
    let tiles =
        outer.iter().map(|axis| axis[0]).product::<usize>() * q_size.div_ceil(32) * c_size.div_ceil(32);
    let blocks = tiles.min(i32::MAX as usize) as u32;
    let launch = Launch::new(&PERMUTE_TILES, [blocks, 1, 1], [32, 8, 1])
        .define("T", x.dtype().cuda_name())
        .define("RANK", outer.len())
        .define("SIZES", broadcast_cuda::inner_sizes(outer.iter().map(|axis| axis[0])))
        .define("X_STRIDES", broadcast_cuda::list(outer.iter().map(|axis| axis[1])))
        .define("Y_STRIDES", broadcast_cuda::list(outer.iter().map(|axis| axis[2])))
        .arg(x.arg()?)
        .arg(y.arg()?)
        .arg(Arg::I64(tiles as i64))
        .arg(Arg::I64(q_size as i64))
        .arg(Arg::I64(c_size as i64))
        .arg(Arg::I64(x_stride as i64))
        .arg(Arg::I64(y_stride(q) as i64));
    cuda::launch_on(gpu, launch)
}

/// All of a tensor as one row.
pub fn whole(tensor: &Tensor) -> Columns<'_> {
    Columns { tensor, start: 0, stride: tensor.numel() }
}
