//! How many neighbouring elements a thread of a GPU reads or writes at once.

use rb_tensor::Tensor;

use crate::Result;

/// Bytes of the widest access.
const BYTES: usize = 16;

/// Elements of one access to any of `tensors`: what 16 bytes hold of the widest element type, where every
/// tensor begins at a multiple of that and it divides all of `lengths` (rows, distances); else 1.
pub fn width(tensors: &[&Tensor], lengths: &[usize]) -> Result<usize> {
    let largest = tensors.iter().map(|t| t.dtype().size_bytes()).max().unwrap_or(BYTES);
    let width = BYTES / largest;
    let mut fits = lengths.iter().all(|n| n.is_multiple_of(width));
    for tensor in tensors {
        fits &= tensor.place()?.offset_bytes.is_multiple_of(width * tensor.dtype().size_bytes());
    }
    Ok(if fits { width } else { 1 })
}

#[cfg(test)]
mod tests {
    use rb_cuda::{Gpu, GpuOptions};
    use rb_tensor::{DType, Device};

    use super::*;

    #[test]
    fn the_widest_type_and_every_place_count() {
        let device = Device::Cuda(Gpu::dry((9, 0), &GpuOptions::default()));
        let small = Tensor::uninit([4, 8], DType::BF16, device).unwrap();
        let large = Tensor::uninit([4, 2], DType::F32, device).unwrap();
        assert_eq!(width(&[&small], &[8, 32]).unwrap(), 8);
        assert_eq!(width(&[&small], &[12]).unwrap(), 1);
        assert_eq!(width(&[&small, &large], &[12]).unwrap(), 4);
        assert_eq!(width(&[&large.narrow(1, 2).unwrap()], &[]).unwrap(), 1);
        assert_eq!(width(&[&small, &large.narrow(2, 2).unwrap()], &[]).unwrap(), 4);
    }
}
