//! What the CUDA halves of operations share.

mod product;

pub use product::Product;

use rb_cuda::{Arg, Gpu, Kernel, Launch, MatrixType, kernel};
use rb_tensor::{DType, Device, Shape, Tensor};

use crate::{AutogradError, Beta, Result};

/// Up to so many rows (tokens of a batch) gradients of parameters are made beside the backward pass: above that each
/// product fills the card, and what it reads would be held for long.
pub const BESIDE_ROWS: usize = 8192;

const ACCUMULATE: Kernel = kernel!("accumulate");

impl Beta {
    /// The factor of the old content: 0 or 1.
    pub fn factor(self) -> f32 {
        match self {
            Beta::Overwrite => 0.0,
            Beta::Accumulate => 1.0,
        }
    }

    /// The same as a constant of a kernel.
    pub fn define(self) -> u8 {
        u8::from(self == Beta::Accumulate)
    }
}

/// An output for a kernel that writes all of it.
pub fn output(gpu: Gpu, shape: &Shape, dtype: DType) -> Result<Tensor> {
    Ok(Tensor::uninit(shape.clone(), dtype, Device::Cuda(gpu))?)
}

/// `dst = beta * dst + src`, element by element, over any mix of f32 and bf16.
pub fn accumulate(dst: &Tensor, src: &Tensor, beta: Beta) -> Result<()> {
    let Device::Cuda(gpu) = dst.device() else {
        return Err(rb_tensor::TensorError::NotOnGpu { op: "accumulate" }.into());
    };
    let n = dst.numel();
    debug_assert_eq!(n, src.numel(), "accumulate: lengths");
    if n == 0 {
        return Ok(());
    }
    let width = pack_width(n, &[src])?.min(pack_width(n, &[dst])?);
    let launch = Launch::for_items(&ACCUMULATE, n / width, 256)
        .define("TX", src.dtype().cuda_name())
        .define("TY", dst.dtype().cuda_name())
        .define("VEC", width)
        .define("BETA", beta.define())
        .arg(src.arg()?)
        .arg(dst.arg()?)
        .arg(Arg::I64((n / width) as i64));
    let passes = if beta == Beta::Accumulate { 2 } else { 1 };
    launch_on(gpu, launch.moves(src.size_bytes() + passes * dst.size_bytes()))
}

/// Enqueues a kernel.
pub fn launch_on(gpu: Gpu, launch: Launch<'_>) -> Result<()> {
    gpu.launch(launch).map_err(|e| AutogradError::Tensor(e.into()))
}

/// The matrix type of an element type.
///
/// # Errors
/// f64 and integers have no product on a GPU.
pub fn matrix_type(op: &'static str, tensor: &Tensor) -> Result<MatrixType> {
    match tensor.dtype() {
        DType::F32 => Ok(MatrixType::F32),
        DType::BF16 => Ok(MatrixType::Bf16),
        dtype => Err(AutogradError::Unsupported { op, dtype, device: tensor.device() }),
    }
}

const COLUMN_SUM: Kernel = kernel!("column_sum");

/// `dst[c] = beta * dst[c] + sum over rows of src[r, c]`, in two stages where there are many rows.
pub fn column_sums(
    gpu: Gpu,
    src: &Tensor,
    rows: usize,
    columns: usize,
    dst: &Tensor,
    beta: Beta,
) -> Result<()> {
    /// Rows of one block of the first stage.
    const ROWS: usize = 512;
    if columns == 0 {
        return Ok(());
    }
    let sum = |src: &Tensor, rows: usize, per_block: usize, dst: &Tensor, beta: Beta| {
        let grid = [columns.div_ceil(32) as u32, rows.div_ceil(per_block).max(1) as u32, 1];
        let launch = Launch::new(&COLUMN_SUM, grid, [32, 32, 1])
            .define("TX", src.dtype().cuda_name())
            .define("TY", dst.dtype().cuda_name())
            .define("ROWS", per_block)
            .define("BETA", beta.define())
            .arg(src.arg()?)
            .arg(dst.arg()?)
            .arg(Arg::I64(rows as i64))
            .arg(Arg::I64(columns as i64));
        launch_on(gpu, launch)
    };
    // The grid's second dimension takes 65535 blocks: very tall matrices get taller blocks.
    let per_block = ROWS.max(rows.div_ceil(32768).next_multiple_of(32));
    let parts = rows.div_ceil(per_block);
    if parts <= 1 {
        return sum(src, rows, per_block, dst, beta);
    }
    let partial = output(gpu, &[parts, columns].into(), DType::F32)?;
    sum(src, rows, per_block, &partial, Beta::Overwrite)?;
    sum(&partial, parts, parts.next_power_of_two().max(32), dst, beta)
}

/// How many neighbours a kernel may load at once: 4 where rows of `columns` elements stay aligned, else 1.
pub fn vector_width(columns: usize) -> usize {
    if columns.is_multiple_of(4) { 4 } else { 1 }
}

/// The number of neighbouring elements that a kernel may load at once: the largest power of two of at most 16
/// bytes that divides `inner` and at which all `tensors` (of one element type) are aligned.
pub fn pack_width(inner: usize, tensors: &[&Tensor]) -> Result<usize> {
    let mut width = 16 / tensors[0].dtype().size_bytes();
    for tensor in tensors {
        let (offset, size) = (tensor.place()?.offset_bytes, tensor.dtype().size_bytes());
        while width > 1 && !(inner.is_multiple_of(width) && offset.is_multiple_of(width * size)) {
            width /= 2;
        }
    }
    Ok(width)
}

/// An argument that points at element `first` of a tensor.
pub fn arg_from(tensor: &Tensor, first: usize) -> Result<Arg<'_>> {
    let place = tensor.place()?;
    Ok(Arg::Buffer(place.buffer, place.offset_bytes + first * tensor.dtype().size_bytes()))
}
