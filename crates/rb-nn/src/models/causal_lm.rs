//! [`CausalLm`]: a Llama-style decoder.

use rb_autograd::ops::attention::AttentionMask;
use rb_autograd::ops::cross_entropy::{CrossEntropyOptions, Denominator};
use rb_autograd::ops::rope::{RopeTable, angles, check_positions};
use rb_autograd::{ParamBuilder, ParamStore, Tape, Var, ops};
use rb_planted::{Defect, active};
use rb_tensor::{Device, ShapeError, Tensor};

use crate::{
    AttentionContext, DecoderBlock, Embedding, KvCache, LlamaConfig, NnError, Recompute, Result, RmsNorm,
    Stream, rope_table,
};

/// Tokens of a forward pass.
#[derive(Clone, Debug)]
pub struct ModelInput {
    /// Token ids `[B, T]`, i32.
    pub input_ids: Tensor,
    /// Position of each token `[B, T]`, i32; `0..T` in each row if left out.
    pub position_ids: Option<Tensor>,
    /// Which tokens each token sees.
    pub mask: AttentionMask,
}

impl ModelInput {
    /// Rows of ids that see everything before them.
    pub fn causal(input_ids: Tensor) -> ModelInput {
        ModelInput { input_ids, position_ids: None, mask: AttentionMask::Causal }
    }
}

/// Embedding, blocks, final norm and output product, with Llama's names (Qwen3's with QK-norm).
///
/// # Examples
/// ```
/// use rb_autograd::ops::cross_entropy::CrossEntropyOptions;
/// use rb_autograd::{GradStore, ParamBuilder, Tape};
/// use rb_nn::{CausalLm, LlamaConfig, ModelInput};
/// use rb_tensor::{Device, Rng, Tensor};
///
/// let config = LlamaConfig { num_key_value_heads: Some(2), ..LlamaConfig::new(257, 32, 48, 2, 4) };
/// let mut builder = ParamBuilder::default();
/// let model = CausalLm::init(&config, &mut builder)?;
/// let params = builder.build(&Rng::new(0), Device::Cpu)?;
///
/// let input = ModelInput::causal(Tensor::from_vec(vec![1, 2, 3, 4], [1, 4])?);
/// let labels = Tensor::from_vec(vec![2, 3, 4, -100], [1, 4])?; // shifted; -100 is ignored
/// let tape = Tape::new(&params);
/// let loss = model.loss(&tape, &input, &labels, &CrossEntropyOptions::default())?;
/// let mut grads = GradStore::new(&params)?;
/// tape.backward(&loss, &mut grads)?;
/// grads.require_complete()?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct CausalLm {
    config: LlamaConfig,
    rope: RopeTable,
    embed_tokens: Embedding,
    blocks: Vec<DecoderBlock>,
    norm: RmsNorm,
    lm_head: Option<Embedding>,
    recompute: Recompute,
}

impl CausalLm {
    /// Declares all parameters.
    ///
    /// # Errors
    /// A config that breaks a rule.
    pub fn init(config: &LlamaConfig, builder: &mut ParamBuilder) -> Result<CausalLm> {
        config.validate()?;
        let (vocab, padded) = (config.vocab_size, config.padded_vocab_size());
        let (c, std) = (config.hidden_size, config.initializer_range);
        let table = |builder: &mut ParamBuilder, name| Embedding::init(builder, name, vocab, padded, c, std);
        let embed_tokens = table(builder, "model.embed_tokens")?;
        let blocks = (0..config.num_hidden_layers)
            .map(|i| DecoderBlock::init(builder, &format!("model.layers.{i}"), config))
            .collect::<Result<_>>()?;
        let norm = RmsNorm::init(builder, "model.norm", c, config.rms_norm_eps)?;
        let lm_head = if config.tie_word_embeddings { None } else { Some(table(builder, "lm_head")?) };
        let (config, rope) = (config.clone(), rope_table(config));
        Ok(CausalLm { config, rope, embed_tokens, blocks, norm, lm_head, recompute: Recompute::None })
    }

    /// The same model with layers that compute again in backward what `recompute` says.
    pub fn with_recompute(self, recompute: Recompute) -> CausalLm {
        CausalLm { recompute, ..self }
    }

    /// What the layers compute again in backward.
    pub fn recompute(&self) -> Recompute {
        self.recompute
    }

    /// The shape of the model.
    pub fn config(&self) -> &LlamaConfig {
        &self.config
    }

    /// Final hidden states `[B, T, C]`, after the last norm.
    ///
    /// # Errors
    /// Ids that are not `[B, T]` or not in the vocabulary; more positions than the model has.
    pub fn hidden<'t>(&self, tape: &'t Tape<'t>, input: &ModelInput) -> Result<Var<'t>> {
        let (batch, len) = batch_and_len(&input.input_ids)?;
        if len > self.config.max_position_embeddings {
            return Err(NnError::TooLong { len, limit: self.config.max_position_embeddings });
        }
        let positions = match &input.position_ids {
            Some(positions) => positions.clone(),
            None => Tensor::from_vec((0..batch).flat_map(|_| 0..len as i32).collect(), [batch, len])?,
        };
        let mut x = self.embed_tokens.forward(tape, &input.input_ids)?;
        // Checked and copied to the device once, not once a layer.
        let device = x.detach().device();
        check_positions(&positions)?;
        let (positions, mask) = (positions.to_device(device)?, input.mask.on("causal_lm", device, len)?);
        let positions = angles(&positions, &self.rope)?;
        if self.recompute == Recompute::None && !active(Defect::MaskRebuiltPerLayer) {
            let cx = AttentionContext { rope: &self.rope, positions: &positions, mask: &mask, cache: None };
            let mut stream = Stream { x, branch: None };
            for block in &self.blocks {
                stream = block.forward_stream(tape, stream, &cx)?;
            }
            return Ok(stream.normed(tape, &self.norm)?.1);
        }
        for block in &self.blocks {
            let made = if active(Defect::MaskRebuiltPerLayer) {
                Some(mask.on("causal_lm", Device::Cpu, len)?.on("causal_lm", device, len)?)
            } else {
                None
            };
            let mask = made.as_ref().unwrap_or(&mask);
            let cx = AttentionContext { rope: &self.rope, positions: &positions, mask, cache: None };
            x = block.forward(tape, &x, &cx, self.recompute)?;
        }
        self.norm.forward(tape, &x)
    }

    /// An empty cache of keys and values for `batch` sequences of up to `capacity` tokens, where the weights are and in
    /// the element type that they compute in.
    ///
    /// # Errors
    /// More tokens than the model has positions; a GPU without the memory.
    pub fn new_cache(&self, params: &ParamStore, batch: usize, capacity: usize) -> Result<KvCache> {
        let tape = Tape::inference(params);
        KvCache::new(&self.config, (batch, capacity), tape.compute_dtype(), tape.device())
    }

    /// Reads `input_ids [B, T]`, which follow the tokens in `cache`, and gives the scores `[B, 1, vocab_size]` of the
    /// token after them: what [`CausalLm::next_token_logits`] gives for all tokens at once, up to rounding.
    ///
    /// # Errors
    /// More tokens than the cache holds; those of [`CausalLm::hidden`].
    pub fn next_token_logits_cached(
        &self,
        params: &ParamStore,
        cache: &mut KvCache,
        input_ids: &Tensor,
    ) -> Result<Tensor> {
        let (batch, len) = batch_and_len(input_ids)?;
        cache.check(batch, len)?;
        let tape = Tape::inference(params);
        let device = tape.device();
        let x = self.embed_tokens.forward(&tape, input_ids)?;
        let positions = cache.positions(len)?.to_device(device)?;
        let mask = cache.mask(len)?.on("causal_lm", device, cache.capacity())?;
        let mut stream = Stream { x, branch: None };
        for (index, block) in self.blocks.iter().enumerate() {
            let cache = Some(cache.layer(index));
            let cx = AttentionContext { rope: &self.rope, positions: &positions, mask: &mask, cache };
            stream = block.forward_stream(&tape, stream, &cx)?;
        }
        let hidden = stream.normed(&tape, &self.norm)?.1;
        let last = ops::slice(&hidden, 1, len - 1, 1)?;
        let scores = self.read_scores(&tape, &last)?;
        cache.advance(len);
        Ok(scores)
    }

    /// For each row of `labels [B, T]` (i32, already shifted; -100 is ignored) the sum of `-ln p(label)` in nats: what a
    /// text, or a continuation of one, costs.
    ///
    /// # Errors
    /// Those of [`CausalLm::loss`].
    pub fn row_losses(&self, params: &ParamStore, input: &ModelInput, labels: &Tensor) -> Result<Vec<f64>> {
        let tape = Tape::inference(params);
        let hidden = self.hidden(&tape, input)?;
        let (batch, len) = batch_and_len(labels)?;
        let ids = labels.to_vec::<i32>()?;
        let options = CrossEntropyOptions {
            num_classes: Some(self.config.vocab_size),
            denominator: Denominator::Fixed(1.0),
            ..CrossEntropyOptions::default()
        };
        let mut losses = Vec::with_capacity(batch);
        for (b, ids) in ids.chunks_exact(len).enumerate() {
            // Scores are made only where there are labels: of a long context with a short continuation, few.
            let counts = |id: &i32| *id != options.ignore_index;
            let (Some(first), Some(last)) = (ids.iter().position(counts), ids.iter().rposition(counts))
            else {
                losses.push(tape.constant(Tensor::scalar(0f32)).detach());
                continue;
            };
            let row = ops::slice(&ops::slice(&hidden, 0, b, 1)?, 1, first, last + 1 - first)?;
            let labels = Tensor::from_vec(ids[first..=last].to_vec(), [1, last + 1 - first])?;
            let logits = self.head().logits(&tape, &row)?;
            let loss = ops::cross_entropy(&logits, &labels, &options);
            losses.push(loss.map_err(|e| NnError::in_batch("labels", &labels, e))?.detach());
        }
        losses.iter().map(|loss| Ok(loss.item()?)).collect()
    }

    /// Scores `[B, T, padded vocabulary]`; columns from `vocab_size` on mean nothing.
    pub fn forward<'t>(&self, tape: &'t Tape<'t>, input: &ModelInput) -> Result<Var<'t>> {
        let hidden = self.hidden(tape, input)?;
        self.head().logits(tape, &hidden)
    }

    /// Scores `[B, T, vocab_size]` without padding or history, for reading.
    pub fn logits(&self, params: &ParamStore, input: &ModelInput) -> Result<Tensor> {
        let tape = Tape::inference(params);
        let hidden = self.hidden(&tape, input)?;
        self.read_scores(&tape, &hidden)
    }

    /// Scores `[B, 1, vocab_size]` of the token after the last one: what generation needs.
    pub fn next_token_logits(&self, params: &ParamStore, input: &ModelInput) -> Result<Tensor> {
        let tape = Tape::inference(params);
        let hidden = self.hidden(&tape, input)?;
        let last = ops::slice(&hidden, 1, hidden.shape()[1] - 1, 1)?;
        self.read_scores(&tape, &last)
    }

    fn read_scores<'t>(&self, tape: &'t Tape<'t>, hidden: &Var<'t>) -> Result<Tensor> {
        let padded = self.head().logits(tape, hidden)?;
        Ok(ops::slice(&padded, -1, 0, self.config.vocab_size)?.detach())
    }

    fn head(&self) -> &Embedding {
        self.lm_head.as_ref().unwrap_or(&self.embed_tokens)
    }

    /// Cross entropy against `labels [B, T]` (i32, already shifted; -100 is ignored), as a scalar.
    /// `options.num_classes` is always the vocabulary's size.
    ///
    /// # Errors
    /// Those of [`CausalLm::hidden`]; a label outside the vocabulary.
    pub fn loss<'t>(
        &self,
        tape: &'t Tape<'t>,
        input: &ModelInput,
        labels: &Tensor,
        options: &CrossEntropyOptions,
    ) -> Result<Var<'t>> {
        let logits = self.forward(tape, input)?;
        let classes = (!active(Defect::PaddedClassesCounted)).then_some(self.config.vocab_size);
        let options = CrossEntropyOptions { num_classes: classes, ..options.clone() };
        ops::cross_entropy::cross_entropy_consuming(logits, labels, &options)
            .map_err(|e| NnError::in_batch("labels", labels, e))
    }
}

/// `B` and `T` of ids.
fn batch_and_len(ids: &Tensor) -> Result<(usize, usize)> {
    let shape = ids.shape();
    if shape.rank() != 2 || shape.numel() == 0 {
        let error = ShapeError::new("causal_lm", "input_ids", shape, "[B, T], both at least 1");
        return Err(NnError::Tensor(error.into()));
    }
    Ok((shape[0], shape[1]))
}
