//! Softmax over one axis and its logarithm on a GPU.

use rb_cuda::{Arg, Gpu, Kernel, Launch, kernel};
use rb_tensor::Tensor;

use super::reduce_cuda;
use crate::{Result, cuda};

const SOFTMAX_FWD: Kernel = kernel!("softmax_fwd");
const SOFTMAX_BWD: Kernel = kernel!("softmax_bwd");

/// Softmax of `x` over `axis`, or its logarithm.
pub fn forward(gpu: Gpu, x: &Tensor, axis: usize, log: bool) -> Result<Tensor> {
    let y = cuda::output(gpu, x.shape(), x.dtype())?;
    launch(gpu, &SOFTMAX_FWD, &[x, &y], axis, log)?;
    Ok(y)
}

/// The gradient, in the buffer of `dy` where nobody else holds it. `y` is the output of [`forward`].
pub fn backward(gpu: Gpu, y: &Tensor, dy: Tensor, axis: usize, log: bool) -> Result<Tensor> {
    let dx = if dy.is_unshared() { dy.clone() } else { cuda::output(gpu, dy.shape(), dy.dtype())? };
    launch(gpu, &SOFTMAX_BWD, &[y, &dy, &dx], axis, log)?;
    Ok(dx)
}

fn launch(gpu: Gpu, kernel: &Kernel, tensors: &[&Tensor], axis: usize, log: bool) -> Result<()> {
    let (outer, n, inner) = tensors[0].shape().split_at_axis(axis);
    let lines = outer * inner;
    if lines == 0 || n == 0 {
        return Ok(());
    }
    let lanes = reduce_cuda::lanes(n, inner);
    let mut launch = Launch::for_items(kernel, lines * lanes, 256)
        .define("T", tensors[0].dtype().cuda_name())
        .define("LANES", lanes)
        .define("LOG", u8::from(log));
    for tensor in tensors {
        launch = launch.arg(tensor.arg()?);
    }
    let sizes = [lines, n, inner].map(|size| Arg::I64(size as i64));
    cuda::launch_on(gpu, sizes.into_iter().fold(launch, Launch::arg))
}
