//! Batches of sequences from a stream of tokens: every next token once an epoch, in an order that can be resumed.
//!
//! The stream of `N` tokens is cut into `n = ceil((N - 1) / T)` sequences.
//! Sequence `i` reads tokens `i*T .. i*T + T` and predicts each one's successor, so every token but the first is a
//! target exactly once an epoch; what the last sequence lacks is padded with the end-of-document id and
//! [`IGNORE`] labels.
//!
//! Sample `k` of a run is position `k % n` of epoch `k / n`; each epoch has its own order.
//! A step takes the next `B * world_size` samples: rank `r` gets those with `k % world_size == r` (counted from the
//! first sample of the step), so ranks are disjoint and complete, a small data set wraps, and one number
//! ([`LoaderState::samples_seen`]) resumes a run exactly, with another batch size or number of ranks too.
//!
//! `B` is the batch size, `T` the sequence length; arrays are row-major `[B, T]`.

mod ahead;
mod eval;
mod order;
mod row;

use std::sync::Arc;

use rb_planted::{Defect, active};
use serde::{Deserialize, Serialize};

use ahead::Ahead;
pub use eval::{EvalConfig, EvalIter, sequential};
use order::Order;
pub(crate) use order::permutation;
use row::Rows;

use crate::error::{DataError, Result};
use crate::token_file::TokenData;

/// Label of a position that is not a target; PyTorch's `ignore_index`.
pub const IGNORE: i32 = -100;

/// No run gets here; beyond it `u64` arithmetic could overflow.
const MAX_SAMPLES: u64 = 1 << 62;

/// Most processes; keeps sample numbers within 64 bits.
const MAX_WORLD_SIZE: usize = 1 << 20;

/// How a [`Loader`] cuts, orders and shares out a stream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LoaderConfig {
    /// Sequence length `T`, in tokens.
    pub seq_len: usize,
    /// Rows of a batch `B`, on each rank.
    pub batch_size: usize,
    /// Seed of the order.
    pub seed: u64,
    /// Whether each epoch has a random order; otherwise the order of the file.
    pub shuffle: bool,
    /// Whether documents are kept apart: attention and positions start anew at each document, and the first token of
    /// a document is not a target (nothing before it may be used to predict it).
    pub document_mask: bool,
    /// This process, from 0.
    pub rank: usize,
    /// Number of processes.
    pub world_size: usize,
    /// Batches that a thread makes ahead; 0 makes each when it is asked for. The batches are the same.
    pub prefetch: usize,
}

impl Default for LoaderConfig {
    /// One process, shuffled with seed 0, documents not masked, one sequence of 1,024 tokens a batch, none ahead.
    fn default() -> Self {
        Self {
            seq_len: 1024,
            batch_size: 1,
            seed: 0,
            shuffle: true,
            document_mask: false,
            rank: 0,
            world_size: 1,
            prefetch: 0,
        }
    }
}

/// Rows of token ids with their targets. All arrays are `[batch_size, seq_len]`, row-major.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Batch {
    /// Rows `B`.
    pub batch_size: usize,
    /// Columns `T`.
    pub seq_len: usize,
    /// Token ids, all in `0..vocab_size`.
    pub input_ids: Vec<i32>,
    /// The token after each input, or [`IGNORE`].
    pub labels: Vec<i32>,
    /// Position of each token: in its row, or in its document's part of the row when documents are masked.
    pub position_ids: Vec<i32>,
    /// Column at which the document of this position begins in this row; all 0 when documents are not masked.
    pub doc_start: Vec<i32>,
    /// Labels that are not [`IGNORE`].
    pub valid_tokens: usize,
    /// Targets given up because they are the first token of a document (documents masked only).
    pub dropped_targets: usize,
    /// Epoch, from 0, of the first row; a batch may reach into the next.
    pub epoch: u64,
}

/// What identifies the order of samples: equal fingerprints mean equal runs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LoaderFingerprint {
    /// Checksum of the data, 64 hexadecimal digits.
    pub data_sha256: String,
    /// Number of tokens in the data.
    pub tokens: u64,
    /// Sequence length.
    pub seq_len: u64,
    /// Seed of the order.
    pub seed: u64,
    /// Whether the order is random.
    pub shuffle: bool,
    /// Whether documents are kept apart.
    pub document_mask: bool,
}

/// Where a run stands: all that is needed to continue it exactly.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LoaderState {
    /// Samples (rows) taken so far, over all ranks and epochs.
    pub samples_seen: u64,
    /// Data and settings they were taken from.
    pub fingerprint: LoaderFingerprint,
}

/// Result of [`Loader::check`]: the epoch's accounts. `valid + dropped == tokens - 1`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Coverage {
    /// Sequences an epoch.
    pub sequences: u64,
    /// Labels an epoch that are not [`IGNORE`].
    pub valid: u64,
    /// Targets an epoch that document masking gives up.
    pub dropped: u64,
    /// Positions an epoch after the last target.
    pub padded: u64,
}

/// An endless source of batches.
#[derive(Debug)]
pub struct Loader {
    rows: Rows,
    order: Order,
    config: LoaderConfig,
    fingerprint: LoaderFingerprint,
    samples_seen: u64,
    /// The thread that makes batches ahead, once the first was asked for.
    ahead: Option<Ahead>,
}

impl Loader {
    /// Makes a loader at the start of epoch 0.
    ///
    /// # Errors
    /// [`DataError::BadSetting`] for a zero size, a rank outside `0..world_size`, or a batch of more than
    /// 2,147,483,647 positions;
    /// [`DataError::TooFewTokens`] for fewer than two tokens.
    pub fn new(data: Arc<TokenData>, config: LoaderConfig) -> Result<Self> {
        check_batch("loader", config.batch_size, config.seq_len)?;
        check_rank("loader", config.rank, config.world_size)?;
        let fingerprint = LoaderFingerprint {
            data_sha256: data.sha256(),
            tokens: data.len(),
            seq_len: config.seq_len as u64,
            seed: config.seed,
            shuffle: config.shuffle,
            document_mask: config.document_mask,
        };
        let rows = Rows::new(data, config.seq_len, config.document_mask)?;
        let order = Order::new(rows.sequences(), config.seed, config.shuffle);
        Ok(Self { rows, order, config, fingerprint, samples_seen: 0, ahead: None })
    }

    /// The settings.
    pub fn config(&self) -> &LoaderConfig {
        &self.config
    }

    /// The data.
    pub fn data(&self) -> &Arc<TokenData> {
        self.rows.data()
    }

    /// Sequences an epoch, over all ranks.
    pub fn sequences_per_epoch(&self) -> u64 {
        self.rows.sequences()
    }

    /// Epoch of the next sample, from 0.
    pub fn epoch(&self) -> u64 {
        self.samples_seen / self.rows.sequences()
    }

    /// This rank's next batch. Never ends: after the last sequence of an epoch comes the first of the next.
    pub fn next_batch(&mut self) -> Batch {
        let first = self.samples_seen;
        self.samples_seen += self.step();
        if self.config.prefetch > 0 {
            let ahead = self.ahead.get_or_insert_with(|| {
                let order = Order::new(self.rows.sequences(), self.config.seed, self.config.shuffle);
                Ahead::start(self.rows.clone(), order, self.config.clone(), first)
            });
            if let Some(batch) = ahead.next(first) {
                return batch;
            }
            // The thread could not be started.
            self.config.prefetch = 0;
        }
        batch_at(&self.rows, &mut self.order, &self.config, first)
    }

    /// Samples of a step, over all ranks.
    fn step(&self) -> u64 {
        self.config.batch_size as u64 * self.config.world_size as u64
    }

    /// Number of the sequence that is sample `sample` of a run, wherever the loader stands.
    pub(crate) fn sequence_of(&mut self, sample: u64) -> u64 {
        self.order.sequence(sample).1
    }

    /// Where the run stands, to be stored with a checkpoint.
    pub fn state(&self) -> LoaderState {
        LoaderState { samples_seen: self.samples_seen, fingerprint: self.fingerprint.clone() }
    }

    /// Continues exactly where `state` was taken. Batch size, rank and world size may differ: the samples go on in
    /// the same order, shared out anew.
    ///
    /// # Errors
    /// [`DataError::StateMismatch`] naming the first setting that differs; [`DataError::BadSetting`] for a count
    /// of samples that no run can reach.
    pub fn set_state(&mut self, state: &LoaderState) -> Result<()> {
        let (saved, now) = (&state.fingerprint, &self.fingerprint);
        let differs = |field, saved: &dyn ToString, now: &dyn ToString| {
            let (saved, now) = (saved.to_string(), now.to_string());
            if saved == now { Ok(()) } else { Err(DataError::StateMismatch { field, saved, now }) }
        };
        differs("tokens", &saved.tokens, &now.tokens)?;
        differs("data_sha256", &saved.data_sha256, &now.data_sha256)?;
        differs("seq_len", &saved.seq_len, &now.seq_len)?;
        differs("seed", &saved.seed, &now.seed)?;
        differs("shuffle", &saved.shuffle, &now.shuffle)?;
        differs("document_mask", &saved.document_mask, &now.document_mask)?;
        if state.samples_seen > MAX_SAMPLES {
            let got = state.samples_seen.to_string();
            return Err(DataError::BadSetting {
                what: "loader state",
                name: "samples_seen",
                got,
                expected: "at most 2^62; the state is damaged",
            });
        }
        self.ahead = None;
        if !active(Defect::DataPlaceNotRestored) {
            self.samples_seen = state.samples_seen;
        }
        Ok(())
    }

    /// Proves by running through this epoch that every token but the first is a target exactly once (or is one of
    /// the dropped ones), without moving the loader. Takes one pass over the data and a bit a token of memory.
    ///
    /// # Errors
    /// [`DataError::Coverage`], which would be a defect of this program.
    pub fn check(&mut self) -> Result<Coverage> {
        let n = self.rows.sequences();
        let first = self.epoch() * n;
        let sequences = (first..first + n).map(|sample| self.order.sequence(sample).1);
        self.rows.coverage(sequences)
    }
}

/// A rank's batch of the step whose first sample is `first`.
fn batch_at(rows: &Rows, order: &mut Order, config: &LoaderConfig, first: u64) -> Batch {
    let mut batch = rows.empty_batch(config.batch_size);
    for row in 0..config.batch_size as u64 {
        let (epoch, sequence) = order.sequence(first + row * config.world_size as u64 + config.rank as u64);
        if row == 0 {
            batch.epoch = epoch;
        }
        rows.push(sequence, &mut batch);
    }
    batch
}

fn check_setting(what: &'static str, name: &'static str, value: usize) -> Result<()> {
    match value {
        0 => Err(DataError::BadSetting { what, name, got: "0".into(), expected: "at least 1" }),
        v if v > i32::MAX as usize => {
            Err(DataError::BadSetting { what, name, got: v.to_string(), expected: "at most 2147483647" })
        }
        _ => Ok(()),
    }
}

fn check_batch(what: &'static str, batch_size: usize, seq_len: usize) -> Result<()> {
    check_setting(what, "batch_size", batch_size)?;
    check_setting(what, "seq_len", seq_len)?;
    if batch_size.checked_mul(seq_len).is_some_and(|positions| positions <= i32::MAX as usize) {
        return Ok(());
    }
    let got = format!("{batch_size} x {seq_len} positions");
    Err(DataError::BadSetting {
        what,
        name: "batch_size",
        got,
        expected: "at most 2147483647 positions a batch",
    })
}

fn check_rank(what: &'static str, rank: usize, world_size: usize) -> Result<()> {
    check_setting(what, "world_size", world_size)?;
    if world_size > MAX_WORLD_SIZE {
        let got = world_size.to_string();
        return Err(DataError::BadSetting { what, name: "world_size", got, expected: "at most 1048576" });
    }
    if rank < world_size {
        return Ok(());
    }
    let got = format!("{rank} with world_size {world_size}");
    Err(DataError::BadSetting { what, name: "rank", got, expected: "a rank below world_size" })
}

#[cfg(test)]
mod tests;
