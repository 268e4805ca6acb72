//! [`Embedding`]: a table of vectors, and the output product that may share it.

use rb_autograd::{Init, ParamBuilder, ParamId, Tape, Var, ops};
use rb_tensor::{Shape, Tensor};

use crate::{NnError, Result};

/// A table `[vocab, C]` stored with padding rows that are never read, trained or exported.
#[derive(Clone, Copy, Debug)]
pub struct Embedding {
    weight: ParamId,
    vocab_size: usize,
}

impl Embedding {
    /// Declares `<name>.weight` of `vocab_size` rows in a store of `padded` rows.
    pub fn init(
        builder: &mut ParamBuilder,
        name: &str,
        vocab_size: usize,
        padded: usize,
        width: usize,
        std: f64,
    ) -> Result<Embedding> {
        let parts = [(format!("{name}.weight"), vocab_size)];
        let weight = builder.packed(parts, &Shape::from([padded, width]), Init::Normal(std))?;
        Ok(Embedding { weight, vocab_size })
    }

    /// The vectors of `ids [..]` -> `[.., C]`.
    ///
    /// # Errors
    /// [`NnError::NotInVocabulary`] with the place of the first bad id.
    pub fn forward<'t>(&self, tape: &'t Tape<'t>, ids: &Tensor) -> Result<Var<'t>> {
        let dtype = tape.residual_dtype();
        let (table, low) = tape.param_table(self.weight)?;
        let y = ops::embedding::lookup(&table, low, ids, self.vocab_size, dtype);
        y.map_err(|e| NnError::in_batch("input_ids", ids, e))
    }

    /// Scores of every entry for each row: `x [.., C]` -> `[.., padded]`. Columns of padding mean nothing;
    /// the loss and generation leave them out.
    pub fn logits<'t>(&self, tape: &'t Tape<'t>, x: &Var<'t>) -> Result<Var<'t>> {
        Ok(ops::linear(x, &tape.param(self.weight)?, None)?)
    }
}
