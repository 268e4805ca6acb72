//! [`DecoderBlock`]: attention and feed-forward layer, each behind a norm and beside a residual.

use rb_autograd::{ParamBuilder, Tape, Var, ops};

use crate::{AttentionContext, LlamaConfig, Result, RmsNorm, SelfAttention, SwigluMlp};

/// One layer: `h = x + attention(norm(x))`, `y = h + mlp(norm(h))`.
#[derive(Clone, Copy, Debug)]
pub struct DecoderBlock {
    input_norm: RmsNorm,
    attention: SelfAttention,
    post_norm: RmsNorm,
    mlp: SwigluMlp,
}

impl DecoderBlock {
    /// Declares the layer's parameters under `prefix` (`model.layers.N`).
    pub fn init(builder: &mut ParamBuilder, prefix: &str, config: &LlamaConfig) -> Result<DecoderBlock> {
        let (c, eps) = (config.hidden_size, config.rms_norm_eps);
        let scale =
            if config.residual_init_scale { (2.0 * config.num_hidden_layers as f64).sqrt() } else { 1.0 };
        let residual_std = config.initializer_range / scale;
        Ok(DecoderBlock {
            input_norm: RmsNorm::init(builder, &format!("{prefix}.input_layernorm"), c, eps)?,
            attention: SelfAttention::init(builder, &format!("{prefix}.self_attn"), config, residual_std)?,
            post_norm: RmsNorm::init(builder, &format!("{prefix}.post_attention_layernorm"), c, eps)?,
            mlp: SwigluMlp::init(builder, &format!("{prefix}.mlp"), config, residual_std)?,
        })
    }

    /// `x [B, T, C]` -> `[B, T, C]`.
    pub fn forward<'t>(&self, tape: &'t Tape<'t>, x: &Var<'t>, cx: &AttentionContext<'_>) -> Result<Var<'t>> {
        let h = ops::add(x, &self.attention.forward(tape, &self.input_norm.forward(tape, x)?, cx)?)?;
        Ok(ops::add(&h, &self.mlp.forward(tape, &self.post_norm.forward(tape, &h)?)?)?)
    }
}
