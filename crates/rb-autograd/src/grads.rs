//! [`GradStore`]: gradients of parameters, in the layout of the weights.
//!
//! Gradients are not zeroed. An entry is *stale* until its first writer of a step, which overwrites;
//! later writers (a tied head, another micro-batch) accumulate.

use std::sync::Arc;

use rb_cuda::{Arg, Kernel, Launch, kernel};
use rb_planted::{Defect, active};
use rb_tensor::{Arena, DType, Device, Tensor};

use crate::cuda;
use crate::host;
use crate::params::Layout;
use crate::{AutogradError, Float, ParamId, ParamStore, Precision, Result};

/// Whether a writer replaces what a buffer holds or adds to it: the beta of a matrix product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Beta {
    /// beta = 0: the old content is not read.
    Overwrite,
    /// beta = 1: the result is added.
    Accumulate,
}

const SUM_OF_SQUARES: Kernel = kernel!("sum_of_squares");

/// Gradients of all parameters of one model.
#[derive(Debug)]
pub struct GradStore {
    layout: Arc<Layout>,
    arena: Arena,
    fresh: Vec<bool>,
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
        Ok(GradStore { fresh: vec![false; layout.entries.len()], layout, arena })
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
    /// frozen entries hold zeros.
    pub fn sum_of_squares_parts(&self) -> Result<Tensor> {
        /// Blocks: several for each multiprocessor of the largest cards, and few enough to add in one block.
        const PARTS: usize = 1024;
        let all = self.arena.view(0, [self.layout.numel])?;
        let Some(gpu) = self.device().gpu() else {
            return Err(rb_tensor::TensorError::NotOnGpu { op: "sum_of_squares" }.into());
        };
        let parts = self.layout.numel.div_ceil(1024).clamp(1, PARTS);
        let out = cuda::output(gpu, &[parts].into(), DType::F32)?;
        let launch = Launch::new(&SUM_OF_SQUARES, [parts as u32, 1, 1], [256, 1, 1])
            .define("T", all.dtype().cuda_name())
            .moves(all.size_bytes())
            .arg(all.arg()?)
            .arg(out.arg()?)
            .arg(Arg::I64(self.layout.numel as i64));
        cuda::launch_on(gpu, launch)?;
        Ok(out)
    }

    /// As [`GradStore::slot`] on a GPU: a view that kernels write through.
    pub(crate) fn device_slot(&mut self, id: ParamId) -> Result<(Tensor, Beta)> {
        let index = id.0 as usize;
        let entry = &self.layout.entries[index];
        let beta = self.beta(index);
        if let (Beta::Accumulate, Device::Cuda(gpu)) = (beta, self.device()) {
            // What was written beside is added to.
            gpu.join()?;
        }
        let view = self.arena.view(entry.offset, &entry.shape)?;
        self.fresh[index] = true;
        Ok((view, beta))
    }

    pub(crate) fn device(&self) -> Device {
        self.arena.device()
    }
}
