//! Attention on a GPU, for separate and for packed inputs.

use rb_cuda::{Arg, Gpu, Kernel, Launch, kernel};
use rb_tensor::{DType, Shape, Tensor};

use super::AttentionMask;
use crate::{AutogradError, Result, cuda};

const ATTENTION_FWD: Kernel = kernel!("attention_fwd", "attention");
const ATTENTION_DELTA: Kernel = kernel!("attention_delta");
const ATTENTION_BWD_KV: Kernel = kernel!("attention_bwd_kv", "attention");
const ATTENTION_BWD_Q: Kernel = kernel!("attention_bwd_q", "attention");
const ATTENTION_MMA_FWD: Kernel = kernel!("attention_mma_fwd", "attention", "mma", "attention_mma");
const ATTENTION_MMA_BWD_KV: Kernel = kernel!("attention_mma_bwd_kv", "attention", "mma", "attention_mma");
const ATTENTION_MMA_BWD_Q: Kernel = kernel!("attention_mma_bwd_q", "attention", "mma", "attention_mma");

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

/// The three kernels that do the work, and what their launches need.
struct Variant {
    fwd: &'static Kernel,
    bwd_kv: &'static Kernel,
    bwd_q: &'static Kernel,
    /// Queries, and keys, of one block.
    tile: usize,
    threads: u32,
    /// Shared memory of each of the three, in bytes.
    shared_bytes: [usize; 3],
}

/// The only choice of an implementation: tensor cores where they apply, else the plain kernels, which are also
/// their reference. `tensors` are all rows of heads that the kernels read or write.
fn variant(gpu: Gpu, head_dim: usize, mask: &AttentionMask, tensors: &[&Tensor]) -> Result<Variant> {
    let mut mma = gpu.info().capability >= (8, 0) && matches!(head_dim, 32 | 64 | 96 | 128);
    for tensor in tensors {
        mma &= tensor.dtype() == DType::BF16 && tensor.place()?.offset_bytes.is_multiple_of(16);
    }
    if let AttentionMask::Ranges(ranges) = mask {
        mma &= ranges.place()?.offset_bytes.is_multiple_of(8);
    }
    if mma {
        let rows = 64 * (head_dim + 8) * 2;
        return Ok(Variant {
            fwd: &ATTENTION_MMA_FWD,
            bwd_kv: &ATTENTION_MMA_BWD_KV,
            bwd_q: &ATTENTION_MMA_BWD_Q,
            tile: 64,
            threads: 128,
            shared_bytes: [3 * rows, 4 * rows + 1024, 2 * rows],
        });
    }
    let tile = if head_dim <= 128 { 32 } else { 16 };
    let (rows, scores) = (4 * tile * (head_dim | 1), 4 * tile * (tile + 1));
    Ok(Variant {
        fwd: &ATTENTION_FWD,
        bwd_kv: &ATTENTION_BWD_KV,
        bwd_q: &ATTENTION_BWD_Q,
        tile,
        threads: 8 * tile as u32,
        shared_bytes: [3 * rows + scores, 4 * rows + 2 * scores, 4 * rows + scores],
    })
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
            let chosen = variant(gpu, self.head_dim, self.mask, &[q.tensor, k.tensor, v.tensor, &y])?;
            let blocks = self.queries.div_ceil(chosen.tile) * self.batch * self.num_heads;
            let launch = self
                .launch(chosen.fwd, &chosen, blocks, chosen.shared_bytes[0], [q, k])
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
        let tensors = [q.tensor, k.tensor, v.tensor, dy, dq.tensor, dk.tensor, dv.tensor];
        let chosen = variant(gpu, self.head_dim, self.mask, &tensors)?;
        let [_, shared_kv, shared_q] = chosen.shared_bytes;
        let delta = cuda::output(gpu, &self.rows(), DType::F32)?;
        if y.numel() > 0 {
            let rows = delta.numel();
            let launch = Launch::new(&ATTENTION_DELTA, [blocks_u32(rows.div_ceil(8)), 1, 1], [256, 1, 1])
                .define("T", y.dtype().cuda_name())
                .define("D", self.head_dim)
                .define("VEC", cuda::pack_width(self.head_dim, &[y, dy])?)
                .arg(y.arg()?)
                .arg(dy.arg()?)
                .arg(delta.arg()?)
                .arg(Arg::I64(rows as i64));
            cuda::launch_on(gpu, launch)?;
            let blocks = self.queries.div_ceil(chosen.tile) * self.batch * self.num_heads;
            let launch = self.launch(chosen.bwd_q, &chosen, blocks, shared_q, [q, k]);
            let launch = self.inputs(launch, [q, k, v], [dy, lse, &delta])?.arg(dq.arg()?);
            cuda::launch_on(gpu, self.sizes(launch))?;
        }
        if self.batch * self.keys * self.head_dim > 0 {
            let blocks = self.keys.div_ceil(chosen.tile) * self.batch * self.num_kv_heads;
            let launch = self.launch(chosen.bwd_kv, &chosen, blocks, shared_kv, [q, k]);
            let launch = self.inputs(launch, [q, k, v], [dy, lse, &delta])?.arg(dk.arg()?).arg(dv.arg()?);
            cuda::launch_on(gpu, self.sizes(launch))?;
        }
        Ok(())
    }

    /// The shape of a number for each query and head.
    fn rows(&self) -> Shape {
        Shape::from([self.batch, self.queries, self.num_heads])
    }

    /// A launch of one of the chosen kernels.
    fn launch<'l>(
        &self,
        kernel: &Kernel,
        chosen: &Variant,
        blocks: usize,
        shared_bytes: usize,
        [q, k]: [Heads<'_>; 2],
    ) -> Launch<'l> {
        Launch::new(kernel, [blocks_u32(blocks), 1, 1], [chosen.threads, 1, 1])
            .shared_bytes(shared_bytes)
            .define("T", q.tensor.dtype().cuda_name())
            .define("TILE", chosen.tile)
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
