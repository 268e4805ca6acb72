//! One optimizer step and one evaluation pass: the arithmetic of training, without files or clocks.

use rb_autograd::ops::attention::AttentionMask;
use rb_autograd::ops::cross_entropy::{CrossEntropyOptions, Denominator};
use rb_autograd::{AutogradError, Beta, GradStore, ParamStore, Tape, cuda};
use rb_data::{Batch, IGNORE};
use rb_nn::{CausalLm, ModelInput, NnError};
use rb_planted::{Defect, active};
use rb_tensor::{DType, Device, Tensor};

use crate::{Result, TrainError};

/// Terms of the training loss besides cross entropy.
#[derive(Clone, Copy, Debug, PartialEq, Default)]
pub struct LossTerms {
    /// Label smoothing.
    pub label_smoothing: f64,
    /// Weight of the squared log-partition term.
    pub z_loss: f64,
}

/// A batch as the model takes it, with its labels, on `device`.
///
/// # Errors
/// A token id or label outside the vocabulary is refused by the model where it is in host memory, and here
/// where it is about to leave it.
pub fn model_input(
    batch: &Batch,
    document_mask: bool,
    vocab_size: usize,
    device: Device,
) -> Result<(ModelInput, Tensor)> {
    let shape = [batch.batch_size, batch.seq_len];
    let host = |values: &[i32]| Tensor::from_vec(values.to_vec(), shape);
    let tensor = |values: &[i32]| host(values)?.to_device(device);
    if device != Device::Cpu {
        check_range("input_ids", &batch.input_ids, 0, vocab_size)?;
        check_range("labels", &batch.labels, IGNORE, vocab_size)?;
    }
    let mask = match document_mask {
        false => AttentionMask::Causal,
        true => match AttentionMask::documents(&host(&batch.doc_start)?)? {
            AttentionMask::Ranges(ranges) => AttentionMask::Ranges(ranges.to_device(device)?),
            other => other,
        },
    };
    let position_ids = if document_mask { Some(tensor(&batch.position_ids)?) } else { None };
    let input = ModelInput { input_ids: tensor(&batch.input_ids)?, position_ids, mask };
    Ok((input, tensor(&batch.labels)?))
}

/// Kernels cannot raise an error, so what they index with is checked before it leaves the host.
pub(crate) fn check_range(argument: &'static str, ids: &[i32], least: i32, bound: usize) -> Result<()> {
    let good = |id: i32| id == least || usize::try_from(id).is_ok_and(|id| id < bound);
    match ids.iter().position(|&id| !good(id)) {
        None => Ok(()),
        Some(position) => {
            let index = i64::from(ids[position]);
            Err(AutogradError::IndexOutOfRange { op: "batch", argument, position, index, bound }.into())
        }
    }
}

/// Gradients of the mean loss over all valid tokens of all `batches`, and that loss as a scalar, which on a GPU is
/// still being computed.
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
) -> Result<Tensor> {
    let count = |b: &Batch| {
        if active(Defect::StepMeanOverPadding) { b.batch_size * b.seq_len } else { b.valid_tokens }
    };
    let valid: usize = batches.iter().map(count).sum();
    let options = |at: usize| match active(Defect::MeanOfMicroBatches) {
        true => loss_options(batches[at].valid_tokens * batches.len(), terms),
        false => loss_options(valid, terms),
    };
    let device = params.arena().device();
    let vocab_size = model.config().vocab_size;
    let inputs = batches.iter().map(|batch| model_input(batch, document_mask, vocab_size, device));
    accumulate(model, params, grads, inputs, options)
}

/// As [`forward_backward`] from inputs and labels that are on the device of the weights, with the options of the loss
/// by the number of the micro-batch.
pub(crate) fn accumulate(
    model: &CausalLm,
    params: &ParamStore,
    grads: &mut GradStore,
    inputs: impl Iterator<Item = Result<(ModelInput, Tensor)>>,
    options: impl Fn(usize) -> CrossEntropyOptions,
) -> Result<Tensor> {
    let device = params.arena().device();
    grads.mark_stale();
    let (mut total, mut on_device) = (0.0, None);
    let mut inputs = inputs.enumerate();
    while let Some((at, input)) = inputs.next() {
        let (input, labels) = input?;
        let options = &options(at);
        grads.set_last_pass(inputs.size_hint().1 == Some(0));
        let tape = Tape::new(params);
        let loss = model.loss(&tape, &input, &labels, options)?;
        match (device, &on_device) {
            (Device::Cpu, _) => total += loss.detach().item()?,
            (_, None) => on_device = Some(loss.detach().to_owned_copy()?),
            (_, Some(sum)) => cuda::accumulate(sum, &loss.detach(), Beta::Accumulate)?,
        }
        tape.backward(&loss, grads)?;
        if device == Device::Cpu && active(Defect::ClipBeforeAccumulationEnds) {
            clip_in_place(grads, 0.1)?;
        }
    }
    Ok(on_device.unwrap_or_else(|| Tensor::scalar(total)))
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
    let tape = Tape::inference(params).checked();
    match loss_on(model, &tape, batches, document_mask, terms) {
        Err(TrainError::Nn(NnError::Autograd(found @ AutogradError::NonFinite { .. }))) => {
            Ok(Some(found.to_string()))
        }
        other => other.map(|()| None),
    }
}

/// The forward passes of `batches` on a tape that records nothing.
pub(crate) fn loss_on<'t>(
    model: &CausalLm,
    tape: &'t Tape<'t>,
    batches: &[Batch],
    document_mask: bool,
    terms: LossTerms,
) -> Result<()> {
    let options = loss_options(valid_tokens(batches), terms);
    for batch in batches {
        let (input, labels) = model_input(batch, document_mask, model.config().vocab_size, tape.device())?;
        model.loss(tape, &input, &labels, &options)?;
    }
    Ok(())
}

/// Forward and backward of `batches` once more, stopped at the first gradient in the order of backward that is not
/// finite: the operation it arrived at, or the parameter it belongs to.
pub fn find_non_finite_in_backward(
    model: &CausalLm,
    params: &ParamStore,
    grads: &mut GradStore,
    batches: &[Batch],
    document_mask: bool,
    terms: LossTerms,
) -> Result<Option<String>> {
    let options = loss_options(valid_tokens(batches), terms);
    grads.mark_stale();
    for batch in batches {
        let (input, labels) =
            model_input(batch, document_mask, model.config().vocab_size, params.arena().device())?;
        let tape = Tape::new(params).checked();
        let loss = model.loss(&tape, &input, &labels, &options)?;
        match tape.backward(&loss, grads) {
            Err(
                found @ (AutogradError::NonFiniteGradient { .. }
                | AutogradError::NonFiniteParameterGradient { .. }),
            ) => return Ok(Some(found.to_string())),
            other => drop(other?),
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
        let (input, labels) =
            model_input(&batch, document_mask, model.config().vocab_size, params.arena().device())?;
        // Sums, not means: batches with unequal numbers of valid tokens weigh as their tokens do.
        let options = CrossEntropyOptions { denominator: Denominator::Fixed(1.0), ..Default::default() };
        let sum = model.loss(&Tape::inference(params), &input, &labels, &options)?.detach().item()?;
        if active(Defect::EvaluationMeanOfMeans) {
            (total, tokens) = (total + sum / batch.valid_tokens as f64, tokens + 1);
            continue;
        }
        total += sum;
        tokens += batch.valid_tokens as u64;
    }
    Ok((total / tokens.max(1) as f64, tokens))
}

/// What the planted defect of an early clip does.
fn clip_in_place(grads: &mut GradStore, max_norm: f64) -> Result<()> {
    let scale = rb_optim::clip_coefficient(grads.global_norm()?, max_norm);
    match grads.arena().dtype() {
        DType::F64 => grads.arena_mut().as_mut_slice::<f64>()?.iter_mut().for_each(|g| *g *= scale),
        _ => grads.arena_mut().as_mut_slice::<f32>()?.iter_mut().for_each(|g| *g *= scale as f32),
    }
    Ok(())
}

/// Tokens of a step that are targets.
pub(crate) fn valid_tokens(batches: &[Batch]) -> usize {
    batches.iter().map(|b| b.valid_tokens).sum()
}

pub(crate) fn loss_options(valid_tokens: usize, terms: LossTerms) -> CrossEntropyOptions {
    CrossEntropyOptions {
        label_smoothing: terms.label_smoothing,
        z_loss: terms.z_loss,
        denominator: Denominator::Fixed(valid_tokens.max(1) as f64),
        ..Default::default()
    }
}
