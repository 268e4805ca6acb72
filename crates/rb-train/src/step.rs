//! One optimizer step and one evaluation pass: the arithmetic of training, without files or clocks.

use rb_autograd::ops::attention::AttentionMask;
use rb_autograd::ops::cross_entropy::{CrossEntropyOptions, Denominator};
use rb_autograd::{AutogradError, GradStore, ParamStore, Tape};
use rb_data::Batch;
use rb_nn::{CausalLm, ModelInput, NnError};
use rb_tensor::Tensor;

use crate::Result;

/// Terms of the training loss besides cross entropy.
#[derive(Clone, Copy, Debug, PartialEq, Default)]
pub struct LossTerms {
    /// Label smoothing.
    pub label_smoothing: f64,
    /// Weight of the squared log-partition term.
    pub z_loss: f64,
}

/// A batch as the model takes it, with its labels.
pub fn model_input(batch: &Batch, document_mask: bool) -> Result<(ModelInput, Tensor)> {
    let shape = [batch.batch_size, batch.seq_len];
    let tensor = |values: &[i32]| Tensor::from_vec(values.to_vec(), shape);
    let mask = if document_mask {
        AttentionMask::documents(&tensor(&batch.doc_start)?)?
    } else {
        AttentionMask::Causal
    };
    let position_ids = if document_mask { Some(tensor(&batch.position_ids)?) } else { None };
    let input = ModelInput { input_ids: tensor(&batch.input_ids)?, position_ids, mask };
    Ok((input, tensor(&batch.labels)?))
}

/// Gradients of the mean loss over all valid tokens of all `batches`, and that loss.
///
/// Every micro-batch divides by the step's count of valid tokens, so loss and gradients are those of one
/// large batch however the tokens are spread.
pub fn forward_backward(
    model: &CausalLm,
    params: &ParamStore,
    grads: &mut GradStore,
    batches: &[Batch],
    document_mask: bool,
    terms: LossTerms,
) -> Result<f64> {
    let valid: usize = batches.iter().map(|b| b.valid_tokens).sum();
    let options = loss_options(valid, terms);
    grads.mark_stale();
    let mut total = 0.0;
    for batch in batches {
        let (input, labels) = model_input(batch, document_mask)?;
        let tape = Tape::new(params);
        let loss = model.loss(&tape, &input, &labels, &options)?;
        total += loss.detach().item()?;
        tape.backward(&loss, grads)?;
    }
    Ok(total)
}

/// The loss of `batches` alone, on a tape that names the first operation whose output is not finite.
pub fn find_non_finite(
    model: &CausalLm,
    params: &ParamStore,
    batches: &[Batch],
    document_mask: bool,
    terms: LossTerms,
) -> Result<Option<String>> {
    for (_, part) in params.layout().parts() {
        if params.part(&part.name)?.first_non_finite()?.is_some() {
            return Ok(Some(format!("weight {}", part.name)));
        }
    }
    let options = loss_options(batches.iter().map(|b| b.valid_tokens).sum(), terms);
    for batch in batches {
        let (input, labels) = model_input(batch, document_mask)?;
        let tape = Tape::inference(params).checked();
        match model.loss(&tape, &input, &labels, &options) {
            Err(NnError::Autograd(found @ AutogradError::NonFinite { .. })) => {
                return Ok(Some(found.to_string()));
            }
            other => other.map(drop)?,
        }
    }
    Ok(None)
}

/// The first gradient that is not finite, by name.
pub fn find_non_finite_gradient(grads: &GradStore) -> Result<Option<String>> {
    for (_, part) in grads.layout().parts() {
        if let Some(grad) = grads.part(&part.name)?
            && grad.first_non_finite()?.is_some()
        {
            return Ok(Some(format!("gradient of {}", part.name)));
        }
    }
    Ok(None)
}

/// Mean loss in nats over the valid tokens of all `batches`, and their number.
pub fn evaluate(
    model: &CausalLm,
    params: &ParamStore,
    batches: impl Iterator<Item = Batch>,
    document_mask: bool,
) -> Result<(f64, u64)> {
    let (mut total, mut tokens) = (0.0, 0u64);
    for batch in batches.filter(|b| b.valid_tokens > 0) {
        let (input, labels) = model_input(&batch, document_mask)?;
        // Sums, not means: batches with unequal numbers of valid tokens weigh as their tokens do.
        let options = CrossEntropyOptions { denominator: Denominator::Fixed(1.0), ..Default::default() };
        total += model.loss(&Tape::inference(params), &input, &labels, &options)?.detach().item()?;
        tokens += batch.valid_tokens as u64;
    }
    Ok((total / tokens.max(1) as f64, tokens))
}

fn loss_options(valid_tokens: usize, terms: LossTerms) -> CrossEntropyOptions {
    CrossEntropyOptions {
        label_smoothing: terms.label_smoothing,
        z_loss: terms.z_loss,
        denominator: Denominator::Fixed(valid_tokens.max(1) as f64),
        ..Default::default()
    }
}
