//! Elementwise functions of one input on a GPU; the functions are bodies of C functions.

use rb_cuda::{Arg, Gpu, Kernel, Launch, kernel};
use rb_tensor::Tensor;

use super::packs;
use crate::{Result, cuda};

const UNARY_FWD: Kernel = kernel!("unary_fwd");
const UNARY_BWD: Kernel = kernel!("unary_bwd");

/// The function that `body` computes from `x` and the numbers `p` and `q`, at every element.
pub fn map(gpu: Gpu, x: &Tensor, body: &str, params: [f32; 2]) -> Result<Tensor> {
    let y = cuda::output(gpu, x.shape(), x.dtype())?;
    map_into(gpu, x, &y, body, params)?;
    Ok(y)
}

/// As [`map`], in the buffer of `x` where nobody else holds it.
pub fn map_in_place(gpu: Gpu, x: Tensor, body: &str, params: [f32; 2]) -> Result<Tensor> {
    if !x.is_unshared() {
        return map(gpu, &x, body, params);
    }
    map_into(gpu, &x, &x, body, params)?;
    Ok(x)
}

fn map_into(gpu: Gpu, x: &Tensor, y: &Tensor, body: &str, [p, q]: [f32; 2]) -> Result<()> {
    let n = x.numel();
    if n == 0 {
        return Ok(());
    }
    let width = packs::width(&[x, y], &[])?;
    let launch = Launch::for_items(&UNARY_FWD, n.div_ceil(width), 256)
        .define("T", x.dtype().cuda_name())
        .define("VEC", width)
        .define("BODY", body)
        .arg(x.arg()?)
        .arg(y.arg()?)
        .arg(Arg::F32(p))
        .arg(Arg::F32(q))
        .arg(Arg::I64(n as i64));
    cuda::launch_on(gpu, launch)
}

/// Which value forward saved, and what backward computes from it and `dy`.
pub enum Slope {
    /// A body in `x`, the input, and `dy`.
    OfInput(&'static str),
    /// A body in `y`, the output, and `dy`.
    OfOutput(&'static str),
}

/// `slope` at every element, in the buffer of `dy` where nobody else holds it.
pub fn chain(gpu: Gpu, dy: Tensor, saved: &Tensor, slope: &Slope) -> Result<Tensor> {
    let (name, body) = match slope {
        Slope::OfInput(body) => ("x", body),
        Slope::OfOutput(body) => ("y", body),
    };
    let n = dy.numel();
    let dx = if dy.is_unshared() { dy.clone() } else { cuda::output(gpu, dy.shape(), dy.dtype())? };
    if n > 0 {
        let width = packs::width(&[saved, &dy, &dx], &[])?;
        let launch = Launch::for_items(&UNARY_BWD, n.div_ceil(width), 256)
            .define("T", dy.dtype().cuda_name())
            .define("VEC", width)
            .define("SAVED", name)
            .define("BODY", body)
            .arg(saved.arg()?)
            .arg(dy.arg()?)
            .arg(dx.arg()?)
            .arg(Arg::I64(n as i64));
        cuda::launch_on(gpu, launch)?;
    }
    Ok(dx)
}
