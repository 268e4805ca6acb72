//! [`RmsNorm`].

use rb_autograd::{Init, ParamBuilder, ParamId, Tape, Var, ops};

use crate::Result;

/// Root-mean-square norm of the last axis with a learned scale that starts at 1.
///
/// - **Computes** `y = x / sqrt(mean(x^2) + eps) * weight`.
/// - **Shapes** `x [.., C]`, `weight [C]` -> `y [.., C]`.
/// - **Source** arXiv:1910.07467.
#[derive(Clone, Copy, Debug)]
pub struct RmsNorm {
    weight: ParamId,
    eps: f64,
}

impl RmsNorm {
    /// Declares `<name>.weight`.
    pub fn init(builder: &mut ParamBuilder, name: &str, width: usize, eps: f64) -> Result<RmsNorm> {
        Ok(RmsNorm { weight: builder.param(format!("{name}.weight"), [width], Init::Ones)?, eps })
    }

    /// `h = x + branch`, and `h` normalised, in one pass on a GPU.
    pub fn forward_sum<'t>(
        &self,
        tape: &'t Tape<'t>,
        x: &Var<'t>,
        branch: &Var<'t>,
    ) -> Result<(Var<'t>, Var<'t>)> {
        let weight = tape.param_full(self.weight)?;
        Ok(ops::add_rms_norm(x, branch, &weight, self.eps, tape.compute_dtype())?)
    }

    /// Normalises each row.
    pub fn forward<'t>(&self, tape: &'t Tape<'t>, x: &Var<'t>) -> Result<Var<'t>> {
        let weight = tape.param_full(self.weight)?;
        Ok(ops::rms_norm::rms_norm_as(x, &weight, self.eps, tape.compute_dtype())?)
    }
}
