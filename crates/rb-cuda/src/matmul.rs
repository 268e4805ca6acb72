//! Matrix products, described in row-major terms.

use crate::{Buffer, Gpu, Result};

/// Element type of a matrix. Products accumulate in fp32 always; `F32` uses no TF32.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum MatrixType {
    /// 32-bit floats.
    F32,
    /// bfloat16.
    Bf16,
}

impl MatrixType {
    /// Bytes of one element.
    pub const fn size_bytes(self) -> usize {
        match self {
            MatrixType::F32 => 4,
            MatrixType::Bf16 => 2,
        }
    }
}

/// `C[m, n] = alpha * op(A)[m, k] * op(B)[k, n] + beta * C`, `batch` times.
///
/// All matrices are row-major and dense: `A` is stored `[m, k]`, or `[k, m]` where `trans_a`; `B` is stored
/// `[k, n]`, or `[n, k]` where `trans_b`. Consecutive matrices of a batch are `stride_*` elements apart.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Matmul {
    /// Rows of C.
    pub m: usize,
    /// Columns of C.
    pub n: usize,
    /// Summed dimension.
    pub k: usize,
    /// Whether A is stored transposed.
    pub trans_a: bool,
    /// Whether B is stored transposed.
    pub trans_b: bool,
    /// Number of products.
    pub batch: usize,
    /// Elements between matrices A.
    pub stride_a: usize,
    /// Elements between matrices B.
    pub stride_b: usize,
    /// Elements between matrices C.
    pub stride_c: usize,
    /// Element type of A and B.
    pub ab: MatrixType,
    /// Element type of C.
    pub c: MatrixType,
    /// Factor of the product.
    pub alpha: f32,
    /// Factor of the old C; 0 means that C is not read.
    pub beta: f32,
}

/// A place in device memory.
#[derive(Clone, Copy, Debug)]
pub struct Place<'a> {
    /// The buffer.
    pub buffer: &'a Buffer,
    /// First byte.
    pub offset_bytes: usize,
}

impl Gpu {
    /// Enqueues a product. A product over no summed elements writes `beta * C`.
    pub fn matmul(&self, spec: &Matmul, a: Place<'_>, b: Place<'_>, c: Place<'_>) -> Result<()> {
        let elements = spec.m * spec.n * spec.batch;
        if elements == 0 {
            return Ok(());
        }
        if spec.k == 0 {
            if spec.beta == 0.0 {
                for i in 0..spec.batch {
                    let start = c.offset_bytes + i * spec.stride_c * spec.c.size_bytes();
                    self.memset(c.buffer, start, spec.m * spec.n * spec.c.size_bytes(), 0)?;
                }
            }
            return Ok(());
        }
        self.count("matmul");
        self.backend().matmul(
            self,
            spec,
            a.buffer.pointer(a.offset_bytes),
            b.buffer.pointer(b.offset_bytes),
            c.buffer.pointer(c.offset_bytes),
        )
    }
}
