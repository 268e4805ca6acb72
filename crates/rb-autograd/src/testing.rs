//! Checks that hold for every operation: finite differences in f64, f32 against f64, repeatability.

use std::fmt;

use rb_tensor::{DType, Device, Rng, Shape, Tensor};

use crate::{AutogradError, GradStore, ParamStore, Result, Tape, Var};

/// How a differentiable input of a case is filled.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Fill {
    /// Standard normal.
    Normal,
    /// Normal, moved away from 0 by 0.1: for functions with a kink there.
    AwayFromZero,
    /// Uniform in this range.
    Uniform(f64, f64),
    /// A random permutation of evenly spaced values: no ties.
    Distinct,
}

/// The operation under test as a function of its differentiable inputs.
type Run = Box<dyn for<'t> Fn(&[Var<'t>]) -> Result<Var<'t>> + Send + Sync>;

/// One call of an operation with fresh random inputs.
pub struct Case {
    /// Name in reports, unique within the operation.
    pub name: String,
    /// Shapes and distributions of the differentiable inputs.
    pub inputs: Vec<(Shape, Fill)>,
    run: Run,
}

impl Case {
    /// A case with inputs of the given fills.
    pub fn new(
        name: impl Into<String>,
        inputs: impl IntoIterator<Item = (Shape, Fill)>,
        run: impl for<'t> Fn(&[Var<'t>]) -> Result<Var<'t>> + Send + Sync + 'static,
    ) -> Case {
        Case { name: name.into(), inputs: inputs.into_iter().collect(), run: Box::new(run) }
    }

    /// A case with standard normal inputs of the given shapes.
    pub fn normal(
        name: impl Into<String>,
        shapes: &[&[usize]],
        run: impl for<'t> Fn(&[Var<'t>]) -> Result<Var<'t>> + Send + Sync + 'static,
    ) -> Case {
        Case::new(name, shapes.iter().map(|&s| (Shape::from(s), Fill::Normal)), run)
    }

    /// Random inputs, in f64.
    pub fn sample(&self, rng: &mut Rng) -> Result<Vec<Tensor>> {
        self.inputs.iter().map(|(shape, fill)| random(shape, *fill, rng)).collect()
    }

    /// Output, and the gradients of all inputs for the upstream gradient `dy`.
    pub fn run(&self, inputs: &[Tensor], dy: Option<&Tensor>) -> Result<Outcome> {
        self.run_wanting(inputs, dy, |_| true)
    }

    /// As [`Case::run`], where only the inputs that `wanted` names need a gradient.
    pub fn run_wanting(
        &self,
        inputs: &[Tensor],
        dy: Option<&Tensor>,
        wanted: impl Fn(usize) -> bool,
    ) -> Result<Outcome> {
        let params = ParamStore::empty();
        let tape = Tape::new(&params);
        let var = |(i, t): (usize, &Tensor)| {
            if wanted(i) { tape.leaf(t.clone()) } else { tape.constant(t.clone()) }
        };
        let vars: Vec<Var<'_>> = inputs.iter().enumerate().map(var).collect();
        let y = (self.run)(&vars)?;
        let out = y.detach();
        let Some(dy) = dy else { return Ok(Outcome { y: out, dx: Vec::new() }) };
        let grads = tape.backward_from(&y, dy.to_dtype(out.dtype())?, &mut GradStore::new(&params)?)?;
        let dx = vars.iter().map(|v| grads.get(v).cloned()).collect();
        Ok(Outcome { y: out, dx })
    }
}

/// What a case gave.
pub struct Outcome {
    /// Output.
    pub y: Tensor,
    /// Gradient of each input; `None` if backward gave none.
    pub dx: Vec<Option<Tensor>>,
}

/// A check that failed: operation, case, where and by how much.
#[derive(Debug)]
pub struct Failure(pub String);

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}
impl From<AutogradError> for Failure {
    fn from(error: AutogradError) -> Self {
        Failure(error.to_string())
    }
}

impl From<rb_tensor::TensorError> for Failure {
    fn from(error: rb_tensor::TensorError) -> Self {
        Failure(error.to_string())
    }
}

fn all_to(tensors: &[Tensor], dtype: DType) -> rb_tensor::Result<Vec<Tensor>> {
    tensors.iter().map(|t| t.to_dtype(dtype)).collect()
}

/// A random tensor in f64.
pub fn random(shape: &Shape, fill: Fill, rng: &mut Rng) -> Result<Tensor> {
    let n = shape.numel();
    let values: Vec<f64> = match fill {
        Fill::Normal => (0..n).map(|_| rng.normal()).collect(),
        Fill::AwayFromZero => (0..n).map(|_| rng.normal()).map(|x| x + 0.1f64.copysign(x)).collect(),
        Fill::Uniform(lo, hi) => (0..n).map(|_| lo + (hi - lo) * rng.uniform()).collect(),
        Fill::Distinct => {
            let mut v: Vec<f64> = (0..n).map(|i| (i as f64 - n as f64 / 2.0) * 0.1).collect();
            (1..n).rev().for_each(|i| v.swap(i, rng.below(i as u64 + 1) as usize));
            v
        }
    };
    Ok(Tensor::from_vec(values, shape.clone())?)
}

/// Compares every gradient of a case with central differences in f64, for a random upstream gradient: in
/// one random direction over all inputs, and at up to 16 single elements of each input.
pub fn gradcheck(op: &str, case: &Case, seed: u64) -> Result<(), Failure> {
    const STEP: f64 = 1e-5; // error of the difference: about STEP^2 f''' + 1e-16 / STEP, near 1e-10
    const TOLERANCE: f64 = 1e-6;
    let mut rng = Rng::new(seed).fork(op).fork(&case.name);
    let inputs = case.sample(&mut rng)?;
    let probe = case.run(&inputs, None)?;
    let dy = random(probe.y.shape(), Fill::Normal, &mut rng)?;
    let analytic = case.run(&inputs, Some(&dy))?;
    let objective = |inputs: &[Tensor]| -> Result<f64> {
        let y = case.run(inputs, None)?.y;
        Ok(y.as_slice::<f64>()?.iter().zip(dy.as_slice::<f64>()?).map(|(a, b)| a * b).sum())
    };
    let slope = |direction: &[Vec<f64>]| -> Result<f64> {
        let moved = |sign: f64| -> Result<Vec<Tensor>> {
            let pairs = inputs.iter().zip(direction);
            pairs
                .map(|(x, d)| {
                    let v = x.as_slice::<f64>()?.iter().zip(d).map(|(x, d)| x + sign * STEP * d).collect();
                    Ok(Tensor::from_vec::<f64>(v, x.shape().clone())?)
                })
                .collect()
        };
        Ok((objective(&moved(1.0)?)? - objective(&moved(-1.0)?)?) / (2.0 * STEP))
    };
    let mut gradients = Vec::new();
    for (i, dx) in analytic.dx.iter().enumerate() {
        let dx =
            dx.as_ref().ok_or_else(|| Failure(format!("{op}/{}: input {i} got no gradient", case.name)))?;
        gradients.push(dx.to_vec::<f64>().map_err(AutogradError::from)?);
    }
    let compare = |what: String, direction: Vec<Vec<f64>>| -> Result<(), Failure> {
        let numeric = slope(&direction)?;
        let terms = || gradients.iter().flatten().zip(direction.iter().flatten()).map(|(g, d)| g * d);
        let exact: f64 = terms().sum();
        let scale = terms().map(f64::abs).sum::<f64>().max(numeric.abs()).max(1.0);
        let error = (numeric - exact).abs();
        if error <= TOLERANCE * scale {
            return Ok(());
        }
        Err(Failure(format!(
            "{op}/{}: {what}: difference quotient {numeric:e}, backward {exact:e}",
            case.name
        )))
    };
    let random_direction = inputs.iter().map(|x| (0..x.numel()).map(|_| rng.normal()).collect()).collect();
    compare("random direction".into(), random_direction)?;
    for i in 0..inputs.len() {
        let n = inputs[i].numel();
        for _ in 0..n.min(16) {
            let j = rng.below(n as u64) as usize;
            let mut direction: Vec<Vec<f64>> = inputs.iter().map(|x| vec![0.0; x.numel()]).collect();
            direction[i][j] = 1.0;
            compare(format!("input {i}, element {j}"), direction)?;
        }
    }
    Ok(())
}

/// Checks that the gradient of each input has the same bits when no other input needs one.
pub fn subset_check(op: &str, case: &Case, seed: u64) -> Result<(), Failure> {
    let mut rng = Rng::new(seed).fork(op).fork(&case.name);
    let inputs = case.sample(&mut rng)?;
    if inputs.len() < 2 {
        return Ok(());
    }
    let dy = random(case.run(&inputs, None)?.y.shape(), Fill::Normal, &mut rng)?;
    let all = case.run(&inputs, Some(&dy))?;
    for i in 0..inputs.len() {
        let alone = case.run_wanting(&inputs, Some(&dy), |j| j == i)?;
        for (j, (got, want)) in alone.dx.iter().zip(&all.dx).enumerate() {
            let fail = |what: &str| {
                Err(Failure(format!("{op}/{}: with input {i} alone, input {j} {what}", case.name)))
            };
            match (got, want) {
                (None, _) if j != i => {}
                (Some(_), _) if j != i => return fail("got a gradient"),
                (Some(got), Some(want)) if got.as_bytes()? == want.as_bytes()? => {}
                _ => return fail("has another gradient than with all"),
            }
        }
    }
    Ok(())
}

/// Compares the f32 path with the f64 path: outputs and gradients within `1e-5` of the largest magnitude
/// (about a hundred roundings of f32; a result that cancels to less than 0.05 counts as 0.05, inputs being
/// of order 1), two runs bit for bit.
pub fn precision_check(op: &str, case: &Case, seed: u64) -> Result<(), Failure> {
    const TOLERANCE: f64 = 1e-5;
    let mut rng = Rng::new(seed).fork(op).fork(&case.name);
    // The inputs are rounded to f32 first, so that both paths see the same numbers.
    let small = all_to(&case.sample(&mut rng)?, DType::F32)?;
    let wide = all_to(&small, DType::F64)?;
    let dy = random(case.run(&wide, None)?.y.shape(), Fill::Normal, &mut rng)?.to_dtype(DType::F32)?;
    let truth = case.run(&wide, Some(&dy.to_dtype(DType::F64)?))?;
    let fast = case.run(&small, Some(&dy))?;
    let again = case.run(&small, Some(&dy))?;
    let named = |o: &Outcome| -> Vec<(String, Option<Tensor>)> {
        let dx = o.dx.iter().enumerate().map(|(i, t)| (format!("gradient {i}"), t.clone()));
        std::iter::once(("output".to_string(), Some(o.y.clone()))).chain(dx).collect()
    };
    for (((what, truth), (_, fast)), (_, again)) in
        named(&truth).into_iter().zip(named(&fast)).zip(named(&again))
    {
        let (Some(truth), Some(fast), Some(again)) = (truth, fast, again) else {
            return Err(Failure(format!("{op}/{}: {what} is missing", case.name)));
        };
        if fast.as_bytes()? != again.as_bytes()? {
            return Err(Failure(format!("{op}/{}: {what} differs between two runs", case.name)));
        }
        let (truth, fast) = (truth.to_dtype(DType::F64)?, fast.to_dtype(DType::F64)?);
        let truth = truth.as_slice::<f64>().map_err(AutogradError::from)?;
        let fast = fast.as_slice::<f64>().map_err(AutogradError::from)?;
        let scale = truth.iter().fold(0.05f64, |m, x| m.max(x.abs()));
        for (i, (t, f)) in truth.iter().zip(fast).enumerate() {
            if (t - f).abs() > TOLERANCE * scale || !f.is_finite() {
                return Err(Failure(format!(
                    "{op}/{}: {what}[{i}] is {f:e} in f32, {t:e} in f64",
                    case.name
                )));
            }
        }
    }
    Ok(())
}

/// Element types of a comparison with a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DevicePrecision {
    /// All inputs f32.
    F32,
    /// All inputs bf16.
    Bf16,
    /// The first input f32, the others bf16: a residual stream. Only operations that allow it.
    Mixed,
}

impl fmt::Display for DevicePrecision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            DevicePrecision::F32 => "f32",
            DevicePrecision::Bf16 => "bf16",
            DevicePrecision::Mixed => "mixed",
        })
    }
}

/// How far a device was from the truth in f64, beside the host in f32 rounded to the same types.
#[derive(Clone, Debug)]
pub struct DeviceError {
    /// `output` or `gradient i`.
    pub what: String,
    /// Root mean square error of the device over that of the truth.
    pub device: f64,
    /// The same of the naive run.
    pub naive: f64,
    /// What was allowed: twice the naive error, and a rounding of an operand.
    pub budget: f64,
}

/// Elements that an error is a mean over, at least: of a handful of roundings the naive run's may all be lucky.
const ELEMENTS: usize = 512;

/// Draws of one case, at most.
const DRAWS: usize = 8;

/// Compares a case on a GPU with the host: outputs and all gradients, two runs bit for bit, over several draws where
/// the case is small. On a dry run only shapes, types and the presence of gradients are checked.
///
/// # Errors
/// The first thing that is missing, differs between two runs, or is further from f64 than the budget.
pub fn device_check(
    op: &str,
    case: &Case,
    gpu: rb_cuda::Gpu,
    precision: DevicePrecision,
    seed: u64,
) -> Result<Vec<DeviceError>, Failure> {
    let device = Device::Cuda(gpu);
    let mut rng = Rng::new(seed).fork(op).fork(&case.name);
    let dtype_of = |i: usize| match precision {
        DevicePrecision::F32 => DType::F32,
        DevicePrecision::Mixed if i == 0 => DType::F32,
        _ => DType::BF16,
    };
    let named = |error: Failure| Failure(format!("{op}/{} {precision}: {error}", case.name));
    let elements: usize = case.inputs.iter().map(|(shape, _)| shape.numel()).sum();
    let draws = if gpu.is_dry() { 1 } else { ELEMENTS.div_ceil(elements.max(1)).min(DRAWS) };
    let mut pools: Vec<Pool> = Vec::new();
    for _ in 0..draws {
        let sampled = case.sample(&mut rng)?;
        let rounded: Vec<Tensor> = sampled
            .iter()
            .enumerate()
            .map(|(i, t)| t.to_dtype(dtype_of(i)))
            .collect::<rb_tensor::Result<_>>()?;
        let on_device: Vec<Tensor> =
            rounded.iter().map(|t| t.to_device(device)).collect::<rb_tensor::Result<_>>()?;
        let probe = case.run(&on_device, None).map_err(|e| named(e.into()))?;
        let dy = random(probe.y.shape(), Fill::Normal, &mut rng)?.to_dtype(probe.y.dtype())?;
        let dy_device = dy.to_device(device)?;
        let run = || case.run(&on_device, Some(&dy_device)).map_err(|e| named(e.into()));
        let (got, again) = (run()?, run()?);
        let wide = case.run(&all_to(&rounded, DType::F64)?, Some(&dy.to_dtype(DType::F64)?))?;
        let plain = case.run(&all_to(&rounded, DType::F32)?, Some(&dy.to_dtype(DType::F32)?))?;
        let mut compared = vec![("output".to_string(), [&got.y, &again.y, &wide.y, &plain.y])];
        for i in 0..wide.dx.len() {
            let what = format!("gradient {i}");
            match (&got.dx[i], &again.dx[i], &wide.dx[i], &plain.dx[i]) {
                (Some(g), Some(a), Some(w), Some(p)) => compared.push((what, [g, a, w, p])),
                (None, _, None, _) => {}
                _ => return Err(named(Failure(format!("{what} is missing")))),
            }
        }
        for (i, (what, tensors)) in compared.into_iter().enumerate() {
            if pools.len() == i {
                pools.push(Pool::new(what, tensors[0].dtype(), roundings(op)));
            }
            pools[i].add(tensors, gpu.is_dry()).map_err(named)?;
        }
    }
    if gpu.is_dry() {
        return Ok(Vec::new());
    }
    pools.into_iter().map(|pool| pool.verdict().map_err(named)).collect()
}

/// Values that an operation rounds to bf16 between its inputs and its gradients, at the size of its results.
/// Attention rounds probabilities, their gradients and the output that these are centred with; with few keys these
/// are differences of numbers that are nearly equal. `rb_verify::verify_attention` compares it with a run that rounds
/// the same.
fn roundings(op: &str) -> f64 {
    if op.starts_with("attention") { 3.0 } else { 1.0 }
}

/// Sums of squares of one output or gradient over the draws of a case.
struct Pool {
    what: String,
    dtype: DType,
    roundings: f64,
    elements: usize,
    device: f64,
    naive: f64,
    truth: f64,
    /// The largest error of the device, with what it read and the truth.
    worst: (f64, String),
}

impl Pool {
    fn new(what: String, dtype: DType, roundings: f64) -> Pool {
        Pool {
            what,
            dtype,
            roundings,
            elements: 0,
            device: 0.0,
            naive: 0.0,
            truth: 0.0,
            worst: (0.0, String::new()),
        }
    }

    fn add(&mut self, [got, again, truth, plain]: [&Tensor; 4], dry: bool) -> Result<(), Failure> {
        let fail = |text: String| Err(Failure(format!("{} {text}", self.what)));
        if got.shape() != truth.shape() {
            return fail(format!("has shape {}, on the host {}", got.shape(), truth.shape()));
        }
        if dry {
            return Ok(());
        }
        let (got, again) = (got.to_device(Device::Cpu)?, again.to_device(Device::Cpu)?);
        if got.as_bytes()? != again.as_bytes()? {
            return fail("differs between two runs".into());
        }
        let values = |t: &Tensor| -> rb_tensor::Result<Vec<f64>> { t.to_dtype(DType::F64)?.to_vec() };
        let (mine, truth, naive) = (values(&got)?, values(truth)?, values(&plain.to_dtype(got.dtype())?)?);
        for (i, ((x, t), n)) in mine.iter().zip(&truth).zip(&naive).enumerate() {
            // A NaN or infinity that the truth does not have makes the sum NaN, which no budget admits.
            let off = |x: &f64| if x == t { 0.0 } else { x - t };
            self.device += off(x).powi(2);
            self.naive += off(n).powi(2);
            if t.is_finite() {
                self.truth += t * t;
            }
            let size = if x.is_finite() || x == t { off(x).abs() } else { f64::INFINITY };
            if size > self.worst.0 {
                self.worst = (size, format!("; worst [{i}]: {x:e}, truth {t:e}"));
            }
        }
        self.elements += truth.len();
        Ok(())
    }

    fn verdict(self) -> Result<DeviceError, Failure> {
        let mean = |sum: f64| (sum / self.elements.max(1) as f64).sqrt();
        let scale = mean(self.truth).max(0.05);
        // bf16: a saved value or an operand of a product may be rounded too, as in any run of that precision; the
        // naive run rounds results alone. f32: functions of the device's library are right to two units.
        let bf16 = self.dtype == DType::BF16;
        let rounding = if bf16 { self.roundings * 2f64.powi(-8) } else { 2f64.powi(-21) };
        let (device, naive) = (mean(self.device) / scale, mean(self.naive) / scale);
        let budget = 2.0 * naive + rounding;
        if device.partial_cmp(&budget).is_none_or(|order| order.is_gt()) {
            let (what, worst) = (&self.what, &self.worst.1);
            return Err(Failure(format!(
                "{what} is off by {device:.3e}, budget {budget:.3e} (naive {naive:.3e}){worst}"
            )));
        }
        Ok(DeviceError { what: self.what, device, naive, budget })
    }
}

/// The precisions in which an operation of the registry is compared with a GPU.
pub fn device_precisions(op: &str) -> &'static [DevicePrecision] {
    use DevicePrecision::{Bf16, F32, Mixed};
    match op {
        "add" | "add_rms_norm" | "rms_norm" => &[F32, Bf16, Mixed],
        _ => &[F32, Bf16],
    }
}

/// Runs the three checks on every case of one operation of the registry: the body of each file's `gradcheck` test.
///
/// # Errors
/// The first failure; also an unknown operation, or one with no case.
pub fn check_op(name: &str) -> Result<(), Failure> {
    let entry = crate::ops::REGISTRY.iter().find(|e| e.name == name);
    let cases = entry.map(|e| (e.cases)()).unwrap_or_default();
    if cases.is_empty() {
        return Err(Failure(format!("{name}: not in the registry, or it has no cases")));
    }
    for case in &cases {
        gradcheck(name, case, 0)?;
        precision_check(name, case, 1)?;
        subset_check(name, case, 2)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_operation_runs_on_a_dry_gpu() {
        let gpu = rb_cuda::Gpu::dry((9, 0), &rb_cuda::GpuOptions::default());
        let mut failures = Vec::new();
        for entry in crate::ops::REGISTRY {
            for case in (entry.cases)() {
                for &precision in device_precisions(entry.name) {
                    failures.extend(device_check(entry.name, &case, gpu, precision, 3).err().map(|e| e.0));
                }
            }
        }
        assert!(failures.is_empty(), "{} failures\n{}", failures.len(), failures.join("\n"));
        let held = gpu.memory().holders;
        assert!(held.iter().all(|(holder, _)| *holder == "workspace"), "everything is given back: {held:?}");
    }
}
