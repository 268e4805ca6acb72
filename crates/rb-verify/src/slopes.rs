//! Gradients of a whole model against what they stand for: the slope of its loss.

use rb_autograd::ops::cross_entropy::{CrossEntropyOptions, Denominator};
use rb_autograd::{GradStore, ParamStore, Precision, Tape};
use rb_nn::ModelInput;
use rb_tensor::{DType, Device, Rng, Tensor};

use crate::batches::{IGNORE, packed_documents, random_batch};
use crate::model::backward;
use crate::{Check, LanguageModel, Result};

/// Parts that are moved one by one; of a larger model an even choice, and all parts at once.
const MOST_PARTS: usize = 24;

/// Checks in f64 on the host that the gradient of each part is the slope of the loss: along a direction that is half
/// the gradient's own and half random. An operation or module that loses or scales a gradient anywhere between a
/// parameter and the loss is seen here, although every parameter still gets some gradient.
///
/// # Errors
/// The model cannot run at all.
pub fn gradients_are_slopes(model: &dyn LanguageModel, params: &ParamStore, seed: u64) -> Result<Check> {
    /// Error of the central difference: about `STEP^2` of the third derivative and `1e-16 / STEP`.
    const STEP: f64 = 3e-6;
    let wide = params.to_device(Device::Cpu)?.to_dtype(DType::F64)?;
    let batch = packed_documents(model, seed)?;
    let mut grads = GradStore::new(&wide)?;
    {
        let tape = Tape::new(&wide);
        let loss = model.loss(&tape, &batch.input, &batch.labels, &CrossEntropyOptions::default())?;
        tape.backward(&loss, &mut grads)?;
    }
    let mut parts: Vec<(String, usize, Vec<f64>)> = Vec::new();
    for (entry, part) in wide.layout().parts() {
        if let Some(grad) = grads.part(&part.name)?.filter(|_| entry.trainable) {
            parts.push((part.name.clone(), part.offset, grad.to_vec()?));
        }
    }
    drop(grads);
    let mut moved = wide.to_dtype(DType::F64)?;
    let mut rng = Rng::new(seed).fork("slopes");
    let mut worst = (0.0f64, String::new());
    let stride = parts.len().div_ceil(MOST_PARTS).max(1);
    let single = (0..parts.len()).step_by(stride).map(|i| i..i + 1);
    // One more direction moves everything, whatever was left out.
    let groups: Vec<_> = single.chain(std::iter::once(0..parts.len())).collect();
    for group in &groups {
        let direction: Vec<Vec<f64>> =
            parts[group.clone()].iter().map(|(_, _, grad)| direction(grad, &mut rng)).collect();
        let mut at = |sign: f64| -> Result<f64> {
            shift(&mut moved, &parts[group.clone()], &direction, sign * STEP)?;
            let tape = Tape::inference(&moved);
            let loss = model.loss(&tape, &batch.input, &batch.labels, &CrossEntropyOptions::default())?;
            let value = loss.detach().item()?;
            drop(loss);
            shift(&mut moved, &parts[group.clone()], &direction, -sign * STEP)?;
            Ok(value)
        };
        let numeric = (at(1.0)? - at(-1.0)?) / (2.0 * STEP);
        let terms = parts[group.clone()].iter().zip(&direction);
        let exact: f64 = terms.map(|((_, _, g), d)| g.iter().zip(d).map(|(g, d)| g * d).sum::<f64>()).sum();
        let off = (numeric - exact).abs() / (exact.abs() + 1e-5);
        if off.is_nan() || off > worst.0 {
            let name = if group.len() == 1 { parts[group.start].0.as_str() } else { "all together" };
            worst = (off, format!("{name}: slope {numeric:.6e}, gradient {exact:.6e}"));
        }
        if off.is_nan() {
            break;
        }
    }
    let good = worst.0 <= 1e-4 && !parts.is_empty();
    let detail = match good {
        true => format!("{} slopes, worst off by {:.0e}", groups.len(), worst.0),
        false => worst.1,
    };
    Ok(Check::new("gradients are slopes", good, detail))
}

/// A unit vector: half along the gradient, half random.
fn direction(grad: &[f64], rng: &mut Rng) -> Vec<f64> {
    let unit = |x: Vec<f64>| {
        let norm = x.iter().map(|x| x * x).sum::<f64>().sqrt().max(f64::MIN_POSITIVE);
        x.into_iter().map(|x| x / norm).collect::<Vec<f64>>()
    };
    let own = unit(grad.to_vec());
    let random = unit((0..grad.len()).map(|_| rng.normal()).collect());
    unit(own.iter().zip(&random).map(|(a, b)| a + b).collect())
}

fn shift(
    params: &mut ParamStore,
    parts: &[(String, usize, Vec<f64>)],
    directions: &[Vec<f64>],
    by: f64,
) -> Result<()> {
    let weights = params.arena_mut().as_mut_slice::<f64>()?;
    for ((_, offset, _), direction) in parts.iter().zip(directions) {
        weights[*offset..][..direction.len()].iter_mut().zip(direction).for_each(|(w, d)| *w += by * d);
    }
    Ok(())
}

/// Checks in f64 on the host that each trainable part has an effect on the loss. What cancels by symmetry (a bias that
/// shifts all scores of a softmax alike) has a gradient of rounding noise in f32, from which an optimizer makes steps.
///
/// # Errors
/// The model cannot run at all.
pub fn every_part_matters(model: &dyn LanguageModel, params: &ParamStore, seed: u64) -> Result<Check> {
    /// Share of the norm of all gradients. Noise in f64 is about 1e-16 of it.
    const LEAST: f64 = 1e-12;
    let wide = params.to_device(Device::Cpu)?.to_dtype(DType::F64)?;
    let mut grads = GradStore::new(&wide)?;
    backward(model, &wide, &mut grads, &random_batch(model, 2, seed)?)?;
    let all = grads.global_norm()?;
    let (mut seen, mut without) = (0, Vec::new());
    for (_, part) in wide.layout().parts().filter(|(e, _)| e.trainable) {
        seen += 1;
        let grad: Vec<f64> = grads.part(&part.name)?.map_or(Ok(Vec::new()), |grad| grad.to_vec())?;
        let share = grad.iter().map(|x| x * x).sum::<f64>().sqrt() / all;
        if share.is_nan() || share <= LEAST {
            without.push(format!("{} has {share:.0e} of the gradients' norm", part.name));
        }
    }
    let detail = match without.is_empty() {
        true => format!("{seen} parameters have an effect on the loss"),
        false => format!("{} of {seen} have no effect on the loss: {}", without.len(), without.join(", ")),
    };
    Ok(Check::new("every parameter matters", seen > 0 && without.is_empty(), detail))
}

/// Checks gradients in the precision and on the device of a run against f64 on the host, part by part.
///
/// # Errors
/// The model cannot run at all.
pub fn gradients_follow_f64(model: &dyn LanguageModel, params: &ParamStore, seed: u64) -> Result<Check> {
    let wide = params.to_device(Device::Cpu)?.to_dtype(DType::F64)?;
    let run = |params: &ParamStore| -> Result<GradStore> {
        let batch = packed_documents(model, seed)?;
        let device = params.arena().device();
        let mut grads = GradStore::new(params)?;
        let tape = Tape::new(params);
        let input = ModelInput { input_ids: batch.input.input_ids.to_device(device)?, ..batch.input };
        let labels = batch.labels.to_device(device)?;
        let loss = model.loss(&tape, &input, &labels, &CrossEntropyOptions::default())?;
        tape.backward(&loss, &mut grads)?;
        Ok(grads)
    };
    let (mine, truth) = (run(params)?, run(&wide)?);
    // bf16 keeps 8 bits, and a gradient that is a small difference of large terms keeps fewer.
    let limit = if params.precision() == Precision::Full { 1e-3 } else { 0.3 };
    let (mut worst, mut name) = (0.0f64, String::new());
    // A part whose gradient is far below all others is a small difference of large terms, and moves little.
    let least = 1e-4 * truth.global_norm()?;
    for (entry, part) in params.layout().parts().filter(|(e, _)| e.trainable) {
        debug_assert!(entry.trainable);
        let values = |grads: &GradStore| -> Result<Option<Vec<f64>>> {
            let Some(grad) = grads.part(&part.name)? else { return Ok(None) };
            Ok(Some(grad.to_device(Device::Cpu)?.to_dtype(DType::F64)?.to_vec()?))
        };
        let off = match (values(&mine)?, values(&truth)?) {
            (Some(mine), Some(truth)) => {
                let norm = truth.iter().map(|x| x * x).sum::<f64>().sqrt();
                let error = mine.iter().zip(&truth).map(|(a, b)| (a - b) * (a - b)).sum::<f64>().sqrt();
                error / norm.max(least)
            }
            _ => f64::NAN,
        };
        if off.is_nan() || off > worst {
            (worst, name) = (off, part.name.clone());
        }
        if off.is_nan() {
            break;
        }
    }
    let detail = format!("largest relative difference {worst:.0e} ({name})");
    Ok(Check::new("gradients follow f64", worst <= limit, detail))
}

/// Checks that one batch and the same rows one at a time give the same loss and gradients, that a step's gradients
/// replace those of the step before, and that the same work gives the same bits.
///
/// # Errors
/// The model cannot run at all.
pub fn accumulation(model: &dyn LanguageModel, params: &ParamStore, seed: u64) -> Result<Vec<Check>> {
    let device = params.arena().device();
    let batch = packed_documents(model, seed)?;
    let (ids, labels) = (batch.input.input_ids, batch.labels);
    let len = ids.shape()[1];
    let valid = labels.to_vec::<i32>()?.iter().filter(|l| **l != IGNORE).count();
    let options = CrossEntropyOptions {
        denominator: Denominator::Fixed(valid as f64),
        ..CrossEntropyOptions::default()
    };
    let pass = |grads: &mut GradStore, rows: std::ops::Range<usize>| -> Result<f64> {
        let part = |t: &Tensor| -> Result<Tensor> {
            let values = t.to_vec::<i32>()?[rows.start * len..rows.end * len].to_vec();
            Ok(Tensor::from_vec(values, [rows.len(), len])?.to_device(device)?)
        };
        let tape = Tape::new(params);
        let loss = model.loss(&tape, &ModelInput::causal(part(&ids)?), &part(&labels)?, &options)?;
        tape.backward(&loss, grads)?;
        Ok(loss.detach().item()?)
    };
    let values = |grads: &GradStore| -> Result<Vec<f64>> {
        let all = grads.arena().view(0, [grads.layout().numel])?;
        Ok(all.to_device(Device::Cpu)?.to_dtype(DType::F64)?.to_vec()?)
    };
    let mut grads = GradStore::new(params)?;
    let whole_loss = pass(&mut grads, 0..2)?;
    let whole = values(&grads)?;
    grads.mark_stale();
    let stale_is_known = grads.require_complete().is_err();
    let again_loss = pass(&mut grads, 0..2)?;
    let again = values(&grads)?;
    grads.mark_stale();
    let split_loss = pass(&mut grads, 0..1)? + pass(&mut grads, 1..2)?;
    let split = values(&grads)?;

    let same = again == whole && again_loss.to_bits() == whole_loss.to_bits();
    let detail = match (stale_is_known, same) {
        (false, _) => "gradients still count as new after they were used".to_string(),
        (_, false) => "a second pass over the same batch gives other gradients".to_string(),
        _ => "a second pass over the same batch gives the same bits".to_string(),
    };
    let mut checks = vec![Check::new("gradients are replaced and repeat", stale_is_known && same, detail)];
    let norm = |x: &[f64]| x.iter().map(|x| x * x).sum::<f64>().sqrt();
    let error: Vec<f64> = whole.iter().zip(&split).map(|(a, b)| a - b).collect();
    let off = norm(&error) / norm(&whole).max(f64::MIN_POSITIVE);
    let loss_off = ((whole_loss - split_loss) / whole_loss).abs();
    let limit = if params.precision() == Precision::Full { 1e-4 } else { 3e-2 };
    let detail =
        format!("two rows at once and one by one: loss off by {loss_off:.0e}, gradients by {off:.0e}");
    checks.push(Check::new("accumulation is one batch", off <= limit && loss_off <= limit, detail));
    Ok(checks)
}
