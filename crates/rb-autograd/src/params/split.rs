//! fp32 weights in halves: the bf16 working copy, and the 16 bits that complete each of its elements.

use half::bf16;
use rb_cuda::{Arg, Kernel, Launch, kernel};
use rb_tensor::{Arena, DType, Device, Shape, Tensor};

use super::{ParamId, ParamStore};
use crate::{AutogradError, Result, cuda};

const SPLIT_WEIGHTS: Kernel = kernel!("split_weights", "split");
const JOIN_WEIGHTS: Kernel = kernel!("join_weights", "split");

/// The two halves of a weight: its value rounded to bf16, half away from zero, and its low 16 bits.
///
/// Rounding to nearest even, as elsewhere, could not be undone: of a value half way between two others the halves would
/// not say which way it went. A NaN stays a NaN, with other bits.
pub fn split_weight(x: f32) -> (bf16, u16) {
    if x.is_nan() {
        return (bf16::from_bits(0x7fff), 0);
    }
    let bits = x.to_bits();
    (bf16::from_bits((bits.wrapping_add(0x8000) >> 16) as u16), bits as u16)
}

/// The weight of these halves.
pub fn join_weight(high: bf16, low: u16) -> f32 {
    let high = u32::from(high.to_bits()) << 16;
    f32::from_bits(high.wrapping_sub(u32::from(low & 0x8000) << 1) | u32::from(low))
}

/// Weights on a GPU as an optimizer changes them.
pub struct Masters {
    /// In fp32, those that are split left out.
    pub weights: Tensor,
    /// The bf16 working copy of all.
    pub working: Option<Tensor>,
    /// The low halves of the first elements of the layout, as many as the number says, whose high halves are the
    /// working copy: 16 bits that are no floating point numbers.
    pub low: Option<(Tensor, usize)>,
}

/// The low halves of the first `len` elements of a layout.
#[derive(Debug)]
pub(super) struct Split {
    /// Sixteen bits each; the element type says only their size.
    pub(super) low: Arena,
    pub(super) len: usize,
}

impl Split {
    /// Splits `value` into its place.
    pub(super) fn write(&mut self, working: &mut Arena, offset: usize, value: &Tensor) -> Result<()> {
        let gpu = self.low.device().gpu().ok_or_else(only_on_a_gpu)?;
        let value = value.to_dtype(DType::F32)?.to_device(Device::Cuda(gpu))?;
        if value.numel() == 0 {
            return Ok(());
        }
        let high = working.device_mut()?.narrow(offset, value.numel())?;
        let low = self.low.device_mut()?.narrow(offset, value.numel())?;
        let launch = Launch::for_items(&SPLIT_WEIGHTS, value.numel(), 256)
            .arg(value.arg()?)
            .arg(high.arg()?)
            .arg(low.arg()?)
            .arg(Arg::I64(value.numel() as i64));
        cuda::launch_on(gpu, launch)
    }

    /// The weights at a place.
    fn join(&self, working: &Arena, offset: usize, shape: &Shape) -> Result<Tensor> {
        let gpu = self.low.device().gpu().ok_or_else(only_on_a_gpu)?;
        let (high, low) = (working.view(offset, shape)?, self.low.view(offset, shape)?);
        let whole = cuda::output(gpu, shape, DType::F32)?;
        if whole.numel() > 0 {
            let launch = Launch::for_items(&JOIN_WEIGHTS, whole.numel(), 256)
                .arg(high.arg()?)
                .arg(low.arg()?)
                .arg(whole.arg()?)
                .arg(Arg::I64(whole.numel() as i64));
            cuda::launch_on(gpu, launch)?;
        }
        Ok(whole)
    }
}

fn only_on_a_gpu() -> AutogradError {
    AutogradError::Unsupported { op: "split weights", dtype: DType::F32, device: Device::Cpu }
}

impl ParamStore {
    /// Splits matrices and tables, which come first in the layout; vectors stay as they are.
    pub(super) fn make_split(&mut self) -> Result<()> {
        let device = self.weights.device();
        let vectors = self.layout.entries.iter().filter(|entry| !entry.decay);
        let len = vectors.map(|entry| entry.offset).min().unwrap_or(self.layout.numel);
        let mut split = Split { low: Arena::zeros("low halves of weights", len, DType::BF16, device)?, len };
        if let Some(working) = &mut self.working {
            split.write(working, 0, &self.weights.view(0, [len])?)?;
        }
        let left = self.layout.numel - len;
        let mut vectors = Arena::zeros("weights", left, DType::F32, device)?;
        vectors.write(0, &self.weights.view(len, [left])?)?;
        (self.weights, self.split) = (vectors, Some(split));
        Ok(())
    }

    /// Joins what is split.
    pub(super) fn make_whole(&mut self) -> Result<()> {
        if let Some(start) = self.split.as_ref().map(|split| split.len) {
            let mut whole = Arena::zeros("weights", self.layout.numel, DType::F32, self.weights.device())?;
            whole.write(0, &self.whole(0, &Shape::from([start]))?)?;
            whole.write(start, &self.weights.view(0, [self.weights.numel()])?)?;
            (self.weights, self.split) = (whole, None);
        }
        Ok(())
    }

    /// A table to look up: in full precision, or as working copy and low halves where it is split.
    pub(crate) fn table(&self, id: ParamId) -> Result<(Tensor, Option<Tensor>)> {
        let entry = self.entry(id);
        match &self.split {
            Some(split) if entry.offset < split.len => {
                Ok((self.tensor(id)?, Some(split.low.view(entry.offset, &entry.shape)?)))
            }
            _ => Ok((self.full_tensor(id)?, None)),
        }
    }

    /// What lies at a place of the layout, in full precision.
    pub(super) fn whole(&self, offset: usize, shape: &Shape) -> Result<Tensor> {
        match (&self.split, &self.working) {
            (Some(split), Some(working)) if offset < split.len => split.join(working, offset, shape),
            (Some(split), _) => Ok(self.weights.view(offset - split.len, shape)?),
            (None, _) => Ok(self.weights.view(offset, shape)?),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Init, MasterWeights, ParamBuilder, Precision};
    use proptest::prelude::*;
    use rb_cuda::{Gpu, GpuOptions};

    proptest! {
        #[test]
        fn halves_give_the_weight_back(bits: u32) {
            let x = f32::from_bits(bits);
            let (high, low) = split_weight(x);
            if x.is_nan() {
                prop_assert!(join_weight(high, low).is_nan());
            } else {
                prop_assert_eq!(join_weight(high, low).to_bits(), bits);
                let tie = bits & 0xffff == 0x8000;
                let nearest = bf16::from_f32(x);
                prop_assert!(high.to_bits() == nearest.to_bits() || tie, "{} {} {}", x, high, nearest);
            }
        }
    }

    #[test]
    fn ties_go_away_from_zero() {
        // Half way between two bf16 numbers: to the even one below, and away from zero.
        let tie = f32::from_bits(0x3f80_8000);
        assert_eq!((bf16::from_f32(tie).to_bits(), split_weight(tie).0.to_bits()), (0x3f80, 0x3f81));
        assert_eq!(split_weight(-tie).0.to_bits(), 0xbf81);
        let edges =
            [0.0, -0.0, f32::MIN_POSITIVE / 3.0, f32::MAX, f32::MIN, f32::INFINITY, f32::NEG_INFINITY, tie];
        for x in edges {
            let (high, low) = split_weight(x);
            assert_eq!(join_weight(high, low).to_bits(), x.to_bits(), "{x}");
        }
    }

    /// Memory and launches on a card that computes nothing.
    #[test]
    fn matrices_are_split_and_vectors_are_not() {
        let gpu = Gpu::dry((9, 0), &GpuOptions::default());
        let mut builder = ParamBuilder::default();
        let norm = builder.param("norm", [96], Init::Ones).unwrap();
        let table = builder.param("table", [10, 64], Init::Normal(1.0)).unwrap();
        let mut store = builder.build_zeros(DType::F32, Device::Cuda(gpu)).unwrap();
        store.set_precision(Precision::MIXED.with_master(MasterWeights::Split)).unwrap();
        assert_eq!(store.arena().numel(), 128);
        let (high, low) = store.table(table).unwrap();
        assert_eq!((high.dtype(), low.unwrap().shape().dims()), (DType::BF16, &[10, 64][..]));
        drop(high);
        assert_eq!(store.table(norm).unwrap().0.dtype(), DType::F32);
        assert_eq!(store.part("table").unwrap().dtype(), DType::F32);
        let masters = store.masters().unwrap();
        assert_eq!(masters.low.as_ref().map(|(low, len)| (low.numel(), *len)), Some((640, 640)));
        drop(masters);
        store.set_part("norm", &Tensor::zeros([96], DType::F32, Device::Cuda(gpu)).unwrap()).unwrap();
        store.set_part("table", &Tensor::zeros([10, 64], DType::F32, Device::Cuda(gpu)).unwrap()).unwrap();
        store.set_precision(Precision::MIXED).unwrap();
        assert_eq!(store.arena().numel(), 640 + 128);
        let launches = gpu.launches();
        assert_eq!((launches["split_weights"], launches["join_weights"]), (2, 2), "{launches:?}");
    }
}
