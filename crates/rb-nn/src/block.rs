//! [`DecoderBlock`]: attention and feed-forward layer, each behind a norm and beside a residual.

use rb_autograd::{ParamBuilder, Tape, Var, ops};
use rb_planted::{Defect, active};

use crate::{AttentionContext, LlamaConfig, NnError, Result, RmsNorm, SelfAttention, SwigluMlp};

/// What a layer computes again in backward instead of keeping it: less memory for more time, and the same bits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Recompute {
    /// Nothing.
    #[default]
    None,
    /// The norm before the feed-forward layer and that layer.
    Mlp,
    /// All of it: only the layer's input is kept.
    Block,
}

/// A residual stream whose last branch may not be added yet.
pub struct Stream<'t> {
    /// The stream `[B, T, C]`.
    pub x: Var<'t>,
    /// What is to be added.
    pub branch: Option<Var<'t>>,
}

impl<'t> Stream<'t> {
    /// The stream with its branch added, and that normalised.
    pub fn normed(self, tape: &'t Tape<'t>, norm: &RmsNorm) -> Result<(Var<'t>, Var<'t>)> {
        match self.branch {
            Some(branch) => norm.forward_sum(tape, &self.x, &branch),
            None => {
                let normed = norm.forward(tape, &self.x)?;
                Ok((self.x, normed))
            }
        }
    }
}

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

    /// `x [B, T, C]` -> `[B, T, C]`, keeping for backward what `recompute` says. The bits are the same for each.
    pub fn forward<'t>(
        &self,
        tape: &'t Tape<'t>,
        x: &Var<'t>,
        cx: &AttentionContext<'_>,
        recompute: Recompute,
    ) -> Result<Var<'t>> {
        let block = *self;
        let recompute = if active(Defect::RecomputeNeverRan) { Recompute::None } else { recompute };
        match recompute {
            Recompute::None => {
                let h = self.attend(tape, x, cx)?;
                Ok(ops::add(&h, &self.feed_forward(tape, &h)?)?)
            }
            Recompute::Mlp => {
                let h = self.attend(tape, x, cx)?;
                let y = tape.recompute(&[&h], move |tape, inputs| {
                    block.feed_forward(tape, &inputs[0]).map_err(NnError::on_tape)
                })?;
                Ok(ops::add(&h, &y)?)
            }
            Recompute::Block => {
                let (rope, positions, mask) = (cx.rope.clone(), cx.positions.clone(), cx.mask.clone());
                Ok(tape.recompute(&[x], move |tape, inputs| {
                    let cx =
                        AttentionContext { rope: &rope, positions: &positions, mask: &mask, cache: None };
                    block.forward(tape, &inputs[0], &cx, Recompute::None).map_err(NnError::on_tape)
                })?)
            }
        }
    }

    /// As [`DecoderBlock::forward`] without recomputation, with sums left to the norms that follow them.
    pub fn forward_stream<'t>(
        &self,
        tape: &'t Tape<'t>,
        stream: Stream<'t>,
        cx: &AttentionContext<'_>,
    ) -> Result<Stream<'t>> {
        let (x, normed) = stream.normed(tape, &self.input_norm)?;
        let branch = Some(self.attention.forward(tape, &normed, cx)?);
        let (x, mut normed) = Stream { x, branch }.normed(tape, &self.post_norm)?;
        if active(Defect::DetachedBranch) {
            normed = tape.constant(normed.detach());
        }
        Ok(Stream { x, branch: Some(self.mlp.forward(tape, &normed)?) })
    }

    fn attend<'t>(&self, tape: &'t Tape<'t>, x: &Var<'t>, cx: &AttentionContext<'_>) -> Result<Var<'t>> {
        Ok(ops::add(x, &self.attention.forward(tape, &self.input_norm.forward(tape, x)?, cx)?)?)
    }

    fn feed_forward<'t>(&self, tape: &'t Tape<'t>, h: &Var<'t>) -> Result<Var<'t>> {
        if active(Defect::DetachedBranch) {
            return self.mlp.forward(tape, &self.post_norm.forward(tape, &tape.constant(h.detach()))?);
        }
        self.mlp.forward(tape, &self.post_norm.forward(tape, h)?)
    }
}
