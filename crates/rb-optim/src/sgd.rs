//! Stochastic gradient descent with momentum and decoupled weight decay.
//!
//! ```text
//! p <- p (1 - lr wd)                        matrices only
//! u <- momentum u + g
//! p <- p - lr u
//! ```
//!
//! **Source** `torch.optim.SGD` (its momentum form, without dampening); decay as in [`crate::AdamW`].

use std::collections::BTreeMap;
use std::sync::Arc;

use rayon::prelude::*;
use rb_autograd::{Float, GradStore, Layout, ParamStore};
use rb_tensor::{Arena, DType, Tensor};

use crate::optimizer::{self, Optimizer};
use crate::{OptimError, Result};

/// Elements of one parallel task.
const TASK: usize = 16 * 1024;

/// Settings of [`Sgd`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SgdConfig {
    /// Share of the last direction that is kept.
    pub momentum: f64,
    /// Decoupled decay of matrices.
    pub weight_decay: f64,
}

/// The optimizer and its momentum.
#[derive(Debug)]
pub struct Sgd {
    config: SgdConfig,
    layout: Arc<Layout>,
    buffer: Arena,
    steps: u64,
}

impl Sgd {
    /// Zero momentum for `params`.
    pub fn new(config: SgdConfig, params: &ParamStore) -> Result<Sgd> {
        let arena = params.arena();
        let buffer = Arena::zeros("momentum_buffer", arena.numel(), arena.dtype(), arena.device())?;
        Ok(Sgd { config, layout: params.layout().clone(), buffer, steps: 0 })
    }

    fn update<T: Float>(
        &mut self,
        params: &mut ParamStore,
        grads: &GradStore,
        lr: f64,
        scale: f64,
    ) -> Result<()> {
        let (momentum, rate, scale) =
            (T::from_f64(self.config.momentum), T::from_f64(lr), T::from_f64(scale));
        let grads = grads.arena().as_slice::<T>()?;
        let weights = params.arena_mut().as_mut_slice::<T>()?;
        let buffer = self.buffer.as_mut_slice::<T>()?;
        for span in optimizer::spans(&self.layout) {
            let keep = T::from_f64(if span.decay { 1.0 - lr * self.config.weight_decay } else { 1.0 });
            let r = span.range;
            weights[r.clone()]
                .par_chunks_mut(TASK)
                .zip(buffer[r.clone()].par_chunks_mut(TASK))
                .zip(grads[r].par_chunks(TASK))
                .for_each(|((p, u), g)| {
                    for ((p, u), &g) in p.iter_mut().zip(u).zip(g) {
                        *u = u.mul_add(momentum, g * scale);
                        *p = *p * keep - rate * *u;
                    }
                });
        }
        Ok(())
    }
}

impl Optimizer for Sgd {
    fn step(
        &mut self,
        params: &mut ParamStore,
        grads: &mut GradStore,
        lr: f64,
        grad_scale: f64,
    ) -> Result<()> {
        optimizer::check(&self.layout, params, grads)?;
        match params.arena().dtype() {
            DType::F64 => self.update::<f64>(params, grads, lr, grad_scale)?,
            _ => self.update::<f32>(params, grads, lr, grad_scale)?,
        }
        self.steps += 1;
        grads.mark_stale();
        Ok(())
    }

    fn steps_done(&self) -> u64 {
        self.steps
    }

    fn state(&self) -> Result<Vec<(String, Tensor)>> {
        let mut out = Vec::new();
        optimizer::export("momentum_buffer", &self.buffer, &self.layout, &mut out)?;
        Ok(out)
    }

    fn load_state(&mut self, tensors: &BTreeMap<String, Tensor>, steps_done: u64) -> Result<(), OptimError> {
        optimizer::import(&mut [("momentum_buffer", &mut self.buffer)], &self.layout, tensors)?;
        self.steps = steps_done;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::optimizer::test_support::{gradients, model, weights};

    #[test]
    fn five_steps_match_the_formula_in_f64() {
        let (mut params, mut grads) = model(DType::F64);
        let mut sgd = Sgd::new(SgdConfig { momentum: 0.7, weight_decay: 0.2 }, &params).unwrap();
        let mut expected = weights(&params);
        let mut momenta: Vec<Vec<f64>> = expected.iter().map(|w| vec![0.0; w.len()]).collect();
        for t in 1..=5 {
            let g = gradients(&params, &mut grads, t);
            sgd.step(&mut params, &mut grads, 0.05, 2.0).unwrap();
            for (i, w) in expected.iter_mut().enumerate() {
                let decay = if i == 0 { 0.2 } else { 0.0 };
                for (j, p) in w.iter_mut().enumerate() {
                    momenta[i][j] = 0.7 * momenta[i][j] + 2.0 * g[i][j];
                    *p = *p * (1.0 - 0.05 * decay) - 0.05 * momenta[i][j];
                }
            }
        }
        for (got, want) in weights(&params).iter().flatten().zip(expected.iter().flatten()) {
            assert!((got - want).abs() < 1e-12, "{got} {want}");
        }
        assert_eq!((sgd.steps_done(), sgd.state().unwrap().len()), (5, 2));
    }
}
