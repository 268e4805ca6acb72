//! [`Tensor`]: shared, immutable values.

use std::fmt;
use std::sync::Arc;

use rb_cuda::{Arg, Place, Reading};

use crate::storage::Storage;
use crate::{DType, Device, Elem, Result, Shape, ShapeError, TensorError};

/// A contiguous, row-major block of values on one device.
///
/// Cloning shares the buffer. A tensor has no gradient: `rb_autograd::Var` has.
#[derive(Clone)]
pub struct Tensor {
    pub(crate) storage: Arc<Storage>,
    pub(crate) offset: usize,
    pub(crate) shape: Shape,
}

impl Tensor {
    /// A tensor from host values in row-major order.
    ///
    /// # Errors
    /// [`ShapeError`] if `values.len()` is not the product of `shape`.
    pub fn from_vec<T: Elem>(values: Vec<T>, shape: impl Into<Shape>) -> Result<Tensor> {
        let shape = shape.into();
        if shape.checked_numel("from_vec")? != values.len() {
            return Err(ShapeError::new("from_vec", "values", format!("[{}]", values.len()), &shape).into());
        }
        Ok(Tensor { storage: Arc::new(Storage::from_vec(values)), offset: 0, shape })
    }

    /// A rank-0 tensor.
    pub fn scalar<T: Elem>(value: T) -> Tensor {
        Tensor { storage: Arc::new(Storage::from_vec(vec![value])), offset: 0, shape: Shape::default() }
    }

    /// Zeros.
    pub fn zeros(shape: impl Into<Shape>, dtype: DType, device: Device) -> Result<Tensor> {
        let shape = shape.into();
        let numel = shape.checked_numel("zeros")?;
        Ok(Tensor { storage: Arc::new(Storage::zeros(numel, dtype, device)?), offset: 0, shape })
    }

    /// A tensor for a writer that fills it whole: zeros on the host, undefined on a GPU.
    pub fn uninit(shape: impl Into<Shape>, dtype: DType, device: Device) -> Result<Tensor> {
        let shape = shape.into();
        let numel = shape.checked_numel("uninit")?;
        Ok(Tensor { storage: Arc::new(Storage::uninit(numel, dtype, device)?), offset: 0, shape })
    }

    /// One f32 value in every place; on a GPU without a copy from the host.
    pub fn filled(shape: impl Into<Shape>, value: f32, device: Device) -> Result<Tensor> {
        let shape = shape.into();
        let numel = shape.checked_numel("filled")?;
        match device {
            Device::Cpu => Tensor::from_vec(vec![value; numel], shape),
            Device::Cuda(gpu) => {
                let tensor = Tensor::uninit(shape, DType::F32, device)?;
                let place = tensor.place()?;
                gpu.fill(place.buffer, place.offset_bytes, numel, value.to_bits())?;
                Ok(tensor)
            }
        }
    }

    /// The same values on another device; shares the buffer where they are there already. Reading from a GPU
    /// waits for all work before.
    pub fn to_device(&self, device: Device) -> Result<Tensor> {
        if device == self.device() {
            return Ok(self.clone());
        }
        let mut storage = Storage::uninit(self.numel(), self.dtype(), device)?;
        storage.copy_from(0, &self.storage, self.offset, self.numel())?;
        Ok(Tensor { storage: Arc::new(storage), offset: 0, shape: self.shape.clone() })
    }

    /// The place of the values as an argument of a kernel.
    ///
    /// # Errors
    /// [`TensorError::NotOnGpu`].
    pub fn arg(&self) -> Result<Arg<'_>> {
        let place = self.place()?;
        Ok(Arg::Buffer(place.buffer, place.offset_bytes))
    }

    /// The place of the values in device memory.
    ///
    /// # Errors
    /// [`TensorError::NotOnGpu`].
    pub fn place(&self) -> Result<Place<'_>> {
        let buffer = &self.storage.cuda("kernel argument")?.buffer;
        Ok(Place { buffer, offset_bytes: self.offset * self.dtype().size_bytes() })
    }

    /// The shape.
    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    /// Number of elements.
    pub fn numel(&self) -> usize {
        self.shape.numel()
    }

    /// The element type.
    pub fn dtype(&self) -> DType {
        self.storage.dtype()
    }

    /// The device that holds the values.
    pub fn device(&self) -> Device {
        self.storage.device()
    }

    /// Bytes of the values this tensor shows (its buffer may be larger and shared).
    pub fn size_bytes(&self) -> usize {
        self.numel() * self.dtype().size_bytes()
    }

    /// The values as a host slice.
    ///
    /// # Errors
    /// [`TensorError::DType`] if `T` is another element type.
    pub fn as_slice<T: Elem>(&self) -> Result<&[T]> {
        let all = self.storage.host_slice::<T>("as_slice")?;
        Ok(&all[self.offset..self.offset + self.numel()])
    }

    /// The values as a mutable host slice, or `None` where the buffer is shared or is of another type.
    pub fn as_mut_slice<T: Elem>(&mut self) -> Option<&mut [T]> {
        let range = self.offset..self.offset + self.shape.numel();
        let storage = Arc::get_mut(&mut self.storage)?;
        storage.host_slice_mut::<T>("as_mut_slice").ok().map(|all| &mut all[range])
    }

    /// A copy of the values in a `Vec`, from whichever device.
    pub fn to_vec<T: Elem>(&self) -> Result<Vec<T>> {
        self.to_device(Device::Cpu)?.as_slice::<T>().map(<[T]>::to_vec)
    }

    /// The one value of a tensor with a single element, as f64.
    pub fn item(&self) -> Result<f64> {
        if self.numel() != 1 {
            return Err(ShapeError::new("item", "tensor", &self.shape, "one element").into());
        }
        Ok(self.to_device(Device::Cpu)?.to_dtype(DType::F64)?.as_slice::<f64>()?[0])
    }

    /// Starts to read the one value of a tensor with a single element. On a GPU neither this nor the wait holds
    /// up work that is enqueued in between.
    pub fn item_later(&self) -> Result<LaterItem> {
        match (self.device().gpu(), self.dtype()) {
            (Some(gpu), DType::F32) if self.numel() == 1 => {
                let place = self.place()?;
                Ok(LaterItem::Coming(gpu.read_later(place.buffer, place.offset_bytes, 4)?))
            }
            _ => Ok(LaterItem::Here(self.item()?)),
        }
    }

    /// The same values with another shape; shares the buffer.
    ///
    /// # Errors
    /// [`ShapeError`] if the numbers of elements differ.
    pub fn reshape(&self, shape: impl Into<Shape>) -> Result<Tensor> {
        let shape = shape.into();
        if shape.checked_numel("reshape")? != self.numel() {
            return Err(ShapeError::new(
                "reshape",
                "tensor",
                &self.shape,
                format!("{} elements for {shape}", shape.numel()),
            )
            .into());
        }
        Ok(Tensor { storage: self.storage.clone(), offset: self.offset, shape })
    }

    /// Rows `start..start + len` of the first axis; shares the buffer.
    ///
    /// # Errors
    /// [`ShapeError`] for a scalar or a range outside the first axis.
    pub fn narrow(&self, start: usize, len: usize) -> Result<Tensor> {
        let first = self.shape.first().copied().unwrap_or(0);
        if self.shape.rank() == 0 || start.checked_add(len).is_none_or(|end| end > first) {
            let expected = format!("at least {} rows in the first axis", start.saturating_add(len));
            return Err(ShapeError::new("narrow", "tensor", &self.shape, expected).into());
        }
        let mut dims = self.shape.to_vec();
        dims[0] = len;
        let row: usize = dims[1..].iter().product();
        Ok(Tensor { storage: self.storage.clone(), offset: self.offset + start * row, shape: dims.into() })
    }

    /// The values in another element type (round to nearest even; floats to integers truncate).
    /// Shares the buffer when the type is already right.
    pub fn to_dtype(&self, dtype: DType) -> Result<Tensor> {
        if dtype == self.dtype() {
            return Ok(self.clone());
        }
        let storage = self.storage.convert(self.offset, self.numel(), dtype)?;
        Ok(Tensor { storage: Arc::new(storage), offset: 0, shape: self.shape.clone() })
    }

    /// A copy in a buffer of its own.
    pub fn to_owned_copy(&self) -> Result<Tensor> {
        let storage = self.storage.convert(self.offset, self.numel(), self.dtype())?;
        Ok(Tensor { storage: Arc::new(storage), offset: 0, shape: self.shape.clone() })
    }

    /// The raw bytes in row-major order, little-endian.
    ///
    /// # Errors
    /// [`TensorError::DeviceMismatch`] if the values are on a GPU.
    pub fn as_bytes(&self) -> Result<&[u8]> {
        self.storage.host_bytes(self.offset, self.numel())
    }

    /// The flat position of the first value that is NaN or infinite.
    pub fn first_non_finite(&self) -> Result<Option<usize>> {
        let wide = self.to_device(Device::Cpu)?.to_dtype(DType::F64)?;
        Ok(wide.as_slice::<f64>()?.iter().position(|x| !x.is_finite()))
    }

    /// Whether this tensor alone owns its whole buffer.
    pub fn is_unshared(&self) -> bool {
        Arc::strong_count(&self.storage) == 1
    }

    /// An identity of the underlying buffer, equal for tensors that share it: for counting held memory.
    pub fn buffer_id(&self) -> usize {
        Arc::as_ptr(&self.storage) as usize
    }

    /// Checks the element type, naming the operation and argument.
    pub fn expect_dtype(&self, op: &'static str, argument: &str, dtype: DType) -> Result<()> {
        if self.dtype() == dtype {
            return Ok(());
        }
        Err(TensorError::DType {
            op,
            argument: argument.into(),
            got: self.dtype(),
            expected: dtype.to_string(),
        })
    }
}

/// A value that may still be on its way from a GPU.
pub enum LaterItem {
    /// It is here.
    Here(f64),
    /// It is being read.
    Coming(Reading),
}

impl LaterItem {
    /// The value, waited for.
    pub fn wait(self) -> Result<f64> {
        match self {
            LaterItem::Here(value) => Ok(value),
            LaterItem::Coming(reading) => {
                let bytes = reading.wait()?;
                let value: f32 = bytemuck::pod_read_unaligned(&bytes);
                Ok(f64::from(value))
            }
        }
    }
}

impl fmt::Debug for Tensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Tensor({} {} on {})", self.dtype(), self.shape, self.device())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn views_share_and_check() {
        let t = Tensor::from_vec((0..12).map(|x| x as f32).collect(), [3, 4]).unwrap();
        assert_eq!(t.narrow(1, 2).unwrap().as_slice::<f32>().unwrap()[0], 4.0);
        assert_eq!(t.narrow(1, 2).unwrap().reshape([8]).unwrap().shape().dims(), &[8]);
        let message = t.narrow(2, 2).unwrap_err().to_string();
        assert_eq!(message, "narrow: tensor has shape [3, 4], expected at least 4 rows in the first axis");
        assert!(t.reshape([5]).is_err());
        assert!(t.as_slice::<f64>().is_err());
        assert!(Tensor::from_vec(vec![1.0f32; 3], [2]).is_err());
    }

    #[test]
    fn mutation_needs_sole_ownership() {
        let mut t = Tensor::zeros([2], DType::F32, Device::Cpu).unwrap();
        let other = t.clone();
        assert!(t.as_mut_slice::<f32>().is_none());
        drop(other);
        t.as_mut_slice::<f32>().unwrap()[1] = 2.0;
        assert_eq!(t.to_vec::<f32>().unwrap(), [0.0, 2.0]);
    }

    #[test]
    fn conversions_round_to_nearest_even() {
        let t = Tensor::from_vec(vec![1.0f32, 1.003_906_3, -3.7], [3]).unwrap();
        let b = t.to_dtype(DType::BF16).unwrap().to_dtype(DType::F32).unwrap();
        assert_eq!(b.to_vec::<f32>().unwrap()[..2], [1.0, 1.0]);
        assert_eq!(t.to_dtype(DType::I32).unwrap().to_vec::<i32>().unwrap(), [1, 1, -3]);
    }

    #[test]
    fn non_finite_values_are_found_one_by_one() {
        // Finite values whose sum would overflow raise no alarm.
        let large = Tensor::from_vec(vec![f32::MAX; 3], [3]).unwrap();
        assert_eq!(large.first_non_finite().unwrap(), None);
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let t = Tensor::from_vec(vec![0.0, f32::MAX, bad], [3]).unwrap();
            assert_eq!(t.first_non_finite().unwrap(), Some(2));
            assert_eq!(t.narrow(0, 2).unwrap().first_non_finite().unwrap(), None);
        }
    }

    #[test]
    fn too_large_is_an_error() {
        let error = Tensor::zeros([usize::MAX, 2], DType::F32, Device::Cpu).unwrap_err();
        assert!(error.to_string().contains("too many elements"), "{error}");
    }
}
