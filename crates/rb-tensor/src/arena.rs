//! [`Arena`]: one flat buffer that many tensors look into.

use std::sync::Arc;

use crate::storage::{Storage, convert_cuda};
use crate::{DType, Device, Elem, Result, Shape, ShapeError, Tensor, TensorError};

/// A flat, named buffer. Tensors are views into it; it changes only when no view is alive, so a tensor
/// never changes under its holder.
#[derive(Debug)]
pub struct Arena {
    name: &'static str,
    storage: Arc<Storage>,
    numel: usize,
}

impl Arena {
    /// A zeroed arena of `numel` elements.
    pub fn zeros(name: &'static str, numel: usize, dtype: DType, device: Device) -> Result<Arena> {
        Shape::from([numel]).checked_numel(name)?;
        let _holder = device.gpu().map(|gpu| gpu.holding(name));
        let storage = Storage::zeros(numel, dtype, device)?;
        Ok(Arena { name, storage: Arc::new(storage), numel })
    }

    /// Number of elements.
    pub fn numel(&self) -> usize {
        self.numel
    }

    /// The element type.
    pub fn dtype(&self) -> DType {
        self.storage.dtype()
    }

    /// The device.
    pub fn device(&self) -> Device {
        self.storage.device()
    }

    /// A tensor that looks at elements `offset..offset + shape.numel()`.
    ///
    /// # Errors
    /// [`ShapeError`] if the range leaves the arena.
    pub fn view(&self, offset: usize, shape: impl Into<Shape>) -> Result<Tensor> {
        let shape = shape.into();
        if offset.checked_add(shape.checked_numel(self.name)?).is_none_or(|end| end > self.numel) {
            let expected = format!("at most {} elements from {offset}", self.numel.saturating_sub(offset));
            return Err(ShapeError::new("arena view", self.name, &shape, expected).into());
        }
        Ok(Tensor { storage: self.storage.clone(), offset, shape })
    }

    /// Overwrites the elements from `offset` with the values of `source`, in the arena's element type and
    /// from whichever device they are on.
    ///
    /// # Errors
    /// [`ShapeError`] if the values leave the arena; [`TensorError::Shared`] while a tensor still looks into it.
    pub fn write(&mut self, offset: usize, source: &Tensor) -> Result<()> {
        // The view checks the range and is gone before the buffer is borrowed.
        let len = self.view(offset, source.shape())?.numel();
        let values = source.to_dtype(self.dtype())?;
        self.unshared()?.copy_from(offset, &values.storage, values.offset, len)?;
        Ok(())
    }

    /// The whole buffer as a host slice.
    pub fn as_slice<T: Elem>(&self) -> Result<&[T]> {
        self.storage.host_slice(self.name)
    }

    /// The whole buffer as a mutable host slice.
    ///
    /// # Errors
    /// [`TensorError::Shared`] while a tensor still looks into the arena.
    pub fn as_mut_slice<T: Elem>(&mut self) -> Result<&mut [T]> {
        let name = self.name;
        self.unshared()?.host_slice_mut(name)
    }

    /// Overwrites the whole arena with the values of another one of the same length, converted on the device
    /// that holds both.
    ///
    /// # Errors
    /// [`TensorError::Shared`]; another length or device.
    pub fn convert_from(&mut self, source: &Arena) -> Result<()> {
        if self.numel != source.numel {
            return Err(ShapeError::new("convert_from", source.name, source.numel, self.numel).into());
        }
        if let (Device::Cuda(gpu), Ok(from)) = (self.device(), source.storage.cuda("convert_from"))
            && source.dtype() != self.dtype()
        {
            let numel = self.numel;
            return convert_cuda(gpu, from, 0, self.unshared()?.cuda("convert_from")?, 0, numel);
        }
        let all = source.view(0, [source.numel])?;
        self.write(0, &all)
    }

    /// The arena as a device tensor for kernels that change it in place.
    ///
    /// # Errors
    /// [`TensorError::Shared`] while a tensor still looks into the arena; host memory.
    pub fn device_mut(&mut self) -> Result<Tensor> {
        let name = self.name;
        self.unshared()?.cuda(name)?;
        self.view(0, [self.numel])
    }

    fn unshared(&mut self) -> Result<&mut Storage> {
        let holders = Arc::strong_count(&self.storage) - 1;
        let shared = TensorError::Shared { arena: self.name.into(), holders };
        Arc::get_mut(&mut self.storage).ok_or(shared)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_view_blocks_mutation() {
        let mut arena = Arena::zeros("weights", 6, DType::F32, Device::Cpu).unwrap();
        let view = arena.view(2, [2, 2]).unwrap();
        let error = arena.as_mut_slice::<f32>().unwrap_err().to_string();
        assert!(error.starts_with("weights: 1 tensor(s) still look"), "{error}");
        drop(view);
        arena.as_mut_slice::<f32>().unwrap()[2] = 5.0;
        assert_eq!(arena.view(2, [1]).unwrap().item().unwrap(), 5.0);
        assert!(arena.view(5, [2]).is_err());
    }

    #[test]
    fn write_converts_checks_the_range_and_needs_sole_ownership() {
        let mut arena = Arena::zeros("weights", 4, DType::F32, Device::Cpu).unwrap();
        let pair = Tensor::from_vec(vec![1.5f64, -2.0], [2]).unwrap();
        arena.write(1, &pair).unwrap();
        assert_eq!(arena.as_slice::<f32>().unwrap(), [0.0, 1.5, -2.0, 0.0]);
        assert!(arena.write(3, &pair).is_err());
        let view = arena.view(0, [1]).unwrap();
        assert!(matches!(arena.write(1, &pair), Err(TensorError::Shared { .. })));
        drop(view);
    }
}
