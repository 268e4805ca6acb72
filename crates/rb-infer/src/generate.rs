//! Text from a trained model, a token at a time.

use std::time::Instant;

use rb_autograd::ParamStore;
use rb_data::Tokenizer;
use rb_nn::{CausalLm, KvCache, ModelInput};
use rb_tensor::{DType, Rng, Tensor};

use crate::{InferError, SampleOptions};

/// What a generation took.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Generated {
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Tokens chosen, the one that ended the text included.
    pub new_tokens: usize,
    /// Whether the text ended by itself.
    pub ended: bool,
    /// Time until the first token was chosen, in seconds.
    pub first_token_s: f64,
    /// Time of the tokens after the first, in seconds.
    pub later_tokens_s: f64,
}

impl Generated {
    /// Tokens a second after the first, if there are two or more.
    pub fn tokens_per_s(&self) -> Option<f64> {
        (self.new_tokens > 1).then(|| (self.new_tokens - 1) as f64 / self.later_tokens_s)
    }
}

/// Continues `prompt` by up to `options.max_new_tokens` tokens, ending early at the end-of-text token. `emit`
/// gets the text as it comes, always whole characters. The prompt comes after what the tokenizer's template puts before
/// a text; an empty prompt starts a new document.
///
/// A text that outgrows the model's positions goes on from its last part: see [`context_start`].
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
) -> Result<Generated, InferError> {
    options.check()?;
    let mut ids = [tokenizer.template(), &tokenizer.encode(prompt)?].concat();
    if ids.is_empty() {
        ids.push(tokenizer.bos_id());
    }
    let mut stream = tokenizer.decode_stream();
    let mut failed = None;
    let generated = generate_ids(model, params, &ids, tokenizer.eos_id(), options, |id| {
        if id == tokenizer.eos_id() {
            return;
        }
        match stream.push(id) {
            Ok(text) if text.is_empty() => {}
            Ok(text) => emit(&text),
            Err(error) => failed = failed.take().or(Some(error)),
        }
    })?;
    if let Some(error) = failed {
        return Err(error.into());
    }
    let rest = stream.finish();
    if !rest.is_empty() {
        emit(&rest);
    }
    Ok(generated)
}

/// As [`generate`], from ids to ids: `emit` gets every token chosen, `eos_id` included.
///
/// # Errors
/// As [`generate`]; a prompt without tokens or with one that the model does not know.
pub fn generate_ids(
    model: &CausalLm,
    params: &ParamStore,
    prompt: &[u32],
    eos_id: u32,
    options: &SampleOptions,
    mut emit: impl FnMut(u32),
) -> Result<Generated, InferError> {
    options.check()?;
    let mut rng = Rng::new(options.seed).fork("sampling");
    let mut reader = Reader::new(model, params, prompt.len() + options.max_new_tokens, options.kv_cache);
    let mut ids = prompt.to_vec();
    let mut generated = Generated { prompt_tokens: prompt.len(), ..Generated::default() };
    let mut last = Instant::now();
    for _ in 0..options.max_new_tokens {
        let logits = reader.next_token_logits(&ids)?;
        let next = options.pick(&logits, &ids, &mut rng)?;
        let seconds = last.elapsed().as_secs_f64();
        last = Instant::now();
        let time = if generated.new_tokens == 0 {
            &mut generated.first_token_s
        } else {
            &mut generated.later_tokens_s
        };
        *time += seconds;
        generated.new_tokens += 1;
        emit(next);
        if next == eos_id && !options.ignore_eos {
            generated.ended = true;
            break;
        }
        ids.push(next);
    }
    Ok(generated)
}

/// Where the context of a text of `len` tokens begins in a model of `limit` positions.
///
/// It is the beginning of the text as long as all of it fits. After that the context begins half of the positions later
/// each time it is full, so that a cache of keys and values serves until then.
pub fn context_start(len: usize, limit: usize) -> usize {
    let step = (limit / 2).max(1);
    len.saturating_sub(limit).div_ceil(step) * step
}

/// A model that reads one growing text.
struct Reader<'a> {
    model: &'a CausalLm,
    params: &'a ParamStore,
    /// Tokens that the text may reach.
    longest: usize,
    cached: bool,
    cache: Option<KvCache>,
    /// Where the cached context begins.
    start: usize,
}

impl<'a> Reader<'a> {
    fn new(model: &'a CausalLm, params: &'a ParamStore, longest: usize, cached: bool) -> Reader<'a> {
        Reader { model, params, longest, cached, cache: None, start: 0 }
    }

    /// Scores of the token after `ids`, which only grow from call to call.
    fn next_token_logits(&mut self, ids: &[u32]) -> Result<Vec<f32>, InferError> {
        let limit = self.model.config().max_position_embeddings;
        let start = context_start(ids.len(), limit);
        let logits = if self.cached {
            if start != self.start {
                self.start = start;
                self.cache.iter_mut().for_each(|cache| cache.truncate(0));
            }
            let cache = match &mut self.cache {
                Some(cache) => cache,
                none => none.insert(self.model.new_cache(self.params, 1, self.longest.min(limit))?),
            };
            let new = row(&ids[start + cache.len()..])?;
            self.model.next_token_logits_cached(self.params, cache, &new)?
        } else {
            self.model.next_token_logits(self.params, &ModelInput::causal(row(&ids[start..])?))?
        };
        Ok(logits.to_dtype(DType::F32)?.to_vec::<f32>()?)
    }
}

/// Ids as a batch of one row.
fn row(ids: &[u32]) -> Result<Tensor, InferError> {
    Ok(Tensor::from_vec(ids.iter().map(|&id| id as i32).collect(), [1, ids.len()])?)
}

#[cfg(test)]
mod tests {
    use rb_autograd::ParamBuilder;
    use rb_nn::{LlamaConfig, RopeScaling};
    use rb_tensor::Device;

    use super::*;

    /// Weights large enough that every part of the model has a say in the next token.
    fn model(config: &LlamaConfig) -> (CausalLm, ParamStore) {
        let mut builder = ParamBuilder::default();
        let model = CausalLm::init(config, &mut builder).unwrap();
        let params = builder.build(&Rng::new(3), Device::Cpu).unwrap();
        (model, params)
    }

    fn base() -> LlamaConfig {
        LlamaConfig {
            num_key_value_heads: Some(2),
            max_position_embeddings: 24,
            initializer_range: 0.3,
            ..LlamaConfig::new(101, 32, 40, 2, 4)
        }
    }

    fn variants() -> Vec<LlamaConfig> {
        let llama3 = RopeScaling::Llama3 {
            factor: 4.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_max_position_embeddings: 8,
        };
        vec![
            base(),
            LlamaConfig { num_key_value_heads: Some(4), tie_word_embeddings: true, ..base() },
            LlamaConfig { num_key_value_heads: Some(1), attention_bias: true, ..base() },
            LlamaConfig { use_qk_norm: true, head_dim: Some(16), ..base() },
            LlamaConfig { rope_scaling: Some(RopeScaling::Linear { factor: 2.0 }), ..base() },
            LlamaConfig { rope_scaling: Some(llama3), ..base() },
            LlamaConfig { sliding_window: Some(5), ..base() },
            LlamaConfig { attn_logit_softcapping: Some(2.0), ..base() },
        ]
    }

    /// Past the end of the model's positions too, greedily and by draws.
    #[test]
    fn cached_tokens_are_the_uncached_ones() {
        for (which, config) in variants().iter().enumerate() {
            let (model, params) = model(config);
            for (prompt, temperature) in [(1, 0.0), (7, 1.0), (24, 0.0), (60, 1.0)] {
                let prompt: Vec<u32> = (0..prompt).map(|i| i * 37 % 101).collect();
                let run = |kv_cache| {
                    let options = SampleOptions {
                        max_new_tokens: 40,
                        temperature,
                        top_p: 1.0,
                        kv_cache,
                        ignore_eos: true,
                        ..SampleOptions::default()
                    };
                    let mut ids = Vec::new();
                    let done =
                        generate_ids(&model, &params, &prompt, 0, &options, |id| ids.push(id)).unwrap();
                    assert_eq!((done.prompt_tokens, done.new_tokens), (prompt.len(), 40));
                    ids
                };
                let (cached, plain) = (run(true), run(false));
                assert_eq!(cached, plain, "variant {which}, prompt of {}", prompt.len());
                let mut distinct = plain.clone();
                distinct.sort_unstable();
                distinct.dedup();
                assert!(distinct.len() > 3, "variant {which}: a text of few tokens proves little: {plain:?}");
            }
        }
    }

    /// The device code of a cached step, on a card that computes nothing: every score is 0, and 0 is the first of equals.
    #[test]
    fn every_step_launches() {
        for capability in [(8, 0), (9, 0)] {
            let gpu = rb_cuda::Gpu::dry(capability, &rb_cuda::GpuOptions::default());
            for precision in [rb_autograd::Precision::Full, rb_autograd::Precision::MIXED] {
                for config in variants() {
                    let (model, params) = model(&config);
                    let mut params = params.to_device(Device::Cuda(gpu)).unwrap();
                    params.set_precision(precision).unwrap();
                    let options =
                        SampleOptions { max_new_tokens: 30, temperature: 0.0, ..Default::default() };
                    let mut ids = Vec::new();
                    generate_ids(&model, &params, &[5, 6, 7], 101, &options, |id| ids.push(id)).unwrap();
                    assert_eq!(ids, [0; 30]);
                }
            }
        }
    }

    #[test]
    fn the_context_moves_in_halves() {
        assert_eq!([0, 1, 24].map(|len| context_start(len, 24)), [0, 0, 0]);
        assert_eq!([25, 36, 37, 48, 49].map(|len| context_start(len, 24)), [12, 12, 24, 24, 36]);
        assert_eq!([1, 2, 3].map(|len| context_start(len, 1)), [0, 1, 2]);
        for (len, limit) in (0..200).flat_map(|len| (1..40).map(move |limit| (len, limit))) {
            let start = context_start(len, limit);
            assert!(len - start <= limit && (len == 0 || start < len), "{len} of {limit}: {start}");
        }
    }

    #[test]
    fn a_text_ends_at_its_end_token() {
        let (model, params) = model(&base());
        let options = SampleOptions { max_new_tokens: 9, temperature: 0.0, ..SampleOptions::default() };
        let mut ids = Vec::new();
        let all = generate_ids(&model, &params, &[5], 101, &options, |id| ids.push(id)).unwrap();
        assert!(!all.ended && all.tokens_per_s().is_some());
        let at = ids.iter().position(|&id| id == ids[4]).unwrap();
        let mut short = Vec::new();
        let done = generate_ids(&model, &params, &[5], ids[4], &options, |id| short.push(id)).unwrap();
        assert!(done.ended);
        assert_eq!(short, ids[..=at]);
        let empty = generate_ids(&model, &params, &[], 0, &options, |_| ());
        assert!(empty.unwrap_err().to_string().contains("[B, T], both at least 1"));
    }
}
