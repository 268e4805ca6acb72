//! [`Linear`]: `x W^T + b`.

use rb_autograd::{Init, ParamBuilder, ParamId, Tape, Var, ops};
use rb_tensor::Shape;

use crate::Result;

/// A linear map of the last axis.
///
/// - **Computes** `y = x weight^T + bias`.
/// - **Shapes** `x [.., in]`, `weight [out, in]`, `bias [out]` -> `y [.., out]`.
/// - **Init** weight normal with the given deviation, bias zero.
#[derive(Clone, Copy, Debug)]
pub struct Linear {
    weight: ParamId,
    bias: Option<ParamId>,
}

impl Linear {
    /// One product under several names: output rows belong to `parts` in order (`q_proj`, `k_proj`, `v_proj`).
    /// Parameters are `<prefix>.<part>.weight` and, with `bias`, `<prefix>.<part>.bias`.
    pub fn init(
        builder: &mut ParamBuilder,
        prefix: &str,
        parts: &[(&str, usize)],
        in_features: usize,
        bias: bool,
        std: f64,
    ) -> Result<Linear> {
        let out: usize = parts.iter().map(|(_, rows)| rows).sum();
        let named = |kind: &str| {
            let names = parts.iter().map(|(name, rows)| (format!("{prefix}.{name}.{kind}"), *rows));
            names.collect::<Vec<_>>()
        };
        let weight = builder.packed(named("weight"), &Shape::from([out, in_features]), Init::Normal(std))?;
        let bias =
            if bias { Some(builder.packed(named("bias"), &Shape::from([out]), Init::Zeros)?) } else { None };
        Ok(Linear { weight, bias })
    }

    /// Applies the map.
    pub fn forward<'t>(&self, tape: &'t Tape<'t>, x: &Var<'t>) -> Result<Var<'t>> {
        let weight = tape.param(self.weight)?;
        let bias = self.bias.map(|b| tape.param_full(b)).transpose()?;
        Ok(ops::linear(x, &weight, bias.as_ref())?)
    }
}
