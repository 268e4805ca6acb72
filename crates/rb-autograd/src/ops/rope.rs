//! Rotary positions, half-split: pair `i` of a head is elements `i` and `i + D/2`.
//!
//! - **Computes** with `a = position * inv_freq[i]`: `y1 = x1 cos(a) - x2 sin(a)`, `y2 = x2 cos(a) + x1 sin(a)`, for
//!   the first `num_rotated` heads; the others are copied.
//! - **Shapes** `x [B, T, H, D]`, `positions [B, T]` (i32), or on a GPU their [`angles`] `[B, T, D/2, 2]` (f32) ->
//!   `y [B, T, H, D]`.
//! - **Dtypes** `x` any float type; angles, cosines and sines are computed in f64 and rounded once.
//! - **Backward** the rotation by `-a`.
//! - **Saves** cosines and sines.
//! - **Kernels** `rope_angles`, `rope`.
//! - **Errors** `ShapeError` if `x` is not `[B, T, H, D]` with even `D`, or `positions` not `[B, T]`; `Argument` for a
//!   table of another size, too many heads or a negative position (NaN where
//!   positions are on the GPU).
//! - **Source** arXiv:2104.09864; `apply_rotary_pos_emb` of transformers' Llama.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use rb_cuda::{Arg, Gpu, Kernel, Launch, kernel};
use rb_planted::{Defect, active};
use rb_tensor::{DType, Device, Shape, ShapeError, Tensor};

use crate::testing::Case;
use crate::{AutogradError, Float, GradSinks, Op, Result, Saved, Var, apply};
use crate::{cuda, host};

/// Rotary frequencies.
#[derive(Clone, Debug, PartialEq)]
pub struct RopeTable {
    /// Radians a position, one for each of the `D/2` pairs.
    pub inv_freq: Arc<[f64]>,
    /// Factor of both cosine and sine; 1 in the plain case.
    pub attention_scaling: f64,
}

/// `x` with its first `num_rotated` heads turned by `positions`, which may be their [`angles`].
pub fn rope<'t>(x: &Var<'t>, positions: &Tensor, table: &RopeTable, num_rotated: usize) -> Result<Var<'t>> {
    apply(Rope::new(x, positions, table, num_rotated)?, &[x])
}

/// As [`rope`], for an `x` that it may overwrite: on a GPU, where nobody else holds it, it is turned where it is.
/// Through `undone` the operation that reads the result can say in backward that its gradient is turned back already.
pub(super) fn rope_consuming<'t>(
    x: Var<'t>,
    positions: &Tensor,
    table: &RopeTable,
    num_rotated: usize,
    undone: &Arc<Undone>,
) -> Result<Var<'t>> {
    let in_place = x.value.device() != Device::Cpu && x.value.is_unshared();
    let op = Rope::new(&x, positions, table, num_rotated)?;
    apply(Rope { in_place, undone: Some(undone.clone()), ..op }, &[&x])
}

/// Cosines and sines, each times the table's scaling, of `positions [B, T]` on a GPU, `[B, T, D/2, 2]` in f32: made once
/// they serve every layer. On the host, and where they are
/// angles already, the positions themselves.
///
/// # Errors
/// A driver error.
pub fn angles(positions: &Tensor, table: &RopeTable) -> Result<Tensor> {
    let (Device::Cuda(gpu), DType::I32) = (positions.device(), positions.dtype()) else {
        return Ok(positions.clone());
    };
    let half = table.inv_freq.len();
    let items = positions.numel() * half;
    let shape: Vec<usize> = positions.shape().dims().iter().copied().chain([half, 2]).collect();
    let angles = cuda::output(gpu, &shape.as_slice().into(), DType::F32)?;
    if items > 0 {
        // The shortest decimals that read back as the same f64.
        let inv_freq: Vec<String> = table.inv_freq.iter().map(|f| format!("{f:e}")).collect();
        let launch = Launch::for_items(&ROPE_ANGLES, items, 128)
            .define("HALF", half)
            .define("SCALING", format!("{:e}", table.attention_scaling))
            .define("INV_FREQ", inv_freq.join(","))
            .arg(positions.arg()?)
            .arg(angles.arg()?)
            .arg(Arg::I64(items as i64));
        cuda::launch_on(gpu, launch)?;
    }
    Ok(angles)
}

/// The buffer whose gradient is turned back already; 0 for none.
#[derive(Debug, Default)]
pub(super) struct Undone(AtomicUsize);

impl Undone {
    /// Says that the gradient in this tensor is that of what was turned.
    pub(super) fn set(&self, gradient: &Tensor) {
        self.0.store(gradient.buffer_id(), Ordering::Relaxed);
    }

    fn is(&self, gradient: &Tensor) -> bool {
        self.0.swap(0, Ordering::Relaxed) == gradient.buffer_id()
    }
}

/// Checks that `positions` are i32 and none is negative; on a GPU they are not read, and may be [`angles`].
///
/// # Errors
/// Another element type; the first negative position.
pub fn check_positions(positions: &Tensor) -> Result<()> {
    if positions.device() != Device::Cpu && positions.dtype() == DType::F32 {
        return Ok(());
    }
    positions.expect_dtype(Rope::NAME, "positions", DType::I32)?;
    if positions.device() != Device::Cpu {
        return Ok(());
    }
    match positions.as_slice::<i32>()?.iter().find(|p| **p < 0) {
        None => Ok(()),
        Some(p) => Err(AutogradError::Argument {
            op: Rope::NAME,
            argument: "positions",
            got: p.to_string(),
            expected: "at least 0".into(),
        }),
    }
}

struct Rope {
    /// i32, or on a GPU angles in f32.
    positions: Tensor,
    table: RopeTable,
    num_rotated: usize,
    /// Whether the result takes the place of `x`.
    in_place: bool,
    undone: Option<Arc<Undone>>,
}

/// Cosines and sines of every position: two tensors on the host, one on a GPU.
struct RopeSaved(Vec<Tensor>);

impl Saved for RopeSaved {
    fn tensors(&self) -> Vec<&Tensor> {
        self.0.iter().collect()
    }
}

impl Op for Rope {
    const NAME: &'static str = "rope";
    type Saved = RopeSaved;

    fn out_shape(&self, inputs: &[&Shape]) -> Result<Shape> {
        let x = inputs[0];
        if x.rank() != 4 || !x[3].is_multiple_of(2) {
            return Err(ShapeError::new(Self::NAME, "x", x, "[B, T, H, D] with an even D").into());
        }
        let (half, shape) = (self.table.inv_freq.len(), self.positions.shape());
        let angles = self.positions.dtype() == DType::F32;
        let fits = if angles { shape.dims() == [x[0], x[1], half, 2] } else { shape.dims() == &x[..2] };
        if !fits {
            let expected = format!("[{}, {}] for x {x}", x[0], x[1]);
            return Err(ShapeError::new(Self::NAME, "positions", self.positions.shape(), expected).into());
        }
        let argument = |argument, got: usize, expected: String| {
            Err(AutogradError::Argument { op: Self::NAME, argument, got: got.to_string(), expected })
        };
        if self.table.inv_freq.len() != x[3] / 2 {
            return argument("table length", self.table.inv_freq.len(), format!("{} for x {x}", x[3] / 2));
        }
        if self.num_rotated > x[2] {
            return argument("num_rotated", self.num_rotated, format!("at most {} for x {x}", x[2]));
        }
        check_positions(&self.positions)?;
        Ok(x.clone())
    }

    fn host_forward<T: Float>(&self, inputs: &[Tensor], out: &Shape) -> Result<(Tensor, RopeSaved)> {
        let (cos, sin) = self.tables::<T>()?;
        let (x, row_len) = (inputs[0].as_slice::<T>()?, out[2] * out[3]);
        let mut y = vec![T::ZERO; x.len()];
        host::par_rows(&mut y, row_len, |row, y| {
            y.copy_from_slice(&x[row * row_len..][..row_len]);
            self.turn(row, y, &cos, &sin, T::ONE);
        });
        let shape = [out[0], out[1], self.table.inv_freq.len()];
        let saved = RopeSaved(vec![Tensor::from_vec(cos, shape)?, Tensor::from_vec(sin, shape)?]);
        Ok((Tensor::from_vec(y, out.clone())?, saved))
    }

    fn host_backward<T: Float>(&self, saved: RopeSaved, dy: Tensor, grads: &mut GradSinks<'_>) -> Result<()> {
        let (cos, sin) = (saved.0[0].as_slice::<T>()?, saved.0[1].as_slice::<T>()?);
        let row_len = dy.shape()[2] * dy.shape()[3];
        let dx = host::update::<T>(dy, |dx| {
            host::par_rows(dx, row_len, |row, dx| self.turn(row, dx, cos, sin, -T::ONE));
        })?;
        grads.add(0, dx)
    }

    fn cuda_forward(&self, gpu: Gpu, inputs: &[Tensor], out: &Shape) -> Result<(Tensor, RopeSaved)> {
        let x = &inputs[0];
        let made = self.positions.dtype() == DType::F32;
        let angles = if made { self.positions.clone() } else { angles(&self.positions, &self.table)? };
        let y = if self.in_place { x.clone() } else { cuda::output(gpu, out, x.dtype())? };
        self.launch(gpu, x, &y, &angles, 1)?;
        Ok((y, RopeSaved(vec![angles])))
    }

    fn cuda_backward(
        &self,
        gpu: Gpu,
        saved: RopeSaved,
        dy: Tensor,
        grads: &mut GradSinks<'_>,
    ) -> Result<()> {
        if self.undone.as_ref().is_some_and(|undone| undone.is(&dy)) {
            return grads.add(0, dy);
        }
        let dx = if dy.is_unshared() { dy.clone() } else { cuda::output(gpu, dy.shape(), dy.dtype())? };
        self.launch(gpu, &dy, &dx, &saved.0[0], -1)?;
        drop(dy);
        grads.add(0, dx)
    }
}

const ROPE: Kernel = kernel!("rope");
const ROPE_ANGLES: Kernel = kernel!("rope_angles");

impl Rope {
    fn new(x: &Var<'_>, positions: &Tensor, table: &RopeTable, num_rotated: usize) -> Result<Rope> {
        check_positions(positions)?;
        let positions = positions.to_device(x.value.device())?;
        let mut table = table.clone();
        if active(Defect::RopeAppliedTwice) {
            table.inv_freq = table.inv_freq.iter().map(|f| 2.0 * f).collect();
        }
        let num_rotated = if active(Defect::RopeNotApplied) { 0 } else { num_rotated };
        Ok(Rope { positions, table, num_rotated, in_place: false, undone: None })
    }

    /// Enqueues the rotation of `x` into `y`, which may be `x`, by `direction` times the angle.
    fn launch(&self, gpu: Gpu, x: &Tensor, y: &Tensor, angles: &Tensor, direction: i32) -> Result<()> {
        /// Tokens from which on a thread turns several heads by the angles that it has read.
        const MANY_TOKENS: usize = 8192;
        let in_place = x.buffer_id() == y.buffer_id();
        let (heads, half) = (x.shape()[2], self.table.inv_freq.len());
        let tokens = x.shape()[0] * x.shape()[1];
        // What is not turned must be copied, or is where it belongs.
        let touched = if in_place { self.num_rotated } else { heads };
        let vector = cuda::pack_width(half, &[x, y])?;
        let each = if tokens >= MANY_TOKENS { 4 } else { 1 };
        let items = tokens * touched.div_ceil(each) * (half / vector);
        if items == 0 {
            return Ok(());
        }
        let launch = Launch::for_items(&ROPE, items, 256)
            .define("T", x.dtype().cuda_name())
            .define("VEC", vector)
            .define("HALF", half)
            .define("HEADS", heads)
            .define("TOUCHED", touched)
            .define("ROTATED", self.num_rotated)
            .define("EACH", each)
            .define("DIRECTION", direction)
            .arg(x.arg()?)
            .arg(angles.arg()?)
            .arg(y.arg()?)
            .arg(Arg::I64(items as i64));
        let bytes = 2 * tokens * touched * 2 * half * x.dtype().size_bytes() + angles.size_bytes();
        cuda::launch_on(gpu, launch.moves(bytes))
    }

    /// Cosines and sines of every position, `[B * T, D/2]` each. Rows often share positions, so each distinct
    /// position is computed once.
    fn tables<T: Float>(&self) -> Result<(Vec<T>, Vec<T>)> {
        let positions = self.positions.as_slice::<i32>()?;
        let half = self.table.inv_freq.len();
        let mut distinct = positions.to_vec();
        distinct.sort_unstable();
        distinct.dedup();
        let scaling = self.table.attention_scaling;
        let angle = |k: usize| f64::from(distinct[k / half]) * self.table.inv_freq[k % half];
        let table = |f: fn(f64) -> f64| -> Vec<T> {
            (0..distinct.len() * half).map(|k| T::from_f64(f(angle(k)) * scaling)).collect()
        };
        let (cos, sin) = (table(f64::cos), table(f64::sin));
        let mut out = (Vec::new(), Vec::new());
        for position in positions {
            let k = distinct.partition_point(|d| d < position) * half;
            out.0.extend_from_slice(&cos[k..k + half]);
            out.1.extend_from_slice(&sin[k..k + half]);
        }
        Ok(out)
    }

    /// Turns the heads of row `row` in place, by `direction` times the angle.
    fn turn<T: Float>(&self, row: usize, x: &mut [T], cos: &[T], sin: &[T], direction: T) {
        let half = self.table.inv_freq.len();
        let (cos, sin) = (&cos[row * half..][..half], &sin[row * half..][..half]);
        for head in x.chunks_exact_mut(2 * half).take(self.num_rotated) {
            if active(Defect::RopeInterleaved) {
                for (pair, (&c, &s)) in head.chunks_exact_mut(2).zip(cos.iter().zip(sin)) {
                    let (a, b, s) = (pair[0], pair[1], s * direction);
                    pair.copy_from_slice(&[a * c - b * s, b * c + a * s]);
                }
                continue;
            }
            let (x1, x2) = head.split_at_mut(half);
            for (((x1, x2), &c), &s) in x1.iter_mut().zip(x2).zip(cos).zip(sin) {
                let (a, b, s) = (*x1, *x2, s * direction);
                *x1 = a * c - b * s;
                *x2 = b * c + a * s;
            }
        }
    }
}

/// Cases for gradient checks and device comparisons.
pub fn cases() -> Vec<Case> {
    let case = |shape: [usize; 4], rotated: usize, first: i32| {
        let [b, t, _, d] = shape;
        let inv_freq = (0..d / 2).map(|i| 1e4f64.powf(-2.0 * i as f64 / d as f64)).collect();
        let table = RopeTable { inv_freq, attention_scaling: 1.0 };
        let name = format!("{shape:?}, {rotated} heads from {first}");
        Case::normal(name, &[&shape], move |v| {
            let positions = (0..b * t).map(|i| first + (i % t + i / t) as i32).collect();
            rope(&v[0], &Tensor::from_vec(positions, [b, t])?, &table, rotated)
        })
    };
    vec![
        case([1, 1, 1, 2], 1, 0),
        case([2, 7, 5, 6], 3, 0),
        case([1, 33, 3, 10], 3, 8100),
        case([2, 3, 2, 4], 0, 5),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{ParamStore, Tape};

    fn op(positions: Vec<i32>, pairs: usize, num_rotated: usize) -> Rope {
        let n = positions.len();
        let table = RopeTable { inv_freq: vec![1.0; pairs].into(), attention_scaling: 1.0 };
        let positions = Tensor::from_vec(positions, [1, n]).unwrap();
        Rope { positions, table, num_rotated, in_place: false, undone: None }
    }

    #[test]
    fn shape_rule() {
        let rule = |op: Rope, x: &[usize]| op.out_shape(&[&x.into()]).map_err(|e| e.to_string());
        assert_eq!(rule(op(vec![0, 1], 2, 3), &[1, 2, 3, 4]).unwrap().dims(), &[1, 2, 3, 4]);
        let odd = rule(op(vec![0, 1], 2, 3), &[1, 2, 3, 5]).unwrap_err();
        assert_eq!(odd, "rope: x has shape [1, 2, 3, 5], expected [B, T, H, D] with an even D");
        let positions = rule(op(vec![0], 2, 3), &[1, 2, 3, 4]).unwrap_err();
        assert_eq!(positions, "rope: positions has shape [1, 1], expected [1, 2] for x [1, 2, 3, 4]");
        let table = rule(op(vec![0, 1], 3, 3), &[1, 2, 3, 4]).unwrap_err();
        assert_eq!(table, "rope: table length is 3, expected 2 for x [1, 2, 3, 4]");
        let heads = rule(op(vec![0, 1], 2, 4), &[1, 2, 3, 4]).unwrap_err();
        assert_eq!(heads, "rope: num_rotated is 4, expected at most 3 for x [1, 2, 3, 4]");
        let negative = rule(op(vec![0, -1], 2, 3), &[1, 2, 3, 4]).unwrap_err();
        assert_eq!(negative, "rope: positions is -1, expected at least 0");
    }

    /// Far positions: an angle rounded to f32 before its cosine would be off by 5e-4 at position 8191.
    #[test]
    fn far_positions_are_exact() {
        let params = ParamStore::empty();
        let tape = Tape::inference(&params);
        let inv_freq: Arc<[f64]> = [1.0, 0.731].into();
        let table = RopeTable { inv_freq: inv_freq.clone(), attention_scaling: 1.0 };
        let x = Tensor::from_vec(vec![1f32, 1.0, 0.0, 0.0], [1, 1, 1, 4]).unwrap();
        let positions = Tensor::from_vec(vec![8191i32], [1, 1]).unwrap();
        let y = rope(&tape.constant(x), &positions, &table, 1).unwrap().detach().to_vec::<f32>().unwrap();
        for (i, f) in inv_freq.iter().enumerate() {
            assert!((f64::from(y[i]) - (8191.0 * f).cos()).abs() < 1e-7);
            assert!((f64::from(y[i + 2]) - (8191.0 * f).sin()).abs() < 1e-7);
        }
    }

    #[test]
    fn gradcheck() {
        crate::testing::check_op("rope").unwrap();
    }

    #[test]
    fn golden() {
        for case in crate::golden::load("rope") {
            let x = case.tensor("in0").shape().clone();
            let inv_freq = case.tensor("inv_freq").to_dtype(DType::F64).unwrap().to_vec::<f64>().unwrap();
            let table = RopeTable { inv_freq: inv_freq.into(), attention_scaling: 1.0 };
            let positions = case.tensor("positions");
            let rows: Vec<i32> =
                positions.to_vec::<i32>().unwrap().into_iter().cycle().take(x[0] * x[1]).collect();
            let positions = Tensor::from_vec(rows, [x[0], x[1]]).unwrap();
            crate::golden::check(&case, |v| rope(&v[0], &positions, &table, x[2]), 1e-11);
        }
    }
}
