//! Bytes: the only file that knows how they are held and where.

use half::bf16;
use rayon::prelude::*;
use rb_cuda::{Arg, Buffer, Gpu, Kernel, Launch, kernel};

use crate::{DType, Device, Elem, Result, TensorError};

/// An owned, typed buffer on one device.
#[derive(Debug)]
pub(crate) enum Storage {
    Host(HostBuffer),
    Cuda(CudaBuffer),
}

/// A typed buffer in host memory.
#[derive(Debug, Clone)]
pub(crate) enum HostBuffer {
    F32(Vec<f32>),
    F64(Vec<f64>),
    BF16(Vec<bf16>),
    I32(Vec<i32>),
}

/// A typed buffer in the memory of a GPU.
#[derive(Debug)]
pub(crate) struct CudaBuffer {
    pub(crate) buffer: Buffer,
    dtype: DType,
}

const CONVERT: Kernel = kernel!("convert");

/// Runs one expression on whichever vector a host buffer holds.
macro_rules! each {
    ($buffer:expr, $v:ident => $body:expr) => {
        match $buffer {
            HostBuffer::F32($v) => $body,
            HostBuffer::F64($v) => $body,
            HostBuffer::BF16($v) => $body,
            HostBuffer::I32($v) => $body,
        }
    };
}

impl HostBuffer {
    fn dtype(&self) -> DType {
        match self {
            HostBuffer::F32(_) => DType::F32,
            HostBuffer::F64(_) => DType::F64,
            HostBuffer::BF16(_) => DType::BF16,
            HostBuffer::I32(_) => DType::I32,
        }
    }

    fn zeros(numel: usize, dtype: DType) -> HostBuffer {
        match dtype {
            DType::F32 => HostBuffer::F32(vec![0.0; numel]),
            DType::F64 => HostBuffer::F64(vec![0.0; numel]),
            DType::BF16 => HostBuffer::BF16(vec![bf16::ZERO; numel]),
            DType::I32 => HostBuffer::I32(vec![0; numel]),
        }
    }

    fn bytes(&self, offset: usize, len: usize) -> &[u8] {
        each!(self, v => bytemuck::cast_slice(&v[offset..offset + len]))
    }

    fn bytes_mut(&mut self, offset: usize, len: usize) -> &mut [u8] {
        each!(self, v => bytemuck::cast_slice_mut(&mut v[offset..offset + len]))
    }
}

impl Storage {
    pub(crate) fn from_vec<T: Elem>(values: Vec<T>) -> Storage {
        let any: Box<dyn std::any::Any> = Box::new(values);
        // The element type is closed (`Elem` is implemented here only), so one of these matches.
        let buffer = match T::DTYPE {
            DType::F32 => any.downcast().map(|v| HostBuffer::F32(*v)),
            DType::F64 => any.downcast().map(|v| HostBuffer::F64(*v)),
            DType::BF16 => any.downcast().map(|v| HostBuffer::BF16(*v)),
            DType::I32 => any.downcast().map(|v| HostBuffer::I32(*v)),
        };
        match buffer {
            Ok(b) => Storage::Host(b),
            // INVARIANT: `Elem::DTYPE` names the implementing type, see dtype.rs.
            Err(_) => unreachable!("Elem::DTYPE disagrees with its type"),
        }
    }

    /// A buffer for a writer that fills it whole: zeros on the host, undefined on a GPU.
    pub(crate) fn uninit(numel: usize, dtype: DType, device: Device) -> Result<Storage> {
        match device {
            Device::Cpu => Ok(Storage::Host(HostBuffer::zeros(numel, dtype))),
            Device::Cuda(gpu) => {
                Ok(Storage::Cuda(CudaBuffer { buffer: gpu.alloc(numel * dtype.size_bytes())?, dtype }))
            }
        }
    }

    pub(crate) fn zeros(numel: usize, dtype: DType, device: Device) -> Result<Storage> {
        let storage = Storage::uninit(numel, dtype, device)?;
        if let Storage::Cuda(c) = &storage {
            c.buffer.gpu().memset(&c.buffer, 0, numel * dtype.size_bytes(), 0)?;
        }
        Ok(storage)
    }

    pub(crate) fn dtype(&self) -> DType {
        match self {
            Storage::Host(b) => b.dtype(),
            Storage::Cuda(c) => c.dtype,
        }
    }

    pub(crate) fn device(&self) -> Device {
        match self {
            Storage::Host(_) => Device::Cpu,
            Storage::Cuda(c) => Device::Cuda(c.buffer.gpu()),
        }
    }

    /// The device buffer, or an error that names the operation.
    pub(crate) fn cuda(&self, op: &'static str) -> Result<&CudaBuffer> {
        match self {
            Storage::Cuda(c) => Ok(c),
            Storage::Host(_) => Err(TensorError::NotOnGpu { op }),
        }
    }

    pub(crate) fn host_slice<T: Elem>(&self, op: &'static str) -> Result<&[T]> {
        match self {
            Storage::Host(b) if b.dtype() == T::DTYPE => Ok(each!(b, v => bytemuck::cast_slice(v))),
            _ => Err(self.wrong_slice::<T>(op)),
        }
    }

    pub(crate) fn host_slice_mut<T: Elem>(&mut self, op: &'static str) -> Result<&mut [T]> {
        let error = self.wrong_slice::<T>(op);
        match self {
            Storage::Host(b) if b.dtype() == T::DTYPE => Ok(each!(b, v => bytemuck::cast_slice_mut(v))),
            _ => Err(error),
        }
    }

    fn wrong_slice<T: Elem>(&self, op: &'static str) -> TensorError {
        if self.device() != Device::Cpu {
            return self.not_on_host(op);
        }
        TensorError::DType {
            op,
            argument: "tensor".into(),
            got: self.dtype(),
            expected: T::DTYPE.to_string(),
        }
    }

    fn not_on_host(&self, op: &'static str) -> TensorError {
        let (got, expected) = (self.device(), Device::Cpu);
        TensorError::DeviceMismatch { op, argument: "tensor".into(), got, expected }
    }

    /// The bytes of `len` elements from `offset`, little-endian as on every supported host.
    pub(crate) fn host_bytes(&self, offset: usize, len: usize) -> Result<&[u8]> {
        match self {
            Storage::Host(b) => Ok(b.bytes(offset, len)),
            Storage::Cuda(_) => Err(self.not_on_host("as_bytes")),
        }
    }

    /// Overwrites `len` elements from `offset` with the elements of `source` from `source_offset`; both have
    /// the same element type, and may be on different devices.
    pub(crate) fn copy_from(
        &mut self,
        offset: usize,
        source: &Storage,
        source_offset: usize,
        len: usize,
    ) -> Result<()> {
        let size = self.dtype().size_bytes();
        let (to, from, bytes) = (offset * size, source_offset * size, len * size);
        match (self, source) {
            (Storage::Host(t), Storage::Host(s)) => {
                t.bytes_mut(offset, len).copy_from_slice(s.bytes(source_offset, len));
            }
            (Storage::Host(t), Storage::Cuda(s)) => {
                s.buffer.gpu().download(&s.buffer, from, t.bytes_mut(offset, len))?;
            }
            (Storage::Cuda(t), Storage::Host(s)) => {
                t.buffer.gpu().upload(&t.buffer, to, s.bytes(source_offset, len))?;
            }
            (Storage::Cuda(t), Storage::Cuda(s)) => {
                t.buffer.gpu().copy(&t.buffer, to, &s.buffer, from, bytes)?;
            }
        }
        Ok(())
    }

    /// A new buffer with elements `offset..offset + len` converted to `dtype` (round to nearest even).
    pub(crate) fn convert(&self, offset: usize, len: usize, dtype: DType) -> Result<Storage> {
        match self {
            Storage::Host(b) => Ok(Storage::Host(match b {
                HostBuffer::F32(v) => convert_host(&v[offset..offset + len], dtype, f64::from),
                HostBuffer::F64(v) => convert_host(&v[offset..offset + len], dtype, |x| x),
                HostBuffer::BF16(v) => convert_host(&v[offset..offset + len], dtype, bf16::to_f64),
                HostBuffer::I32(v) => convert_host(&v[offset..offset + len], dtype, f64::from),
            })),
            Storage::Cuda(c) => {
                let gpu = c.buffer.gpu();
                let mut target = Storage::uninit(len, dtype, Device::Cuda(gpu))?;
                if dtype == c.dtype {
                    target.copy_from(0, self, offset, len)?;
                } else {
                    let to = target.cuda("convert")?;
                    convert_cuda(gpu, c, offset, to, 0, len)?;
                }
                Ok(target)
            }
        }
    }
}

/// Converts `len` elements on a GPU into a place of another buffer.
pub(crate) fn convert_cuda(
    gpu: Gpu,
    source: &CudaBuffer,
    source_offset: usize,
    target: &CudaBuffer,
    target_offset: usize,
    len: usize,
) -> Result<()> {
    if len == 0 {
        return Ok(());
    }
    let launch = Launch::for_items(&CONVERT, len, 256)
        .define("TX", source.dtype.cuda_name())
        .define("TY", target.dtype.cuda_name())
        .arg(Arg::Buffer(&source.buffer, source_offset * source.dtype.size_bytes()))
        .arg(Arg::Buffer(&target.buffer, target_offset * target.dtype.size_bytes()))
        .arg(Arg::I64(len as i64));
    Ok(gpu.launch(launch)?)
}

/// Converts through f64, which holds every value of the other types exactly.
fn convert_host<S: Elem>(source: &[S], dtype: DType, to_f64: impl Fn(S) -> f64 + Sync) -> HostBuffer {
    match dtype {
        DType::F32 => HostBuffer::F32(source.par_iter().map(|&x| to_f64(x) as f32).collect()),
        DType::F64 => HostBuffer::F64(source.par_iter().map(|&x| to_f64(x)).collect()),
        DType::BF16 => HostBuffer::BF16(source.par_iter().map(|&x| bf16_from_f64(to_f64(x))).collect()),
        DType::I32 => HostBuffer::I32(source.par_iter().map(|&x| to_f64(x) as i32).collect()),
    }
}

/// Rounds to nearest even in one step. (`bf16::from_f64` drops the low half of the f64 first, so it takes values
/// just above a tie for the tie.)
fn bf16_from_f64(x: f64) -> bf16 {
    let near = x as f32;
    if f64::from(near) == x || !near.is_finite() {
        return bf16::from_f32(near);
    }
    // The f32 toward zero, its last bit set because something was lost: "round to odd", after which rounding to
    // the shorter type is right.
    let toward_zero = if f64::from(near).abs() > x.abs() { near.to_bits() - 1 } else { near.to_bits() };
    bf16::from_f32(f32::from_bits(toward_zero | 1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bf16_rounds_to_nearest_even_once() {
        let ulp = 2f64.powi(-7); // of bf16 between 1 and 2
        let tie = 1.0 + 0.5 * ulp;
        let up = 1.0 + ulp;
        let cases = [
            (1.0, 1.0),
            (tie, 1.0),
            (f64::from(f32::from_bits((tie as f32).to_bits() + 1)), up),
            (tie + 2f64.powi(-40), up),
            (tie - 2f64.powi(-40), 1.0),
            (up + 0.5 * ulp, 1.0 + 2.0 * ulp),
            (-tie - 2f64.powi(-50), -up),
            (1e300, f64::INFINITY),
            (f64::NEG_INFINITY, f64::NEG_INFINITY),
        ];
        for (x, want) in cases {
            assert_eq!(bf16_from_f64(x).to_f64(), want, "{x}");
        }
        assert!(bf16_from_f64(f64::NAN).is_nan());
        // Every f32 goes the way of the direct conversion.
        for bits in (0..u32::MAX).step_by(65_521) {
            let x = f32::from_bits(bits);
            assert_eq!(bf16_from_f64(f64::from(x)).to_bits(), bf16::from_f32(x).to_bits(), "{x}");
        }
    }
}
