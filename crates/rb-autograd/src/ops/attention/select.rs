//! Which kernels compute an attention: one choice, by card, element type, shape and alignment.

use rb_cuda::{Gpu, GpuInfo, Kernel, kernel};
use rb_tensor::{DType, Tensor};

use super::{AttentionMask, cuda::Problem, wgmma};
use crate::{AutogradError, Result};

const ATTENTION_FWD: Kernel = kernel!("attention_fwd", "attention");
const ATTENTION_BWD_KV: Kernel = kernel!("attention_bwd_kv", "attention");
const ATTENTION_BWD_Q: Kernel = kernel!("attention_bwd_q", "attention");
const ATTENTION_MMA_FWD: Kernel = kernel!("attention_mma_fwd", "attention", "mma", "attention_mma");
const ATTENTION_MMA_BWD_KV: Kernel = kernel!("attention_mma_bwd_kv", "attention", "mma", "attention_mma");
const ATTENTION_MMA_BWD_Q: Kernel = kernel!("attention_mma_bwd_q", "attention", "mma", "attention_mma");

/// A family of kernels that compute attention on a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum AttentionPath {
    /// Any float type and head size up to 256, without tensor cores: the reference of the others.
    Plain,
    /// bf16 on tensor cores by `mma.sync`, from compute capability 8.0 on.
    Mma,
    /// bf16 on tensor cores by `wgmma`, on compute capability 9.0, for heads of 64 or 128 without cap or window.
    Wgmma,
}

impl AttentionPath {
    /// All of them, the slowest first.
    pub const ALL: [AttentionPath; 3] = [AttentionPath::Plain, AttentionPath::Mma, AttentionPath::Wgmma];

    /// `plain`, `mma` or `wgmma`.
    pub fn name(self) -> &'static str {
        match self {
            AttentionPath::Plain => "plain",
            AttentionPath::Mma => "mma",
            AttentionPath::Wgmma => "wgmma",
        }
    }

    /// The kernel of its forward: proof of which path ran.
    pub fn forward_kernel(self) -> &'static str {
        match self {
            AttentionPath::Plain => ATTENTION_FWD.name,
            AttentionPath::Mma => ATTENTION_MMA_FWD.name,
            AttentionPath::Wgmma => wgmma::FWD.name,
        }
    }
}

/// How one kernel is launched.
pub struct Plan {
    pub kernel: &'static Kernel,
    /// Queries, or keys, of one block.
    pub rows: usize,
    pub threads: u32,
    pub shared_bytes: usize,
    pub defines: Vec<(&'static str, usize)>,
}

/// A block for each piece of queries or keys.
pub struct Plans {
    /// Whether the sums of `dy * y` need a kernel of their own.
    pub apart: bool,
    pub fwd: Plan,
    pub bwd_q: Plan,
    pub bwd_kv: Plan,
}

/// How an attention is computed.
pub enum Chosen {
    Blocks(Plans),
    /// As [`wgmma`] launches it.
    Wgmma,
}

/// The only choice of an implementation: the fastest that applies. `tensors` are all rows of heads that the kernels
/// read or write.
///
/// # Errors
/// [`AutogradError::Argument`] where the problem names a path that cannot compute it.
pub fn select(gpu: Gpu, problem: &Problem<'_>, tensors: &[&Tensor]) -> Result<Chosen> {
    let info = gpu.info();
    let no_mma = mma_refusal(info, problem, tensors)?;
    let no_wgmma = no_mma.clone().or_else(|| wgmma::refusal(info, problem));
    let path = match problem.path {
        Some(path) => path,
        None if no_mma.is_some() => AttentionPath::Plain,
        None if no_wgmma.is_some() => AttentionPath::Mma,
        None => AttentionPath::Wgmma,
    };
    let reason = match path {
        AttentionPath::Plain => None,
        AttentionPath::Mma => no_mma,
        AttentionPath::Wgmma => no_wgmma,
    };
    if let Some(reason) = reason {
        return Err(AutogradError::Argument {
            op: "attention",
            argument: "the path",
            got: path.name().into(),
            expected: format!("a slower one: {reason}"),
        });
    }
    Ok(match path {
        AttentionPath::Plain => Chosen::Blocks(plain(problem.head_dim)),
        AttentionPath::Mma => Chosen::Blocks(mma(info, problem)),
        AttentionPath::Wgmma => Chosen::Wgmma,
    })
}

/// Why heads of this size do not run on tensor cores on a card of this capability; nothing if they do.
pub fn mma_reason(capability: (u32, u32), head_dim: usize) -> Option<String> {
    if capability < (8, 0) {
        return Some(format!("compute capability {}.{} is below 8.0", capability.0, capability.1));
    }
    let known = matches!(head_dim, 32 | 64 | 96 | 128);
    (!known).then(|| format!("a head size of {head_dim} is none of 32, 64, 96 and 128"))
}

fn mma_refusal(info: &GpuInfo, problem: &Problem<'_>, tensors: &[&Tensor]) -> Result<Option<String>> {
    if let Some(reason) = mma_reason(info.capability, problem.head_dim) {
        return Ok(Some(reason));
    }
    let scale = problem.options.scale;
    if !((scale as f32).is_normal() && scale > 0.0) {
        return Ok(Some(format!("a scale of {scale} is not above 0")));
    }
    for tensor in tensors {
        if tensor.dtype() != DType::BF16 {
            return Ok(Some(format!("the element type is {}, not bf16", tensor.dtype())));
        }
        if !tensor.place()?.offset_bytes.is_multiple_of(16) {
            return Ok(Some("a tensor is not aligned to 16 bytes".into()));
        }
    }
    if let AttentionMask::Ranges(ranges) = problem.mask
        && !ranges.place()?.offset_bytes.is_multiple_of(8)
    {
        return Ok(Some("the ranges of the mask are not aligned to 8 bytes".into()));
    }
    Ok(None)
}

fn plain(head_dim: usize) -> Plans {
    let tile = if head_dim <= 128 { 32 } else { 16 };
    let (rows, scores) = (4 * tile * (head_dim | 1), 4 * tile * (tile + 1));
    let plan = |kernel, shared_bytes| Plan {
        kernel,
        rows: tile,
        threads: 8 * tile as u32,
        shared_bytes,
        defines: vec![("TILE", tile)],
    };
    Plans {
        apart: true,
        fwd: plan(&ATTENTION_FWD, 3 * rows + scores),
        bwd_q: plan(&ATTENTION_BWD_Q, 4 * rows + scores),
        bwd_kv: plan(&ATTENTION_BWD_KV, 4 * rows + 2 * scores),
    }
}

/// Sizes of a tensor core kernel.
#[derive(Clone, Copy)]
struct Tile {
    /// Warps that share the rows of a block.
    warps: usize,
    /// Fragments of 16 rows of a warp.
    fragments: usize,
    /// Keys, or queries in the gradients of keys, of one turn of the loop.
    columns: usize,
    /// Blocks that a multiprocessor should hold: the limit of registers.
    blocks: usize,
    /// Whether queries (forward) stay in shared memory, or keys and values (their gradients) stay in registers.
    keep: bool,
    /// Teams of warps that share the loop over queries.
    teams: usize,
}

const fn tile(warps: usize, fragments: usize, columns: usize, blocks: usize) -> Tile {
    Tile { warps, fragments, columns, blocks, keep: false, teams: 1 }
}

impl Tile {
    const fn keep(self) -> Tile {
        Tile { keep: true, ..self }
    }

    const fn teams(self, teams: usize) -> Tile {
        Tile { teams, ..self }
    }

    fn rows(&self) -> usize {
        16 * self.warps * self.fragments
    }

    fn plan(&self, kernel: &'static Kernel, columns: &'static str, shared_bytes: usize) -> Plan {
        let defines = vec![
            ("WARPS", self.warps),
            ("FRAGS", self.fragments),
            (columns, self.columns),
            ("BLOCKS", self.blocks),
        ];
        let threads = (32 * self.warps * self.teams) as u32;
        Plan { kernel, rows: self.rows(), threads, shared_bytes, defines }
    }

    fn forward(&self, head_dim: usize) -> Plan {
        let (twice, rows) = (2 * self.columns, self.rows());
        let lines = if self.keep { 2 * twice + rows } else { (2 * twice).max(twice + rows) };
        let mut plan = self.plan(&ATTENTION_MMA_FWD, "KEYS", 2 * (head_dim + 8) * lines);
        plan.defines.push(("Q_SHARED", usize::from(self.keep)));
        plan
    }

    fn backward_q(&self, head_dim: usize) -> Plan {
        let lines = (2 * self.columns).max(self.columns + self.rows());
        self.plan(&ATTENTION_MMA_BWD_Q, "KEYS", 4 * (head_dim + 8) * lines)
    }

    fn backward_kv(&self, head_dim: usize) -> Plan {
        let turn = self.columns * (8 * (head_dim + 8) + 32);
        let tiles = 4 * (head_dim + 8) * self.rows() + self.teams * turn;
        let sums = 8 * head_dim * self.rows() * (self.teams - 1);
        let mut plan = self.plan(&ATTENTION_MMA_BWD_KV, "QUERIES", tiles.max(sums));
        plan.defines.extend([("KEEP", usize::from(self.keep)), ("TEAMS", self.teams)]);
        plan
    }
}

// The tables below were measured on an H200, causal, 12 query and 4 key heads, T 512 to 4096
// (docs/benchmarks/attention_h200_202611.md). Few blocks want many small ones, many want each fragment of keys to
// serve two of queries. On cards with 99 KiB of shared memory a block they are unmeasured; what does not fit there
// gives way to the next row.
//
// Rejected everywhere: 8 warps instead of 4 (10 to 25 % slower: more warps wait at each barrier); 128 keys a turn
// (spills with two fragments, 30 % slower with one); heads of 96 with two fragments in backward, heads of 128 with
// two fragments and 64 keys, and eight warps under two blocks (spills).

/// Forward. `load` is blocks of 64 queries to a multiprocessor.
fn forward_tile(head_dim: usize, load: f64, capped: bool) -> Tile {
    match (head_dim, load >= 4.0) {
        (32, false) => tile(4, 1, 64, 4),
        // 64 keys are 4 % faster on an H200, and spill 8 bytes.
        (32, true) => tile(4, 2, 32, 3),
        (64, false) => tile(4, 1, 64, 3),
        // 32 keys: 4 % slower. Queries in shared memory: 2 %.
        (64, true) => tile(4, 2, 64, 2),
        (96 | 128, false) => tile(4, 1, 64, 2),
        // Queries in shared memory: 4 % slower, but with a cap they spill on sm_120.
        (96, true) if !capped => tile(4, 2, 32, 2),
        // Queries in registers spill.
        (_, _) => tile(4, 2, 32, 2).keep(),
    }
}

/// Gradient of queries. `load` as forward.
fn backward_q_tile(head_dim: usize, load: f64) -> Tile {
    match (head_dim, load >= 4.0) {
        (32, false) => tile(4, 1, 64, 3),
        (32, true) => tile(4, 2, 64, 2),
        (64, false) => tile(4, 1, 64, 2),
        (64, true) => tile(4, 2, 32, 2),
        // 64 keys: 2 % faster with heads of 96, but all registers; slower with 128.
        (_, _) => tile(4, 1, 32, 2),
    }
}

/// Gradients of keys and values, the first that fits is taken. `load` is blocks of 64 keys to a multiprocessor:
/// a block runs over all queries of all heads of its group, so few blocks leave a card idle and are shared by teams.
/// A cap takes registers: two fragments would spill with it.
fn backward_kv_tiles(head_dim: usize, load: f64, capped: bool) -> &'static [Tile] {
    const D32_FEW: &[Tile] = &[tile(4, 1, 64, 1).keep().teams(2)];
    const D32_MANY: &[Tile] = &[tile(4, 2, 64, 2)];
    const D64_FEW: &[Tile] = &[tile(2, 1, 64, 1).keep().teams(4), tile(2, 1, 32, 1).keep().teams(3)];
    const D64_SOME: &[Tile] = &[tile(4, 1, 32, 1).keep().teams(3)];
    const D64_MANY: &[Tile] = &[tile(4, 2, 32, 1).teams(2)];
    const D64_CROWD: &[Tile] = &[tile(4, 2, 32, 2)];
    const D96_FEW: &[Tile] = &[tile(2, 1, 32, 1).teams(4), tile(2, 1, 32, 1).teams(2)];
    const D96_SOME: &[Tile] = &[tile(4, 1, 32, 1).teams(2)];
    const D96_MANY: &[Tile] = &[tile(4, 1, 32, 2).keep()];
    const D128_FEW: &[Tile] = &[tile(2, 1, 32, 1).teams(4), tile(2, 1, 32, 1).teams(2)];
    // 16 queries: 11 % slower, for cards where 32 do not fit.
    const D128_SOME: &[Tile] = &[tile(4, 1, 32, 1).teams(2), tile(4, 1, 16, 1).teams(2)];
    const D128_MANY: &[Tile] = &[tile(4, 1, 32, 2)];
    let (few, some) = (load < 1.5, load < 3.0);
    match head_dim {
        32 if load < 4.0 || capped => D32_FEW,
        32 => D32_MANY,
        64 if few => D64_FEW,
        64 if some || capped => D64_SOME,
        64 if load < 10.0 => D64_MANY,
        64 => D64_CROWD,
        96 if few => D96_FEW,
        96 if some => D96_SOME,
        96 => D96_MANY,
        _ if few => D128_FEW,
        _ if some => D128_SOME,
        _ => D128_MANY,
    }
}

fn mma(info: &GpuInfo, problem: &Problem<'_>) -> Plans {
    let d = problem.head_dim;
    let load = |tokens: usize, heads: usize| {
        (tokens.div_ceil(64) * problem.batch * heads) as f64 / f64::from(info.multiprocessors.max(1))
    };
    let of_queries = load(problem.queries, problem.num_heads);
    let of_keys = load(problem.keys, problem.num_kv_heads);
    let capped = problem.options.softcap.is_some();
    let kv = backward_kv_tiles(d, of_keys, capped);
    let fits = kv.iter().find(|tile| tile.backward_kv(d).shared_bytes <= info.shared_bytes_per_block);
    Plans {
        apart: false,
        fwd: forward_tile(d, of_queries, capped).forward(d),
        bwd_q: backward_q_tile(d, of_queries).backward_q(d),
        bwd_kv: fits.unwrap_or(&kv[kv.len() - 1]).backward_kv(d),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Shared memory of a block on consumer cards.
    const CONSUMER_BYTES: usize = 99 << 10;

    #[test]
    fn every_tile_fits_a_consumer_card() {
        let loads = [0.1, 1.4, 1.6, 2.9, 3.1, 4.1, 9.9, 10.1, 100.0];
        for (d, load, capped) in [32, 64, 96, 128]
            .into_iter()
            .flat_map(|d| loads.into_iter().flat_map(move |load| [(d, load, false), (d, load, true)]))
        {
            let kv = backward_kv_tiles(d, load, capped);
            let least = kv[kv.len() - 1].backward_kv(d);
            let forward = forward_tile(d, load, capped).forward(d);
            for plan in [forward, backward_q_tile(d, load).backward_q(d), least] {
                let name = plan.kernel.name;
                assert!(plan.shared_bytes <= CONSUMER_BYTES, "{name} D {d}: {}", plan.shared_bytes);
            }
            for tile in kv {
                assert!(tile.backward_kv(d).shared_bytes <= 227 << 10, "D {d} on a data center card");
            }
        }
    }

    #[test]
    fn what_does_not_run_on_tensor_cores_is_named() {
        assert_eq!(mma_reason((9, 0), 64), None);
        assert_eq!(mma_reason((8, 6), 128), None);
        assert_eq!(mma_reason((9, 0), 80).unwrap(), "a head size of 80 is none of 32, 64, 96 and 128");
        assert_eq!(mma_reason((7, 5), 64).unwrap(), "compute capability 7.5 is below 8.0");
    }
}
