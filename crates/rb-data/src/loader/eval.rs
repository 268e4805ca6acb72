//! One pass in file order, for validation.

use std::sync::Arc;

use super::row::Rows;
use super::{Batch, check_batch, check_rank};
use crate::error::Result;
use crate::token_file::TokenData;

/// How [`sequential`] cuts and shares out a stream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EvalConfig {
    /// Sequence length `T`, in tokens.
    pub seq_len: usize,
    /// Most rows of a batch, on each rank.
    pub batch_size: usize,
    /// As [`LoaderConfig::document_mask`](super::LoaderConfig::document_mask).
    pub document_mask: bool,
    /// This process, from 0.
    pub rank: usize,
    /// Number of processes.
    pub world_size: usize,
}

/// Batches of one pass over all sequences in file order, each token (but the first) a target once.
///
/// The last batch may have fewer rows. Every rank yields the same number of batches, [`EvalIter::num_batches`], so
/// ranks that meet after each batch never wait for one that has none: with more than one rank the last batch of
/// some may have no row at all (`batch_size == 0`, `valid_tokens == 0`).
///
/// # Errors
/// As [`Loader::new`](super::Loader::new).
pub fn sequential(data: Arc<TokenData>, config: EvalConfig) -> Result<EvalIter> {
    check_batch("evaluation", config.batch_size, config.seq_len)?;
    check_rank("evaluation", config.rank, config.world_size)?;
    let rows = Rows::new(data, config.seq_len, config.document_mask)?;
    Ok(EvalIter { rows, config, next: 0 })
}

/// Iterator of [`sequential`].
#[derive(Debug, Clone)]
pub struct EvalIter {
    rows: Rows,
    config: EvalConfig,
    next: u64,
}

impl EvalIter {
    /// Batches that each rank yields from the start.
    pub fn num_batches(&self) -> u64 {
        let rows_a_rank = self.rows.sequences().div_ceil(self.config.world_size as u64);
        rows_a_rank.div_ceil(self.config.batch_size as u64)
    }
}

impl Iterator for EvalIter {
    type Item = Batch;

    fn next(&mut self) -> Option<Batch> {
        if self.next >= self.num_batches() {
            return None;
        }
        let (b, rank, world_size) =
            (self.config.batch_size as u64, self.config.rank as u64, self.config.world_size as u64);
        let first = self.next * b * world_size;
        self.next += 1;
        let mut batch = self.rows.empty_batch(self.config.batch_size);
        (0..b)
            .map(|row| first + row * world_size + rank)
            .take_while(|sequence| *sequence < self.rows.sequences())
            .for_each(|sequence| self.rows.push(sequence, &mut batch));
        Some(batch)
    }
}
