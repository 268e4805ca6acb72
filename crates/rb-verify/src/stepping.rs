//! An optimizer against its formula, and a schedule against its promises.

use rb_autograd::{GradStore, MasterWeights, ParamStore, Precision, split_weight};
use rb_optim::{AdamW, AdamWConfig, Optimizer, Schedule};
use rb_tensor::{DType, Device, Tensor};

use crate::batches::random_batch;
use crate::model::backward;
use crate::{Check, LanguageModel, Result};

/// Steps that are compared: enough for bias correction to change.
const STEPS: usize = 3;

/// Checks three clipped steps of AdamW, at a rate so small that a rounding to 16 bits would lose it, against the
/// formula in f64: each part's weights, the norm before clipping, and the working copy of mixed precision. Then checks
/// that a step whose loss is not finite changes nothing. The weights change.
///
/// # Errors
/// The model cannot run at all.
pub fn optimizer_follows_formula(
    model: &dyn LanguageModel,
    params: &mut ParamStore,
    seed: u64,
) -> Result<Vec<Check>> {
    const LR: f64 = 1e-5;
    let config = AdamWConfig { weight_decay: 0.5, ..AdamWConfig::default() };
    let mut adam = AdamW::new(config, params)?;
    let mut grads = GradStore::new(params)?;
    let batch = random_batch(model, 2, seed)?;
    // Name, whether it decays and is trained, weight, and both moments.
    let mut parts: Vec<(String, bool, bool, [Vec<f64>; 3])> = Vec::new();
    for (entry, part) in params.layout().parts() {
        let weight = values(&params.part(&part.name)?)?;
        let zeros = vec![0.0; weight.len()];
        // Matrices decay, norms and biases do not.
        let decays = part.shape.rank() >= 2;
        parts.push((part.name.clone(), decays, entry.trainable, [weight, zeros.clone(), zeros]));
    }
    let (mut worst, mut place) = (0.0f64, String::new());
    for step in 1..=STEPS {
        let loss = backward(model, params, &mut grads, &batch)?;
        let mut gradients = Vec::new();
        for (name, _, trainable, _) in &parts {
            gradients.push(if *trainable {
                grads.part(name)?.map(|g| values(&g)).transpose()?
            } else {
                None
            });
        }
        let norm = gradients.iter().flatten().flatten().map(|g| g * g).sum::<f64>().sqrt();
        if !norm.is_finite() {
            let detail = format!("the norm of the gradients is {norm} at step {step}");
            return Ok(vec![Check::new("optimizer follows its formula", false, detail)]);
        }
        let limit = norm / 2.0;
        let scale = (limit / (norm + 1e-6)).min(1.0);
        let told = adam.clipped_step(params, &mut grads, LR, limit, &placed(loss, params)?)?;
        let told = told.to_device(Device::Cpu)?.item()?;
        if (told / norm - 1.0).abs() > 1e-4 || told.is_nan() {
            let detail = format!("step {step} reports norm {told:.6e}, before clipping it was {norm:.6e}");
            return Ok(vec![Check::new("optimizer follows its formula", false, detail)]);
        }
        let t = step as i32;
        for ((name, decays, trainable, [w, m, v]), grad) in parts.iter_mut().zip(&gradients) {
            let old = w.clone();
            if let Some(grad) = grad.as_ref().filter(|_| *trainable) {
                for (((w, m), v), g) in w.iter_mut().zip(m).zip(v).zip(grad) {
                    let g = g * scale;
                    *m = config.beta1 * *m + (1.0 - config.beta1) * g;
                    *v = config.beta2 * *v + (1.0 - config.beta2) * g * g;
                    let (m, v) = (*m / (1.0 - config.beta1.powi(t)), *v / (1.0 - config.beta2.powi(t)));
                    let decay = if *decays { LR * config.weight_decay * *w } else { 0.0 };
                    *w -= decay + LR * m / (v.sqrt() + config.eps);
                }
            }
            let got = values(&params.part(name)?)?;
            for ((want, got), old) in w.iter().zip(&got).zip(&old) {
                // Of the step itself, beyond the rounding of the weight and of a gradient near zero.
                let off = (want - got).abs() - 2f64.powi(-23) * old.abs();
                if off.is_nan() || off / LR > worst {
                    (worst, place) = (off / LR, format!("{name} in step {step}"));
                }
            }
            // The next step starts from the weights as they are: roundings must not add up.
            w.copy_from_slice(&got);
        }
    }
    let mut detail = format!("{STEPS} steps, largest difference {worst:.1e} of the rate ({place})");
    let mut good = worst <= 0.02;
    if let Some(name) = stale_working_copy(params)? {
        (good, detail) = (false, format!("the working copy of {name} is not its weights rounded to bf16"));
    }
    let mut checks = vec![Check::new("optimizer follows its formula", good, detail)];

    let before = arena(params)?;
    let loss = backward(model, params, &mut grads, &batch)?;
    debug_assert!(loss.is_finite());
    let nan = placed(f64::NAN, params)?;
    adam.clipped_step(params, &mut grads, 1e-2, 1.0, &nan)?;
    let kept = before == arena(params)?;
    let detail = if kept { "the weights kept their bits" } else { "the weights changed" };
    checks.push(Check::new("a step that is not finite changes nothing", kept, detail));
    Ok(checks)
}

/// The first parameter whose working copy is not its weights.
fn stale_working_copy(params: &ParamStore) -> Result<Option<String>> {
    if params.precision() == Precision::Full {
        return Ok(None);
    }
    for (entry, part) in params.layout().parts().filter(|(e, _)| e.trainable) {
        let id = params.id(&part.name)?;
        let start = part.offset - entry.offset;
        let copy = values(&params.tensor(id)?)?[start..][..part.shape.numel()].to_vec();
        let whole = params.part(&part.name)?.to_device(Device::Cpu)?;
        let split = matches!(params.precision(), Precision::Bf16 { master: MasterWeights::Split, .. });
        let rounded = if split && entry.decay {
            whole.to_vec::<f32>()?.into_iter().map(|x| f64::from(split_weight(x).0.to_f32())).collect()
        } else {
            values(&whole.to_dtype(DType::BF16)?)?
        };
        if copy != rounded {
            return Ok(Some(part.name.clone()));
        }
    }
    Ok(None)
}

/// A loss where an optimizer reads it.
fn placed(loss: f64, params: &ParamStore) -> Result<Tensor> {
    Ok(Tensor::from_vec(vec![loss as f32], [1])?.to_device(params.arena().device())?)
}

fn values(tensor: &Tensor) -> Result<Vec<f64>> {
    Ok(tensor.to_device(Device::Cpu)?.to_dtype(DType::F64)?.to_vec()?)
}

fn arena(params: &ParamStore) -> Result<Vec<u64>> {
    let mut bits = Vec::new();
    for (_, part) in params.layout().parts() {
        bits.extend(values(&params.part(&part.name)?)?.into_iter().map(f64::to_bits));
    }
    Ok(bits)
}

/// Checks every step of a schedule and some after its end: no rate of zero, none above `peak`, none above the one
/// before it once the warm-up is over, and none other than the last after the end.
pub fn schedule_keeps_its_promises(
    schedule: &Schedule,
    peak: f64,
    warmup_steps: u64,
    total_steps: u64,
) -> Check {
    // A long run is sampled, its beginning and its end taken whole.
    const WHOLE: u64 = 10_000;
    let stride = (total_steps / WHOLE).max(1);
    let near = |at: u64| at.saturating_sub(10)..at + 10;
    let mut steps: Vec<u64> = (0..total_steps)
        .step_by(stride as usize)
        .chain(near(warmup_steps))
        .chain(near(total_steps))
        .collect();
    steps.extend(0..10);
    steps.extend((1..5).map(|i| total_steps + i * total_steps / 2));
    steps.sort_unstable();
    steps.dedup();
    let mut problem = None;
    let mut before = f64::INFINITY;
    let slack = 1.0 + 1e-12;
    for &step in &steps {
        let rate = schedule.lr(step);
        // A warm-up that is longer than the run has no end to look at.
        let past = step >= total_steps && warmup_steps < total_steps;
        let last = schedule.lr(total_steps.saturating_sub(1));
        let reason = if !rate.is_finite() || rate < 0.0 {
            Some("is no rate".to_string())
        } else if rate == 0.0 && step + 1 < total_steps {
            Some("moves nothing".to_string())
        } else if rate > peak * slack {
            Some(format!("is above the peak {peak:e}"))
        } else if step >= warmup_steps && rate > before * slack {
            Some(format!("is above the {before:e} before it"))
        } else if past && rate != last {
            Some(format!("is not the last rate {last:e}, although the schedule has ended"))
        } else {
            None
        };
        if let Some(reason) = reason {
            problem = Some(format!("the rate {rate:e} of step {} {reason}", step + 1));
            break;
        }
        before = if step + 1 >= warmup_steps { rate } else { f64::INFINITY };
    }
    let detail = problem.clone().unwrap_or_else(|| format!("{} steps of {total_steps} seen", steps.len()));
    Check::new("learning rates", problem.is_none(), detail)
}
