//! [`SwigluMlp`]: the feed-forward layer.

use rb_autograd::{ParamBuilder, Tape, Var, ops};

use crate::{Linear, LlamaConfig, Result};

/// `down(silu(gate(x)) * up(x))`, with gate and up in one product.
///
/// **Source** arXiv:2002.05202; names as in Llama.
#[derive(Clone, Copy, Debug)]
pub struct SwigluMlp {
    gate_up: Linear,
    down: Linear,
}

impl SwigluMlp {
    /// Declares `gate_proj`, `up_proj` and `down_proj` under `prefix`.
    pub fn init(
        builder: &mut ParamBuilder,
        prefix: &str,
        config: &LlamaConfig,
        residual_std: f64,
    ) -> Result<Self> {
        let (c, f) = (config.hidden_size, config.intermediate_size);
        let gate_up = [("gate_proj", f), ("up_proj", f)];
        Ok(SwigluMlp {
            gate_up: Linear::init(builder, prefix, &gate_up, c, false, config.initializer_range)?,
            down: Linear::init(builder, prefix, &[("down_proj", c)], f, false, residual_std)?,
        })
    }

    /// `x [.., C]` -> `[.., C]`.
    pub fn forward<'t>(&self, tape: &'t Tape<'t>, x: &Var<'t>) -> Result<Var<'t>> {
        let gate_up = self.gate_up.forward(tape, x)?;
        self.down.forward(tape, &ops::swiglu(&gate_up)?)
    }
}
