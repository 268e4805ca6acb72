//! Batches for checks.

use rb_autograd::ops::attention::AttentionMask;
use rb_nn::ModelInput;
use rb_tensor::{Rng, Tensor};

use crate::{LanguageModel, Result};

/// Label of a position that is not a target.
pub(crate) const IGNORE: i32 = -100;

/// Random ids `[rows, len]` and labels of the same shape.
pub(crate) fn random_batch(model: &dyn LanguageModel, rows: usize, seed: u64) -> Result<(Tensor, Tensor)> {
    let len = model.max_positions().min(24);
    let mut rng = Rng::new(seed).fork("verify batch");
    let mut ids = || -> Result<Tensor> {
        let values = (0..rows * len).map(|_| rng.below(model.vocab_size() as u64) as i32).collect();
        Ok(Tensor::from_vec::<i32>(values, [rows, len])?)
    };
    Ok((ids()?, ids()?))
}

/// Documents packed into two rows: one ends with its row, and padding that sees nothing follows another.
pub(crate) struct Packed {
    pub(crate) input: ModelInput,
    /// [`IGNORE`] at the last token of each document and in padding.
    pub(crate) labels: Tensor,
    /// `[B * T]`; behind the row for padding.
    pub(crate) doc_start: Vec<i32>,
    /// Row, first column and length of each document.
    pub(crate) documents: Vec<(usize, usize, usize)>,
}

/// Two rows of at most 12 tokens.
pub(crate) fn packed_documents(model: &dyn LanguageModel, seed: u64) -> Result<Packed> {
    let len = model.max_positions().min(12);
    // A row of one position has room for one document.
    let first = (len / 2).max(1);
    let mut documents = vec![(0, 0, first), (1, 0, len.div_ceil(3))];
    if first < len {
        documents.push((0, first, len - first));
    }
    let (mut doc_start, mut positions, mut labels) =
        (vec![len as i32; 2 * len], vec![0; 2 * len], vec![IGNORE; 2 * len]);
    let mut rng = Rng::new(seed).fork("packed documents");
    let mut token = || rng.below(model.vocab_size() as u64) as i32;
    let ids: Vec<i32> = (0..2 * len).map(|_| token()).collect();
    for &(row, start, count) in &documents {
        for t in 0..count {
            let at = row * len + start + t;
            (doc_start[at], positions[at]) = (start as i32, t as i32);
            // A document of one token needs a label too: some configs have no longer ones.
            if t + 1 < count || count == 1 {
                labels[at] = token();
            }
        }
    }
    let matrix = |values: Vec<i32>| Tensor::from_vec(values, [2, len]);
    let mask = AttentionMask::documents(&matrix(doc_start.clone())?)?;
    let input = ModelInput { input_ids: matrix(ids)?, position_ids: Some(matrix(positions)?), mask };
    Ok(Packed { input, labels: matrix(labels)?, doc_start, documents })
}
