//! [`SelfAttention`]: grouped-query attention with rotary positions.

use rb_autograd::ops::attention::{AttentionMask, AttentionOptions};
use rb_autograd::ops::rope::RopeTable;
use rb_autograd::{ParamBuilder, Tape, Var, ops};
use rb_planted::{Defect, active};
use rb_tensor::Tensor;

use crate::{LayerView, Linear, LlamaConfig, Result, RmsNorm};

/// What all layers of a forward pass share: made once, not once a layer.
pub struct AttentionContext<'a> {
    /// Rotary frequencies.
    pub rope: &'a RopeTable,
    /// Position of each token `[B, T]`, i32, or on a GPU its angles (`rb_autograd::ops::rope::angles`).
    pub positions: &'a Tensor,
    /// Which keys each query sees.
    pub mask: &'a AttentionMask,
    /// This layer's keys and values of earlier tokens, which the mask counts too; left out in training.
    pub cache: Option<LayerView<'a>>,
}

/// Causal self-attention of `H` query heads over `G` key and value heads of width `D`.
///
/// - **Computes** `softmax(rope(q) rope(k)^T / sqrt(D)) v`, then the output product. With QK-norm, queries and
///   keys are normalised for each head before they are rotated (Qwen3's order). A window and a cap of the config
///   apply on top of the mask.
/// - **Shapes** `x [B, T, C]` -> `[B, T, C]`.
/// - **Source** arXiv:2305.13245 (groups), arXiv:2104.09864 (rotation).
#[derive(Clone, Copy, Debug)]
pub struct SelfAttention {
    qkv: Linear,
    out: Linear,
    qk_norm: Option<(RmsNorm, RmsNorm)>,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    options: AttentionOptions,
}

impl SelfAttention {
    /// Declares `q_proj`, `k_proj`, `v_proj` (one packed parameter), `o_proj` and the norms under `prefix`.
    pub fn init(
        builder: &mut ParamBuilder,
        prefix: &str,
        config: &LlamaConfig,
        residual_std: f64,
    ) -> Result<Self> {
        let (heads, kv_heads, head_dim) = (config.num_attention_heads, config.kv_heads(), config.head_dim());
        let (c, bias) = (config.hidden_size, config.attention_bias);
        let qkv =
            [("q_proj", heads * head_dim), ("k_proj", kv_heads * head_dim), ("v_proj", kv_heads * head_dim)];
        let qkv = Linear::init(builder, prefix, &qkv, c, bias, config.initializer_range)?;
        let out = Linear::init(builder, prefix, &[("o_proj", c)], heads * head_dim, bias, residual_std)?;
        let mut norm =
            |name: &str| RmsNorm::init(builder, &format!("{prefix}.{name}"), head_dim, config.rms_norm_eps);
        let qk_norm = if config.use_qk_norm { Some((norm("q_norm")?, norm("k_norm")?)) } else { None };
        let options = AttentionOptions {
            scale: 1.0 / (head_dim as f64).sqrt(),
            softcap: config.attn_logit_softcapping,
            window: config.sliding_window,
        };
        Ok(SelfAttention { qkv, out, qk_norm, heads, kv_heads, head_dim, options })
    }

    /// Applies attention.
    pub fn forward<'t>(&self, tape: &'t Tape<'t>, x: &Var<'t>, cx: &AttentionContext<'_>) -> Result<Var<'t>> {
        let (batch, len) = (x.shape()[0], x.shape()[1]);
        let (h, g, d) = (self.heads, self.kv_heads, self.head_dim);
        let scale = if active(Defect::ScoresNotScaled) { 1.0 } else { self.options.scale };
        let options = AttentionOptions { scale, ..self.options };
        let qkv = ops::reshape(&self.qkv.forward(tape, x)?, [batch, len, h + 2 * g, d])?;
        let heads = |x: &Var<'t>, start, count| ops::slice(x, 2, start, count);
        let attend = |q: &Var<'t>, k: &Var<'t>, v: &Var<'t>| -> Result<Var<'t>> {
            match cx.cache {
                None => Ok(ops::attention(q, k, v, cx.mask, options)?),
                Some(cache) => {
                    let (k, v) = cache.extend(tape, k, v)?;
                    Ok(ops::attention(q, &k, &v, cx.mask, options)?)
                }
            }
        };
        let y = match &self.qk_norm {
            None if active(Defect::FusedPathNeverRan) => {
                let q = ops::rope(&heads(&qkv, 0, h)?, cx.positions, cx.rope, h)?;
                let k = ops::rope(&heads(&qkv, h, g)?, cx.positions, cx.rope, g)?;
                attend(&q, &k, &heads(&qkv, h + g, g)?)?
            }
            None => {
                let turn = (cx.positions, cx.rope);
                if cx.cache.is_none() {
                    ops::attention_packed::rotated_attention(qkv, turn, [h, g], cx.mask, options)?
                } else {
                    let rotated = ops::rope(&qkv, turn.0, turn.1, h + g)?;
                    let (q, k, v) =
                        (heads(&rotated, 0, h)?, heads(&rotated, h, g)?, heads(&rotated, h + g, g)?);
                    attend(&q, &k, &v)?
                }
            }
            Some((q_norm, k_norm)) => {
                let q = ops::rope(&q_norm.forward(tape, &heads(&qkv, 0, h)?)?, cx.positions, cx.rope, h)?;
                let k = ops::rope(&k_norm.forward(tape, &heads(&qkv, h, g)?)?, cx.positions, cx.rope, g)?;
                attend(&q, &k, &heads(&qkv, h + g, g)?)?
            }
        };
        self.out.forward(tape, &ops::reshape(&y, [batch, len, h * d])?)
    }
}
