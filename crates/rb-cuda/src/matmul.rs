//! Matrix products, described in row-major terms.

use std::fmt;

use crate::{Buffer, CudaError, Gpu, Result};

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

impl fmt::Display for Matmul {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.key().fmt(f)
    }
}

impl Matmul {
    /// One product in bf16, neither scaled nor added to what C holds, of A as it is and B transposed or not.
    pub const fn plain([m, n, k]: [usize; 3], trans_b: bool) -> Matmul {
        Matmul {
            m,
            n,
            k,
            trans_a: false,
            trans_b,
            batch: 1,
            stride_a: 0,
            stride_b: 0,
            stride_c: 0,
            ab: MatrixType::Bf16,
            c: MatrixType::Bf16,
            alpha: 1.0,
            beta: 0.0,
        }
    }

    pub(crate) fn key(&self) -> MatmulKey {
        let single = self.batch == 1;
        MatmulKey {
            m: self.m,
            n: self.n,
            k: self.k,
            trans_a: self.trans_a,
            trans_b: self.trans_b,
            batch: self.batch,
            stride_a: if single { 0 } else { self.stride_a },
            stride_b: if single { 0 } else { self.stride_b },
            stride_c: if single { 0 } else { self.stride_c },
            ab: self.ab,
            c: self.c,
            accumulates: self.beta != 0.0,
        }
    }

    /// Floating-point operations.
    pub fn flops(&self) -> f64 {
        2.0 * self.m as f64 * self.n as f64 * self.k as f64 * self.batch as f64
    }

    /// Bytes of operands and result, each read or written once.
    pub fn moved_bytes(&self) -> f64 {
        let (m, n, k) = (self.m as f64, self.n as f64, self.k as f64);
        let passes = if self.beta == 0.0 { 1.0 } else { 2.0 };
        let (ab, c) = (self.ab.size_bytes() as f64, self.c.size_bytes() as f64);
        self.batch as f64 * ((m * k + k * n) * ab + m * n * c * passes)
    }

    /// Bytes that A, B and C reach over, from their first.
    pub(crate) fn spans(&self) -> Option<[usize; 3]> {
        let span = |rows: usize, cols: usize, stride: usize, of: MatrixType| {
            let before = self.batch.checked_sub(1)?.checked_mul(stride)?;
            rows.checked_mul(cols)?.checked_add(before)?.checked_mul(of.size_bytes())
        };
        Some([
            span(self.m, self.k, self.stride_a, self.ab)?,
            span(self.k, self.n, self.stride_b, self.ab)?,
            span(self.m, self.n, self.stride_c, self.c)?,
        ])
    }
}

/// What decides the choice of an algorithm: everything but the factors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct MatmulKey {
    pub(crate) m: usize,
    pub(crate) n: usize,
    pub(crate) k: usize,
    pub(crate) trans_a: bool,
    pub(crate) trans_b: bool,
    pub(crate) batch: usize,
    pub(crate) stride_a: usize,
    pub(crate) stride_b: usize,
    pub(crate) stride_c: usize,
    pub(crate) ab: MatrixType,
    pub(crate) c: MatrixType,
    pub(crate) accumulates: bool,
}

impl fmt::Display for MatmulKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let transposed = |t: bool| if t { "^T" } else { "" };
        let name = |t: MatrixType| match t {
            MatrixType::F32 => "f32",
            MatrixType::Bf16 => "bf16",
        };
        write!(
            f,
            "[{}, {}] {} A{} B{}, k {}, {}",
            self.m,
            self.n,
            if self.accumulates { "+=" } else { "=" },
            transposed(self.trans_a),
            transposed(self.trans_b),
            self.k,
            name(self.ab)
        )?;
        if self.c != self.ab {
            write!(f, " to {}", name(self.c))?;
        }
        if self.batch != 1 {
            let (a, b, c) = (self.stride_a, self.stride_b, self.stride_c);
            write!(f, ", batch {} by {a}, {b}, {c}", self.batch)?;
        }
        Ok(())
    }
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
    /// Enqueues a product: on our own kernel where it was measured to be faster, else on cuBLASLt. A product over no
    /// summed elements writes `beta * C`.
    ///
    /// # Errors
    /// A matrix that reaches past its buffer, a product that cuBLASLt has no algorithm for, a driver error.
    pub fn matmul(&self, spec: &Matmul, a: Place<'_>, b: Place<'_>, c: Place<'_>) -> Result<()> {
        if spec.m == 0 || spec.n == 0 || spec.batch == 0 {
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
        let spans = spec.spans().ok_or_else(|| CudaError::Unsupported {
            what: format!("product {spec}"),
            reason: "sizes overflow".into(),
        })?;
        for (place, bytes) in [a, b, c].iter().zip(spans) {
            place.buffer.check(place.offset_bytes, bytes)?;
        }
        if let Some(tile) = self.own_tile(spec, [a, b, c].map(|place| place.offset_bytes)) {
            return self.matmul_in_tiles(spec, tile, [a, b, c]);
        }
        self.note_use(&[a.buffer, b.buffer, c.buffer]);
        self.count("matmul");
        self.note_matmul(spec);
        let workspace = self.workspace()?;
        let pointers = [a, b, c].map(|place| place.buffer.pointer(place.offset_bytes));
        self.backend().matmul(spec, pointers, workspace)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::GpuOptions;

    fn spec() -> Matmul {
        Matmul {
            m: 2,
            n: 3,
            k: 4,
            trans_a: false,
            trans_b: true,
            batch: 1,
            stride_a: 0,
            stride_b: 0,
            stride_c: 0,
            ab: MatrixType::Bf16,
            c: MatrixType::F32,
            alpha: 1.0,
            beta: 1.0,
        }
    }

    #[test]
    fn a_product_reads_as_mathematics() {
        assert_eq!(spec().to_string(), "[2, 3] += A B^T, k 4, bf16 to f32");
        let batch = Matmul { batch: 5, stride_a: 8, beta: 0.0, c: MatrixType::Bf16, ..spec() };
        assert_eq!(batch.to_string(), "[2, 3] = A B^T, k 4, bf16, batch 5 by 8, 0, 0");
    }

    #[test]
    fn matrices_past_their_buffer_are_refused_and_products_are_noted() {
        let gpu = Gpu::dry((9, 0), &GpuOptions::default());
        let buffer = gpu.alloc(24).unwrap();
        let at = |offset_bytes| Place { buffer: &buffer, offset_bytes };
        gpu.matmul(&spec(), at(0), at(0), at(0)).unwrap();
        gpu.matmul(&Matmul { alpha: 2.0, ..spec() }, at(0), at(0), at(0)).unwrap();
        for (b, c) in [(2, 0), (0, 4)] {
            let message = gpu.matmul(&spec(), at(0), at(b), at(c)).unwrap_err().to_string();
            assert!(message.contains("of 24"), "{message}");
        }
        let huge = Matmul { m: usize::MAX / 2, ..spec() };
        assert!(gpu.matmul(&huge, at(0), at(0), at(0)).is_err());
        assert_eq!(gpu.matmuls(), [spec()], "factors do not make another product");
        assert_eq!(gpu.memory().holders[0].0, "workspace", "a dry run counts the workspace");
    }
}
