//! [`GradStore`]: gradients of parameters, in the layout of the weights.
//!
//! Gradients are not zeroed. An entry is *stale* until its first writer of a step, which overwrites;
//! later writers (a tied head, another micro-batch) accumulate.

mod later;
mod norm;

use std::sync::Arc;

use rb_cuda::Gpu;
use rb_planted::{Defect, active};
use rb_tensor::{Arena, DType, Device, Tensor};

use crate::host;
use crate::params::Layout;
use crate::{AutogradError, Float, ParamId, ParamStore, Precision, Result};
use later::Later;
use norm::Norm;

/// Whether a writer replaces what a buffer holds or adds to it: the beta of a matrix product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Beta {
    /// beta = 0: the old content is not read.
    Overwrite,
    /// beta = 1: the result is added.
    Accumulate,
}

/// Gradients of all parameters of one model.
#[derive(Debug)]
pub struct GradStore {
    layout: Arc<Layout>,
    arena: Arena,
    fresh: Vec<bool>,
    /// Whether nothing is added after the backward pass that comes next.
    last_pass: bool,
    /// Backward passes under way, one within the other.
    passes: usize,
    /// Gradients whose partial sums wait; on a GPU.
    later: Option<Later>,
    /// On a GPU.
    norm: Option<Norm>,
}

impl GradStore {
    /// Gradients for `params`, all stale, in the element type that their [`Precision`] says.
    pub fn new(params: &ParamStore) -> Result<GradStore> {
        let layout = params.layout().clone();
        let weights = params.arena();
        let dtype = match params.precision() {
            Precision::Full => weights.dtype(),
            Precision::Bf16 { gradients, .. } => gradients,
        };
        let arena = Arena::zeros("gradients", layout.numel, dtype, weights.device())?;
        let norm = weights.device().gpu().map(|gpu| Norm::new(gpu, &layout)).transpose()?;
        let fresh = vec![false; layout.entries.len()];
        Ok(GradStore { layout, arena, fresh, last_pass: true, passes: 0, later: None, norm })
    }

    /// The layout.
    pub fn layout(&self) -> &Arc<Layout> {
        &self.layout
    }

    /// The flat gradients.
    pub fn arena(&self) -> &Arena {
        &self.arena
    }

    /// The flat gradients, to change (clipping, all-reduce).
    pub fn arena_mut(&mut self) -> &mut Arena {
        if let Some(norm) = &mut self.norm {
            norm.reset();
        }
        &mut self.arena
    }

    /// The gradient of a named part, or `None` while it is stale.
    pub fn part(&self, name: &str) -> Result<Option<Tensor>> {
        for (entry, fresh) in self.layout.entries.iter().zip(&self.fresh) {
            if let Some(part) = entry.parts.iter().find(|p| p.name == name) {
                return if *fresh { Ok(Some(self.arena.view(part.offset, &part.shape)?)) } else { Ok(None) };
            }
        }
        Err(AutogradError::UnknownParameter { name: name.into() })
    }

    /// Declares every gradient stale: the next writer overwrites. Optimizers call it after a step.
    pub fn mark_stale(&mut self) {
        if let Some(norm) = &mut self.norm {
            norm.reset();
        }
        if !active(Defect::GradientsStayFresh) {
            self.fresh.fill(false);
        }
    }

    /// How the next writer of an entry writes.
    fn beta(&self, index: usize) -> Beta {
        if active(Defect::FirstWriteAccumulates) {
            return Beta::Accumulate;
        }
        let fresh = self.fresh[index] && !active(Defect::TiedHeadCountedOnce);
        if fresh { Beta::Accumulate } else { Beta::Overwrite }
    }

    /// Checks that every trainable parameter has a gradient from this step.
    ///
    /// # Errors
    /// [`AutogradError::MissingGradients`] with all names.
    pub fn require_complete(&self) -> Result<()> {
        let missing =
            self.layout.entries.iter().zip(&self.fresh).filter(|(e, fresh)| e.trainable && !**fresh);
        let names: Vec<String> = missing.flat_map(|(e, _)| e.parts.iter().map(|p| p.name.clone())).collect();
        if names.is_empty() { Ok(()) } else { Err(AutogradError::MissingGradients { names }) }
    }

    /// Euclidean norm over all trainable gradients, accumulated in f64. On a GPU it waits for all work before;
    /// optimizers take it there without waiting.
    pub fn global_norm(&self) -> Result<f64> {
        let mut total = 0.0;
        if self.device() != Device::Cpu {
            let parts = self.sum_of_squares_parts()?.to_vec::<f32>()?;
            return Ok(parts.iter().map(|&x| f64::from(x)).sum::<f64>().sqrt());
        }
        for entry in self.layout.entries.iter().filter(|e| e.trainable) {
            total += match self.arena.dtype() {
                DType::F64 => host::sum_of_squares(&self.arena.as_slice::<f64>()?[entry.range()]),
                _ => host::sum_of_squares(&self.arena.as_slice::<f32>()?[entry.range()]),
            };
        }
        Ok(total.sqrt())
    }

    /// The buffer of an entry and how to write it; marks it fresh.
    pub(crate) fn slot<T: Float>(&mut self, id: ParamId) -> Result<(&mut [T], Beta)> {
        let index = id.0 as usize;
        let range = self.layout.entries[index].range();
        let beta = self.beta(index);
        let values = &mut self.arena.as_mut_slice::<T>()?[range];
        self.fresh[index] = true;
        Ok((values, beta))
    }

    /// On a GPU: partial sums of squares over the whole arena, `[parts]` f32, in a fixed order. Padding, gaps and
    /// frozen entries hold zeros. Those that the backward pass has not taken are enqueued.
    pub fn sum_of_squares_parts(&self) -> Result<Tensor> {
        let norm = self.norm.as_ref().ok_or(rb_tensor::TensorError::NotOnGpu { op: "sum_of_squares" })?;
        norm.parts(&self.arena)
    }

    /// Says whether gradients are complete after the backward pass that comes next, so that it may sum their squares as
    /// it goes. They are unless this says otherwise; sums are right in any case.
    pub fn set_last_pass(&mut self, last: bool) {
        self.last_pass = last;
    }

    /// Begins a backward pass, maybe within another.
    pub(crate) fn begin_pass(&mut self) {
        self.passes += 1;
    }

    /// Ends it; after the outermost one every gradient is enqueued. One that failed leaves nothing that waits.
    pub(crate) fn end_pass(&mut self, done: bool) -> Result<()> {
        self.passes -= 1;
        if !done {
            self.later = None;
        }
        if self.passes == 0 { self.sum_waiting() } else { Ok(()) }
    }

    /// Says that a parameter gets nothing more in this pass.
    pub(crate) fn finish(&mut self, id: ParamId) -> Result<()> {
        if let Some(norm) = self.norm.as_mut().filter(|_| self.last_pass) {
            norm.finish(id.0 as usize);
        }
        self.sum_if_complete(id.0 as usize)
    }

    fn sum_if_complete(&mut self, entry: usize) -> Result<()> {
        let Some(norm) = &mut self.norm else { return Ok(()) };
        let later = &self.later;
        let waits = |e| later.as_ref().is_some_and(|later| later.holds(e));
        norm.sum_if_complete(entry, waits, &self.arena)
    }

    /// A place for `[rows, columns]` partial sums, flat, over whose rows the gradient of a parameter of `columns`
    /// elements is summed beside the pass, in time. What writes them is enqueued before the operation ends.
    pub(crate) fn partial_sums(
        &mut self,
        gpu: Gpu,
        id: ParamId,
        rows: usize,
        columns: usize,
    ) -> Result<Tensor> {
        let (_, beta) = self.place(id)?;
        if self.later.as_ref().is_some_and(|later| !later.takes(rows, columns)) {
            self.sum_waiting()?;
        }
        let (index, layout) = (id.0 as usize, &self.layout);
        let later = match &mut self.later {
            Some(later) => later,
            none => {
                let alike =
                    layout.entries.iter().filter(|e| e.trainable && e.shape.dims() == [columns]).count();
                none.insert(Later::new(gpu, rows, columns, alike)?)
            }
        };
        later.add(index, layout.entries[index].offset, beta)
    }

    /// Enqueues the sums that wait if no more fit. Operations have ended that make what they sum.
    pub(crate) fn sum_if_full(&mut self) -> Result<()> {
        if self.later.as_ref().is_some_and(Later::is_full) { self.sum_waiting() } else { Ok(()) }
    }

    /// Enqueues the sums that wait.
    pub(crate) fn sum_waiting(&mut self) -> Result<()> {
        let Some(later) = self.later.take() else { return Ok(()) };
        let arena = self.arena.view(0, [self.layout.numel])?;
        later.sum(&arena, |entry| self.sum_if_complete(entry))
    }

    /// As [`GradStore::slot`] on a GPU: a view that kernels write through.
    pub(crate) fn device_slot(&mut self, id: ParamId) -> Result<(Tensor, Beta)> {
        let (view, beta) = self.place(id)?;
        if let (Beta::Accumulate, Device::Cuda(gpu)) = (beta, self.device()) {
            // What was written beside is added to.
            gpu.join()?;
        }
        Ok((view, beta))
    }

    /// The same for work beside, which comes after all that was enqueued there.
    fn place(&mut self, id: ParamId) -> Result<(Tensor, Beta)> {
        let index = id.0 as usize;
        if self.later.as_ref().is_some_and(|later| later.holds(index)) {
            self.sum_waiting()?;
        }
        if let Some(norm) = &mut self.norm {
            norm.changes(index);
        }
        let entry = &self.layout.entries[index];
        let beta = self.beta(index);
        let view = self.arena.view(entry.offset, &entry.shape)?;
        self.fresh[index] = true;
        Ok((view, beta))
    }

    pub(crate) fn device(&self) -> Device {
        self.arena.device()
    }
}
