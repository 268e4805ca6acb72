//! Stochastic gradient descent with momentum.

use std::collections::BTreeMap;

use rb_autograd::{Float, GradStore, ParamStore};
use rb_cuda::{Kernel, kernel};
use rb_tensor::Tensor;

use crate::error::require;
use crate::update::{CudaUpdate, GradScale, State, Update};
use crate::{Optimizer, Result};

/// Numbers of [`Sgd`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SgdConfig {
    /// Decay of the velocity, in [0, 1); 0 is plain gradient descent.
    pub momentum: f64,
    /// Decoupled weight decay, for entries that declare it (matrices). PyTorch's `SGD` adds
    /// `weight_decay * p` to the gradient instead.
    pub weight_decay: f64,
}

impl Default for SgdConfig {
    fn default() -> Self {
        SgdConfig { momentum: 0.9, weight_decay: 0.0 }
    }
}

const NAME: &str = "sgd";

/// Gradient descent with momentum and decoupled weight decay.
///
/// With `g` the scaled gradient: `p *= 1 - lr * weight_decay` (matrices only), `b = momentum b + g`,
/// `p -= lr b`.
///
/// **Source** `torch.optim.SGD` with dampening 0, but for the weight decay.
#[derive(Debug)]
pub struct Sgd {
    config: SgdConfig,
    state: State<1>,
}

impl Sgd {
    /// An optimizer with zero velocity for `params`. Freeze parameters before.
    ///
    /// # Errors
    /// A number out of its range.
    pub fn new(config: SgdConfig, params: &ParamStore) -> Result<Sgd> {
        let SgdConfig { momentum, weight_decay } = config;
        require((0.0..1.0).contains(&momentum), NAME, "momentum", momentum, "0 to below 1")?;
        let decay = weight_decay.is_finite() && weight_decay >= 0.0;
        require(decay, NAME, "weight_decay", weight_decay, "a finite number of at least 0")?;
        Ok(Sgd { config, state: State::new(NAME, ["momentum_buffer"], params)? })
    }

    fn update(&self) -> SgdUpdate {
        let lr = self.state.rate();
        let SgdConfig { momentum, weight_decay } = self.config;
        SgdUpdate { keep: 1.0 - lr * weight_decay, momentum, lr, weight_decay }
    }

    /// The numbers it was made with.
    pub fn config(&self) -> &SgdConfig {
        &self.config
    }
}

impl Optimizer for Sgd {
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
struct SgdUpdate {
    /// Factor of decayed weights.
    keep: f64,
    momentum: f64,
    lr: f64,
    weight_decay: f64,
}

const SGD_STEP: Kernel = kernel!("sgd_step", "split");

impl Update<1> for SgdUpdate {
    fn update<T: Float>(
        &self,
        decay: bool,
        grad_scale: f64,
        weights: &mut [T],
        grads: &[T],
        [velocity]: [&mut [T]; 1],
    ) {
        let keep = T::from_f64(if decay { self.keep } else { 1.0 });
        let [scale, momentum, lr] = [grad_scale, self.momentum, self.lr].map(T::from_f64);
        for ((p, &g), b) in weights.iter_mut().zip(grads).zip(velocity) {
            *b = momentum * *b + g * scale;
            *p = *p * keep - lr * *b;
        }
    }

    fn cuda(&self) -> CudaUpdate {
        let constants = vec![self.momentum as f32];
        // No bias correction: with both betas 0 the kernel's corrections are 1.
        CudaUpdate { kernel: &SGD_STEP, beta1: 0.0, beta2: 0.0, weight_decay: self.weight_decay, constants }
    }
}
