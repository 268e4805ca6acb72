//! The update on a GPU: nothing is waited for, and what a step does is decided on the device.

use std::ops::Range;

use rb_autograd::{GradStore, Layout, ParamStore, cuda};
use rb_cuda::{Arg, Gpu, Kernel, Launch, kernel};
use rb_tensor::{Arena, DType, Device, Shape, Tensor, TensorError};

use crate::Result;
use crate::update::GradScale;

const CONTROL: Kernel = kernel!("optimizer_control");

/// What the device needs to know of an optimizer's formula.
pub(crate) struct CudaUpdate {
    /// Called with gradients, weights, state, working copy, control, `constants` and the number of groups of four.
    pub(crate) kernel: &'static Kernel,
    /// For the bias corrections; 0 turns one off.
    pub(crate) beta1: f64,
    pub(crate) beta2: f64,
    pub(crate) weight_decay: f64,
    pub(crate) constants: Vec<f32>,
}

/// Counters and decisions that live on the device.
#[derive(Debug)]
pub(crate) struct CudaState {
    gpu: Gpu,
    /// Of `optimizer_control`: ok, scale, keep, step size, correction, norm, learning rate.
    control: Tensor,
    /// Steps done, halted, steps left out, as three 64-bit integers.
    counters: Arena,
    /// The learning rate of the next step, f64: it changes while the work that reads it may be captured.
    rate: Arena,
}

impl CudaState {
    pub(crate) fn new(gpu: Gpu) -> Result<CudaState> {
        let _holder = gpu.holding("optimizer");
        let device = Device::Cuda(gpu);
        Ok(CudaState {
            gpu,
            control: Tensor::zeros([8], DType::F32, device)?,
            counters: Arena::zeros("optimizer counters", 6, DType::I32, device)?,
            rate: Arena::zeros("learning rate", 1, DType::F64, device)?,
        })
    }

    pub(crate) fn set_rate(&mut self, lr: f64) -> Result<()> {
        Ok(self.rate.write(0, &Tensor::from_vec(vec![lr], [1])?)?)
    }

    /// Enqueues one step at the rate that was set; gives the norm.
    pub(crate) fn run<const N: usize>(
        &self,
        update: &CudaUpdate,
        layout: &Layout,
        params: &mut ParamStore,
        grads: &GradStore,
        state: &mut [Arena; N],
        (scale, halt): (GradScale<'_>, bool),
    ) -> Result<Tensor> {
        let parts = grads.sum_of_squares_parts()?;
        let (factor, max_norm, loss) = match scale {
            GradScale::Fixed(factor) => (factor, 0.0, None),
            GradScale::Clip { max_norm, loss } => (1.0, max_norm, Some(loss)),
        };
        let (counters, rate) = (self.counters.view(0, [6])?, self.rate.view(0, [1])?);
        let norm = cuda::output(self.gpu, &Shape::default(), DType::F32)?;
        let mut launch = Launch::new(&CONTROL, [1, 1, 1], [256, 1, 1])
            .arg(parts.arg()?)
            .arg(Arg::I32(parts.numel() as i32))
            .arg(loss.map_or(Ok(Arg::Null), Tensor::arg)?)
            .arg(self.control.arg()?)
            .arg(counters.arg()?)
            .arg(norm.arg()?)
            .arg(rate.arg()?);
        for number in [factor, max_norm, update.weight_decay, update.beta1, update.beta2] {
            launch = launch.arg(Arg::U64(number.to_bits()));
        }
        cuda::launch_on(self.gpu, launch.arg(Arg::I32(i32::from(halt))))?;
        let masters = params.masters()?;
        let (low, start) = masters.low.as_ref().map_or((None, 0), |(low, len)| (Some(low), *len));
        let state: Vec<Tensor> = state.iter_mut().map(Arena::device_mut).collect::<rb_tensor::Result<_>>()?;
        let gradients = grads.arena().view(0, [layout.numel])?;
        for (decay, range) in ranges(layout) {
            let at = |tensor: &Tensor| tensor.narrow(range.start, range.len());
            // No range is half split: what decays is, and comes first.
            let split = low.filter(|_| range.start < start);
            let p = match split {
                Some(low) => at(low)?,
                None => masters.weights.narrow(range.start - start, range.len())?,
            };
            let (g, w) = (at(&gradients)?, masters.working.as_ref().map(at).transpose()?);
            let s: Vec<Tensor> = state.iter().map(at).collect::<rb_tensor::Result<_>>()?;
            let groups = range.len() / 4;
            let mut launch = Launch::for_items(update.kernel, groups, 256)
                .define("TG", g.dtype().cuda_name())
                .define("DECAY", u8::from(decay))
                .define("WORKING", u8::from(w.is_some()))
                .define("SPLIT", u8::from(split.is_some()))
                .define("TP", if split.is_some() { "u16" } else { "float" })
                .arg(g.arg()?)
                .arg(p.arg()?);
            for state in &s {
                launch = launch.arg(state.arg()?);
            }
            launch = launch.arg(w.as_ref().map_or(Ok(Arg::Null), Tensor::arg)?).arg(self.control.arg()?);
            for &constant in &update.constants {
                launch = launch.arg(Arg::F32(constant));
            }
            let read_and_written = 2 * (p.size_bytes() + s.iter().map(Tensor::size_bytes).sum::<usize>());
            let written = w.as_ref().map_or(0, Tensor::size_bytes) * if split.is_some() { 2 } else { 1 };
            let moved = g.size_bytes() + read_and_written + written;
            cuda::launch_on(self.gpu, launch.arg(Arg::I64(groups as i64)).moves(moved))?;
        }
        Ok(norm)
    }

    pub(crate) fn steps_done(&self) -> Result<u64> {
        let halves = self.counters.view(0, [2])?.to_vec::<i32>()?;
        Ok(u64::from(halves[0].cast_unsigned()) | u64::from(halves[1].cast_unsigned()) << 32)
    }

    /// Puts the count in place and lets steps run again.
    pub(crate) fn set_steps(&self, steps: u64) -> Result<()> {
        let halves = [steps as u32 as i32, (steps >> 32) as u32 as i32, 0, 0, 0, 0];
        let place = self.counters.view(0, [6])?;
        let bytes: Vec<u8> = halves.iter().flat_map(|h| h.to_le_bytes()).collect();
        let place = place.place()?;
        Ok(self.gpu.upload(place.buffer, place.offset_bytes, &bytes).map_err(TensorError::from)?)
    }
}

/// Trainable entries in order, padding and gaps included, as `(decay, range)`; neighbours of one kind are joined.
/// What is padding has zero gradients and zero state, and stays zero.
fn ranges(layout: &Layout) -> Vec<(bool, Range<usize>)> {
    let mut entries: Vec<_> = layout.entries.iter().collect();
    entries.sort_by_key(|e| e.offset);
    let ends = entries.iter().skip(1).map(|e| e.offset).chain([layout.numel]);
    let mut joined: Vec<(bool, Range<usize>)> = Vec::new();
    for (entry, end) in entries.iter().zip(ends).filter(|(e, _)| e.trainable) {
        match joined.last_mut() {
            Some((decay, last)) if *decay == entry.decay && last.end == entry.offset => last.end = end,
            _ => joined.push((entry.decay, entry.offset..end)),
        }
    }
    joined
}
