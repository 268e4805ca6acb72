//! Checks that hold for every operation: finite differences in f64, f32 against f64, repeatability.

use std::fmt;

use rb_tensor::{DType, Rng, Shape, Tensor};

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
        let params = ParamStore::empty();
        let tape = Tape::new(&params);
        let vars: Vec<Var<'_>> = inputs.iter().map(|t| tape.leaf(t.clone())).collect();
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

/// Runs both checks on every case of one operation of the registry: the body of each file's `gradcheck` test.
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
    }
    Ok(())
}
