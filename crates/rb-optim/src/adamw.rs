//! AdamW: Adam with decoupled weight decay.
//!
//! ```text
//! p <- p (1 - lr wd)                        matrices only
//! m <- beta1 m + (1 - beta1) g
//! v <- beta2 v + (1 - beta2) g^2
//! p <- p - lr/(1 - beta1^t) m / (sqrt(v / (1 - beta2^t)) + eps)
//! ```
//!
//! **Source** arXiv:1711.05101; `torch.optim.AdamW`.

use std::collections::BTreeMap;
use std::sync::Arc;

use rayon::prelude::*;
use rb_autograd::{Float, GradStore, Layout, ParamStore};
use rb_tensor::{Arena, DType, Tensor};

use crate::optimizer::{self, Optimizer};
use crate::{OptimError, Result};

/// Elements of one parallel task.
const TASK: usize = 16 * 1024;

/// Settings of [`AdamW`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamWConfig {
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Added to the root of the second moment.
    pub eps: f64,
    /// Decoupled decay of matrices.
    pub weight_decay: f64,
}

impl Default for AdamWConfig {
    /// The usual values of language-model pretraining (arXiv:2005.14165, appendix B).
    fn default() -> Self {
        AdamWConfig { beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1 }
    }
}

/// The optimizer and its moments.
#[derive(Debug)]
pub struct AdamW {
    config: AdamWConfig,
    layout: Arc<Layout>,
    exp_avg: Arena,
    exp_avg_sq: Arena,
    steps: u64,
}

impl AdamW {
    /// Zero moments for `params`.
    pub fn new(config: AdamWConfig, params: &ParamStore) -> Result<AdamW> {
        let arena = params.arena();
        let zeros = |name| Arena::zeros(name, arena.numel(), arena.dtype(), arena.device());
        Ok(AdamW {
            config,
            layout: params.layout().clone(),
            exp_avg: zeros("exp_avg")?,
            exp_avg_sq: zeros("exp_avg_sq")?,
            steps: 0,
        })
    }

    fn update<T: Float>(
        &mut self,
        params: &mut ParamStore,
        grads: &GradStore,
        lr: f64,
        scale: f64,
    ) -> Result<()> {
        let AdamWConfig { beta1, beta2, eps, weight_decay } = self.config;
        let t = self.steps as f64 + 1.0;
        let step_size = T::from_f64(lr / (1.0 - beta1.powf(t)));
        let root_correction = T::from_f64(1.0 / (1.0 - beta2.powf(t)).sqrt());
        let (b1, b2, eps, scale) =
            (T::from_f64(beta1), T::from_f64(beta2), T::from_f64(eps), T::from_f64(scale));
        let (c1, c2) = (T::from_f64(1.0 - beta1), T::from_f64(1.0 - beta2));
        let grads = grads.arena().as_slice::<T>()?;
        let weights = params.arena_mut().as_mut_slice::<T>()?;
        let ms = self.exp_avg.as_mut_slice::<T>()?;
        let vs = self.exp_avg_sq.as_mut_slice::<T>()?;
        for span in optimizer::spans(&self.layout) {
            let keep = T::from_f64(if span.decay { 1.0 - lr * weight_decay } else { 1.0 });
            let r = span.range;
            weights[r.clone()]
                .par_chunks_mut(TASK)
                .zip(ms[r.clone()].par_chunks_mut(TASK))
                .zip(vs[r.clone()].par_chunks_mut(TASK))
                .zip(grads[r].par_chunks(TASK))
                .for_each(|(((p, m), v), g)| {
                    for (((p, m), v), &g) in p.iter_mut().zip(m).zip(v).zip(g) {
                        let g = g * scale;
                        *m = m.mul_add(b1, c1 * g);
                        *v = v.mul_add(b2, c2 * g * g);
                        *p = *p * keep - step_size * *m / (v.sqrt() * root_correction + eps);
                    }
                });
        }
        Ok(())
    }
}

impl Optimizer for AdamW {
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
        optimizer::export("exp_avg", &self.exp_avg, &self.layout, &mut out)?;
        optimizer::export("exp_avg_sq", &self.exp_avg_sq, &self.layout, &mut out)?;
        Ok(out)
    }

    fn load_state(&mut self, tensors: &BTreeMap<String, Tensor>, steps_done: u64) -> Result<(), OptimError> {
        let slots = &mut [("exp_avg", &mut self.exp_avg), ("exp_avg_sq", &mut self.exp_avg_sq)];
        optimizer::import(slots, &self.layout, tensors)?;
        self.steps = steps_done;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::optimizer::test_support::{gradients, model, weights};

    #[test]
    fn ten_steps_match_the_formula_in_f64() {
        let (mut params, mut grads) = model(DType::F64);
        let config = AdamWConfig { beta1: 0.8, beta2: 0.9, eps: 1e-6, weight_decay: 0.3 };
        let mut adam = AdamW::new(config, &params).unwrap();
        let mut expected: Vec<Vec<f64>> = weights(&params);
        let mut moments: Vec<Vec<(f64, f64)>> = expected.iter().map(|w| vec![(0.0, 0.0); w.len()]).collect();
        for t in 1..=10 {
            let g = gradients(&params, &mut grads, t);
            let lr = 0.01 * t as f64;
            adam.step(&mut params, &mut grads, lr, 0.5).unwrap();
            for (i, w) in expected.iter_mut().enumerate() {
                let decay = if i == 0 { 0.3 } else { 0.0 }; // the matrix decays, the vector does not
                for (j, p) in w.iter_mut().enumerate() {
                    let g = 0.5 * g[i][j];
                    let (m, v) = &mut moments[i][j];
                    *m = 0.8 * *m + 0.2 * g;
                    *v = 0.9 * *v + 0.1 * g * g;
                    let (mh, vh) = (*m / (1.0 - 0.8f64.powi(t)), *v / (1.0 - 0.9f64.powi(t)));
                    *p = *p * (1.0 - lr * decay) - lr * mh / (vh.sqrt() + 1e-6);
                }
            }
        }
        for (got, want) in weights(&params).iter().flatten().zip(expected.iter().flatten()) {
            assert!((got - want).abs() < 1e-12, "{got} {want}");
        }
    }

    #[test]
    fn a_stale_gradient_is_an_error_and_changes_nothing() {
        let (mut params, mut grads) = model(DType::F32);
        let mut adam = AdamW::new(AdamWConfig::default(), &params).unwrap();
        let before = params.arena().as_slice::<f32>().unwrap().to_vec();
        let message = adam.step(&mut params, &mut grads, 0.1, 1.0).unwrap_err().to_string();
        assert!(message.contains("2 parameter(s) got no gradient this step: w, b"), "{message}");
        assert_eq!(params.arena().as_slice::<f32>().unwrap(), before);
        assert_eq!(adam.steps_done(), 0);
        gradients(&params, &mut grads, 1);
        adam.step(&mut params, &mut grads, 0.0, 1.0).unwrap();
        assert_eq!(params.arena().as_slice::<f32>().unwrap(), before, "learning rate 0 moves nothing");
        assert!(adam.step(&mut params, &mut grads, 0.1, 1.0).is_err(), "a gradient serves one step");
    }

    #[test]
    fn padding_stays_zero_and_frozen_parameters_stay() {
        let (mut params, _) = model(DType::F32);
        params.set_trainable("b", false).unwrap();
        let mut grads = GradStore::new(&params).unwrap();
        let mut adam = AdamW::new(AdamWConfig::default(), &params).unwrap();
        let frozen = params.part("b").unwrap().to_vec::<f32>().unwrap();
        gradients(&params, &mut grads, 1);
        adam.step(&mut params, &mut grads, 0.1, 1.0).unwrap();
        assert_eq!(params.part("b").unwrap().to_vec::<f32>().unwrap(), frozen);
        assert_eq!(params.arena().as_slice::<f32>().unwrap()[6..9], [0.0; 3], "padding row");
    }

    #[test]
    fn state_round_trip_continues_bit_for_bit_and_bad_state_is_named() {
        let (mut params, mut grads) = model(DType::F32);
        let mut adam = AdamW::new(AdamWConfig::default(), &params).unwrap();
        gradients(&params, &mut grads, 1);
        adam.step(&mut params, &mut grads, 0.1, 1.0).unwrap();
        let stored: BTreeMap<String, Tensor> =
            adam.state().unwrap().into_iter().map(|(n, t)| (n, t.to_owned_copy())).collect();
        let (mut twin, mut twin_grads) = model(DType::F32);
        for name in ["w", "b"] {
            twin.set_part(name, &params.part(name).unwrap().to_owned_copy()).unwrap();
        }
        let mut resumed = AdamW::new(AdamWConfig::default(), &twin).unwrap();
        resumed.load_state(&stored, 1).unwrap();
        for (p, g, o) in [(&mut params, &mut grads, &mut adam), (&mut twin, &mut twin_grads, &mut resumed)] {
            gradients(p, g, 2);
            o.step(p, g, 0.1, 1.0).unwrap();
        }
        assert_eq!(params.arena().as_slice::<f32>().unwrap(), twin.arena().as_slice::<f32>().unwrap());

        let mut less = stored.clone();
        less.remove("exp_avg/b");
        assert!(resumed.load_state(&less, 1).unwrap_err().to_string().contains("exp_avg/b is missing"));
        let mut more = stored.clone();
        more.insert("momentum/b".into(), stored["exp_avg/b"].clone());
        assert!(resumed.load_state(&more, 1).unwrap_err().to_string().contains("momentum/b"));
    }
}
