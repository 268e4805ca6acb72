//! Element types.

use std::fmt;

use bytemuck::Pod;
use half::bf16;

/// The element type of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DType {
    /// IEEE single precision, 4 bytes.
    F32,
    /// IEEE double precision, 8 bytes: the truth that other precisions are compared with.
    F64,
    /// bfloat16, 2 bytes: storage and device compute; host operations cast it first.
    BF16,
    /// 32-bit integers: token ids, labels, positions. Never differentiable.
    I32,
}

impl DType {
    /// Bytes of one element.
    pub const fn size_bytes(self) -> usize {
        match self {
            DType::F32 | DType::I32 => 4,
            DType::F64 => 8,
            DType::BF16 => 2,
        }
    }

    /// The element type in kernel sources.
    pub const fn cuda_name(self) -> &'static str {
        match self {
            DType::F32 => "float",
            DType::F64 => "double",
            DType::BF16 => "bf16",
            DType::I32 => "int",
        }
    }

    /// Whether a gradient can exist in this type.
    pub const fn is_float(self) -> bool {
        !matches!(self, DType::I32)
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            DType::F32 => "f32",
            DType::F64 => "f64",
            DType::BF16 => "bf16",
            DType::I32 => "i32",
        })
    }
}

/// A Rust type that is the element of a tensor.
pub trait Elem:
    Pod + Default + PartialEq + PartialOrd + fmt::Debug + fmt::Display + Send + Sync + 'static
{
    /// The matching run-time tag.
    const DTYPE: DType;
}

impl Elem for f32 {
    const DTYPE: DType = DType::F32;
}
impl Elem for f64 {
    const DTYPE: DType = DType::F64;
}
impl Elem for bf16 {
    const DTYPE: DType = DType::BF16;
}
impl Elem for i32 {
    const DTYPE: DType = DType::I32;
}
