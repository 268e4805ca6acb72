//! Sizes of activations, gradients and weights, on request: where a model grows or dies, by layer.

use std::cell::RefCell;
use std::io::Write;
use std::path::Path;

use rb_autograd::{GradStore, ParamStore, Seen, Tape, Watch};
use rb_data::Batch;
use rb_nn::CausalLm;
use rb_tensor::{DType, Device, Tensor};
use serde::Serialize;

use crate::step::{self, LossTerms};
use crate::{Result, TrainError};

/// A line of `statistics.jsonl`.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Statistic {
    /// Step that the numbers are of, counted from 1.
    pub step: u64,
    /// `activation`, `gradient` or `weight`.
    pub kind: &'static str,
    /// The operation with its number in the forward pass and the parameter read last, or the parameter.
    pub name: String,
    /// Root mean square; `null` where it is not finite.
    pub rms: Option<f64>,
    /// Largest magnitude of the finite values.
    pub max_abs: f64,
    /// Values that are exactly zero, as a part of all.
    pub zeros: f64,
    /// Values that are NaN or infinite.
    pub non_finite: usize,
}

impl Statistic {
    fn of(step: u64, kind: &'static str, name: String, tensor: &Tensor) -> Result<Statistic> {
        let wide = tensor.to_device(Device::Cpu)?.to_dtype(DType::F64)?;
        let values = wide.as_slice::<f64>()?;
        let count = values.len().max(1) as f64;
        let rms = (values.iter().map(|x| x * x).sum::<f64>() / count).sqrt();
        Ok(Statistic {
            step,
            kind,
            name,
            rms: rms.is_finite().then_some(rms),
            max_abs: values.iter().filter(|x| x.is_finite()).fold(0.0, |m, x| m.max(x.abs())),
            zeros: values.iter().filter(|x| **x == 0.0).count() as f64 / count,
            non_finite: values.iter().filter(|x| !x.is_finite()).count(),
        })
    }
}

/// Collects the outputs of operations.
struct Collector {
    step: u64,
    found: RefCell<Vec<Result<Statistic>>>,
}

impl Watch for Collector {
    fn seen(&self, seen: &Seen<'_>) {
        let place = seen.param.map_or(String::new(), |param| format!(" after {param}"));
        let name = format!("#{} {}{place}", seen.number, seen.op);
        self.found.borrow_mut().push(Statistic::of(self.step, "activation", name, seen.output));
    }
}

/// Statistics of a step: every operation's output in a second forward pass of its first batch, and each parameter's
/// gradient and weight. On a GPU everything is copied to the host: for a look, not for every step.
pub fn collect(
    model: &CausalLm,
    params: &ParamStore,
    grads: &GradStore,
    batch: &Batch,
    document_mask: bool,
    step: u64,
) -> Result<Vec<Statistic>> {
    let collector = Collector { step, found: RefCell::new(Vec::new()) };
    {
        let tape = Tape::inference(params).watched(&collector);
        step::loss_on(model, &tape, std::slice::from_ref(batch), document_mask, LossTerms::default())?;
    }
    let mut all = collector.found.into_inner().into_iter().collect::<Result<Vec<_>>>()?;
    for (_, part) in params.layout().parts() {
        if let Some(grad) = grads.part(&part.name)? {
            all.push(Statistic::of(step, "gradient", part.name.clone(), &grad)?);
        }
        all.push(Statistic::of(step, "weight", part.name.clone(), &params.part(&part.name)?)?);
    }
    Ok(all)
}

/// Appends statistics to a file, one JSON object a line.
pub fn append(path: &Path, statistics: &[Statistic]) -> Result<()> {
    let mut text = String::new();
    for statistic in statistics {
        let line = serde_json::to_string(statistic)
            .map_err(|e| TrainError::io(path, "encoding as JSON", std::io::Error::other(e)))?;
        text.push_str(&line);
        text.push('\n');
    }
    let file = std::fs::OpenOptions::new().create(true).append(true).open(path);
    let written = file.and_then(|mut file| file.write_all(text.as_bytes()));
    written.map_err(|e| TrainError::io(path, "writing", e))
}
