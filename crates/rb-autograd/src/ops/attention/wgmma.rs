//! Attention on Hopper: persistent blocks that copy tiles by tensor maps and multiply with `wgmma`.
//!
//! A block holds one warpgroup that copies and some that compute, its workers, each with 64 queries of one head
//! (forward, gradient of queries) or 64 keys (gradients of keys and values). As many blocks as multiprocessors take
//! the work in an order that gives each as much.

use rb_cuda::{Arg, Gpu, GpuInfo, Kernel, Launch, Tiles, kernel};
use rb_tensor::{DType, Shape, Tensor};

use super::cuda::{Heads, Problem};
use super::{AttentionMask, AttentionOptions};
use crate::{Result, cuda};

pub const FWD: Kernel = kernel!("attention_wgmma_fwd", "attention", "mma", "hopper", "attention_wgmma");
const BWD_Q: Kernel = kernel!("attention_wgmma_bwd_q", "attention", "mma", "hopper", "attention_wgmma");
const BWD_KV: Kernel = kernel!("attention_wgmma_bwd_kv", "attention", "mma", "hopper", "attention_wgmma");

/// Rows of a worker.
const ROWS: usize = 64;

/// Bytes that what the blocks in flight read may take, so that it stays in the level-two cache (50 MB or more).
const CACHED_BYTES: usize = 32 << 20;

/// Blocks to a multiprocessor up to which the query heads of a group are shared among blocks.
const MOST_SPLIT_LOAD: f64 = 1.5;

/// Sizes of a block.
#[derive(Clone, Copy)]
struct Block {
    workers: usize,
    /// Keys of a step; of the gradients of keys and values, queries.
    step: usize,
    /// Steps whose tiles shared memory holds.
    stages: usize,
    /// Registers of a copying and of a computing thread.
    registers: [usize; 2],
    /// Workers that share 64 queries or 64 keys, of which each takes every so manieth step (backward).
    team: usize,
}

// The table was measured on an H200, causal, 12 query and 4 key heads (docs/benchmarks/attention_h200_202611.md).
// Where the blocks of the first row would not fill the card, those of the second do it better. Every row was compiled
// by NVRTC 12.9, 13.0 and 13.5, for 12 and 4 heads without spills and with products that overlap.
//
// Heads of 128: three workers with steps of 64 keys are a tenth faster than two with 128, forward and for the gradient
// of queries, and a few percent slower from 4096 (gradient) and 8192 keys (forward) on.
//
// Rejected: 64 keys a step forward of heads of 64 (10 % slower with 3 workers, 6 % with 4); 2 workers for heads of 64
// (25 % slower forward; for the gradient of queries 17 %, and 8 to 17 % with 128 keys a step); 3 workers for the
// gradients of keys and values (spills, or ptxas waits after each product); queries or keys as operands in registers
// (5 % faster for the gradients of keys and values, but ptxas 13.0 takes their registers for others while they are in
// use: wrong results); turns in backward (8 % slower); skipping the scaling of sums whose maximum stays (2 % slower);
// half of a causal step's products left out with given ranges (ptxas then waits after each product, by version);
// scores and dy v^T of a step before the products of the step before have ended, with heads of 128 (the same).

/// Forward, for so many blocks of three workers to a multiprocessor.
fn forward_block(head_dim: usize, load: f64, keys: usize, with_ranges: bool) -> Block {
    match head_dim {
        64 if load <= 0.5 => Block { workers: 1, step: 64, stages: 4, registers: [24, 240], team: 1 },
        64 => Block { workers: 3, step: 128, stages: 4, registers: [32, 160], team: 1 },
        _ if load <= 0.67 => Block { workers: 1, step: 128, stages: 2, registers: [24, 240], team: 1 },
        // Two workers with given ranges spill.
        _ if with_ranges || (load > 1.0 && keys <= 4096) => {
            Block { workers: 3, step: 64, stages: 4, registers: [32, 160], team: 1 }
        }
        _ => Block { workers: 2, step: 128, stages: 2, registers: [32, 232], team: 1 },
    }
}

/// Gradient of queries. With given ranges, and where each query head has a key head of its own, three workers with heads
/// of 128 spill (`spills`).
fn backward_q_block(head_dim: usize, load: f64, keys: usize, spills: bool) -> Block {
    match head_dim {
        64 if load <= 1.0 => Block { workers: 2, step: 64, stages: 4, registers: [24, 240], team: 2 },
        64 => Block { workers: 3, step: 64, stages: 4, registers: [32, 160], team: 1 },
        _ if load <= 0.67 => Block { workers: 1, step: 64, stages: 4, registers: [24, 240], team: 1 },
        _ if load > 1.0 && keys <= 2048 && !spills => {
            Block { workers: 3, step: 64, stages: 4, registers: [24, 160], team: 1 }
        }
        _ => Block { workers: 2, step: 128, stages: 2, registers: [24, 240], team: 1 },
    }
}

/// Gradients of keys and values.
fn backward_kv_block(head_dim: usize, load: f64) -> Block {
    let usual = Block { workers: 2, step: 64, stages: 4, registers: [24, 240], team: 1 };
    match head_dim {
        _ if load > 1.0 => usual,
        // A team needs more stages, since each of its workers holds one while it reads another; heads of 128 have no
        // room for them.
        64 => Block { stages: 6, team: 2, ..usual },
        _ => Block { team: 2, ..usual },
    }
}

/// Places for the keys and values of an item: two let the next ones arrive while a worker ends its item.
fn key_places(head_dim: usize) -> usize {
    if head_dim <= 64 { 2 } else { 1 }
}

impl Block {
    fn threads(&self) -> u32 {
        128 * (self.workers as u32 + 1)
    }

    /// Shared memory of forward, which holds two tiles of 64 queries for each unit.
    fn forward_bytes(&self, head_dim: usize) -> usize {
        self.bytes_of_queries(head_dim, 2)
    }

    /// Shared memory of the gradient of queries.
    fn query_bytes(&self, head_dim: usize) -> usize {
        self.bytes_of_queries(head_dim, 2 * self.query_places(head_dim))
    }

    fn bytes_of_queries(&self, head_dim: usize, tiles: usize) -> usize {
        let sums = (self.team - 1) * self.units() * 256 * head_dim;
        1024 + head_dim * (tiles * self.units() * 128 + 4 * self.stages * self.step) + sums
    }

    /// Places for the queries and dy of an item: of heads of 128 a stage more is worth more than the second.
    fn query_places(&self, head_dim: usize) -> usize {
        if head_dim <= 64 || self.workers == 1 { 2 } else { 1 }
    }

    fn key_bytes(&self, head_dim: usize) -> usize {
        // Sums of keys and of values, of heads of 128 those of keys alone.
        let sums = (self.team - 1) * self.units() * 32768;
        1024 + 256 * head_dim * key_places(head_dim) * self.units() + self.stages * (256 * head_dim + 1024) + sums
    }

    /// Blocks that share the query heads of a group, for so many blocks to a multiprocessor without: more would not
    /// find room at once, and would do what is the same for each again and again.
    fn split(&self, group: usize, load: f64) -> usize {
        // Clusters of up to 8 blocks run on every card that has them.
        let fits = |n: &usize| group.is_multiple_of(*n) && load * *n as f64 <= MOST_SPLIT_LOAD;
        if self.team == 1 || load > 1.0 { 1 } else { (1..=8).rev().find(fits).unwrap_or(1) }
    }

    /// Pieces of 64 queries or keys.
    fn units(&self) -> usize {
        self.workers / self.team
    }
}

/// Work of a kernel: `blocks` pieces for each of `pairs` key heads, in sections of key heads that read
/// `bytes_each` each.
struct Grid {
    blocks: u32,
    section: usize,
}

fn grid(info: &GpuInfo, pieces: usize, pairs: usize, bytes_each: usize) -> Grid {
    let blocks = (info.multiprocessors as usize).min(pieces * pairs).max(1);
    let most = (CACHED_BYTES / bytes_each.max(1)).clamp(1, pairs);
    // Rounds go forward and backward in turns: sections of whole pairs of rounds share the work evenly, which counts
    // for more than the cache: blocks that are at work at one time read the same tiles at about that time anyway.
    let even = 2 * blocks / gcd(2 * blocks, pieces);
    let section = (most / even * even).max(even).min(pairs);
    Grid { blocks: u32::try_from(blocks).unwrap_or(u32::MAX), section }
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// Why heads of this size with these options do not run on these kernels on a card of this capability; nothing if
/// they do.
pub fn wgmma_reason(
    capability: (u32, u32),
    head_dim: usize,
    keys: usize,
    options: &AttentionOptions,
) -> Option<String> {
    if capability != (9, 0) {
        return Some(format!("compute capability {}.{} is not 9.0", capability.0, capability.1));
    }
    if !matches!(head_dim, 64 | 128) {
        return Some(format!("a head size of {head_dim} is neither 64 nor 128"));
    }
    if options.softcap.is_some() {
        return Some("scores have a cap".into());
    }
    if options.window.is_some_and(|window| window < keys) {
        return Some("there is a window".into());
    }
    (keys == 0).then(|| "there are no keys".into())
}

/// As [`wgmma_reason`], for a problem.
pub fn refusal(info: &GpuInfo, p: &Problem<'_>) -> Option<String> {
    let reason = wgmma_reason(info.capability, p.head_dim, p.keys, &p.options);
    reason.or_else(|| (p.batch * p.queries == 0).then(|| "there are no queries".into()))
}

impl Problem<'_> {
    fn with_ranges(&self) -> bool {
        matches!(self.mask, AttentionMask::Ranges(_))
    }

    fn group(&self) -> usize {
        self.num_heads / self.num_kv_heads
    }

    fn pairs(&self) -> usize {
        self.batch * self.num_kv_heads
    }

    fn query_pieces(&self, workers: usize) -> usize {
        (self.queries.div_ceil(ROWS) * self.group()).div_ceil(workers)
    }

    fn key_pieces(&self, units: usize) -> usize {
        self.keys.div_ceil(ROWS * units)
    }

    /// Blocks for each multiprocessor.
    fn load(&self, info: &GpuInfo, pieces: usize) -> f64 {
        (pieces * self.pairs()) as f64 / f64::from(info.multiprocessors.max(1))
    }

    /// Blocks of three workers for each multiprocessor, of which each has 64 queries.
    fn query_load(&self, info: &GpuInfo) -> f64 {
        self.load(info, self.query_pieces(3))
    }

    fn tiles<'t>(&self, heads: Heads<'t>, count: usize, tokens: usize) -> Result<Arg<'t>> {
        let place = heads.tensor.place()?;
        Ok(Arg::Tiles(Tiles {
            buffer: place.buffer,
            offset_bytes: place.offset_bytes + heads.first * self.head_dim * 2,
            shape: [self.batch, tokens, count, self.head_dim],
            token_stride: heads.stride(),
            box_tokens: ROWS,
        }))
    }

    /// The maps of queries, keys and values.
    fn inputs_as_tiles<'l>(&self, launch: Launch<'l>, [q, k, v]: [Heads<'l>; 3]) -> Result<Launch<'l>> {
        Ok(launch
            .arg(self.tiles(q, self.num_heads, self.queries)?)
            .arg(self.tiles(k, self.num_kv_heads, self.keys)?)
            .arg(self.tiles(v, self.num_kv_heads, self.keys)?))
    }

    fn persistent<'l>(
        &self,
        kernel: &Kernel,
        block: &Block,
        grid: &Grid,
        bytes: usize,
        strides: [usize; 2],
    ) -> Launch<'l> {
        Launch::new(kernel, [grid.blocks, 1, 1], [block.threads(), 1, 1])
            .shared_bytes(bytes)
            .define("D", self.head_dim)
            .define("HEADS", self.num_heads)
            .define("KV_HEADS", self.num_kv_heads)
            .define("Q_STRIDE", strides[0])
            .define("K_STRIDE", strides[1])
            .define("MASK", self.mask_number())
            .define("WORKERS", block.workers)
            .define("KEYS", block.step)
            .define("STAGES", block.stages)
            .define("SPARE", block.registers[0])
            .define("SHARE", block.registers[1])
    }

    /// The last argument of a kernel of backward: by what it turns its gradients back.
    fn turning<'l>(&'l self, launch: Launch<'l>) -> Result<Launch<'l>> {
        let launch = launch.define("TURN", u8::from(self.angles.is_some()));
        Ok(launch.arg(self.angles.map_or(Ok(Arg::Null), Tensor::arg)?))
    }

    fn end<'l>(&self, launch: Launch<'l>, grid: &Grid) -> Launch<'l> {
        self.sizes(launch).arg(Arg::I32(grid.section as i32))
    }
}

/// Writes the output and `lse`.
pub fn forward(p: &Problem<'_>, gpu: Gpu, [q, k, v]: [Heads<'_>; 3], [y, lse]: [&Tensor; 2]) -> Result<()> {
    let info = gpu.info();
    let block = forward_block(p.head_dim, p.query_load(info), p.keys, p.with_ranges());
    let grid = grid(info, p.query_pieces(block.workers), p.pairs(), 4 * p.keys * p.head_dim);
    // Of long rows it is next to nothing.
    let half = p.head_dim == 64 && block.step == 128 && p.keys <= 2048;
    let half = half && matches!(p.mask, AttentionMask::Causal);
    let launch = p
        .persistent(&FWD, &block, &grid, block.forward_bytes(p.head_dim), [q.stride(), k.stride()])
        .define("HALF", usize::from(half));
    let launch = p.inputs_as_tiles(launch, [q, k, v])?.arg(p.ranges()?).arg(y.arg()?).arg(lse.arg()?);
    cuda::launch_on(gpu, p.end(launch, &grid))
}

/// Writes the gradients of queries, keys and values.
pub fn backward(
    p: &Problem<'_>,
    gpu: Gpu,
    [q, k, v]: [Heads<'_>; 3],
    [y, dy, lse]: [&Tensor; 3],
    [dq, dk, dv]: [Heads<'_>; 3],
) -> Result<()> {
    let info = gpu.info();
    let (tiles, strides) = (p.queries.div_ceil(ROWS), [q.stride(), k.stride()]);
    let sums = cuda::output(gpu, &Shape::from([p.batch, p.num_heads, tiles * ROWS, 2]), DType::F32)?;
    // Given ranges are checked once, and what 64 queries see is found once.
    let with_ranges = p.with_ranges();
    let of_ranges = |shape: [usize; 3]| -> Result<Option<Tensor>> {
        let make = || cuda::output(gpu, &Shape::from(shape), DType::I32);
        with_ranges.then(make).transpose()
    };
    let (spans, reaches) = (of_ranges([p.batch, tiles * ROWS, 2])?, of_ranges([p.batch, tiles, 4])?);
    let dy_tiles = p.tiles(Heads::all(dy), p.num_heads, p.queries)?;

    let block = backward_q_block(p.head_dim, p.query_load(info), p.keys, with_ranges || p.group() == 1);
    let q_grid = grid(info, p.query_pieces(block.units()), p.pairs(), 4 * p.keys * p.head_dim);
    let launch = p
        .persistent(&BWD_Q, &block, &q_grid, block.query_bytes(p.head_dim), strides)
        .define("PLACES", block.query_places(p.head_dim))
        .define("TEAM", block.team);
    let launch = p
        .inputs_as_tiles(launch, [q, k, v])?
        .arg(dy_tiles)
        .arg(p.ranges()?)
        .arg(y.arg()?)
        .arg(lse.arg()?)
        .arg(dq.arg()?)
        .arg(sums.arg()?)
        .arg(optional(&spans)?)
        .arg(optional(&reaches)?);
    cuda::launch_on(gpu, p.turning(p.end(launch, &q_grid))?)?;

    let block = backward_kv_block(p.head_dim, p.load(info, p.key_pieces(2)));
    let read_each = 4 * p.queries * p.head_dim * p.group();
    let mut kv_grid = grid(info, p.key_pieces(block.units()), p.pairs(), read_each);
    let split = block.split(p.group(), p.load(info, p.key_pieces(block.units())));
    if split > 1 {
        // One round of clusters; fewer items than multiprocessors, so that the grid has a block for each.
        kv_grid.blocks *= split as u32;
    }
    let launch = p
        .persistent(&BWD_KV, &block, &kv_grid, block.key_bytes(p.head_dim), strides)
        .define("PLACES", key_places(p.head_dim))
        .define("TEAM", block.team)
        .define("SPLIT", split);
    let launch = p
        .inputs_as_tiles(launch, [q, k, v])?
        .arg(dy_tiles)
        .arg(sums.arg()?)
        .arg(optional(&spans)?)
        .arg(optional(&reaches)?)
        .arg(dk.arg()?)
        .arg(dv.arg()?);
    cuda::launch_on(gpu, p.turning(p.end(launch, &kv_grid))?)
}

fn optional(tensor: &Option<Tensor>) -> Result<Arg<'_>> {
    match tensor {
        Some(tensor) => Ok(tensor.arg()?),
        None => Ok(Arg::Null),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::attention_packed::DeviceAttention;
    use rb_cuda::GpuOptions;
    use rb_tensor::Device;

    #[test]
    fn every_block_fits_shared_memory_and_registers() {
        let lengths = [(1024, false), (4096, false), (8192, false), (1024, true)];
        for (head_dim, load) in [64, 128].into_iter().flat_map(|d| [0.1, 0.7, 2.0].map(|load| (d, load))) {
            for (keys, with_ranges) in lengths {
                let q = backward_q_block(head_dim, load, keys, with_ranges);
                let kv = backward_kv_block(head_dim, load);
                let fwd = forward_block(head_dim, load, keys, with_ranges);
                let bytes = [fwd.forward_bytes(head_dim), q.query_bytes(head_dim), kv.key_bytes(head_dim)];
                assert!(bytes.iter().all(|&bytes| bytes + 1024 <= 227 << 10), "D {head_dim}: {bytes:?}");
                for block in [fwd, q, kv] {
                    let threads = block.threads() as usize;
                    // What a launch gives a thread, of 65536 for all; more would be waited for without end.
                    let given = (65536 / threads / 8 * 8).min(248) * (block.workers + 1);
                    let taken = block.registers[0] + block.workers * block.registers[1];
                    assert!(taken <= given, "{} workers take {taken} of {given}", block.workers);
                }
            }
        }
    }

    #[test]
    fn few_blocks_share_the_heads_of_a_group() {
        let split = |group, load| backward_kv_block(64, load).split(group, load);
        assert_eq!([split(3, 0.24), split(3, 0.49), split(3, 0.97), split(3, 2.0)], [3, 3, 1, 1]);
        assert_eq!([split(1, 0.1), split(2, 0.7), split(4, 0.5), split(12, 0.1), split(11, 0.1)], [1, 2, 2, 6, 1]);
        assert_eq!(backward_kv_block(128, 0.1).split(3, 0.1), 3);
        assert_eq!(backward_kv_block(128, 1.1).split(3, 1.1), 1, "no team whose sums could be added");
    }

    #[test]
    fn work_is_shared_in_even_rounds_where_the_cache_allows() {
        let gpu = Gpu::dry((9, 0), &GpuOptions::default());
        let info = GpuInfo { multiprocessors: 132, ..gpu.info().clone() };
        // 16 pieces: 33 key heads are four rounds of 132 blocks; a cache of 128 heads holds 99.
        let shared = grid(&info, 16, 256, 256 << 10);
        assert_eq!((shared.blocks, shared.section), (132, 99));
        // Heads too long for that: one pair of rounds nevertheless, or all heads.
        assert_eq!(grid(&info, 64, 256, 2 << 20).section, 33);
        assert_eq!(grid(&info, 64, 16, 1 << 30).section, 16);
        // Less work than multiprocessors.
        assert_eq!(grid(&info, 3, 4, 1 << 10).blocks, 12);
    }

    /// The kernels that run when nothing asks for any.
    fn chosen(capability: (u32, u32), head_dim: usize, options: AttentionOptions, dtype: DType) -> String {
        let gpu = Gpu::dry(capability, &GpuOptions::default());
        let make = |heads: usize| Tensor::uninit([2, 70, heads, head_dim], dtype, Device::Cuda(gpu)).unwrap();
        let attention = DeviceAttention::new(&make(5), 3, 1, &AttentionMask::Causal, options, None).unwrap();
        let [y, lse] = attention.forward().unwrap();
        attention.backward([&y, &lse], &make(3)).unwrap();
        gpu.launches().into_keys().collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn hopper_takes_these_kernels_where_they_apply() {
        let plain = AttentionOptions::from(0.125);
        let here = "attention_wgmma_bwd_kv attention_wgmma_bwd_q attention_wgmma_fwd";
        assert_eq!(chosen((9, 0), 64, plain, DType::BF16), here);
        assert_eq!(chosen((9, 0), 128, plain, DType::BF16), here);
        assert_eq!(chosen((9, 0), 64, AttentionOptions { window: Some(70), ..plain }, DType::BF16), here);
        let mma = "attention_mma_bwd_kv attention_mma_bwd_q attention_mma_fwd";
        assert_eq!(chosen((8, 0), 64, plain, DType::BF16), mma);
        assert_eq!(chosen((12, 0), 128, plain, DType::BF16), mma);
        assert_eq!(chosen((9, 0), 96, plain, DType::BF16), mma);
        assert_eq!(chosen((9, 0), 64, AttentionOptions { window: Some(69), ..plain }, DType::BF16), mma);
        assert_eq!(chosen((9, 0), 64, AttentionOptions { softcap: Some(30.0), ..plain }, DType::BF16), mma);
        let reference = "attention_bwd_kv attention_bwd_q attention_delta attention_fwd";
        assert_eq!(chosen((9, 0), 64, plain, DType::F32), reference);
        assert_eq!(chosen((9, 0), 64, AttentionOptions::from(-1.0), DType::BF16), reference);
    }

    #[test]
    fn what_does_not_run_here_is_named() {
        let options = AttentionOptions::from(0.125);
        let reason = wgmma_reason;
        assert_eq!(reason((9, 0), 64, 10, &options), None);
        assert_eq!(reason((12, 0), 64, 10, &options).unwrap(), "compute capability 12.0 is not 9.0");
        assert_eq!(reason((9, 0), 96, 10, &options).unwrap(), "a head size of 96 is neither 64 nor 128");
        let window = AttentionOptions { window: Some(9), ..options };
        assert_eq!(reason((9, 0), 64, 10, &window).unwrap(), "there is a window");
        assert_eq!(reason((9, 0), 64, 9, &window), None);
        let capped = AttentionOptions { softcap: Some(1.0), ..options };
        assert_eq!(reason((9, 0), 64, 10, &capped).unwrap(), "scores have a cap");
        assert_eq!(reason((9, 0), 64, 0, &options).unwrap(), "there are no keys");
    }
}
