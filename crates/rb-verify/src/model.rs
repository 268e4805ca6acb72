//! Checks of a whole decoder.

use rb_autograd::ops::cross_entropy::CrossEntropyOptions;
use rb_autograd::{GradStore, ParamStore, Precision, Tape};
use rb_nn::{CausalLm, ModelInput};
use rb_optim::{AdamW, AdamWConfig, Optimizer, clip_coefficient};
use rb_tensor::Tensor;

use crate::batches::random_batch;
use crate::{Check, LanguageModel, Result};

/// Mean loss and gradients of a batch.
pub(crate) fn backward(
    model: &dyn LanguageModel,
    params: &ParamStore,
    grads: &mut GradStore,
    batch: &(Tensor, Tensor),
) -> Result<f64> {
    let tape = Tape::new(params);
    let loss =
        model.loss(&tape, &ModelInput::causal(batch.0.clone()), &batch.1, &CrossEntropyOptions::default())?;
    let value = loss.detach().item()?;
    tape.backward(&loss, grads)?;
    Ok(value)
}

/// A new model predicts nothing yet: its loss on random labels is close to that of even odds, `ln(vocab)`.
pub fn initial_loss(model: &dyn LanguageModel, loss: f64) -> Check {
    let even = (model.vocab_size() as f64).ln();
    let limit = 0.1 * even + 0.1;
    let detail = format!("initial loss {loss:.3}, ln(vocab) {even:.3}");
    let hint =
        if (loss - even).abs() <= limit { "" } else { "; expected within a tenth: check initializer_range" };
    Check::new("initial loss", (loss - even).abs() <= limit, format!("{detail}{hint}"))
}

/// Another last token must not change the scores before it.
pub fn causality(model: &dyn LanguageModel, params: &ParamStore, ids: &Tensor) -> Result<Check> {
    let len = ids.shape()[1];
    let change = len - 1;
    let other = changed(ids, change, model.vocab_size())?;
    let (a, b) = (scores(model, params, ids)?, scores(model, params, &other)?);
    let width = model.vocab_size();
    let worst = difference(&a[..change * width], &b[..change * width]);
    // The same rows go through the same arithmetic; only the blocking of products may differ.
    let limit = 1e-5 * f64::from(a.iter().fold(1.0f32, |m, x| m.max(x.abs())));
    let detail = match len {
        1 => "a model of one position has no future".to_string(),
        _ => format!("a changed future changes the past by {worst:.0e}"),
    };
    Ok(Check::new("causality", worst <= limit, detail))
}

/// Positions must matter: the same tokens at stretched positions must score differently.
///
/// Swapping two tokens would not do: behind a causal mask, a model without any position code still tells
/// their order from the lengths of their pasts.
pub fn position_sensitivity(model: &dyn LanguageModel, params: &ParamStore, ids: &Tensor) -> Result<Check> {
    let (len, width) = (ids.shape()[1], model.vocab_size());
    if len < 2 {
        return Ok(Check::new("position sensitivity", true, "a model of one position has no order to see"));
    }
    let mut input = ModelInput::causal(ids.narrow(0, 1)?);
    let mut at = |stretch: i32| -> Result<Vec<f32>> {
        let positions = (0..len as i32).map(|t| t * stretch).collect();
        input.position_ids = Some(Tensor::from_vec(positions, [1, len])?);
        Ok(model.logits(params, &input)?.to_dtype(rb_tensor::DType::F32)?.to_vec()?)
    };
    let (plain, stretched) = (at(1)?, at(3)?);
    let last = (len - 1) * width..len * width;
    let change = difference(&plain[last.clone()], &stretched[last.clone()]);
    let scale = f64::from(plain[last].iter().fold(f32::MIN_POSITIVE, |m, x| m.max(x.abs())));
    // Without a position code the arithmetic is the same and the change is exactly 0.
    let detail = format!("stretched positions change the score by {change:.0e} of {scale:.0e}");
    Ok(Check::new("position sensitivity", change > 1e-7 * scale, detail))
}

/// Where all tokens so far are equal, attention is their mean whatever the positions, and no model of relative
/// positions can tell how many there are: two different labels there could never be learned.
fn without_a_run_at_the_start(ids: &Tensor, vocab_size: usize) -> Result<Tensor> {
    let values = ids.to_vec::<i32>()?;
    if values.len() > 1 && values[1] == values[0] { changed(ids, 1, vocab_size) } else { Ok(ids.clone()) }
}

/// A model that learns can memorise one batch: within `max_steps` its loss must fall below a tenth of where it
/// began. It stops there: most models need ten to twenty steps, a vocabulary of 2 about fifty.
pub fn overfit(
    model: &dyn LanguageModel,
    params: &mut ParamStore,
    max_steps: usize,
    seed: u64,
) -> Result<Check> {
    let (ids, labels) = random_batch(model, 1, seed)?;
    let batch = (without_a_run_at_the_start(&ids, model.vocab_size())?, labels);
    let mut grads = GradStore::new(params)?;
    let mut adam = AdamW::new(AdamWConfig { weight_decay: 0.0, ..AdamWConfig::default() }, params)?;
    let (mut first, mut last, mut steps) = (f64::NAN, f64::NAN, 0);
    let memorised = |first: f64, last: f64| last.is_finite() && (last < 0.1 * first || first < 1e-6);
    while steps < max_steps && !memorised(first, last) {
        last = backward(model, params, &mut grads, &batch)?;
        if steps == 0 {
            first = last;
        }
        let scale = clip_coefficient(grads.global_norm()?, 1.0);
        adam.step(params, &mut grads, 1e-2, scale)?;
        steps += 1;
    }
    let detail = format!("loss {first:.3} -> {last:.4} in {steps} steps");
    Ok(Check::new("overfits one batch", memorised(first, last), detail))
}

/// A tied model has one table: it has no parameter of its own for the head, and a changed row changes the score of its
/// token. An untied head does not follow the embedding.
pub fn tied_weights(model: &CausalLm, params: &ParamStore, seed: u64) -> Result<Check> {
    let (ids, _) = random_batch(model, 1, seed)?;
    let (vocab, tied) = (model.config().vocab_size, model.config().tie_word_embeddings);
    let has_head = params.layout().part("lm_head.weight").is_ok();
    let seen = ids.to_vec::<i32>()?;
    // A token that the text does not hold: its row is read by the head alone.
    let Some(token) = (0..vocab).find(|t| !seen.contains(&(*t as i32))) else {
        let detail = "every token is in the text; only the parameters were looked at";
        return Ok(Check::new("tied weights", has_head != tied, detail));
    };
    let table = "model.embed_tokens.weight";
    let mut other = params.to_device(params.arena().device())?;
    let shape = params.part(table)?.shape().clone();
    let mut rows = params
        .part(table)?
        .to_device(rb_tensor::Device::Cpu)?
        .to_dtype(rb_tensor::DType::F32)?
        .to_vec::<f32>()?;
    rows[token * shape[1]..][..shape[1]].iter_mut().for_each(|w| *w = *w * 2.0 + 0.5);
    other.set_part(table, &Tensor::from_vec(rows, shape)?)?;
    let (a, b) = (scores(model, params, &ids)?, scores(model, &other, &ids)?);
    let pick = |x: &[f32], own: bool| -> Vec<f32> {
        x.iter().enumerate().filter(|(i, _)| (i % vocab == token) == own).map(|(_, x)| *x).collect()
    };
    let own = difference(&pick(&a, true), &pick(&b, true));
    let others = difference(&pick(&a, false), &pick(&b, false));
    let scale = f64::from(a.iter().fold(1.0f32, |m, x| m.max(x.abs())));
    let follows = own > 1e-4 * scale;
    let good = follows == tied && has_head != tied && others <= rounding(params) * scale;
    let word = if tied { "tied" } else { "not tied" };
    let detail = format!(
        "{word}: a changed row of the embedding changes its token's score by {own:.0e}, others by {others:.0e}"
    );
    Ok(Check::new("tied weights", good, detail))
}

fn scores(model: &dyn LanguageModel, params: &ParamStore, ids: &Tensor) -> Result<Vec<f32>> {
    let logits = model.logits(params, &ModelInput::causal(ids.narrow(0, 1)?))?;
    Ok(logits.to_dtype(rb_tensor::DType::F32)?.to_vec()?)
}

fn changed(ids: &Tensor, at: usize, vocab_size: usize) -> Result<Tensor> {
    let mut values = ids.to_vec::<i32>()?;
    values[at] = (values[at] + 1) % vocab_size as i32;
    Ok(Tensor::from_vec(values, ids.shape().clone())?)
}

/// The largest difference of two lists; NaN if there is one in either.
pub(crate) fn difference<T: Copy + Into<f64>>(a: &[T], b: &[T]) -> f64 {
    let off = a.iter().zip(b).map(|(&a, &b)| (a.into() - b.into()).abs());
    off.fold(0.0, |m: f64, x: f64| if x > m || x.is_nan() { x } else { m })
}

/// Relative rounding of scores that are computed twice with other blocks.
pub(crate) fn rounding(params: &ParamStore) -> f64 {
    if params.precision() == Precision::Full { 1e-5 } else { 2f64.powi(-5) }
}
