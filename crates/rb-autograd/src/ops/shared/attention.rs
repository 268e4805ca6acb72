//! Attention on strided views: one engine for separate and for packed inputs.
//!
//! Queries are taken in blocks, and the query heads that share a key head are stacked into the rows of one
//! matrix product. A block looks only at the range of keys that its queries see. No `[T, S]` matrix outlives
//! its block: backward computes the probabilities again from the saved logarithm of each row's sum.
//!
//! Work is split over (batch row, query block) forward and (batch row, key head) backward; inside a task
//! everything runs in order, so results have the same bits on any number of threads.

use std::ops::Range;

use rayon::prelude::*;
use rb_tensor::{Shape, Tensor};

use super::softmax;
use crate::host::{self, Mat, MatMut, matmul_local};
use crate::ops::attention::AttentionMask;
use crate::{AutogradError, Beta, Float, Result};

/// Stacked rows (queries times heads that share a key head) of one block: enough to keep a matrix product
/// busy, few enough that causal blocks compute little that is hidden.
const BLOCK_ROWS: usize = 96;

/// Scores of one block, at most: 256 KiB of f32, so that they stay in a core's second-level cache.
const BLOCK_SCORES: usize = 64 * 1024;

/// Sizes, scale and mask of one attention.
pub struct Problem<'a> {
    pub batch: usize,
    pub queries: usize,
    pub keys: usize,
    pub num_heads: usize,
    pub num_kv_heads: usize,
    pub head_dim: usize,
    pub scale: f64,
    mask: Visible<'a>,
}

/// The mask as the engine reads it.
enum Visible<'a> {
    Causal,
    Full,
    Ranges(&'a [i32]),
}

/// Neighbouring heads of a tensor `[B, tokens, heads, D]`.
#[derive(Clone, Copy)]
pub struct Heads<'a, T> {
    data: &'a [T],
    tokens: usize,
    stride: usize,
    first: usize,
    head_dim: usize,
}

impl<'a, T: Float> Heads<'a, T> {
    /// The heads from `first` on of a tensor `[B, tokens, heads, D]`.
    pub fn new(tensor: &'a Tensor, first: usize) -> Result<Self> {
        let shape = tensor.shape();
        let (tokens, heads, head_dim) = (shape[1], shape[2], shape[3]);
        Ok(Heads { data: tensor.as_slice::<T>()?, tokens, stride: heads * head_dim, first, head_dim })
    }

    /// Element 0 of a token's head, as a position in `data`.
    fn at(&self, b: usize, token: usize, head: usize) -> usize {
        (b * self.tokens + token) * self.stride + (self.first + head) * self.head_dim
    }

    /// Tokens `range` of one head as a matrix `[tokens, D]`.
    fn matrix(&self, b: usize, range: Range<usize>, head: usize) -> Mat<'a, T> {
        let start = self.at(b, range.start, head);
        Mat::strided(&self.data[start..], range.len(), self.head_dim, self.stride, 1)
    }

    /// Copies `group` heads from `head` on of tokens `range` to `dst [tokens * group, D]`.
    fn gather(&self, b: usize, range: Range<usize>, head: usize, group: usize, dst: &mut [T]) {
        let row = group * self.head_dim;
        for (token, dst) in range.zip(dst.chunks_exact_mut(row)) {
            dst.copy_from_slice(&self.data[self.at(b, token, head)..][..row]);
        }
    }
}

impl<'a> Problem<'a> {
    /// The problem of `q` of this shape, with `num_heads` of its heads queries, and `keys` keys. Checks the
    /// ranges of the mask.
    ///
    /// # Errors
    /// [`AutogradError::IndexOutOfRange`] for a range that leaves `0..=keys`.
    pub fn new(
        op: &'static str,
        q: &Shape,
        keys: usize,
        num_heads: usize,
        num_kv_heads: usize,
        mask: &'a AttentionMask,
        scale: f64,
    ) -> Result<Self> {
        let mask = match mask {
            AttentionMask::Causal => Visible::Causal,
            AttentionMask::Full => Visible::Full,
            AttentionMask::Ranges(ranges) => {
                let ranges = ranges.as_slice::<i32>()?;
                let bad = |&x: &i32| usize::try_from(x).map_or(true, |x| x > keys);
                if let Some(position) = ranges.iter().position(bad) {
                    let index = i64::from(ranges[position]);
                    let bound = keys + 1;
                    return Err(AutogradError::IndexOutOfRange {
                        op,
                        argument: "mask",
                        position,
                        index,
                        bound,
                    });
                }
                Visible::Ranges(ranges)
            }
        };
        let (batch, queries, head_dim) = (q[0], q[1], q[3]);
        Ok(Problem { batch, queries, keys, num_heads, num_kv_heads, head_dim, scale, mask })
    }

    /// Query heads for each key head.
    fn group(&self) -> usize {
        self.num_heads / self.num_kv_heads
    }

    /// Queries of one block.
    fn block(&self) -> usize {
        let rows = BLOCK_ROWS.min(BLOCK_SCORES / self.keys.max(1));
        (rows / self.group()).max(1)
    }

    /// The keys that query `t` of batch row `b` sees.
    fn visible(&self, b: usize, t: usize) -> Range<usize> {
        match self.mask {
            Visible::Causal => 0..(t + 1 + self.keys).saturating_sub(self.queries),
            Visible::Full => 0..self.keys,
            Visible::Ranges(ranges) => {
                // Checked by `new` to lie in `0..=keys`.
                let pair = &ranges[2 * (b * self.queries + t)..][..2];
                pair[0] as usize..pair[1] as usize
            }
        }
    }

    /// The smallest range that holds what all queries of a block see; empty if they see nothing.
    fn visible_to_block(&self, b: usize, queries: Range<usize>) -> Range<usize> {
        let seen = queries.map(|t| self.visible(b, t)).filter(|r| !r.is_empty());
        seen.reduce(|a, b| a.start.min(b.start)..a.end.max(b.end)).unwrap_or(0..0)
    }
}

/// Output `[B, T, Hq, D]`, and `lse [B, T, Hq]`: the logarithm of each row's sum of exponentials, negative
/// infinity for a query that sees nothing.
pub fn forward<T: Float>(
    p: &Problem<'_>,
    q: Heads<'_, T>,
    k: Heads<'_, T>,
    v: Heads<'_, T>,
) -> (Vec<T>, Vec<T>) {
    let out_row = p.num_heads * p.head_dim;
    let mut out = vec![T::ZERO; p.batch * p.queries * out_row];
    let mut lse = vec![T::NEG_INFINITY; p.batch * p.queries * p.num_heads];
    if out.is_empty() {
        return (out, lse);
    }
    let block = p.block();
    let rows = out.par_chunks_mut(p.queries * out_row).zip(lse.par_chunks_mut(p.queries * p.num_heads));
    rows.enumerate().for_each(|(b, (out, lse))| {
        let blocks = out.par_chunks_mut(block * out_row).zip(lse.par_chunks_mut(block * p.num_heads));
        blocks.enumerate().for_each_init(Vec::new, |scratch, (i, (out, lse))| {
            let queries = i * block..(i * block + block).min(p.queries);
            forward_block(p, [q, k, v], b, queries, scratch, out, lse);
        });
    });
    (out, lse)
}

/// One block of queries of one batch row, all heads. `out` and `lse` are the rows of these queries.
fn forward_block<T: Float>(
    p: &Problem<'_>,
    [q, k, v]: [Heads<'_, T>; 3],
    b: usize,
    queries: Range<usize>,
    scratch: &mut Vec<T>,
    out: &mut [T],
    lse: &mut [T],
) {
    let (group, d) = (p.group(), p.head_dim);
    let keys = p.visible_to_block(b, queries.clone());
    if keys.is_empty() {
        return;
    }
    let (m, n) = (queries.len() * group, keys.len());
    scratch.resize(m * (2 * d + n), T::ZERO);
    let (q_rows, rest) = scratch.split_at_mut(m * d);
    let (o_rows, scores) = rest.split_at_mut(m * d);
    for kv in 0..p.num_kv_heads {
        q.gather(b, queries.clone(), kv * group, group, q_rows);
        let q_mat = Mat::new(q_rows, m, d);
        let k_mat = k.matrix(b, keys.clone(), kv);
        let scale = T::from_f64(p.scale);
        matmul_local(q_mat, k_mat.t(), MatMut::new(scores, m, n), scale, Beta::Overwrite);
        for (i, t) in queries.clone().enumerate() {
            let seen = relative(p.visible(b, t), &keys);
            for g in 0..group {
                let row = &mut scores[(i * group + g) * n..][..n];
                row[..seen.start].fill(T::ZERO);
                row[seen.end..].fill(T::ZERO);
                let row = &mut row[seen.clone()];
                if row.is_empty() {
                    continue;
                }
                let max = softmax::max(row);
                let sum = softmax::exp_in_place(row, max);
                // The sum is at least 1, the exponential of the maximum, unless a score is NaN.
                lse[i * p.num_heads + kv * group + g] = max + sum.ln();
                let scale = T::ONE / sum;
                row.iter_mut().for_each(|x| *x *= scale);
            }
        }
        let v_mat = v.matrix(b, keys.clone(), kv);
        let scores = Mat::new(scores, m, n);
        matmul_local(scores, v_mat, MatMut::new(o_rows, m, d), T::ONE, Beta::Overwrite);
        scatter(o_rows, out, group * d, p.num_heads * d, kv * group * d);
    }
}

/// A query's range, inside the range of its block.
fn relative(seen: Range<usize>, block: &Range<usize>) -> Range<usize> {
    if seen.is_empty() { 0..0 } else { seen.start - block.start..seen.end - block.start }
}

/// Copies rows of `len` elements to every `stride` elements of `dst`, from `offset` on.
fn scatter<T: Float>(rows: &[T], dst: &mut [T], len: usize, stride: usize, offset: usize) {
    for (src, dst) in rows.chunks_exact(len).zip(dst.chunks_mut(stride)) {
        dst[offset..offset + len].copy_from_slice(src);
    }
}

/// What backward reads.
pub struct BackwardInputs<'a, T> {
    pub q: Heads<'a, T>,
    pub k: Heads<'a, T>,
    pub v: Heads<'a, T>,
    pub out: Heads<'a, T>,
    pub dy: Heads<'a, T>,
    pub lse: &'a [T],
}

/// Gradients of one batch row and one key head.
pub struct HeadGrads<T> {
    kv: usize,
    dq: Vec<T>, // [T * group, D]
    dk: Vec<T>, // [S, D]
    dv: Vec<T>, // [S, D]
}

impl<T: Float> HeadGrads<T> {
    /// Copies `dq` to its heads of one batch row `[T, heads, D]`; query head 0 is `first`.
    pub fn store_dq(&self, p: &Problem<'_>, dst: &mut [T], heads: usize, first: usize) {
        let len = p.group() * p.head_dim;
        scatter(&self.dq, dst, len, heads * p.head_dim, first * p.head_dim + self.kv * len);
    }

    /// Copies `dk` to its head of one batch row `[S, heads, D]`; key head 0 is `first`.
    pub fn store_dk(&self, p: &Problem<'_>, dst: &mut [T], heads: usize, first: usize) {
        scatter(&self.dk, dst, p.head_dim, heads * p.head_dim, (first + self.kv) * p.head_dim);
    }

    /// Copies `dv` to its head of one batch row `[S, heads, D]`; value head 0 is `first`.
    pub fn store_dv(&self, p: &Problem<'_>, dst: &mut [T], heads: usize, first: usize) {
        scatter(&self.dv, dst, p.head_dim, heads * p.head_dim, (first + self.kv) * p.head_dim);
    }
}

/// Gradients of batch row `b`, a value for each key head.
pub fn backward<T: Float>(p: &Problem<'_>, x: &BackwardInputs<'_, T>, b: usize) -> Vec<HeadGrads<T>> {
    (0..p.num_kv_heads).into_par_iter().map(|kv| backward_head(p, x, b, kv)).collect()
}

fn backward_head<T: Float>(p: &Problem<'_>, x: &BackwardInputs<'_, T>, b: usize, kv: usize) -> HeadGrads<T> {
    let (group, d) = (p.group(), p.head_dim);
    let mut dq = vec![T::ZERO; p.queries * group * d];
    let mut dk = vec![T::ZERO; p.keys * d];
    let mut dv = vec![T::ZERO; p.keys * d];
    let scale = T::from_f64(p.scale);
    let block = p.block();
    let rows = block.min(p.queries) * group;
    let mut q_rows = vec![T::ZERO; rows * d];
    let mut o_rows = vec![T::ZERO; rows * d];
    let mut dy_rows = vec![T::ZERO; rows * d];
    let mut probs = vec![T::ZERO; rows * p.keys];
    let mut dscores = vec![T::ZERO; rows * p.keys];
    for start in (0..p.queries).step_by(block) {
        let queries = start..(start + block).min(p.queries);
        let keys = p.visible_to_block(b, queries.clone());
        if keys.is_empty() {
            continue;
        }
        let (m, n) = (queries.len() * group, keys.len());
        x.q.gather(b, queries.clone(), kv * group, group, &mut q_rows);
        x.out.gather(b, queries.clone(), kv * group, group, &mut o_rows);
        x.dy.gather(b, queries.clone(), kv * group, group, &mut dy_rows);
        let (probs, dscores) = (&mut probs[..m * n], &mut dscores[..m * n]);
        let q_mat = Mat::new(&q_rows, m, d);
        let dy_mat = Mat::new(&dy_rows, m, d);
        let (k_mat, v_mat) = (x.k.matrix(b, keys.clone(), kv), x.v.matrix(b, keys.clone(), kv));
        matmul_local(q_mat, k_mat.t(), MatMut::new(probs, m, n), scale, Beta::Overwrite);
        matmul_local(dy_mat, v_mat.t(), MatMut::new(dscores, m, n), T::ONE, Beta::Overwrite);
        for row in 0..m {
            let (t, g) = (queries.start + row / group, row % group);
            let seen = relative(p.visible(b, t), &keys);
            let lse = x.lse[(b * p.queries + t) * p.num_heads + kv * group + g];
            let delta = host::dot(&dy_rows[row * d..][..d], &o_rows[row * d..][..d]);
            let (probs, ds) = (&mut probs[row * n..][..n], &mut dscores[row * n..][..n]);
            for outside in [0..seen.start, seen.end..n] {
                probs[outside.clone()].fill(T::ZERO);
                ds[outside].fill(T::ZERO);
            }
            for (prob, ds) in probs[seen.clone()].iter_mut().zip(&mut ds[seen]) {
                *prob = (*prob - lse).exp();
                *ds = *prob * (*ds - delta) * scale;
            }
        }
        let (probs, dscores) = (Mat::new(probs, m, n), Mat::new(dscores, m, n));
        let dst = &mut dv[keys.start * d..keys.end * d];
        matmul_local(probs.t(), dy_mat, MatMut::new(dst, n, d), T::ONE, Beta::Accumulate);
        let dst = &mut dk[keys.start * d..keys.end * d];
        matmul_local(dscores.t(), q_mat, MatMut::new(dst, n, d), T::ONE, Beta::Accumulate);
        let dst = &mut dq[queries.start * group * d..queries.end * group * d];
        matmul_local(dscores, k_mat, MatMut::new(dst, m, d), T::ONE, Beta::Overwrite);
    }
    HeadGrads { kv, dq, dk, dv }
}
