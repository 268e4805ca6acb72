//! Attention on a GPU, for separate and for packed inputs.

use rb_cuda::{Arg, Gpu, Kernel, Launch, kernel};
use rb_tensor::{DType, Shape, Tensor};

use super::AttentionMask;
use crate::{AutogradError, Result, cuda};

const ATTENTION_FWD: Kernel = kernel!("attention_fwd", "attention");
const ATTENTION_DELTA: Kernel = kernel!("attention_delta");
const ATTENTION_BWD_KV: Kernel = kernel!("attention_bwd_kv", "attention");
const ATTENTION_BWD_Q: Kernel = kernel!("attention_bwd_q", "attention");

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
    fn stride(&self) -> usize {
        self.tensor.shape()[2] * self.tensor.shape()[3]
    }

    fn arg(&self) -> Result<Arg<'a>> {
        cuda::arg_from(self.tensor, self.first * self.tensor.shape()[3])
    }
}

/// Sizes, scale and mask of one attention.
pub struct Problem<'a> {
    batch: usize,
    queries: usize,
    keys: usize,
    num_heads: usize,
    num_kv_heads: usize,
    head_dim: usize,
    scale: f64,
    mask: &'a AttentionMask,
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
        scale: f64,
    ) -> Result<Self> {
        let (batch, queries, num_heads, head_dim) = (q[0], q[1], q[2], q[3]);
        if head_dim > MAX_HEAD_DIM {
            let (argument, got) = ("the head size", head_dim.to_string());
            let expected = format!("at most {MAX_HEAD_DIM} on a GPU");
            return Err(AutogradError::Argument { op, argument, got, expected });
        }
        Ok(Problem { batch, queries, keys, num_heads, num_kv_heads, head_dim, scale, mask })
    }

    /// Output `[B, T, Hq, D]` and `lse [B, T, Hq]` in f32.
    pub fn forward(&self, gpu: Gpu, [q, k, v]: [Heads<'_>; 3], out: &Shape) -> Result<(Tensor, Tensor)> {
        let y = cuda::output(gpu, out, q.tensor.dtype())?;
        let lse = cuda::output(gpu, &self.rows(), DType::F32)?;
        if y.numel() > 0 {
            let blocks = self.queries.div_ceil(self.tile()) * self.batch * self.num_heads;
            let launch = self
                .plain(&ATTENTION_FWD, blocks, 3, 1, [q, k])
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

    /// Writes the gradients of queries, keys and values.
    pub fn backward(
        &self,
        gpu: Gpu,
        [q, k, v]: [Heads<'_>; 3],
        [y, dy, lse]: [&Tensor; 3],
        [dq, dk, dv]: [Heads<'_>; 3],
    ) -> Result<()> {
        let delta = cuda::output(gpu, &self.rows(), DType::F32)?;
        if y.numel() > 0 {
            let rows = delta.numel();
            let launch = Launch::new(&ATTENTION_DELTA, [blocks_u32(rows.div_ceil(8)), 1, 1], [256, 1, 1])
                .define("T", y.dtype().cuda_name())
                .define("D", self.head_dim)
                .arg(y.arg()?)
                .arg(dy.arg()?)
                .arg(delta.arg()?)
                .arg(Arg::I64(rows as i64));
            cuda::launch_on(gpu, launch)?;
            let blocks = self.queries.div_ceil(self.tile()) * self.batch * self.num_heads;
            let launch = self.plain(&ATTENTION_BWD_Q, blocks, 4, 1, [q, k]);
            let launch = self.inputs(launch, [q, k, v], [dy, lse, &delta])?.arg(dq.arg()?);
            cuda::launch_on(gpu, self.sizes(launch))?;
        }
        if self.batch * self.keys * self.head_dim > 0 {
            let blocks = self.keys.div_ceil(self.tile()) * self.batch * self.num_kv_heads;
            let launch = self.plain(&ATTENTION_BWD_KV, blocks, 4, 2, [q, k]);
            let launch = self.inputs(launch, [q, k, v], [dy, lse, &delta])?.arg(dk.arg()?).arg(dv.arg()?);
            cuda::launch_on(gpu, self.sizes(launch))?;
        }
        Ok(())
    }

    /// The shape of a number for each query and head.
    fn rows(&self) -> Shape {
        Shape::from([self.batch, self.queries, self.num_heads])
    }

    /// Queries, and keys, of one block of the plain kernels.
    fn tile(&self) -> usize {
        if self.head_dim <= 128 { 32 } else { 16 }
    }

    /// A launch of a plain kernel, whose shared memory holds tiles of rows and of scores.
    fn plain<'l>(
        &self,
        kernel: &Kernel,
        blocks: usize,
        row_tiles: usize,
        score_tiles: usize,
        [q, k]: [Heads<'_>; 2],
    ) -> Launch<'l> {
        let tile = self.tile();
        let floats = tile * (row_tiles * (self.head_dim | 1) + score_tiles * (tile + 1));
        Launch::new(kernel, [blocks_u32(blocks), 1, 1], [8 * tile as u32, 1, 1])
            .shared_bytes(4 * floats)
            .define("T", q.tensor.dtype().cuda_name())
            .define("TILE", tile)
            .define("D", self.head_dim)
            .define("HEADS", self.num_heads)
            .define("KV_HEADS", self.num_kv_heads)
            .define("Q_STRIDE", q.stride())
            .define("K_STRIDE", k.stride())
            .define(
                "MASK",
                match self.mask {
                    AttentionMask::Full => 0,
                    AttentionMask::Causal => 1,
                    AttentionMask::Ranges(_) => 2,
                },
            )
    }

    /// What both kernels of backward read.
    fn inputs<'l>(
        &'l self,
        launch: Launch<'l>,
        [q, k, v]: [Heads<'l>; 3],
        [dy, lse, delta]: [&'l Tensor; 3],
    ) -> Result<Launch<'l>> {
        let launch = launch.arg(q.arg()?).arg(k.arg()?).arg(v.arg()?).arg(self.ranges()?);
        Ok(launch.arg(dy.arg()?).arg(lse.arg()?).arg(delta.arg()?))
    }

    fn ranges(&self) -> Result<Arg<'_>> {
        match self.mask {
            AttentionMask::Ranges(ranges) => Ok(ranges.arg()?),
            AttentionMask::Full | AttentionMask::Causal => Ok(Arg::Null),
        }
    }

    /// The last arguments of all kernels.
    fn sizes<'l>(&self, launch: Launch<'l>) -> Launch<'l> {
        launch
            .arg(Arg::I32(self.batch as i32))
            .arg(Arg::I32(self.queries as i32))
            .arg(Arg::I32(self.keys as i32))
            .arg(Arg::F32(self.scale as f32))
    }
}

/// Blocks of a launch; what does not fit is refused by it.
fn blocks_u32(blocks: usize) -> u32 {
    u32::try_from(blocks).unwrap_or(u32::MAX)
}
