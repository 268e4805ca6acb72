//! Attention on a GPU, for separate and for packed inputs.

use rb_cuda::{Arg, Gpu, Kernel, Launch, kernel};
use rb_tensor::{DType, Shape, Tensor};

use super::select::{AttentionPath, Chosen, Plan, select};
use super::{AttentionMask, AttentionOptions, wgmma};
use crate::{AutogradError, Result, cuda};

const ATTENTION_DELTA: Kernel = kernel!("attention_delta");

/// The largest head: its tiles fit in the shared memory that every supported card has.
const MAX_HEAD_DIM: usize = 256;

/// Neighbouring heads of a tensor `[B, tokens, heads, D]`, from `first` on.
#[derive(Clone, Copy)]
pub struct Heads<'a> {
    pub tensor: &'a Tensor,
    pub first: usize,
}

impl<'a> Heads<'a> {
    pub fn all(tensor: &'a Tensor) -> Self {
        Heads { tensor, first: 0 }
    }

    /// Elements between tokens.
    pub(super) fn stride(&self) -> usize {
        self.tensor.shape()[2] * self.tensor.shape()[3]
    }

    pub(super) fn arg(&self) -> Result<Arg<'a>> {
        cuda::arg_from(self.tensor, self.first * self.tensor.shape()[3])
    }
}

/// Sizes, options and mask of one attention.
pub struct Problem<'a> {
    pub batch: usize,
    pub queries: usize,
    pub keys: usize,
    pub num_heads: usize,
    pub num_kv_heads: usize,
    pub head_dim: usize,
    pub options: AttentionOptions,
    pub mask: &'a AttentionMask,
    /// The kernels to take; chosen by card and shape if left out.
    pub path: Option<AttentionPath>,
    /// Angles `[B, T, D/2, 2]` by which queries and keys were turned: their gradients are to be turned back where the
    /// kernels can.
    pub angles: Option<&'a Tensor>,
}

impl<'a> Problem<'a> {
    /// The problem of queries `q [B, T, Hq, D]`; the mask's ranges are on the GPU.
    ///
    /// # Errors
    /// [`AutogradError::Argument`] for heads of more than 256.
    pub fn new(
        op: &'static str,
        q: &Shape,
        keys: usize,
        num_kv_heads: usize,
        mask: &'a AttentionMask,
        options: AttentionOptions,
    ) -> Result<Self> {
        let (batch, queries, num_heads, head_dim) = (q[0], q[1], q[2], q[3]);
        if head_dim > MAX_HEAD_DIM {
            let (argument, got) = ("the head size", head_dim.to_string());
            let expected = format!("at most {MAX_HEAD_DIM} on a GPU");
            return Err(AutogradError::Argument { op, argument, got, expected });
        }
        let (path, angles) = (None, None);
        Ok(Problem { batch, queries, keys, num_heads, num_kv_heads, head_dim, options, mask, path, angles })
    }

    /// The same problem for one family of kernels.
    pub fn on_path(self, path: Option<AttentionPath>) -> Self {
        Problem { path, ..self }
    }

    /// Output `[B, T, Hq, D]` and `lse [B, T, Hq]` in f32.
    pub fn forward(&self, gpu: Gpu, [q, k, v]: [Heads<'_>; 3], out: &Shape) -> Result<(Tensor, Tensor)> {
        let y = cuda::output(gpu, out, q.tensor.dtype())?;
        let lse = cuda::output(gpu, &self.rows(), DType::F32)?;
        if y.numel() > 0 {
            let plans = match select(gpu, self, &[q.tensor, k.tensor, v.tensor, &y])? {
                Chosen::Blocks(plans) => plans,
                Chosen::Wgmma => {
                    wgmma::forward(self, gpu, [q, k, v], [&y, &lse])?;
                    return Ok((y, lse));
                }
            };
            let launch = self
                .launch(&plans.fwd, self.queries, self.num_heads, [q, k])
                .arg(q.arg()?)
                .arg(k.arg()?)
                .arg(v.arg()?)
                .arg(self.ranges()?)
                .arg(y.arg()?)
                .arg(lse.arg()?);
            cuda::launch_on(gpu, self.sizes(launch))?;
        }
        Ok((y, lse))
    }

    /// Writes the gradients of queries, keys and values; says whether it turned them back by the angles.
    pub fn backward(
        &self,
        gpu: Gpu,
        [q, k, v]: [Heads<'_>; 3],
        [y, dy, lse]: [&Tensor; 3],
        [dq, dk, dv]: [Heads<'_>; 3],
    ) -> Result<bool> {
        let tensors = [q.tensor, k.tensor, v.tensor, y, dy, dq.tensor, dk.tensor, dv.tensor];
        let plans = match select(gpu, self, &tensors)? {
            Chosen::Blocks(plans) => plans,
            Chosen::Wgmma => {
                wgmma::backward(self, gpu, [q, k, v], [y, dy, lse], [dq, dk, dv])?;
                return Ok(self.angles.is_some());
            }
        };
        let delta = cuda::output(gpu, &self.rows(), DType::F32)?;
        if y.numel() > 0 {
            let launch = self.launch(&plans.bwd_q, self.queries, self.num_heads, [q, k]);
            let launch = self.inputs(launch, [q, k, v], [dy, lse])?;
            // On tensor cores the gradient of queries makes delta on its way.
            let launch = if plans.apart {
                self.delta(gpu, y, dy, &delta)?;
                launch.arg(delta.arg()?)
            } else {
                launch.arg(y.arg()?).arg(delta.arg()?)
            };
            cuda::launch_on(gpu, self.sizes(launch.arg(dq.arg()?)))?;
        }
        if self.batch * self.keys * self.head_dim > 0 {
            let launch = self.launch(&plans.bwd_kv, self.keys, self.num_kv_heads, [q, k]);
            let launch = self.inputs(launch, [q, k, v], [dy, lse])?;
            let launch = launch.arg(delta.arg()?).arg(dk.arg()?).arg(dv.arg()?);
            cuda::launch_on(gpu, self.sizes(launch))?;
        }
        Ok(false)
    }

    /// The sums of `dy * y` for each query and head.
    fn delta(&self, gpu: Gpu, y: &Tensor, dy: &Tensor, delta: &Tensor) -> Result<()> {
        let rows = delta.numel();
        let launch = Launch::new(&ATTENTION_DELTA, [blocks_u32(rows.div_ceil(8)), 1, 1], [256, 1, 1])
            .define("T", y.dtype().cuda_name())
            .define("D", self.head_dim)
            .define("VEC", cuda::pack_width(self.head_dim, &[y, dy])?)
            .arg(y.arg()?)
            .arg(dy.arg()?)
            .arg(delta.arg()?)
            .arg(Arg::I64(rows as i64));
        cuda::launch_on(gpu, launch)
    }

    /// The shape of a number for each query and head.
    fn rows(&self) -> Shape {
        Shape::from([self.batch, self.queries, self.num_heads])
    }

    /// A launch of one of the chosen kernels, over `tokens` of `heads`.
    fn launch<'l>(&self, plan: &Plan, tokens: usize, heads: usize, [q, k]: [Heads<'_>; 2]) -> Launch<'l> {
        let blocks = tokens.div_ceil(plan.rows) * self.batch * heads;
        let mut launch = Launch::new(plan.kernel, [blocks_u32(blocks), 1, 1], [plan.threads, 1, 1])
            .shared_bytes(plan.shared_bytes)
            .define("T", q.tensor.dtype().cuda_name())
            .define("D", self.head_dim)
            .define("HEADS", self.num_heads)
            .define("KV_HEADS", self.num_kv_heads)
            .define("Q_STRIDE", q.stride())
            .define("K_STRIDE", k.stride())
            .define("MASK", self.mask_number());
        for &(name, value) in &plan.defines {
            launch = launch.define(name, value);
        }
        // A window that hides nothing needs no kernel of its own.
        if let Some(window) = self.options.window.filter(|&window| window < self.keys) {
            launch = launch.define("WINDOW", window);
        }
        if let Some(cap) = self.options.softcap {
            launch = launch.define("SOFTCAP", format!("{:?}f", cap as f32));
        }
        launch
    }

    /// The mask as kernels know it.
    pub(super) fn mask_number(&self) -> usize {
        match self.mask {
            AttentionMask::Full => 0,
            AttentionMask::Causal => 1,
            AttentionMask::Ranges(_) => 2,
        }
    }

    /// What both kernels of backward read first.
    fn inputs<'l>(
        &'l self,
        launch: Launch<'l>,
        [q, k, v]: [Heads<'l>; 3],
        [dy, lse]: [&'l Tensor; 2],
    ) -> Result<Launch<'l>> {
        let launch = launch.arg(q.arg()?).arg(k.arg()?).arg(v.arg()?).arg(self.ranges()?);
        Ok(launch.arg(dy.arg()?).arg(lse.arg()?))
    }

    pub(super) fn ranges(&self) -> Result<Arg<'_>> {
        match self.mask {
            AttentionMask::Ranges(ranges) => Ok(ranges.arg()?),
            AttentionMask::Full | AttentionMask::Causal => Ok(Arg::Null),
        }
    }

    /// The last arguments of all kernels.
    pub(super) fn sizes<'l>(&self, launch: Launch<'l>) -> Launch<'l> {
        launch
            .arg(Arg::I32(self.batch as i32))
            .arg(Arg::I32(self.queries as i32))
            .arg(Arg::I32(self.keys as i32))
            .arg(Arg::F32(self.options.scale as f32))
    }
}

/// Blocks of a launch; what does not fit is refused by it.
fn blocks_u32(blocks: usize) -> u32 {
    u32::try_from(blocks).unwrap_or(u32::MAX)
}
