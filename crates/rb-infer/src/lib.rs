//! Text from a trained model.
//!
//! Each token is a full forward pass over the last `max_position_embeddings` tokens; there is no cache of keys
//! and values yet.

mod sample;

use rb_autograd::ParamStore;
use rb_data::Tokenizer;
use rb_nn::{CausalLm, ModelInput};
use rb_tensor::{DType, Rng, Tensor};

pub use sample::{SampleError, SampleOptions};

/// Errors of generation.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum InferError {
    /// Sampling settings.
    #[error(transparent)]
    Sample(#[from] SampleError),
    /// Model.
    #[error(transparent)]
    Nn(#[from] rb_nn::NnError),
    /// Tensors.
    #[error(transparent)]
    Tensor(#[from] rb_tensor::TensorError),
    /// Tokenizer.
    #[error(transparent)]
    Data(#[from] rb_data::DataError),
}

/// Continues `prompt` by up to `options.max_new_tokens` tokens, ending early at the end-of-text token. `emit`
/// gets the text as it comes, always whole characters. An empty prompt starts a new document.
///
/// # Errors
/// Sampling settings out of range; scores that are not finite.
pub fn generate(
    model: &CausalLm,
    params: &ParamStore,
    tokenizer: &Tokenizer,
    prompt: &str,
    options: &SampleOptions,
    mut emit: impl FnMut(&str),
) -> Result<(), InferError> {
    options.check()?;
    let mut ids = tokenizer.encode(prompt)?;
    if ids.is_empty() {
        ids.push(tokenizer.eos_id());
    }
    let mut rng = Rng::new(options.seed).fork("sampling");
    let mut stream = tokenizer.decode_stream();
    for _ in 0..options.max_new_tokens {
        let window = ids.len().saturating_sub(model.config().max_position_embeddings);
        let context: Vec<i32> = ids[window..].iter().map(|&id| id as i32).collect();
        let len = context.len();
        let input = ModelInput::causal(Tensor::from_vec(context, [1, len])?);
        let logits = model.next_token_logits(params, &input)?.to_dtype(DType::F32)?.to_vec::<f32>()?;
        let next = options.pick(&logits, &mut rng)?;
        if next == tokenizer.eos_id() {
            break;
        }
        ids.push(next);
        let text = stream.push(next)?;
        if !text.is_empty() {
            emit(&text);
        }
    }
    let rest = stream.finish();
    if !rest.is_empty() {
        emit(&rest);
    }
    Ok(())
}
