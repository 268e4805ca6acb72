//! One fused, parallel pass over weights, gradients and optimizer state.
//!
//! What is named in the layout and trainable is visited, in ranges as long as neighbours of one kind allow;
//! padding rows and alignment gaps are in no range.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use rayon::prelude::*;
use rb_autograd::{AutogradError, Float, GradStore, Layout, ParamEntry, ParamStore};
use rb_planted::{Defect, active};
use rb_tensor::{Arena, DType, ShapeError, Tensor};

use crate::cuda::CudaState;
pub(crate) use crate::cuda::CudaUpdate;
use crate::error::require;
use crate::watch::Watch;
use crate::{OptimError, Result};

/// Elements of one parallel task: four arrays of this many f32 fit in a second-level cache.
const TASK_ELEMENTS: usize = 16 * 1024;

/// The formula of an optimizer with `N` state arrays, on equally long slices.
pub(crate) trait Update<const N: usize>: Sync {
    fn update<T: Float>(
        &self,
        decay: bool,
        grad_scale: f64,
        weights: &mut [T],
        grads: &[T],
        state: [&mut [T]; N],
    );

    /// The same on a GPU.
    fn cuda(&self) -> CudaUpdate;
}

/// How gradients are scaled as they are read.
#[derive(Clone, Copy, Debug)]
pub(crate) enum GradScale<'a> {
    /// By this factor.
    Fixed(f64),
    /// Down to this global norm; 0 turns it off.
    Clip {
        /// The limit.
        max_norm: f64,
        /// Where it is not finite, nothing changes either.
        loss: &'a Tensor,
    },
}

/// `N` arenas in the layout of the weights, with names.
#[derive(Debug)]
pub(crate) struct State<const N: usize> {
    optimizer: &'static str,
    names: [&'static str; N],
    layout: Arc<Layout>,
    arenas: [Arena; N],
    /// Steps done on the host; on a GPU the device counts.
    pub(crate) steps: u64,
    pub(crate) halt: bool,
    watch: Watch,
    /// Learning rate of the next step.
    rate: f64,
    cuda: Option<CudaState>,
}

impl<const N: usize> State<N> {
    pub(crate) fn new(
        optimizer: &'static str,
        names: [&'static str; N],
        params: &ParamStore,
    ) -> Result<Self> {
        let (layout, weights) = (params.layout().clone(), params.arena());
        let mut arenas = Vec::with_capacity(N);
        for name in names {
            arenas.push(Arena::zeros(name, layout.numel, weights.dtype(), weights.device())?);
        }
        // INVARIANT: the loop pushed one arena a name, and there are N names.
        let arenas = arenas.try_into().unwrap_or_else(|_| unreachable!("one arena a name"));
        let cuda = weights.device().gpu().map(CudaState::new).transpose()?;
        let watch = Watch::new(&layout);
        Ok(State { optimizer, names, layout, arenas, steps: 0, halt: false, watch, rate: 0.0, cuda })
    }

    /// The learning rate of the next step.
    pub(crate) fn set_rate(&mut self, lr: f64) -> Result<()> {
        require(lr.is_finite() && lr >= 0.0, self.optimizer, "lr", lr, "a finite number of at least 0")?;
        self.rate = lr;
        self.cuda.as_mut().map_or(Ok(()), |cuda| cuda.set_rate(lr))
    }

    /// See [`State::set_rate`].
    pub(crate) fn rate(&self) -> f64 {
        self.rate
    }

    /// Everything that may forbid a step, checked before anything changes.
    pub(crate) fn check(&self, params: &ParamStore, grads: &GradStore, grad_scale: f64) -> Result<()> {
        let finite = "a finite number";
        require(grad_scale.is_finite(), self.optimizer, "grad_scale", grad_scale, finite)?;
        if params.layout() != &self.layout {
            return Err(AutogradError::LayoutMismatch { what: "the optimizer state" }.into());
        }
        if params.layout() != grads.layout() {
            return Err(AutogradError::LayoutMismatch { what: "the gradient store" }.into());
        }
        Ok(grads.require_complete()?)
    }

    /// Checks, runs `update` over all ranges, counts the step and marks the gradients stale. Gives the norm of the
    /// gradients before clipping, as a scalar; it is not taken on the host where nothing is clipped.
    pub(crate) fn run(
        &mut self,
        update: &impl Update<N>,
        params: &mut ParamStore,
        grads: &mut GradStore,
        scale: GradScale<'_>,
    ) -> Result<Tensor> {
        let fixed = if let GradScale::Fixed(factor) = scale { factor } else { 1.0 };
        self.check(params, grads, fixed)?;
        if let GradScale::Clip { max_norm, .. } = scale {
            require(max_norm >= 0.0, self.optimizer, "max_norm", max_norm, "a number of at least 0")?;
        }
        if let Some(cuda) = &self.cuda {
            let norm =
                cuda.run(&update.cuda(), &self.layout, params, grads, &mut self.arenas, (scale, self.halt))?;
            grads.mark_stale();
            return Ok(norm);
        }
        let (factor, norm) = match scale {
            GradScale::Fixed(factor) => {
                refuse_non_finite(grads)?;
                (factor, f64::NAN)
            }
            GradScale::Clip { max_norm, loss } => {
                let norm = grads.global_norm()?;
                let finite = norm.is_finite() && loss.item()?.is_finite();
                if !finite && !active(Defect::NonFiniteStepApplied) {
                    return Ok(Tensor::scalar(norm));
                }
                let factor = crate::clip_coefficient(norm, max_norm);
                (factor, if active(Defect::NormAfterClipping) { norm * factor } else { norm })
            }
        };
        self.watch.look(params, grads, self.rate)?;
        match params.arena().dtype() {
            DType::F64 => self.apply_typed::<f64>(update, factor, params, grads)?,
            _ => self.apply_typed::<f32>(update, factor, params, grads)?,
        }
        grads.mark_stale();
        self.steps += 1;
        Ok(Tensor::scalar(norm))
    }

    /// Steps done, whoever counts them.
    pub(crate) fn steps_done(&self) -> Result<u64> {
        match &self.cuda {
            Some(cuda) => cuda.steps_done(),
            None => Ok(self.steps),
        }
    }

    fn apply_typed<T: Float>(
        &mut self,
        update: &impl Update<N>,
        grad_scale: f64,
        params: &mut ParamStore,
        grads: &GradStore,
    ) -> Result<()> {
        let grads = grads.arena().as_slice::<T>()?;
        let mut state = Vec::with_capacity(N);
        for arena in &mut self.arenas {
            state.push(arena.as_mut_slice::<T>()?);
        }
        let mut weights = params.arena_mut().as_mut_slice::<T>()?;
        let mut tasks = Vec::with_capacity(grads.len() / TASK_ELEMENTS + self.layout.entries.len());
        let mut place = 0;
        for (decay, range) in ranges(&self.layout) {
            let mut gap = range.start - place;
            place = range.end;
            for start in range.clone().step_by(TASK_ELEMENTS) {
                let len = TASK_ELEMENTS.min(range.end - start);
                let slices: [&mut [T]; N] = std::array::from_fn(|i| take(&mut state[i], gap, len));
                tasks.push((decay, take(&mut weights, gap, len), &grads[start..start + len], slices));
                gap = 0;
            }
        }
        tasks.into_par_iter().for_each(|(decay, weights, grads, slices)| {
            update.update(decay, grad_scale, weights, grads, slices);
        });
        Ok(())
    }

    /// Views of the state of every trainable part.
    pub(crate) fn named(&self) -> Result<Vec<(String, Tensor)>> {
        let mut tensors = Vec::new();
        for (name, arena) in self.names.iter().zip(&self.arenas) {
            for (entry, part) in self.layout.parts() {
                if entry.trainable {
                    tensors.push((format!("{name}/{}", part.name), arena.view(part.offset, &part.shape)?));
                }
            }
        }
        Ok(tensors)
    }

    pub(crate) fn load(&mut self, tensors: &BTreeMap<String, Tensor>, steps_done: u64) -> Result<()> {
        let expected: BTreeMap<String, Tensor> = self.named()?.into_iter().collect();
        let missing: Vec<String> = expected.keys().filter(|k| !tensors.contains_key(*k)).cloned().collect();
        let unexpected: Vec<String> =
            tensors.keys().filter(|k| !expected.contains_key(*k)).cloned().collect();
        if !missing.is_empty() || !unexpected.is_empty() {
            return Err(OptimError::StateNames { optimizer: self.optimizer, missing, unexpected });
        }
        for (name, want) in &expected {
            let got = tensors[name].shape();
            if got != want.shape() {
                return Err(ShapeError::new("load_state", name.as_str(), got, want.shape()).into());
            }
        }
        // The views must be gone before the arenas change.
        drop(expected);
        for (name, arena) in self.names.iter().zip(&mut self.arenas) {
            for (entry, part) in self.layout.parts().filter(|(entry, _)| entry.trainable) {
                debug_assert!(entry.range().start <= part.offset);
                arena.write(part.offset, &tensors[&format!("{name}/{}", part.name)])?;
            }
        }
        self.steps = steps_done;
        // The weights may be others from here on.
        self.watch = Watch::new(&self.layout);
        match &self.cuda {
            Some(cuda) => cuda.set_steps(steps_done),
            None => Ok(()),
        }
    }
}

/// One gradient that is not finite would stay in its weight and moments for ever.
fn refuse_non_finite(grads: &GradStore) -> Result<()> {
    if grads.global_norm()?.is_finite() {
        return Ok(());
    }
    for (_, part) in grads.layout().parts().filter(|(entry, _)| entry.trainable) {
        if let Some(grad) = grads.part(&part.name)?
            && grad.first_non_finite()?.is_some()
        {
            return Err(OptimError::NonFiniteGradient { name: part.name.clone() });
        }
    }
    // Every element is finite: the sum of their squares is too large for its type.
    Ok(())
}

/// Skips `gap` elements of `rest` and cuts off the `len` after them.
fn take<'a, T>(rest: &mut &'a mut [T], gap: usize, len: usize) -> &'a mut [T] {
    let (cut, tail) = std::mem::take(rest)[gap..].split_at_mut(len);
    *rest = tail;
    cut
}

/// Trainable elements in order, as `(decay, range)`; neighbours of one kind are joined.
fn ranges(layout: &Layout) -> Vec<(bool, Range<usize>)> {
    let all = active(Defect::FrozenParameterMoves);
    let trainable = layout.parts().filter(|(entry, _)| entry.trainable || all);
    let decays = |e: &ParamEntry| e.decay || active(Defect::DecayOnNorms);
    let mut parts: Vec<(bool, Range<usize>)> =
        trainable.map(|(e, p)| (decays(e), p.offset..p.offset + p.shape.numel())).collect();
    if active(Defect::OptimizerSkipsParameter) {
        parts.pop();
    }
    parts.sort_by_key(|(_, range)| range.start);
    let mut joined: Vec<(bool, Range<usize>)> = Vec::new();
    for (decay, range) in parts {
        match joined.last_mut() {
            Some((kind, last)) if *kind == decay && last.end == range.start => last.end = range.end,
            _ => joined.push((decay, range)),
        }
    }
    joined
}

#[cfg(test)]
mod tests {
    use super::*;
    use rb_autograd::{Init, ParamBuilder};
    use rb_tensor::{Device, Rng};

    #[test]
    fn ranges_join_neighbours_and_leave_padding_and_frozen_out() {
        let mut b = ParamBuilder::default();
        b.param("norm", [64], Init::Ones).unwrap();
        b.packed([("q".into(), 2), ("k".into(), 2)], &[4, 32].into(), Init::Zeros).unwrap();
        b.packed([("embed".into(), 3)], &[4, 64].into(), Init::Zeros).unwrap();
        b.param("frozen", [2, 64], Init::Zeros).unwrap();
        let mut store = b.build(&Rng::new(0), Device::Cpu).unwrap();
        store.set_trainable("frozen", false).unwrap();
        assert_eq!(ranges(store.layout()), [(true, 0..128 + 192), (false, 512..576)]);
    }
}
