//! A GPU against the host: every operation on odd shapes, every model variant, training, repeatability, resume,
//! and proof that the kernels that were meant to run did run.

mod captured;
mod split;

use std::collections::{BTreeMap, BTreeSet};

use rb_autograd::ops::REGISTRY;
use rb_autograd::ops::cross_entropy::CrossEntropyOptions;
use rb_autograd::testing;
use rb_autograd::{GradStore, MasterWeights, ParamBuilder, ParamStore, Precision, Tape};
use rb_cuda::{Gpu, GpuOptions, Unit};
use rb_nn::{CausalLm, LlamaConfig, ModelInput, Recompute};
use rb_optim::{AdamW, AdamWConfig, Optimizer};
use rb_tensor::{DType, Device, Rng, Tensor};

use crate::attention::{tile_units, verify_attention};
use crate::products::{product_units, verify_products};
use crate::suite::verify_variants_on;
use crate::{Check, Report, Result, gradients_follow_f64, optimizer_follows_formula};

/// Every kernel, with its constants, that the cases of the registry and a small model's training launch on a card
/// of this compute capability: found on a dry run.
pub fn kernel_units(capability: (u32, u32)) -> Vec<Unit> {
    let gpu = Gpu::dry(capability, &GpuOptions::default());
    for op in REGISTRY {
        for case in (op.cases)() {
            for &precision in testing::device_precisions(op.name) {
                // What a case cannot do on a GPU is for the comparison to report.
                let _ = testing::device_check(op.name, &case, gpu, precision, 0);
            }
        }
    }
    for precision in precisions() {
        let _ = Training::new(Device::Cuda(gpu), precision).run(0, 1, None);
    }
    let _ = split::split_weights(gpu, 0, 1);
    let mut units = gpu.units();
    units.extend(tile_units(capability).unwrap_or_default());
    units.extend(product_units(capability));
    units
}

/// How much of the checks of a GPU runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Extent {
    /// Everything.
    Full,
    /// All cases of all operations and a few training steps.
    Quick,
    /// As many cases as it takes to launch every kernel in every precision: for tools that slow a kernel down a
    /// thousand times, such as `compute-sanitizer --tool racecheck`.
    Cover,
}

/// All checks of a GPU, or part of them. Memory should be poisoned (see [`GpuOptions`]), so that what a kernel leaves
/// unwritten is seen.
///
/// # Errors
/// A check that could not run at all; one that ran and failed is in the report.
pub fn verify_device(
    gpu: Gpu,
    seed: u64,
    extent: Extent,
    progress: &mut dyn FnMut(&Check),
) -> Result<Report> {
    let mut report = Report::default();
    let mut push = |report: &mut Report, checks: Report| {
        checks.checks.iter().for_each(&mut *progress);
        report.checks.extend(checks.checks);
    };
    let units = kernel_units(gpu.info().capability);
    let expected: BTreeSet<&str> = units.iter().map(|u| u.name).collect();
    let full = extent == Extent::Full;
    let chosen = match extent {
        Extent::Cover => covering_comparisons(gpu.info().capability),
        _ => {
            gpu.prepare(&units).map_err(rb_tensor::TensorError::from)?;
            REGISTRY.iter().map(|op| every_comparison(op.name, &(op.cases)())).collect()
        }
    };
    for (op, comparisons) in REGISTRY.iter().zip(chosen) {
        // An operation that only views memory launches nothing.
        if !(comparisons.is_empty() && extent == Extent::Cover) {
            push(&mut report, one(operation(op.name, &(op.cases)(), &comparisons, gpu, seed)));
        }
    }
    if extent != Extent::Cover {
        push(&mut report, verify_attention(gpu, seed, !full)?);
    }
    push(&mut report, tried("device: own products", verify_products(gpu, seed).map(one)));
    for precision in precisions() {
        if full {
            let mut scoped = Report::default();
            scoped.extend(name_of(precision), verify_variants_on(Device::Cuda(gpu), precision, seed)?);
            push(&mut report, scoped);
        }
        let checks: &[(&str, &dyn Fn() -> Result<Report>)] = if extent == Extent::Cover {
            &[("first steps", &|| first_steps(gpu, precision).map(one))]
        } else {
            &[
                ("gradients and optimizer", &|| small_model_checks(gpu, precision, seed)),
                ("repeats", &|| repeats(gpu, precision).map(one)),
                ("resumes", &|| resumes(gpu, precision).map(one)),
                ("recomputes", &|| recomputes(gpu, precision).map(one)),
                ("captured steps", &|| captured::captured(gpu, precision).map(one)),
            ]
        };
        for (name, check) in checks {
            push(&mut report, tried(&format!("device: {}: {name}", name_of(precision)), check()));
        }
    }
    let steps = if extent == Extent::Cover { 1 } else { 6 };
    push(&mut report, tried("device: split weights", split::split_weights(gpu, seed, steps).map(one)));
    if full {
        push(&mut report, tried("device: training", same_training(gpu).map(one)));
        push(&mut report, tried("device: training in bf16", precision_training(gpu).map(one)));
    }
    push(&mut report, one(kernels_ran(gpu, &expected)));
    Ok(report)
}

/// A check that ended in an error has failed, and what was found before it stays in the report.
fn tried(name: &str, report: Result<Report>) -> Report {
    report.unwrap_or_else(|error| one(Check::new(name, false, format!("could not go on: {error}"))))
}

/// Gradients against f64 on the host, and the optimizer against its formula.
fn small_model_checks(gpu: Gpu, precision: Precision, seed: u64) -> Result<Report> {
    let mut builder = ParamBuilder::default();
    let model = CausalLm::init(&small_model(), &mut builder)?;
    let mut params = builder.build(&Rng::new(seed), Device::Cuda(gpu))?;
    params.set_precision(precision)?;
    let mut report = one(gradients_follow_f64(&model, &params, seed)?);
    report.checks.extend(optimizer_follows_formula(&model, &mut params, seed)?);
    let mut scoped = Report::default();
    scoped.extend(&format!("device: {}", name_of(precision)), report);
    Ok(scoped)
}

fn one(check: Check) -> Report {
    Report { checks: vec![check] }
}

fn precisions() -> [Precision; 4] {
    let halves = Precision::MIXED.with_residual(DType::BF16).with_gradients(DType::BF16);
    let split = Precision::MIXED.with_residual(DType::BF16).with_master(MasterWeights::Split);
    [Precision::Full, Precision::MIXED, split, halves]
}

fn name_of(precision: Precision) -> &'static str {
    match precision {
        Precision::Full => "fp32",
        Precision::Bf16 { gradients: DType::BF16, .. } => "bf16, bf16 residual and gradients",
        Precision::Bf16 { master: MasterWeights::Split, .. } => "bf16, bf16 residual, split weights",
        Precision::Bf16 { .. } => "bf16",
    }
}

/// A case of an operation, by its number, in one precision.
type Comparison = (usize, testing::DevicePrecision);

fn every_comparison(op: &str, cases: &[testing::Case]) -> Vec<Comparison> {
    let precisions = testing::device_precisions(op);
    (0..cases.len()).flat_map(|case| precisions.iter().map(move |&precision| (case, precision))).collect()
}

/// Elements of a case above which a sanitizer takes minutes for it.
const LARGE: usize = 8192;

/// For each operation the comparisons that together launch each of its kernels in each precision: the largest
/// cases below [`LARGE`] first, since several warps and blocks at work show more.
fn covering_comparisons(capability: (u32, u32)) -> Vec<Vec<Comparison>> {
    let mut chosen = Vec::new();
    for op in REGISTRY {
        let cases = (op.cases)();
        let mut order = every_comparison(op.name, &cases);
        order.sort_by_key(|&(case, _)| {
            let elements: usize = cases[case].inputs.iter().map(|(shape, _)| shape.numel()).sum();
            (elements > LARGE, if elements > LARGE { elements } else { LARGE - elements })
        });
        let mut covered = BTreeSet::new();
        order.retain(|&(case, precision)| {
            let gpu = Gpu::dry(capability, &GpuOptions::default());
            let _ = testing::device_check(op.name, &cases[case], gpu, precision, 0);
            let kernels: Vec<_> = gpu.launches().into_keys().map(|k| (k, precision.to_string())).collect();
            let news = kernels.iter().any(|k| !covered.contains(k));
            covered.extend(kernels);
            news
        });
        chosen.push(order);
    }
    chosen
}

/// These comparisons of one operation with the host.
fn operation(name: &str, cases: &[testing::Case], comparisons: &[Comparison], gpu: Gpu, seed: u64) -> Check {
    let mut worst: BTreeMap<String, (f64, String)> = BTreeMap::new();
    let mut failures = Vec::new();
    let count = comparisons.len();
    for &(case, precision) in comparisons {
        let case = &cases[case];
        match testing::device_check(name, case, gpu, precision, seed) {
            Err(failure) => failures.push(failure.0),
            Ok(errors) => {
                for e in errors {
                    let ratio = e.device / e.budget;
                    let slot = worst.entry(precision.to_string()).or_insert((0.0, String::new()));
                    if ratio >= slot.0 {
                        *slot = (ratio, format!("{} of {}", e.what, case.name));
                    }
                }
            }
        }
    }
    let detail = if failures.is_empty() {
        let worst = worst.iter().map(|(p, (r, at))| format!("{p} {r:.2} of the budget at {at}"));
        format!("{count} comparisons; worst {}", worst.collect::<Vec<_>>().join(", "))
    } else {
        let shown: Vec<&str> = failures.iter().take(4).map(String::as_str).collect();
        format!("{} of {count} comparisons failed: {}", failures.len(), shown.join(" | "))
    };
    Check::new(format!("device: {name}"), failures.is_empty() && count > 0, detail)
}

/// Low enough that training is smooth: at ten times this rate two runs in fp32 and f64 on the host part ways too.
const LEARNING_RATE: f64 = 3e-4;

/// Small enough for the host, with grouped heads, a tied head and an odd vocabulary.
fn small_model() -> LlamaConfig {
    LlamaConfig {
        num_key_value_heads: Some(2),
        tie_word_embeddings: true,
        max_position_embeddings: 48,
        ..LlamaConfig::new(131, 96, 160, 3, 6)
    }
}

/// Weights and optimizer state, in host memory.
struct Snapshot {
    weights: Vec<(String, Tensor)>,
    state: BTreeMap<String, Tensor>,
    steps: u64,
}

/// A training run of [`small_model`], or of one like it.
#[derive(Clone)]
struct Training {
    config: LlamaConfig,
    device: Device,
    precision: Precision,
    recompute: Recompute,
}

impl Training {
    fn new(device: Device, precision: Precision) -> Training {
        Training { config: small_model(), device, precision, recompute: Recompute::None }
    }

    /// Trains on random rows that repeat, from the beginning or from a snapshot; gives losses and the last state.
    fn run(&self, first_step: usize, steps: usize, from: Option<&Snapshot>) -> Result<(Vec<f64>, Snapshot)> {
        let mut builder = ParamBuilder::default();
        let model = CausalLm::init(&self.config, &mut builder)?.with_recompute(self.recompute);
        let mut params = builder.build(&Rng::new(1), Device::Cpu)?.to_device(self.device)?;
        params.set_precision(self.precision)?;
        let mut adam = AdamW::new(AdamWConfig::default(), &params)?;
        if let Some(from) = from {
            for (name, value) in &from.weights {
                params.set_part(name, value)?;
            }
            adam.load_state(&from.state, from.steps)?;
        }
        let mut grads = GradStore::new(&params)?;
        let mut losses = Vec::new();
        for step in first_step..first_step + steps {
            let (ids, labels) = rows(&self.config, step % 4)?;
            let loss = {
                let tape = Tape::new(&params);
                let input = ModelInput::causal(ids.to_device(self.device)?);
                let loss = model.loss(
                    &tape,
                    &input,
                    &labels.to_device(self.device)?,
                    &CrossEntropyOptions::default(),
                )?;
                tape.backward(&loss, &mut grads)?;
                loss.detach()
            };
            adam.clipped_step(&mut params, &mut grads, LEARNING_RATE, 1.0, &loss)?;
            losses.push(loss.item()?);
        }
        let snapshot = snapshot(&params, &adam)?;
        Ok((losses, snapshot))
    }
}

fn rows(config: &LlamaConfig, batch: usize) -> Result<(Tensor, Tensor)> {
    let (count, len) = (3, config.max_position_embeddings);
    let mut rng = Rng::new(batch as u64).fork("training rows");
    let ids: Vec<i32> = (0..count * (len + 1)).map(|_| rng.below(config.vocab_size as u64) as i32).collect();
    let part = |shift: usize| -> Result<Tensor> {
        let values = (0..count).flat_map(|r| ids[r * (len + 1) + shift..][..len].to_vec()).collect();
        Ok(Tensor::from_vec::<i32>(values, [count, len])?)
    };
    Ok((part(0)?, part(1)?))
}

fn snapshot(params: &ParamStore, optimizer: &dyn Optimizer) -> Result<Snapshot> {
    let host = |t: &Tensor| t.to_device(Device::Cpu)?.to_owned_copy();
    let names: Vec<String> = params.layout().parts().map(|(_, p)| p.name.clone()).collect();
    let mut weights = Vec::new();
    for name in names {
        let value = host(&params.part(&name)?)?;
        weights.push((name, value));
    }
    let mut state = BTreeMap::new();
    for (name, tensor) in optimizer.state()? {
        state.insert(name, host(&tensor)?);
    }
    Ok(Snapshot { weights, state, steps: optimizer.steps_done()? })
}

fn equal(a: &Snapshot, b: &Snapshot) -> Result<bool> {
    let weights = a.weights.iter().map(|(_, t)| t).zip(b.weights.iter().map(|(_, t)| t));
    for (x, y) in weights.chain(a.state.values().zip(b.state.values())) {
        if x.as_bytes()? != y.as_bytes()? {
            return Ok(false);
        }
    }
    Ok(a.weights.len() == b.weights.len() && a.state.len() == b.state.len() && a.steps == b.steps)
}

fn repeats(gpu: Gpu, precision: Precision) -> Result<Check> {
    let run = || Training::new(Device::Cuda(gpu), precision).run(0, 20, None);
    let ((losses, a), (_, b)) = (run()?, run()?);
    let same = equal(&a, &b)?;
    let detail = format!(
        "20 steps twice, last loss {:.4}: {}",
        losses[19],
        if same { "same bits" } else { "other bits" }
    );
    Ok(Check::new(format!("device: {} repeats bit for bit", name_of(precision)), same, detail))
}

fn resumes(gpu: Gpu, precision: Precision) -> Result<Check> {
    let training = Training::new(Device::Cuda(gpu), precision);
    let (_, whole) = training.run(0, 20, None)?;
    let (_, half) = training.run(0, 9, None)?;
    let (_, resumed) = training.run(9, 11, Some(&half))?;
    let same = equal(&whole, &resumed)?;
    let detail = format!("9 and 11 steps beside 20: {}", if same { "same bits" } else { "other bits" });
    Ok(Check::new(format!("device: {} resumes bit for bit", name_of(precision)), same, detail))
}

/// What is computed again in backward has the bits of what was kept.
fn recomputes(gpu: Gpu, precision: Precision) -> Result<Check> {
    let run = |recompute| {
        let training = Training { recompute, ..Training::new(Device::Cuda(gpu), precision) };
        training.run(0, 10, None).map(|(_, snapshot)| snapshot)
    };
    let kept = run(Recompute::None)?;
    let same = equal(&kept, &run(Recompute::Mlp)?)? && equal(&kept, &run(Recompute::Block)?)?;
    let detail =
        format!("10 steps with none, mlp and block: {}", if same { "same bits" } else { "other bits" });
    Ok(Check::new(format!("device: {} recomputes bit for bit", name_of(precision)), same, detail))
}

/// Two steps, so that the kernels of optimizers and of a second write of a gradient run too.
fn first_steps(gpu: Gpu, precision: Precision) -> Result<Check> {
    let (losses, _) = Training::new(Device::Cuda(gpu), precision).run(0, 2, None)?;
    let finite = losses.iter().all(|loss| loss.is_finite());
    let detail = format!("losses {:.4} and {:.4}", losses[0], losses[1]);
    Ok(Check::new(format!("device: {} first steps", name_of(precision)), finite, detail))
}

/// Steps of the comparison with the host.
const STEPS: usize = 200;
/// Ten times what fp32 and f64 on the host are apart over the same steps (the test below).
const CURVE_TOLERANCE: f64 = 1e-3;

/// How far two curves of losses are from each other, relative to the first; NaN is too far.
fn apart(a: &[f64], b: &[f64]) -> f64 {
    let off = a.iter().zip(b).map(|(a, b)| (a - b).abs() / a.abs().max(0.1));
    off.fold(0.0, |m: f64, x| if x > m || x.is_nan() { x } else { m })
}

/// fp32 on both devices: the same losses, but for rounding.
fn same_training(gpu: Gpu) -> Result<Check> {
    let (host, _) = Training::new(Device::Cpu, Precision::Full).run(0, STEPS, None)?;
    let (device, _) = Training::new(Device::Cuda(gpu), Precision::Full).run(0, STEPS, None)?;
    let (first, worst) = (apart(&host[..1], &device[..1]), apart(&host, &device));
    let good = first <= 1e-5 && worst <= CURVE_TOLERANCE && host[STEPS - 1] < 0.9 * host[0];
    let detail = format!(
        "{STEPS} steps, loss {:.4} -> {:.4} on the host, {:.4} on the GPU; largest relative difference {worst:.1e}",
        host[0],
        host[STEPS - 1],
        device[STEPS - 1]
    );
    Ok(Check::new("device: fp32 trains as the host", good, detail))
}

/// bf16 beside fp32 on the GPU.
fn precision_training(gpu: Gpu) -> Result<Check> {
    let device = Device::Cuda(gpu);
    let mut detail = Vec::new();
    let mut good = true;
    let mean = |losses: &[f64]| losses[STEPS - 20..].iter().sum::<f64>() / 20.0;
    let (full, _) = Training::new(device, Precision::Full).run(0, STEPS, None)?;
    for precision in precisions().into_iter().skip(1) {
        let (losses, _) = Training::new(device, precision).run(0, STEPS, None)?;
        let off = (mean(&losses) / mean(&full) - 1.0).abs();
        good &= off <= 0.01;
        detail.push(format!("{} {:.4}", name_of(precision), mean(&losses)));
    }
    let detail =
        format!("mean loss of the last 20 of {STEPS} steps: fp32 {:.4}, {}", mean(&full), detail.join(", "));
    Ok(Check::new("device: bf16 trains as fp32", good, detail))
}

fn kernels_ran(gpu: Gpu, expected: &BTreeSet<&str>) -> Check {
    let launches = gpu.launches();
    let missing: Vec<&str> =
        expected.iter().copied().filter(|name| launches.get(name).copied().unwrap_or(0) == 0).collect();
    let total: u64 = launches.values().sum();
    let products = launches.get("matmul").copied().unwrap_or(0);
    let detail = if missing.is_empty() {
        format!("{} kernels, {total} launches, {products} of them products", expected.len())
    } else {
        format!("never launched: {}", missing.join(", "))
    };
    Check::new("device: kernels ran", missing.is_empty() && products > 0 && !expected.is_empty(), detail)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn covering_cases_launch_every_kernel_of_the_operations() {
        let launched = |chosen: &[Vec<Comparison>]| {
            let gpu = Gpu::dry((9, 0), &GpuOptions::default());
            for (op, comparisons) in REGISTRY.iter().zip(chosen) {
                for &(case, precision) in comparisons {
                    let _ = testing::device_check(op.name, &(op.cases)()[case], gpu, precision, 0);
                }
            }
            gpu.launches().into_keys().collect::<BTreeSet<_>>()
        };
        let every: Vec<_> = REGISTRY.iter().map(|op| every_comparison(op.name, &(op.cases)())).collect();
        let few = covering_comparisons((9, 0));
        assert_eq!(launched(&few), launched(&every));
        let count = |chosen: &[Vec<Comparison>]| chosen.iter().map(Vec::len).sum::<usize>();
        assert!(5 * count(&few) < count(&every), "{} of {}", count(&few), count(&every));
    }

    /// The comparison means something only where rounding alone does not part the curves.
    #[test]
    fn training_of_the_comparison_is_smooth() {
        let (fp32, _) = Training::new(Device::Cpu, Precision::Full).run(0, STEPS, None).unwrap();
        let mut other = Training::new(Device::Cpu, Precision::Full);
        // The same function, summed in another order.
        other.config.rms_norm_eps *= 1.0 + 1e-7;
        let (again, _) = other.run(0, STEPS, None).unwrap();
        let apart = apart(&fp32, &again);
        assert!(apart <= CURVE_TOLERANCE / 10.0, "{apart:e}");
        assert!(fp32[STEPS - 1] < 0.9 * fp32[0], "{} {}", fp32[0], fp32[STEPS - 1]);
    }
}
