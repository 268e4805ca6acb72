//! Whether a card computes what it should: one kernel and one product against the host.

use crate::kernel::{Arg, Kernel, Launch, Unit};
use crate::live::HOLD_BACK;
use crate::matmul::{Matmul, MatrixType, Place};
use crate::{CudaError, Gpu, Result};

/// What [`Gpu::self_check`] measured. Results were right, or there would be an error.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SelfCheck {
    /// Milliseconds until the kernel was compiled, or read from the cache, and loaded.
    pub kernel_ready_ms: f64,
    /// Whether the kernel came from the cache.
    pub kernel_cached: bool,
    /// Floating-point operations per second of a large bf16 product.
    pub product_flops: f64,
}

const SQUARES: Kernel = Kernel {
    name: "squares",
    source: "extern \"C\" __global__ void squares(float* y, int n) { GRID_STRIDE(i, n) y[i] = (float)(i * i); }\n",
};

/// Sides of the product that is compared, odd on purpose, and of the one that is timed.
const SIDES: (usize, usize, usize) = (129, 65, 257);
const LARGE: usize = 4096;

/// The kernels of this crate itself.
pub fn own_units() -> Vec<Unit> {
    [&SQUARES, &HOLD_BACK].map(|kernel| Launch::new(kernel, [1; 3], [1; 3]).unit().clone()).to_vec()
}

impl Gpu {
    /// Runs a kernel and a product and compares both with the host, then times a large product.
    ///
    /// # Errors
    /// [`CudaError::Wrong`] where a result differs, and whatever may fail on the way.
    pub fn self_check(&self) -> Result<SelfCheck> {
        let n = 1000usize;
        let buffer = self.alloc_for(4 * n, "self-check")?;
        let launch = Launch::for_items(&SQUARES, n, 256).arg(Arg::Buffer(&buffer, 0)).arg(Arg::I32(n as i32));
        let stats = self.prepare(std::slice::from_ref(launch.unit()))?;
        self.launch(launch)?;
        let expected: Vec<f32> = (0..n).map(|i| (i * i) as f32).collect();
        compare("a kernel", &self.floats(&buffer, n)?, &expected)?;
        self.check_product()?;
        let milliseconds = self.time_product()?;
        Ok(SelfCheck {
            kernel_ready_ms: stats.milliseconds,
            kernel_cached: stats.compiled == 0,
            product_flops: 2.0 * (LARGE as f64).powi(3) / (milliseconds * 1e-3),
        })
    }

    fn check_product(&self) -> Result<()> {
        let (m, n, k) = SIDES;
        // Small integers: exact in bf16 and in any order of sums.
        let value = |i: usize| (i * 7 % 13) as f32 - 6.0;
        let a: Vec<f32> = (0..m * k).map(value).collect();
        let b: Vec<f32> = (0..n * k).map(|i| value(i + 5)).collect();
        let put = |values: &[f32]| {
            let bytes: Vec<u8> =
                values.iter().flat_map(|x| ((x.to_bits() >> 16) as u16).to_le_bytes()).collect();
            let buffer = self.alloc_for(bytes.len(), "self-check")?;
            self.upload(&buffer, 0, &bytes)?;
            Ok(buffer)
        };
        let (on_a, on_b) = (put(&a)?, put(&b)?);
        let on_c = self.alloc_for(4 * m * n, "self-check")?;
        let spec = Matmul { c: MatrixType::F32, ..product(m, n, k) };
        let at = |buffer| Place { buffer, offset_bytes: 0 };
        self.matmul(&spec, at(&on_a), at(&on_b), at(&on_c))?;
        let expected: Vec<f32> = (0..m * n)
            .map(|i| {
                let (row, col) = (&a[i / n * k..][..k], &b[i % n * k..][..k]);
                row.iter().zip(col).map(|(x, y)| x * y).sum()
            })
            .collect();
        compare("a product", &self.floats(&on_c, m * n)?, &expected)
    }

    fn time_product(&self) -> Result<f64> {
        let matrix = || self.alloc_for(2 * LARGE * LARGE, "self-check");
        let (a, b, c) = (matrix()?, matrix()?, matrix()?);
        for buffer in [&a, &b] {
            // 0x3c3c is a small bf16 number.
            self.memset(buffer, 0, buffer.size_bytes(), 0x3c)?;
        }
        let at = |buffer| Place { buffer, offset_bytes: 0 };
        let times = 10;
        let run = |times: usize| {
            self.elapsed_ms(|| {
                (0..times)
                    .try_for_each(|_| self.matmul(&product(LARGE, LARGE, LARGE), at(&a), at(&b), at(&c)))
            })
        };
        run(2)?;
        Ok(run(times)? / times as f64)
    }

    fn floats(&self, buffer: &crate::Buffer, count: usize) -> Result<Vec<f32>> {
        let mut bytes = vec![0u8; 4 * count];
        self.download(buffer, 0, &mut bytes)?;
        Ok(bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect())
    }
}

/// `C = A B^T` in bf16.
fn product(m: usize, n: usize, k: usize) -> Matmul {
    Matmul::plain([m, n, k], true)
}

fn compare(what: &'static str, found: &[f32], expected: &[f32]) -> Result<()> {
    match found.iter().zip(expected).position(|(x, y)| x != y) {
        None => Ok(()),
        Some(at) => Err(CudaError::Wrong {
            what,
            detail: format!("element {at} is {}, not {}", found[at], expected[at]),
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::GpuOptions;

    #[test]
    fn a_wrong_result_is_an_error() {
        // A dry run computes nothing: its zeros are wrong.
        let message = Gpu::dry((9, 0), &GpuOptions::default()).self_check().unwrap_err().to_string();
        assert_eq!(message, "a kernel gives a wrong result: element 1 is 0, not 1");
    }
}
