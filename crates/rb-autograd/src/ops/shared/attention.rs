//! Attention on strided views: one engine for separate and for packed inputs.
//!
//! Queries are taken in blocks, and the query heads that share a key head are stacked into the rows of one
//! matrix product. A block looks only at the range of keys that its queries see. No `[T, S]` matrix outlives
//! its block: backward computes the probabilities again from the saved logarithm of each row's sum.
//!
//! Work is split over batch rows and key heads, forward over long stretches of queries too. Inside a task
//! everything runs in order, so results have the same bits on any number of threads.

use std::ops::Range;

use rayon::prelude::*;
use rb_planted::{Defect, active};
use rb_tensor::{Shape, Tensor};

use super::softmax;
use super::tiles::{HEIGHT, Panels, WIDTH, add_transposed_product, product};
use crate::host;
use crate::ops::attention::{AttentionMask, AttentionOptions};
use crate::{Float, Result};

/// Stacked rows (queries times heads that share a key head) of one block: enough to use a packed panel of keys
/// many times, few enough that a causal block computes little that is hidden.
const BLOCK_ROWS: usize = 64;

/// Scores of one block, at most: 256 KiB of f32, so that they stay in a core's second-level cache.
const BLOCK_SCORES: usize = 64 * 1024;

/// Queries of one forward task: each packs the keys it sees again, which this many queries hide.
const TASK_QUERIES: usize = 512;

/// Sizes, options and mask of one attention.
pub struct Problem<'a> {
    pub batch: usize,
    pub queries: usize,
    pub keys: usize,
    pub num_heads: usize,
    pub num_kv_heads: usize,
    pub head_dim: usize,
    pub options: AttentionOptions,
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

    /// The `group` heads of a token from `head` on.
    fn row(&self, b: usize, token: usize, head: usize, group: usize) -> &'a [T] {
        let start = (b * self.tokens + token) * self.stride + (self.first + head) * self.head_dim;
        &self.data[start..start + group * self.head_dim]
    }
}

impl<'a> Problem<'a> {
    /// The problem of `q` of this shape, with `num_heads` of its heads queries, and `keys` keys. Checks the
    /// ranges of the mask.
    ///
    /// # Errors
    /// [`crate::AutogradError::IndexOutOfRange`] for a range that leaves `0..=keys`.
    pub fn new(
        op: &'static str,
        q: &Shape,
        keys: usize,
        num_heads: usize,
        num_kv_heads: usize,
        mask: &'a AttentionMask,
        options: AttentionOptions,
    ) -> Result<Self> {
        let mask = match mask {
            AttentionMask::Causal => Visible::Causal,
            AttentionMask::Full => Visible::Full,
            AttentionMask::Ranges(ranges) => {
                let ranges = ranges.as_slice::<i32>()?;
                AttentionMask::check_values(op, ranges, keys)?;
                Visible::Ranges(ranges)
            }
        };
        let (batch, queries, head_dim) = (q[0], q[1], q[3]);
        Ok(Problem { batch, queries, keys, num_heads, num_kv_heads, head_dim, options, mask })
    }

    /// Query heads for each key head.
    fn group(&self) -> usize {
        self.num_heads / self.num_kv_heads
    }

    /// Queries of one block: whole panels of keys where there are enough, so that causal blocks end with one.
    fn block(&self) -> usize {
        let rows = BLOCK_ROWS.min(BLOCK_SCORES / self.keys.max(1));
        let queries = (rows / self.group()).max(1);
        if queries < WIDTH { queries } else { queries / WIDTH * WIDTH }
    }

    /// The keys that query `t` of batch row `b` sees.
    fn visible(&self, b: usize, t: usize) -> Range<usize> {
        let shown = match self.mask {
            Visible::Causal if active(Defect::MaskSeesNext) => {
                0..(t + 2 + self.keys).saturating_sub(self.queries).min(self.keys)
            }
            Visible::Causal if active(Defect::MaskHidesSelf) => {
                0..(t + self.keys).saturating_sub(self.queries)
            }
            Visible::Causal => 0..(t + 1 + self.keys).saturating_sub(self.queries),
            Visible::Full => 0..self.keys,
            Visible::Ranges(ranges) => {
                // Checked by `new` to lie in `0..=keys`.
                let pair = &ranges[2 * (b * self.queries + t)..][..2];
                pair[0] as usize..pair[1] as usize
            }
        };
        match self.options.window {
            None => shown,
            Some(window) => shown.start.max(shown.end.saturating_sub(window))..shown.end,
        }
    }

    /// Caps a row of scores.
    fn cap<T: Float>(&self, scores: &mut [T]) {
        if let Some(cap) = self.options.softcap {
            let cap = T::from_f64(cap);
            scores.iter_mut().for_each(|score| *score = cap * (*score / cap).tanh());
        }
    }

    /// The smallest range that holds what all queries of a block see; empty if they see nothing.
    fn visible_to_block(&self, b: usize, queries: Range<usize>) -> Range<usize> {
        let seen = queries.map(|t| self.visible(b, t)).filter(|r| !r.is_empty());
        seen.reduce(|a, b| a.start.min(b.start)..a.end.max(b.end)).unwrap_or(0..0)
    }

    /// What a block of queries looks at, of the `keys` that its task packed; `None` if it sees nothing.
    fn view(&self, b: usize, queries: Range<usize>, keys: &Range<usize>) -> Option<View> {
        let seen = self.visible_to_block(b, queries);
        if seen.is_empty() {
            return None;
        }
        let panels = (seen.start - keys.start) / WIDTH..(seen.end - keys.start).div_ceil(WIDTH);
        Some(View { first: keys.start + panels.start * WIDTH, panels })
    }
}

/// The panels of keys that a block of queries looks at.
struct View {
    first: usize,
    panels: Range<usize>,
}

impl View {
    /// Columns of the block's scores.
    fn len(&self) -> usize {
        self.panels.len() * WIDTH
    }

    /// Distance of the rows of scores: an odd number of cache lines of f32, so that a column does not fall on
    /// a few sets of the cache.
    fn stride(&self) -> usize {
        (self.panels.len() | 1) * WIDTH
    }

    /// The same columns as rows of the packed keys.
    fn inner(&self) -> Range<usize> {
        self.panels.start * WIDTH..self.panels.end * WIDTH
    }

    /// Hides from a row of scores what lies outside a query's `visible` keys. Returns the range of whole panels
    /// that hold them: hidden scores in it become negative infinity, whose exponential is 0.
    fn hide<T: Float>(&self, visible: Range<usize>, row: &mut [T]) -> Range<usize> {
        if visible.is_empty() {
            return 0..0;
        }
        let (start, end) = (visible.start - self.first, visible.end - self.first);
        let panels = start / WIDTH * WIDTH..end.next_multiple_of(WIDTH);
        row[panels.start..start].fill(T::NEG_INFINITY);
        row[end..panels.end].fill(T::NEG_INFINITY);
        panels
    }
}

/// Zeroes what lies outside `panels`.
fn clear<T: Float>(row: &mut [T], panels: &Range<usize>) {
    for outside in [0..panels.start, panels.end..row.len()] {
        if !outside.is_empty() {
            row[outside].fill(T::ZERO);
        }
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
    let (group, out_row) = (p.group(), p.num_heads * p.head_dim);
    let mut out = vec![T::ZERO; p.batch * p.queries * out_row];
    let mut lse = vec![T::NEG_INFINITY; p.batch * p.queries * p.num_heads];
    if out.is_empty() {
        return (out, lse);
    }
    let tasks = p.queries.div_ceil(TASK_QUERIES);
    let rows = out.par_chunks_mut(p.queries * out_row).zip(lse.par_chunks_mut(p.queries * p.num_heads));
    rows.enumerate().for_each(|(b, (out, lse))| {
        let parts = (0..p.num_kv_heads * tasks).into_par_iter().map(|i| {
            let (kv, start) = (i / tasks, i % tasks * TASK_QUERIES);
            let queries = start..(start + TASK_QUERIES).min(p.queries);
            (kv, start, forward_head(p, [q, k, v], b, kv, queries))
        });
        for (kv, start, (o, l)) in parts.collect::<Vec<_>>() {
            let len = group * p.head_dim;
            scatter((&o, len), len, &mut out[start * out_row..], out_row, kv * len);
            scatter((&l, group), group, &mut lse[start * p.num_heads..], p.num_heads, kv * group);
        }
    });
    (out, lse)
}

/// Output `[queries, group, D]` and `lse [queries, group]` of one batch row and one key head.
fn forward_head<T: Float>(
    p: &Problem<'_>,
    [q, k, v]: [Heads<'_, T>; 3],
    b: usize,
    kv: usize,
    queries: Range<usize>,
) -> (Vec<T>, Vec<T>) {
    let (group, d, block) = (p.group(), p.head_dim, p.block());
    let (scale, d_padded) = (T::from_f64(p.options.scale), d.next_multiple_of(WIDTH));
    let mut out = vec![T::ZERO; queries.len() * group * d];
    let mut lse = vec![T::NEG_INFINITY; queries.len() * group];
    let keys = p.visible_to_block(b, queries.clone());
    let k_columns = Panels::from_columns(d, keys.len(), |i| k.row(b, keys.start + i, kv, 1));
    let mut v_rows = Panels::zeros(keys.len().next_multiple_of(WIDTH), d);
    keys.clone().enumerate().for_each(|(i, token)| v_rows.set_row(i, v.row(b, token, kv, 1)));
    let most_rows = (block.min(queries.len()) * group).next_multiple_of(HEIGHT);
    let mut q_rows = vec![T::ZERO; most_rows * d];
    let mut o_rows = vec![T::ZERO; most_rows * d_padded];
    let mut scores = Vec::new();
    let mut sums = Vec::new();
    for start in queries.clone().step_by(block) {
        let these = start..(start + block).min(queries.end);
        let Some(view) = p.view(b, these.clone(), &keys) else { continue };
        let m = these.len() * group;
        let m_padded = m.next_multiple_of(HEIGHT);
        for (t, row) in these.zip(q_rows.chunks_exact_mut(group * d)) {
            row.iter_mut().zip(q.row(b, t, kv * group, group)).for_each(|(r, &q)| *r = q * scale);
        }
        scores.resize(m_padded * view.stride(), T::ZERO);
        let panels = view.panels.clone();
        product((&q_rows, d), m_padded, &k_columns, 0..d, panels, (&mut scores, view.stride()));
        let first_row = (start - queries.start) * group;
        sums.clear();
        for row in 0..m {
            let scores = &mut scores[row * view.stride()..][..view.len()];
            p.cap(scores);
            let seen = view.hide(p.visible(b, start + row / group), scores);
            clear(scores, &seen);
            let scores = &mut scores[seen];
            let max = softmax::max(scores);
            sums.push(softmax::exp_in_place(scores, softmax::shift(max)));
            lse[first_row + row] = max + sums[row].ln();
        }
        let o_panels = 0..d_padded / WIDTH;
        let o = (&mut o_rows[..], d_padded);
        product((&scores, view.stride()), m_padded, &v_rows, view.inner(), o_panels, o);
        let rows = out[first_row * d..].chunks_exact_mut(d).zip(o_rows.chunks_exact(d_padded));
        for ((out, o), &sum) in rows.zip(&sums) {
            // A query that sees nothing has no sum and keeps its zeros.
            if sum != T::ZERO || active(Defect::EmptyRowIsNan) {
                let scale = T::ONE / sum;
                out.iter_mut().zip(o).for_each(|(out, &o)| *out = o * scale);
            }
        }
    }
    (out, lse)
}

/// Copies the first `len` elements of each row of `src` to every `stride` elements of `dst`, from `offset` on.
fn scatter<T: Float>(
    (src, src_stride): (&[T], usize),
    len: usize,
    dst: &mut [T],
    stride: usize,
    offset: usize,
) {
    for (src, dst) in src.chunks_exact(src_stride).zip(dst.chunks_mut(stride)) {
        dst[offset..offset + len].copy_from_slice(&src[..len]);
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
    first_key: usize,
    d_padded: usize,
    dq: Vec<T>, // [T, group, D]
    dk: Vec<T>, // [keys seen, d_padded]
    dv: Vec<T>, // [keys seen, d_padded]
}

impl<T: Float> HeadGrads<T> {
    /// Copies `dq` to its heads of one batch row `[T, heads, D]`; query head 0 is `first`.
    pub fn store_dq(&self, p: &Problem<'_>, dst: &mut [T], heads: usize, first: usize) {
        let len = p.group() * p.head_dim;
        scatter((&self.dq, len), len, dst, heads * p.head_dim, first * p.head_dim + self.kv * len);
    }

    /// Copies `dk` to its head of one batch row `[S, heads, D]`; key head 0 is `first`.
    pub fn store_dk(&self, p: &Problem<'_>, dst: &mut [T], heads: usize, first: usize) {
        self.store_keys(&self.dk, p, dst, heads, first);
    }

    /// Copies `dv` to its head of one batch row `[S, heads, D]`; value head 0 is `first`.
    pub fn store_dv(&self, p: &Problem<'_>, dst: &mut [T], heads: usize, first: usize) {
        self.store_keys(&self.dv, p, dst, heads, first);
    }

    fn store_keys(&self, src: &[T], p: &Problem<'_>, dst: &mut [T], heads: usize, first: usize) {
        let row = heads * p.head_dim;
        let dst = &mut dst[self.first_key * row..];
        scatter((src, self.d_padded), p.head_dim, dst, row, (first + self.kv) * p.head_dim);
    }
}

/// Gradients of batch row `b`, a value for each key head.
pub fn backward<T: Float>(p: &Problem<'_>, x: &BackwardInputs<'_, T>, b: usize) -> Vec<HeadGrads<T>> {
    (0..p.num_kv_heads).into_par_iter().map(|kv| backward_head(p, x, b, kv)).collect()
}

fn backward_head<T: Float>(p: &Problem<'_>, x: &BackwardInputs<'_, T>, b: usize, kv: usize) -> HeadGrads<T> {
    let (group, d, block) = (p.group(), p.head_dim, p.block());
    let (scale, d_padded) = (T::from_f64(p.options.scale), d.next_multiple_of(WIDTH));
    let keys = p.visible_to_block(b, 0..p.queries);
    let keys_padded = keys.len().next_multiple_of(WIDTH);
    let mut dq = vec![T::ZERO; p.queries * group * d];
    let mut dk = vec![T::ZERO; keys_padded * d_padded];
    let mut dv = vec![T::ZERO; keys_padded * d_padded];
    let key = |i: usize| x.k.row(b, keys.start + i, kv, 1);
    let k_columns = Panels::from_columns(d, keys.len(), key);
    let v_columns = Panels::from_columns(d, keys.len(), |i| x.v.row(b, keys.start + i, kv, 1));
    let mut k_rows = Panels::zeros(keys_padded, d);
    (0..keys.len()).for_each(|i| k_rows.set_row(i, key(i)));
    let most_rows = (block.min(p.queries) * group).next_multiple_of(HEIGHT);
    // Queries are scaled when they are copied, so that dk needs no scale of its own.
    let mut q_rows = vec![T::ZERO; most_rows * d];
    let mut dy_rows = vec![T::ZERO; most_rows * d];
    let mut dq_rows = vec![T::ZERO; most_rows * d_padded];
    let mut q_panels = Panels::zeros(most_rows, d);
    let mut dy_panels = Panels::zeros(most_rows, d);
    let (mut probs, mut dscores) = (Vec::new(), Vec::new());
    for start in (0..p.queries).step_by(block) {
        let these = start..(start + block).min(p.queries);
        let Some(view) = p.view(b, these.clone(), &keys) else { continue };
        let (m, stride) = (these.len() * group, view.stride());
        let m_padded = m.next_multiple_of(HEIGHT);
        let rows = q_rows.chunks_exact_mut(group * d).zip(dy_rows.chunks_exact_mut(group * d));
        for (t, (q, dy)) in these.zip(rows) {
            q.iter_mut().zip(x.q.row(b, t, kv * group, group)).for_each(|(r, &q)| *r = q * scale);
            dy.copy_from_slice(x.dy.row(b, t, kv * group, group));
        }
        for row in 0..m {
            q_panels.set_row(row, &q_rows[row * d..][..d]);
            dy_panels.set_row(row, &dy_rows[row * d..][..d]);
        }
        probs.resize(m_padded * stride, T::ZERO);
        dscores.resize(m_padded * stride, T::ZERO);
        let panels = || view.panels.clone();
        product((&q_rows, d), m_padded, &k_columns, 0..d, panels(), (&mut probs, stride));
        product((&dy_rows, d), m_padded, &v_columns, 0..d, panels(), (&mut dscores, stride));
        for row in 0..m {
            let (t, head) = (start + row / group, kv * group + row % group);
            let lse = x.lse[(b * p.queries + t) * p.num_heads + head];
            let delta = host::dot(&dy_rows[row * d..][..d], x.out.row(b, t, head, 1));
            let probs = &mut probs[row * stride..][..view.len()];
            let ds = &mut dscores[row * stride..][..view.len()];
            p.cap(probs);
            let seen = view.hide(p.visible(b, t), probs);
            clear(probs, &seen);
            clear(ds, &seen);
            let pairs = probs[seen.clone()].iter_mut().zip(&mut ds[seen]);
            match p.options.softcap.map(T::from_f64) {
                None => pairs.for_each(|(prob, ds)| {
                    *prob = (*prob - lse).exp();
                    *ds = *prob * (*ds - delta);
                }),
                Some(cap) => pairs.for_each(|(prob, ds)| {
                    let bend = *prob / cap;
                    *prob = (*prob - lse).exp();
                    // A hidden score is negative infinity, whose slope would be too.
                    let slope = if *prob == T::ZERO { T::ZERO } else { T::ONE - bend * bend };
                    *ds = *prob * (*ds - delta) * slope;
                }),
            }
        }
        let from = view.panels.start * WIDTH * d_padded;
        let (dk, dv) = (&mut dk[from..], &mut dv[from..]);
        add_transposed_product((&probs, stride), view.len(), &dy_panels, m, (dv, d_padded));
        add_transposed_product((&dscores, stride), view.len(), &q_panels, m, (dk, d_padded));
        let dq_panels = 0..d_padded / WIDTH;
        let dst = (&mut dq_rows[..], d_padded);
        product((&dscores, stride), m_padded, &k_rows, view.inner(), dq_panels, dst);
        let rows = dq[start * group * d..].chunks_exact_mut(d).zip(dq_rows.chunks_exact(d_padded));
        rows.take(m).for_each(|(dq, row)| dq.iter_mut().zip(row).for_each(|(dq, &x)| *dq = x * scale));
    }
    HeadGrads { kv, first_key: keys.start, d_padded, dq, dk, dv }
}
