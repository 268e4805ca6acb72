//! Dropout: zeroes elements at random and scales the others, so that the mean stays.
//!
//! - **Computes** `y = x * keep / (1 - p)`, `keep` 1 with probability `1 - p`: element `i` is kept if word `i % 4` of
//!   random block `i / 4` is at least `p * 2^32`. A dropped NaN or infinity gives NaN, so that it is not hidden.
//! - **Shapes** `x [..]` -> `y [..]`.
//! - **Dtypes** any float type.
//! - **Backward** `dx = dy * keep / (1 - p)`, with the same blocks drawn again.
//! - **Saves** nothing: the generator's state is an attribute.
//! - **Kernels** `dropout`, both ways.
//! - **Errors** `Argument` if `p` is outside [0, 1).
//! - **Source** PyTorch `torch.nn.functional.dropout`.

use rb_cuda::{Arg, Gpu, Kernel, Launch, kernel};
use rb_tensor::{Rng, RngState, Shape, Tensor};

use super::shared::packs;
use crate::{cuda, host};
use crate::testing::Case;
use crate::{AutogradError, Float, GradSinks, Op, Result, Var, apply};

/// Zeroes each element with probability `p` and scales the others by `1 / (1 - p)`. Advances `rng` by one block
/// for every four elements, begun ones included; `p` of 0 is the identity and takes nothing.
pub fn dropout<'t>(x: &Var<'t>, p: f64, rng: &mut Rng) -> Result<Var<'t>> {
    if !(0.0..1.0).contains(&p) {
        return Err(AutogradError::Argument {
            op: Dropout::NAME,
            argument: "p",
            got: p.to_string(),
            expected: "0 to below 1".into(),
        });
    }
    if p == 0.0 {
        return Ok(x.clone());
    }
    let state = rng.state();
    let y = apply(Dropout { p, state }, &[x])?;
    *rng = Rng::from_state(after(state, x.shape().numel().div_ceil(BLOCK)));
    Ok(y)
}

/// Words of one random block.
const BLOCK: usize = 4;

/// Elements that one task draws for: a multiple of [`BLOCK`].
const TASK_ELEMENTS: usize = 4 * 1024;

/// The state `blocks` later.
fn after(state: RngState, blocks: usize) -> RngState {
    RngState { counter: state.counter.wrapping_add(blocks as u64), ..state }
}

struct Dropout {
    p: f64,
    state: RngState,
}

impl Dropout {
    /// The least random word of an element that is kept; `p` is below 1.
    fn threshold(&self) -> u32 {
        (self.p * 2f64.powi(32)) as u32
    }

    /// `y` is [`Dropout::mask`] of `x`, which it may be.
    fn mask_cuda(&self, gpu: Gpu, x: &Tensor, y: &Tensor) -> Result<()> {
        let n = x.numel();
        if n == 0 {
            return Ok(());
        }
        let RngState { seed, stream, counter } = self.state;
        let launch = Launch::for_items(&DROPOUT, n.div_ceil(BLOCK), 256)
            .define("T", x.dtype().cuda_name())
            .define("PACKED", u8::from(packs::width(&[x, y], &[])? > 1))
            .arg(x.arg()?)
            .arg(y.arg()?)
            .arg(Arg::U64(seed))
            .arg(Arg::U64(stream))
            .arg(Arg::U64(counter))
            .arg(Arg::U32(self.threshold()))
            .arg(Arg::F32((1.0 / (1.0 - self.p)) as f32))
            .arg(Arg::I64(n as i64));
        cuda::launch_on(gpu, launch)
    }

    /// Multiplies each element by 0 or `1 / (1 - p)`.
    fn mask<T: Float>(&self, values: &mut [T]) {
        let threshold = self.threshold();
        let scale = T::from_f64(1.0 / (1.0 - self.p));
        host::par_rows(values, TASK_ELEMENTS, |task, values| {
            for (i, values) in values.chunks_mut(BLOCK).enumerate() {
                let mut rng = Rng::from_state(after(self.state, task * (TASK_ELEMENTS / BLOCK) + i));
                for x in values {
                    let keep = rng.next_u32() >= threshold;
                    *x *= if keep { scale } else { T::ZERO };
                }
            }
        });
    }
}

impl Op for Dropout {
    const NAME: &'static str = "dropout";
    type Saved = ();

    fn out_shape(&self, inputs: &[&Shape]) -> Result<Shape> {
        Ok(inputs[0].clone())
    }

    fn host_forward<T: Float>(&self, inputs: &[Tensor], out: &Shape) -> Result<(Tensor, ())> {
        let mut y = inputs[0].to_vec::<T>()?;
        self.mask(&mut y);
        Ok((Tensor::from_vec(y, out.clone())?, ()))
    }

    fn host_backward<T: Float>(&self, _saved: (), dy: Tensor, grads: &mut GradSinks<'_>) -> Result<()> {
        grads.add(0, host::update::<T>(dy, |dx| self.mask(dx))?)
    }

    fn cuda_forward(&self, gpu: Gpu, inputs: &[Tensor], out: &Shape) -> Result<(Tensor, ())> {
        let y = cuda::output(gpu, out, inputs[0].dtype())?;
        self.mask_cuda(gpu, &inputs[0], &y)?;
        Ok((y, ()))
    }

    fn cuda_backward(&self, gpu: Gpu, _saved: (), dy: Tensor, grads: &mut GradSinks<'_>) -> Result<()> {
        let dx = if dy.is_unshared() { dy.clone() } else { cuda::output(gpu, dy.shape(), dy.dtype())? };
        self.mask_cuda(gpu, &dy, &dx)?;
        grads.add(0, dx)
    }
}

const DROPOUT: Kernel = kernel!("dropout");

/// Cases for gradient checks and device comparisons.
pub fn cases() -> Vec<Case> {
    let case = |shape: &[usize], p: f64| {
        Case::normal(format!("{shape:?}, p {p}"), &[shape], move |v| dropout(&v[0], p, &mut Rng::new(5)))
    };
    vec![
        case(&[1], 0.5),
        case(&[3, 31], 0.1),
        case(&[2, 3, 33], 0.9),
        case(&[5, 1000], 0.3),
        case(&[3, 5], 0.0),
        case(&[0], 0.5),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{GradStore, ParamStore, Tape};

    /// Output for ones and gradient for an upstream gradient of ones.
    fn run(n: usize, p: f64, rng: &mut Rng) -> (Vec<f32>, Vec<f32>) {
        let params = ParamStore::empty();
        let tape = Tape::new(&params);
        let ones = Tensor::from_vec(vec![1f32; n], [n]).unwrap();
        let x = tape.leaf(ones.clone());
        let y = dropout(&x, p, rng).unwrap();
        let grads = tape.backward_from(&y, ones, &mut GradStore::new(&params).unwrap()).unwrap();
        (y.detach().to_vec().unwrap(), grads.get(&x).unwrap().to_vec().unwrap())
    }

    #[test]
    fn shape_rule() {
        let op = Dropout { p: 0.5, state: Rng::new(0).state() };
        assert_eq!(op.out_shape(&[&[2, 0, 3].into()]).unwrap().dims(), &[2, 0, 3]);
        let params = ParamStore::empty();
        let tape = Tape::new(&params);
        let x = tape.constant(Tensor::scalar(1f32));
        for p in [1.0, -0.1, f64::NAN] {
            let message = dropout(&x, p, &mut Rng::new(0)).unwrap_err().to_string();
            assert_eq!(message, format!("dropout: p is {p}, expected 0 to below 1"));
        }
    }

    #[test]
    fn gradcheck() {
        crate::testing::check_op("dropout").unwrap();
    }

    #[test]
    fn both_directions_use_one_mask_of_the_right_rate() {
        let n = 40_003;
        for p in [0.1, 0.5, 0.9] {
            let (y, dx) = run(n, p, &mut Rng::new(3));
            assert_eq!(y, dx);
            let scale = 1.0 / (1.0 - p);
            assert!(y.iter().all(|&y| y == 0.0 || y == scale as f32));
            let dropped = y.iter().filter(|y| **y == 0.0).count() as f64 / n as f64;
            let deviation = (p * (1.0 - p) / n as f64).sqrt();
            assert!((dropped - p).abs() < 5.0 * deviation, "p {p}: {dropped}");
        }
    }

    #[test]
    fn the_generator_moves_on_by_whole_blocks() {
        let mut rng = Rng::new(9).fork("dropout");
        let start = rng.state();
        let (first, _) = run(5, 0.5, &mut rng);
        assert_eq!(rng.state(), after(start, 2));
        // The same numbers as from a longer call: an element's number depends on its position alone.
        let mut words = Rng::from_state(start);
        let kept: Vec<f32> = (0..5).map(|_| if words.next_u32() >= 1 << 31 { 2.0 } else { 0.0 }).collect();
        assert_eq!(first, kept);
        let long = run(2 * TASK_ELEMENTS + 9, 0.5, &mut Rng::from_state(start)).0;
        assert_eq!(long[..5], first);
        let mut words = Rng::from_state(start);
        assert!(long.iter().all(|&y| (y != 0.0) == (words.next_u32() >= 1 << 31)), "another task, other numbers");
        let state = rng.state();
        assert_eq!(run(7, 0.0, &mut rng), (vec![1.0; 7], vec![1.0; 7]));
        assert_eq!(rng.state(), state);
    }
}
