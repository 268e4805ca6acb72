//! What a token must not see: other documents, padding, other rows.

use rb_autograd::ParamStore;
use rb_nn::ModelInput;
use rb_tensor::{DType, Tensor};

use crate::batches::packed_documents;
use crate::model::{difference, rounding};
use crate::{Check, LanguageModel, Result};

/// Checks that packed documents score as each does alone, whatever stands in the padding beside them.
///
/// # Errors
/// The model cannot run at all.
pub fn independence(model: &dyn LanguageModel, params: &ParamStore, seed: u64) -> Result<Vec<Check>> {
    let device = params.arena().device();
    let batch = packed_documents(model, seed)?;
    let (len, vocab) = (batch.input.input_ids.shape()[1], model.vocab_size());
    let scores = |input: &ModelInput| -> Result<Vec<f64>> {
        let placed = ModelInput { input_ids: input.input_ids.to_device(device)?, ..input.clone() };
        let logits = model.logits(params, &placed)?.to_device(rb_tensor::Device::Cpu)?;
        Ok(logits.to_dtype(DType::F64)?.to_vec()?)
    };
    let packed = scores(&batch.input)?;
    let limit = rounding(params) * packed.iter().fold(1.0f64, |m, x| m.max(x.abs()));
    let mut worst = 0.0f64;
    for &(row, start, count) in &batch.documents {
        let at = row * len + start;
        let ids = batch.input.input_ids.to_vec::<i32>()?[at..at + count].to_vec();
        let alone = scores(&ModelInput::causal(Tensor::from_vec(ids, [1, count])?))?;
        worst = worst.max(difference(&packed[at * vocab..][..count * vocab], &alone));
    }
    let detail =
        format!("{} documents in 2 rows differ from each alone by {worst:.0e}", batch.documents.len());
    let mut checks = vec![Check::new("document independence", worst <= limit, detail)];

    let mut ids = batch.input.input_ids.to_vec::<i32>()?;
    let padding: Vec<usize> = (0..ids.len()).filter(|&i| batch.doc_start[i] as usize == len).collect();
    padding.iter().for_each(|&i| ids[i] = (ids[i] + 1) % vocab as i32);
    let other = ModelInput {
        input_ids: Tensor::from_vec(ids, batch.input.input_ids.shape().clone())?,
        ..batch.input.clone()
    };
    let changed = scores(&other)?;
    let real = |scores: &[f64]| -> Vec<f64> {
        let rows = scores.chunks(vocab).enumerate().filter(|(i, _)| !padding.contains(i));
        rows.flat_map(|(_, row)| row.to_vec()).collect()
    };
    let worst = difference(&real(&packed), &real(&changed));
    let finite = packed.iter().all(|x| x.is_finite());
    let detail = match finite {
        true => format!("{} tokens of other padding change the scores by {worst:.0e}", padding.len()),
        false => "a score beside padding is not finite".to_string(),
    };
    checks.push(Check::new("padding independence", finite && worst <= limit, detail));
    Ok(checks)
}
