//! Reads the golden values that `bench-scripts/golden/ops.py` recorded from PyTorch, and compares with them.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use rb_tensor::{DType, Tensor};
use serde_json::Value;

use crate::{GradStore, ParamStore, Result, Tape, Var};

/// One recorded call.
pub(crate) struct GoldenCase {
    /// Name in the file.
    pub(crate) name: String,
    /// Attributes of the call.
    pub(crate) attrs: Value,
    /// `in0`, `in1`, .., `out`, `dy`, `din0`, .. and integer inputs.
    pub(crate) tensors: BTreeMap<String, Tensor>,
}

impl GoldenCase {
    /// A tensor of the case.
    pub(crate) fn tensor(&self, name: &str) -> &Tensor {
        self.tensors.get(name).unwrap_or_else(|| panic!("{} has no tensor {name}", self.name))
    }

    /// A number among the attributes.
    pub(crate) fn number(&self, name: &str) -> f64 {
        self.attrs[name]
            .as_f64()
            .unwrap_or_else(|| panic!("{} has no attribute {name}: {}", self.name, self.attrs))
    }
}

/// All cases of `golden/<op>.safetensors`; a missing or empty file is a failure, never a skip.
pub(crate) fn load(op: &str) -> Vec<GoldenCase> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("golden").join(format!("{op}.safetensors"));
    let bytes = std::fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let (_, header) = safetensors::SafeTensors::read_metadata(&bytes).unwrap();
    let metadata: HashMap<String, String> = header.metadata().clone().unwrap_or_default();
    let mut cases: BTreeMap<String, BTreeMap<String, Tensor>> = BTreeMap::new();
    for (name, tensor) in rb_tensor::io::read_safetensors(&path).unwrap() {
        let (case, tensor_name) = name.rsplit_once('/').unwrap();
        cases.entry(case.to_string()).or_default().insert(tensor_name.to_string(), tensor);
    }
    assert!(!cases.is_empty(), "{} holds no cases", path.display());
    let attrs =
        |case: &str| metadata.get(case).map_or(Value::Null, |text| serde_json::from_str(text).unwrap());
    cases.into_iter().map(|(name, tensors)| GoldenCase { attrs: attrs(&name), name, tensors }).collect()
}

/// Compares values in f64, relative to the largest magnitude expected (at least 0.1: a result that cancels to
/// nothing has no digits of its own); NaN and infinities must be equal.
pub(crate) fn assert_close(what: &str, got: &Tensor, want: &Tensor, tolerance: f64) {
    assert_eq!(got.shape(), want.shape(), "{what}: shape");
    let (got, want) = (got.to_dtype(DType::F64).unwrap(), want.to_dtype(DType::F64).unwrap());
    let (got, want) = (got.as_slice::<f64>().unwrap(), want.as_slice::<f64>().unwrap());
    let scale = want.iter().filter(|x| x.is_finite()).fold(0.1f64, |m, x| m.max(x.abs()));
    for (i, (g, w)) in got.iter().zip(want).enumerate() {
        let same = g == w || (g.is_nan() && w.is_nan()) || (g - w).abs() <= tolerance * scale;
        assert!(same, "{what}[{i}]: {g:e}, PyTorch {w:e}");
    }
}

/// As [`assert_close`], relative to each expected value (to 1 for smaller ones): for elementwise functions,
/// where one huge element must not hide an error of another.
pub(crate) fn assert_each_close(what: &str, got: &Tensor, want: &Tensor, tolerance: f64) {
    assert_close(what, got, want, tolerance);
    let (got, want) = (got.to_dtype(DType::F64).unwrap(), want.to_dtype(DType::F64).unwrap());
    for (i, (g, w)) in got.as_slice::<f64>().unwrap().iter().zip(want.as_slice::<f64>().unwrap()).enumerate()
    {
        let same = g == w || (g.is_nan() && w.is_nan()) || (g - w).abs() <= tolerance * w.abs().max(1.0);
        assert!(same, "{what}[{i}]: {g:e}, PyTorch {w:e}");
    }
}

/// Runs `op` on the case's inputs in f64, and its backward with the stored `dy`; compares `out` and every
/// `din`. An input without a recorded `din` is a constant.
pub(crate) fn check(case: &GoldenCase, op: impl for<'t> Fn(&[Var<'t>]) -> Result<Var<'t>>, tolerance: f64) {
    check_by(case, op, |what, got, want| assert_close(what, got, want, tolerance));
}

/// As [`check`], by [`assert_each_close`].
pub(crate) fn check_each(
    case: &GoldenCase,
    op: impl for<'t> Fn(&[Var<'t>]) -> Result<Var<'t>>,
    tolerance: f64,
) {
    check_by(case, op, |what, got, want| assert_each_close(what, got, want, tolerance));
}

fn check_by(
    case: &GoldenCase,
    op: impl for<'t> Fn(&[Var<'t>]) -> Result<Var<'t>>,
    compare: impl Fn(&str, &Tensor, &Tensor),
) {
    let params = ParamStore::empty();
    let tape = Tape::new(&params);
    let names: Vec<String> =
        (0..).map(|i| format!("in{i}")).take_while(|n| case.tensors.contains_key(n)).collect();
    assert!(!names.is_empty(), "{} has no inputs", case.name);
    let vars: Vec<Var<'_>> = names
        .iter()
        .map(|n| match case.tensors.contains_key(&format!("d{n}")) {
            true => tape.leaf(case.tensor(n).clone()),
            false => tape.constant(case.tensor(n).clone()),
        })
        .collect();
    let y = op(&vars).unwrap_or_else(|e| panic!("{}: {e}", case.name));
    compare(&format!("{} out", case.name), &y.detach(), case.tensor("out"));
    if !vars.iter().any(Var::requires_grad) {
        return;
    }
    let dy = case.tensor("dy").clone();
    let grads = tape.backward_from(&y, dy, &mut GradStore::new(&params).unwrap()).unwrap();
    for (name, var) in names.iter().zip(&vars).filter(|(_, v)| v.requires_grad()) {
        let what = format!("{} d{name}", case.name);
        let got = grads.get(var).unwrap_or_else(|| panic!("{what} is missing"));
        compare(&what, got, case.tensor(&format!("d{name}")));
    }
}
