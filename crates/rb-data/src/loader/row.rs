//! One row of a batch: ids, labels, positions and document starts of one sequence.

use std::sync::Arc;

use super::{Batch, Coverage, IGNORE};
use crate::error::{DataError, Result};
use crate::token_file::TokenData;
use rb_planted::{Defect, active};

/// Cuts a stream into rows of `seq_len`.
#[derive(Debug, Clone)]
pub(super) struct Rows {
    data: Arc<TokenData>,
    seq_len: usize,
    document_mask: bool,
}

impl Rows {
    /// `seq_len` is at least 1.
    pub(super) fn new(data: Arc<TokenData>, seq_len: usize, document_mask: bool) -> Result<Self> {
        debug_assert!(seq_len > 0);
        if data.len() < 2 {
            return Err(DataError::TooFewTokens { path: data.path().into(), tokens: data.len() });
        }
        if data.vocab_size() > i32::MAX as u32 {
            return Err(DataError::VocabTooLarge {
                got: data.vocab_size() as usize,
                most: i32::MAX as usize,
            });
        }
        Ok(Self { data, seq_len, document_mask })
    }

    pub(super) fn data(&self) -> &Arc<TokenData> {
        &self.data
    }

    /// Number of sequences: every token but the first is a target.
    pub(super) fn sequences(&self) -> u64 {
        let targets = self.data.len() - 1;
        if active(Defect::LastSequenceDropped) {
            return (targets / self.seq_len as u64).max(1);
        }
        targets.div_ceil(self.seq_len as u64)
    }

    /// A batch without rows, with room for `rows`.
    pub(super) fn empty_batch(&self, rows: usize) -> Batch {
        let array = || Vec::with_capacity(rows.saturating_mul(self.seq_len));
        Batch {
            batch_size: 0,
            seq_len: self.seq_len,
            input_ids: array(),
            labels: array(),
            position_ids: array(),
            doc_start: array(),
            valid_tokens: 0,
            dropped_targets: 0,
            epoch: 0,
        }
    }

    /// Appends sequence `sequence` to `batch`.
    pub(super) fn push(&self, sequence: u64, batch: &mut Batch) {
        let t_len = self.seq_len;
        let start = sequence * t_len as u64;
        let row = batch.input_ids.len();

        // One token more than the row: the inputs, then the same shifted by one are the labels.
        let mut tokens = vec![IGNORE; t_len + 1];
        let available = self.data.copy_to(start, &mut tokens);
        batch.labels.extend_from_slice(&tokens[1..]);
        if active(Defect::LabelsShiftedTwice) {
            batch.labels[row..].rotate_left(1);
        }
        let eos = self.data.eos_id() as i32;
        tokens.iter_mut().skip(available).for_each(|t| *t = eos);
        batch.input_ids.extend_from_slice(&tokens[..t_len]);
        let targets = available.saturating_sub(1);

        if self.document_mask {
            batch.dropped_targets +=
                self.push_documents(start, available, &mut batch.labels[row..], &mut batch.doc_start);
            let (starts, positions) = (&batch.doc_start[row..], &mut batch.position_ids);
            let restart = i32::from(!active(Defect::PositionsNotRestarted));
            positions.extend(starts.iter().enumerate().map(|(t, s)| t as i32 - s * restart));
        } else {
            batch.doc_start.resize(row + t_len, 0);
            batch.position_ids.extend(0..t_len as i32);
        }
        let dropped_here = batch.labels[row..row + targets].iter().filter(|l| **l == IGNORE).count();
        batch.valid_tokens += targets - dropped_here;
        batch.batch_size += 1;
    }

    /// Appends the document starts of one row and drops the labels that cross a document's end; returns how many.
    fn push_documents(
        &self,
        start: u64,
        available: usize,
        labels: &mut [i32],
        doc_start: &mut Vec<i32>,
    ) -> usize {
        let (mut dropped, mut begin) = (0, 0);
        let mut document = self.data.document_of(start) + 1;
        let mut next = self.data.document_start(document);
        for (t, label) in labels.iter_mut().enumerate() {
            if next == Some(start + t as u64) {
                begin = t;
                document += 1;
                next = self.data.document_start(document);
            }
            if t == available {
                // Padding is a document of its own: real tokens do not see it and it does not see them.
                begin = t;
            }
            doc_start.push(begin as i32);
            let ends = next == Some(start + t as u64 + 1);
            if ends && *label != IGNORE && !active(Defect::TargetsCrossDocuments) {
                *label = IGNORE;
                dropped += 1;
            }
        }
        dropped
    }

    /// Counts how often each token is a target in `sequences`, which must be an epoch.
    pub(super) fn coverage(&self, sequences: impl Iterator<Item = u64>) -> Result<Coverage> {
        let targets = self.data.len() - 1;
        let mut seen = vec![0u64; targets.div_ceil(64) as usize];
        let mut result = Coverage { sequences: 0, valid: 0, dropped: 0, padded: 0 };
        for sequence in sequences {
            let mut batch = self.empty_batch(1);
            self.push(sequence, &mut batch);
            let first = sequence * self.seq_len as u64;
            let real = targets.saturating_sub(first).min(self.seq_len as u64);
            for t in 0..real {
                let index = first + t; // token index + 1 is the target
                let label = batch.labels[t as usize];
                let expected = self.data.get(index + 1).map_or(IGNORE, |id| id as i32);
                let bit = 1 << (index % 64);
                let word = &mut seen[(index / 64) as usize];
                if *word & bit != 0 || (label != expected && label != IGNORE) {
                    let times = if *word & bit != 0 { 2 } else { 0 };
                    return Err(DataError::Coverage { target: index + 1, times });
                }
                *word |= bit;
            }
            result.sequences += 1;
            result.valid += batch.valid_tokens as u64;
            result.dropped += batch.dropped_targets as u64;
            result.padded += self.seq_len as u64 - real;
        }
        let missing = (0..targets).find(|i| seen[(i / 64) as usize] & (1 << (i % 64)) == 0);
        match missing {
            Some(index) => Err(DataError::Coverage { target: index + 1, times: 0 }),
            None if result.valid + result.dropped != targets => {
                Err(DataError::Coverage { target: result.valid + result.dropped, times: 0 })
            }
            None => Ok(result),
        }
    }
}
