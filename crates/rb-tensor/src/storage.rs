//! Bytes: the only file that knows how they are held and where.

use half::bf16;
use rayon::prelude::*;

use crate::{DType, Device, Elem, Result, TensorError};

/// An owned, typed buffer on one device.
#[derive(Debug)]
pub(crate) enum Storage {
    Host(HostBuffer),
}

/// A typed buffer in host memory.
#[derive(Debug, Clone)]
pub(crate) enum HostBuffer {
    F32(Vec<f32>),
    F64(Vec<f64>),
    BF16(Vec<bf16>),
    I32(Vec<i32>),
}

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

    pub(crate) fn zeros(numel: usize, dtype: DType, device: Device) -> Storage {
        match device {
            Device::Cpu => Storage::Host(match dtype {
                DType::F32 => HostBuffer::F32(vec![0.0; numel]),
                DType::F64 => HostBuffer::F64(vec![0.0; numel]),
                DType::BF16 => HostBuffer::BF16(vec![bf16::ZERO; numel]),
                DType::I32 => HostBuffer::I32(vec![0; numel]),
            }),
        }
    }

    pub(crate) fn dtype(&self) -> DType {
        match self {
            Storage::Host(b) => b.dtype(),
        }
    }

    pub(crate) fn device(&self) -> Device {
        match self {
            Storage::Host(_) => Device::Cpu,
        }
    }

    pub(crate) fn host_slice<T: Elem>(&self, op: &'static str) -> Result<&[T]> {
        let got = self.dtype();
        match self {
            Storage::Host(b) if got == T::DTYPE => Ok(each!(b, v => bytemuck::cast_slice(v))),
            _ => Err(wrong_dtype::<T>(op, got)),
        }
    }

    pub(crate) fn host_slice_mut<T: Elem>(&mut self, op: &'static str) -> Result<&mut [T]> {
        let got = self.dtype();
        match self {
            Storage::Host(b) if got == T::DTYPE => Ok(each!(b, v => bytemuck::cast_slice_mut(v))),
            _ => Err(wrong_dtype::<T>(op, got)),
        }
    }

    /// The bytes of `len` elements from `offset`, little-endian as on every supported host.
    pub(crate) fn host_bytes(&self, offset: usize, len: usize) -> &[u8] {
        match self {
            Storage::Host(b) => each!(b, v => bytemuck::cast_slice(&v[offset..offset + len])),
        }
    }

    /// The bytes of `len` elements from `offset`, to change.
    pub(crate) fn host_bytes_mut(&mut self, offset: usize, len: usize) -> &mut [u8] {
        match self {
            Storage::Host(b) => each!(b, v => bytemuck::cast_slice_mut(&mut v[offset..offset + len])),
        }
    }

    /// A new buffer with elements `offset..offset + len` converted to `dtype` (round to nearest even).
    pub(crate) fn convert(&self, offset: usize, len: usize, dtype: DType) -> Storage {
        match self {
            Storage::Host(b) => Storage::Host(match b {
                HostBuffer::F32(v) => convert_host(&v[offset..offset + len], dtype, f64::from),
                HostBuffer::F64(v) => convert_host(&v[offset..offset + len], dtype, |x| x),
                HostBuffer::BF16(v) => convert_host(&v[offset..offset + len], dtype, bf16::to_f64),
                HostBuffer::I32(v) => convert_host(&v[offset..offset + len], dtype, f64::from),
            }),
        }
    }
}

/// Converts through f64, which holds every value of the other types exactly.
fn convert_host<S: Elem>(source: &[S], dtype: DType, to_f64: impl Fn(S) -> f64 + Sync) -> HostBuffer {
    match dtype {
        DType::F32 => HostBuffer::F32(source.par_iter().map(|&x| to_f64(x) as f32).collect()),
        DType::F64 => HostBuffer::F64(source.par_iter().map(|&x| to_f64(x)).collect()),
        // bf16 from f64 would round twice through f32 only for values f32 cannot hold; f32 sources are exact.
        DType::BF16 => HostBuffer::BF16(source.par_iter().map(|&x| bf16::from_f64(to_f64(x))).collect()),
        DType::I32 => HostBuffer::I32(source.par_iter().map(|&x| to_f64(x) as i32).collect()),
    }
}

fn wrong_dtype<T: Elem>(op: &'static str, got: DType) -> TensorError {
    TensorError::DType { op, argument: "tensor".into(), got, expected: T::DTYPE.to_string() }
}
