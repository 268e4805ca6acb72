//! Batches against the documents they are cut from.

use std::sync::Arc;

use rb_data::{Batch, IGNORE, Loader, LoaderConfig, TokenData};
use rb_tensor::Rng;
use rb_verify::Check;

use super::coverage;
use crate::Result;

const VOCAB: u32 = 50;
/// The end-of-document token.
const EOS: u32 = 49;
const LEN: usize = 16;

/// Documents of 1 to 30 tokens; their number of tokens is no multiple of a row.
fn documents(seed: u64) -> Vec<Vec<u32>> {
    let mut rng = Rng::new(seed).fork("verify documents");
    let mut documents: Vec<Vec<u32>> = (0..40)
        .map(|_| {
            let len = 1 + rng.below(30);
            (0..len).map(|_| rng.below(u64::from(EOS)) as u32).collect()
        })
        .collect();
    let tokens: usize = documents.iter().map(|d| d.len() + 1).sum();
    if (tokens - 1).is_multiple_of(LEN) {
        documents[0].push(7);
    }
    documents
}

fn loader(documents: &[Vec<u32>], seed: u64, shuffle: bool, document_mask: bool) -> Result<Loader> {
    let data = Arc::new(TokenData::from_documents(documents, VOCAB, EOS)?);
    let config =
        LoaderConfig { seq_len: LEN, batch_size: 3, seed, shuffle, document_mask, ..LoaderConfig::default() };
    Ok(Loader::new(data, config)?)
}

/// Checks every array of every batch of an epoch against the documents themselves.
pub(super) fn batches_hold_the_documents(seed: u64) -> Result<Vec<Check>> {
    let documents = documents(seed);
    let mut checks = Vec::new();
    for mask in [false, true] {
        let mut loader = loader(&documents, seed, false, mask)?;
        let mut stream: Vec<u32> = Vec::new();
        let mut starts = Vec::new();
        for document in &documents {
            starts.push(stream.len());
            stream.extend(document);
            stream.push(EOS);
        }
        let sequences = (stream.len() - 1).div_ceil(LEN);
        let mut problem = None;
        'epoch: for first in (0..sequences).step_by(3) {
            let batch = loader.next_batch();
            for row in 0..3 {
                let expected = Row::of(&stream, &starts, (first + row) % sequences, mask);
                if let Some(what) = expected.differs(&batch, row) {
                    problem = Some(format!("row {row} of sequence {}: {what}", first + row));
                    break 'epoch;
                }
            }
        }
        let name = if mask { "batches hold the documents, kept apart" } else { "batches hold the documents" };
        let detail = problem.clone().unwrap_or_else(|| format!("{sequences} rows of {LEN} tokens"));
        checks.push(Check::new(name, problem.is_none(), detail));
    }
    Ok(checks)
}

/// What a row must hold.
struct Row {
    ids: Vec<i32>,
    labels: Vec<i32>,
    positions: Vec<i32>,
    doc_start: Vec<i32>,
}

impl Row {
    fn of(stream: &[u32], starts: &[usize], sequence: usize, mask: bool) -> Row {
        let from = sequence * LEN;
        let (mut ids, mut labels, mut positions, mut doc_start) = (vec![], vec![], vec![], vec![]);
        for t in 0..LEN {
            let at = from + t;
            ids.push(stream.get(at).map_or(EOS as i32, |id| *id as i32));
            let next_begins = starts.contains(&(at + 1));
            let label = stream.get(at + 1).filter(|_| !(mask && next_begins));
            labels.push(label.map_or(IGNORE, |id| *id as i32));
            // The last document that begins here or before, if it begins in this row; padding is one more.
            let begins = starts.iter().rev().copied().find(|s| *s <= at).unwrap_or(0).max(from);
            let begins = if at >= stream.len() { stream.len().max(from) } else { begins };
            let begin = if mask { (begins - from) as i32 } else { 0 };
            doc_start.push(begin);
            positions.push(t as i32 - begin);
        }
        Row { ids, labels, positions, doc_start }
    }

    fn differs(&self, batch: &Batch, row: usize) -> Option<String> {
        let of = |values: &[i32]| values[row * LEN..][..LEN].to_vec();
        [
            ("ids", &self.ids, of(&batch.input_ids)),
            ("labels", &self.labels, of(&batch.labels)),
            ("positions", &self.positions, of(&batch.position_ids)),
            ("document starts", &self.doc_start, of(&batch.doc_start)),
        ]
        .into_iter()
        .find(|(_, expected, got)| **expected != *got)
        .map(|(what, expected, got)| format!("{what} are {got:?}, expected {expected:?}"))
    }
}

/// Checks that shuffled epochs leave nothing out and repeat nothing, kept apart or not.
pub(super) fn epochs_are_complete(seed: u64) -> Result<Vec<Check>> {
    let documents = documents(seed);
    let mut checks = Vec::new();
    for mask in [false, true] {
        let mut loader = loader(&documents, seed, true, mask)?;
        let name = if mask {
            "every token once an epoch, documents kept apart"
        } else {
            "every token once an epoch"
        };
        checks.push(coverage(name, &mut loader));
    }
    Ok(checks)
}

/// Checks that the order changes with the epoch and with the seed, and with nothing else.
pub(super) fn order_has_a_seed(seed: u64) -> Result<Check> {
    let documents = documents(seed);
    let epochs = |seed: u64| -> Result<[Vec<i32>; 2]> {
        let mut loader = loader(&documents, seed, true, false)?;
        let rows = loader.sequences_per_epoch() as usize;
        // Batches of three rows: three epochs are whole batches.
        let ids: Vec<i32> = (0..rows).flat_map(|_| loader.next_batch().input_ids).collect();
        let epoch = |i: usize| ids[i * rows * LEN..(i + 1) * rows * LEN].to_vec();
        Ok([epoch(0), epoch(1)])
    };
    let (first, again, other) = (epochs(seed)?, epochs(seed)?, epochs(seed + 1)?);
    let problem = if first != again {
        Some("the same seed gives another order")
    } else if first[0] == first[1] {
        Some("the second epoch has the order of the first")
    } else if first[0] == other[0] {
        Some("another seed gives the same order")
    } else {
        None
    };
    let detail = problem.unwrap_or("differs between epochs and seeds, repeats for a seed");
    Ok(Check::new("order of the data", problem.is_none(), detail))
}
