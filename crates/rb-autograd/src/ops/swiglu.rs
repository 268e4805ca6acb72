//! Gated activation of a packed pair: the first half of the last axis gates the second.
//!
//! - **Computes** `y = silu(gate) * up`, `silu(g) = g / (1 + e^-g)`.
//! - **Shapes** `gate_up [.., 2F]` -> `y [.., F]`.
//! - **Dtypes** any float type.
//! - **Backward** with `s = sigmoid(gate)`: `dgate = dy * up * s * (1 + gate * (1 - s))`, `dup = dy * gate * s`.
//! - **Saves** `gate_up` (shared).
//! - **Kernels** `swiglu_fwd`, `swiglu_bwd`.
//! - **Errors** `ShapeError` if the last axis is odd or missing.
//! - **Source** arXiv:2002.05202.

use rb_cuda::{Arg, Gpu, Kernel, Launch, kernel};
use rb_planted::{Defect, active};
use rb_tensor::{Shape, ShapeError, Tensor};

use crate::{cuda, host};
use crate::testing::Case;
use crate::{Float, GradSinks, Op, Result, Var, apply, saved};

/// `silu(first half) * second half` of the last axis.
pub fn swiglu<'t>(gate_up: &Var<'t>) -> Result<Var<'t>> {
    apply(Swiglu, &[gate_up])
}

struct Swiglu;

saved!(
    struct SwigluSaved { gate_up }
);

impl Op for Swiglu {
    const NAME: &'static str = "swiglu";
    type Saved = SwigluSaved;

    fn out_shape(&self, inputs: &[&Shape]) -> Result<Shape> {
        let x = inputs[0];
        if x.rank() == 0 || !x.last().is_multiple_of(2) {
            return Err(ShapeError::new(Self::NAME, "gate_up", x, "[.., 2F]: an even last axis").into());
        }
        Ok(x.with_last(x.last() / 2))
    }

    fn host_forward<T: Float>(&self, inputs: &[Tensor], out: &Shape) -> Result<(Tensor, SwigluSaved)> {
        let f = out.last();
        let x = inputs[0].as_slice::<T>()?;
        let mut y = vec![T::ZERO; out.numel()];
        host::par_rows(&mut y, f, |row, y| {
            let (gate, up) = x[2 * row * f..][..2 * f].split_at(f);
            for ((y, &g), &u) in y.iter_mut().zip(gate).zip(up) {
                *y = g * g.sigmoid() * u;
            }
        });
        if active(Defect::TailUnwritten) {
            let whole = y.len() / 8 * 8;
            y[whole..].fill(T::ZERO);
        }
        Ok((Tensor::from_vec(y, out.clone())?, SwigluSaved { gate_up: inputs[0].clone() }))
    }

    fn host_backward<T: Float>(&self, saved: SwigluSaved, dy: Tensor, grads: &mut GradSinks<'_>) -> Result<()> {
        let f = dy.shape().last();
        let (x, dys) = (saved.gate_up.as_slice::<T>()?, dy.as_slice::<T>()?);
        let whole = if active(Defect::TailUnwritten) { dys.len() / 8 * 8 } else { dys.len() };
        let share = T::from_f64(if active(Defect::WrongBackwardFactor) { 0.5 } else { 1.0 });
        let mut dx = vec![T::ZERO; x.len()];
        host::par_rows(&mut dx, 2 * f, |row, dx| {
            let (gate, up) = x[2 * row * f..][..2 * f].split_at(f);
            let (dgate, dup) = dx.split_at_mut(f);
            let dy = &dys[row * f..][..f];
            let written = whole.saturating_sub(row * f);
            for ((((dg, du), &g), &u), &d) in dgate.iter_mut().zip(dup).zip(gate).zip(up).zip(dy).take(written) {
                let s = g.sigmoid();
                *dg = d * u * s * (T::ONE + g * (T::ONE - s));
                *du = d * g * s * share;
            }
        });
        grads.add(0, Tensor::from_vec(dx, saved.gate_up.shape().clone())?)
    }

    fn cuda_forward(&self, gpu: Gpu, inputs: &[Tensor], out: &Shape) -> Result<(Tensor, SwigluSaved)> {
        let x = &inputs[0];
        let y = cuda::output(gpu, out, x.dtype())?;
        if out.numel() > 0 {
            let width = cuda::pack_width(out.last(), &[x, &y])?;
            let packs = out.numel() / width;
            let launch = Launch::for_items(&SWIGLU_FWD, packs, 256)
                .define("T", x.dtype().cuda_name())
                .define("F", out.last())
                .define("VEC", width)
                .arg(x.arg()?)
                .arg(y.arg()?)
                .arg(Arg::I64(packs as i64));
            cuda::launch_on(gpu, launch.moves(x.size_bytes() + y.size_bytes()))?;
        }
        Ok((y, SwigluSaved { gate_up: x.clone() }))
    }

    fn cuda_backward(
        &self,
        gpu: Gpu,
        saved: SwigluSaved,
        dy: Tensor,
        grads: &mut GradSinks<'_>,
    ) -> Result<()> {
        let x = &saved.gate_up;
        let dx = cuda::output(gpu, x.shape(), x.dtype())?;
        if dy.numel() > 0 {
            let width = cuda::pack_width(dy.shape().last(), &[x, &dy, &dx])?;
            let packs = dy.numel() / width;
            let launch = Launch::for_items(&SWIGLU_BWD, packs, 256)
                .define("T", x.dtype().cuda_name())
                .define("F", dy.shape().last())
                .define("VEC", width)
                .arg(x.arg()?)
                .arg(dy.arg()?)
                .arg(dx.arg()?)
                .arg(Arg::I64(packs as i64));
            cuda::launch_on(gpu, launch.moves(2 * x.size_bytes() + dy.size_bytes()))?;
        }
        grads.add(0, dx)
    }
}

const SWIGLU_FWD: Kernel = kernel!("swiglu_fwd");
const SWIGLU_BWD: Kernel = kernel!("swiglu_bwd");

/// Cases for gradient checks and device comparisons.
pub fn cases() -> Vec<Case> {
    let case = |shape: &'static [usize]| Case::normal(format!("{shape:?}"), &[shape], |v| swiglu(&v[0]));
    vec![case(&[2]), case(&[3, 62]), case(&[2, 3, 66]), case(&[5, 1000]), case(&[0, 4])]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shape_rule() {
        assert_eq!(Swiglu.out_shape(&[&[3, 8].into()]).unwrap().dims(), &[3, 4]);
        let message = Swiglu.out_shape(&[&[3, 7].into()]).unwrap_err().to_string();
        assert_eq!(message, "swiglu: gate_up has shape [3, 7], expected [.., 2F]: an even last axis");
        assert!(Swiglu.out_shape(&[&[].into()]).is_err());
    }

    #[test]
    fn gradcheck() {
        crate::testing::check_op("swiglu").unwrap();
    }

    #[test]
    fn golden() {
        for case in crate::golden::load("swiglu") {
            let pack = |v: &[Var<'_>]| v[0].shape().rank() as isize - 1;
            crate::golden::check(&case, |v| swiglu(&super::super::concat(&[&v[0], &v[1]], pack(v))?), 1e-12);
        }
    }
}
