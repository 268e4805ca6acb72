//! AdamW: Adam with decoupled weight decay.

use std::collections::BTreeMap;

use rb_autograd::{Float, GradStore, ParamStore};
use rb_cuda::{Kernel, kernel};
use rb_planted::{Defect, active};
use rb_tensor::Tensor;

use crate::error::require;
use crate::update::{CudaUpdate, GradScale, State, Update};
use crate::{Optimizer, Result};

/// Numbers of [`AdamW`]. The defaults are those of most published language models, not PyTorch's.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamWConfig {
    /// Decay of the first moment, in [0, 1).
    pub beta1: f64,
    /// Decay of the second moment, in [0, 1).
    pub beta2: f64,
    /// Added to the denominator, outside the root of the bias-corrected second moment.
    pub eps: f64,
    /// Decoupled weight decay, for entries that declare it (matrices).
    pub weight_decay: f64,
}

impl Default for AdamWConfig {
    fn default() -> Self {
        AdamWConfig { beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1 }
    }
}

const NAME: &str = "adamw";

/// Adam with decoupled weight decay.
///
/// With `g` the scaled gradient and `t` the step, counted from 1:
/// `p *= 1 - lr * weight_decay` (matrices only), `m += (1 - beta1) (g - m)`,
/// `v = beta2 v + (1 - beta2) g^2`, `p -= lr / (1 - beta1^t) * m / (sqrt(v / (1 - beta2^t)) + eps)`.
///
/// **Source** arXiv:1711.05101; `torch.optim.AdamW`.
#[derive(Debug)]
pub struct AdamW {
    config: AdamWConfig,
    state: State<2>,
}

impl AdamW {
    /// An optimizer with zero moments for `params`. Freeze parameters before.
    ///
    /// # Errors
    /// A number out of its range.
    pub fn new(config: AdamWConfig, params: &ParamStore) -> Result<AdamW> {
        let AdamWConfig { beta1, beta2, eps, weight_decay } = config;
        let unit = "0 to below 1";
        require((0.0..1.0).contains(&beta1), NAME, "beta1", beta1, unit)?;
        require((0.0..1.0).contains(&beta2), NAME, "beta2", beta2, unit)?;
        require(eps.is_finite() && eps > 0.0, NAME, "eps", eps, "a finite number above 0")?;
        let decay = weight_decay.is_finite() && weight_decay >= 0.0;
        require(decay, NAME, "weight_decay", weight_decay, "a finite number of at least 0")?;
        Ok(AdamW { config, state: State::new(NAME, ["exp_avg", "exp_avg_sq"], params)? })
    }

    fn update(&self) -> AdamWUpdate {
        let lr = self.state.rate();
        let AdamWConfig { beta1, beta2, eps, weight_decay } = self.config;
        let corrected = !active(Defect::BiasCorrectionMissing);
        let t = if corrected { (self.state.steps + 1) as f64 } else { f64::INFINITY };
        AdamWUpdate {
            keep: 1.0 - lr * weight_decay,
            beta1,
            beta2,
            step_size: lr / (1.0 - beta1.powf(t)),
            correction2: 1.0 / (1.0 - beta2.powf(t)).sqrt(),
            eps,
            weight_decay,
        }
    }

    /// The numbers it was made with.
    pub fn config(&self) -> &AdamWConfig {
        &self.config
    }
}

impl Optimizer for AdamW {
    fn name(&self) -> &'static str {
        NAME
    }

    fn step(
        &mut self,
        params: &mut ParamStore,
        grads: &mut GradStore,
        lr: f64,
        grad_scale: f64,
    ) -> Result<()> {
        self.state.set_rate(lr)?;
        let update = self.update();
        self.state.run(&update, params, grads, GradScale::Fixed(grad_scale)).map(drop)
    }

    fn set_rate(&mut self, lr: f64) -> Result<()> {
        self.state.set_rate(lr)
    }

    fn rated_step(
        &mut self,
        params: &mut ParamStore,
        grads: &mut GradStore,
        max_norm: f64,
        loss: &Tensor,
    ) -> Result<Tensor> {
        let update = self.update();
        self.state.run(&update, params, grads, GradScale::Clip { max_norm, loss })
    }

    fn halt_on_non_finite(&mut self, halt: bool) {
        self.state.halt = halt;
    }

    fn steps_done(&self) -> Result<u64> {
        self.state.steps_done()
    }

    fn state(&self) -> Result<Vec<(String, Tensor)>> {
        self.state.named()
    }

    fn load_state(&mut self, tensors: &BTreeMap<String, Tensor>, steps_done: u64) -> Result<()> {
        self.state.load(tensors, steps_done)
    }
}

/// What is the same for every element of one step.
struct AdamWUpdate {
    /// Factor of decayed weights.
    keep: f64,
    beta1: f64,
    beta2: f64,
    /// `lr / (1 - beta1^t)`
    step_size: f64,
    /// `1 / sqrt(1 - beta2^t)`
    correction2: f64,
    eps: f64,
    weight_decay: f64,
}

const ADAMW_STEP: Kernel = kernel!("adamw_step", "split");

impl Update<2> for AdamWUpdate {
    fn update<T: Float>(
        &self,
        decay: bool,
        grad_scale: f64,
        weights: &mut [T],
        grads: &[T],
        [m, v]: [&mut [T]; 2],
    ) {
        let keep = T::from_f64(if decay { self.keep } else { 1.0 });
        let [scale, step_size, correction2, eps] =
            [grad_scale, self.step_size, self.correction2, self.eps].map(T::from_f64);
        let [rate1, beta2, rate2] = [1.0 - self.beta1, self.beta2, 1.0 - self.beta2].map(T::from_f64);
        for (((p, &g), m), v) in weights.iter_mut().zip(grads).zip(m).zip(v) {
            let g = g * scale;
            *m += rate1 * (g - *m);
            *v = beta2 * *v + rate2 * (g * g);
            *p = *p * keep - step_size * (*m / (v.sqrt() * correction2 + eps));
            if active(Defect::UpdateRoundedAway) {
                *p = T::from_f64(rb_tensor::bf16::from_f64(p.to_f64()).to_f64());
            }
        }
    }

    fn cuda(&self) -> CudaUpdate {
        let AdamWUpdate { beta1, beta2, eps, weight_decay, .. } = *self;
        let constants = [1.0 - beta1, beta2, 1.0 - beta2, eps].map(|x| x as f32).to_vec();
        CudaUpdate { kernel: &ADAMW_STEP, beta1, beta2, weight_decay, constants }
    }
}
