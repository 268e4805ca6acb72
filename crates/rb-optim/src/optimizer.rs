//! [`Optimizer`]: what a trainer and a checkpoint ask of any optimizer.

use std::collections::BTreeMap;

use rb_autograd::{GradStore, ParamStore};
use rb_tensor::Tensor;

use crate::Result;

/// Turns gradients into changes of weights.
pub trait Optimizer: Send {
    /// Name in errors and reports.
    fn name(&self) -> &'static str;

    /// One update with learning rate `lr`. Every gradient is multiplied by `grad_scale` as it is read: the
    /// clip coefficient, and 1/N where N unscaled gradients were accumulated. Gradients are stale afterwards.
    /// Frozen parameters and padding rows are not touched.
    ///
    /// # Errors
    /// A trainable parameter without a gradient since the last step (all are named); stores of another
    /// model; an `lr` that is negative or not finite; a `grad_scale` that is not finite; a tensor that
    /// still looks into the weights. On the host also a gradient that is not finite, a parameter whose gradients were
    /// zeros alone in the first 16 steps, and one whose bits after 32 steps are those before the first. After an error
    /// nothing has changed.
    fn step(
        &mut self,
        params: &mut ParamStore,
        grads: &mut GradStore,
        lr: f64,
        grad_scale: f64,
    ) -> Result<()>;

    /// As [`Optimizer::step`] with gradients clipped to the global norm `max_norm` (0: not clipped), and gives the
    /// norm before clipping as a scalar. Where it or `loss` is not finite nothing changes, the step is not counted and the
    /// gradients stay. On a GPU nothing is waited for: read the norm later.
    ///
    /// # Errors
    /// As [`Optimizer::step`]; a `max_norm` that is negative or not a number.
    fn clipped_step(
        &mut self,
        params: &mut ParamStore,
        grads: &mut GradStore,
        lr: f64,
        max_norm: f64,
        loss: &Tensor,
    ) -> Result<Tensor> {
        self.set_rate(lr)?;
        self.rated_step(params, grads, max_norm, loss)
    }

    /// Sets the learning rate of the steps that follow; on a GPU also of steps that were captured before.
    ///
    /// # Errors
    /// An `lr` that is negative or not finite.
    fn set_rate(&mut self, lr: f64) -> Result<()>;

    /// As [`Optimizer::clipped_step`] at the rate that was set. On a GPU it copies nothing from the host, so that it can be
    /// captured.
    ///
    /// # Errors
    /// As [`Optimizer::step`].
    fn rated_step(
        &mut self,
        params: &mut ParamStore,
        grads: &mut GradStore,
        max_norm: f64,
        loss: &Tensor,
    ) -> Result<Tensor>;

    /// On a GPU, where a norm is read after later steps were enqueued: whether the first norm that is not finite
    /// keeps all later steps from changing anything until state is loaded.
    fn halt_on_non_finite(&mut self, halt: bool);

    /// Steps made since the beginning of training, those before [`Optimizer::load_state`] included. On a GPU it
    /// waits for all work before.
    fn steps_done(&self) -> Result<u64>;

    /// The state by name (`exp_avg/model.norm.weight`): trainable parameters only, padding rows left out.
    /// The tensors are views: drop them before the next step.
    fn state(&self) -> Result<Vec<(String, Tensor)>>;

    /// Puts stored state in place.
    ///
    /// # Errors
    /// Missing or unexpected names, other shapes: nothing is loaded then.
    fn load_state(&mut self, tensors: &BTreeMap<String, Tensor>, steps_done: u64) -> Result<()>;
}
