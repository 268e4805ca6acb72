//! Matrix products of tensors on a GPU.

use rb_cuda::{Gpu, Matmul, Place};
use rb_tensor::Tensor;

use super::matrix_type;
use crate::{AutogradError, Beta, Result};

/// `C[m, n] = op(A) op(B)`, row-major; see [`Matmul`].
#[derive(Clone, Copy, Debug)]
pub struct Product {
    m: usize,
    n: usize,
    k: usize,
    trans_a: bool,
    trans_b: bool,
}

impl Product {
    /// A product of `A [m, k]` and `B [k, n]`.
    pub fn new(m: usize, n: usize, k: usize) -> Product {
        Product { m, n, k, trans_a: false, trans_b: false }
    }

    /// A is stored `[k, m]`.
    pub fn a_transposed(self) -> Product {
        Product { trans_a: true, ..self }
    }

    /// B is stored `[n, k]`.
    pub fn b_transposed(self) -> Product {
        Product { trans_b: true, ..self }
    }

    /// Enqueues the product of whole tensors.
    pub fn run(self, gpu: Gpu, a: &Tensor, b: &Tensor, c: &Tensor, beta: Beta) -> Result<()> {
        self.launch(gpu, [(a, 0, 0), (b, 0, 0), (c, 0, 0)], 1, beta)
    }

    /// For each matrix of `c`, in order, the sum of the products that `terms` lists as (matrix of `a`, matrix of
    /// `b`). The number beside `a` and `b` is the elements of one of their matrices. Neighbours that step evenly
    /// become one batch.
    pub fn run_terms(
        self,
        gpu: Gpu,
        (a, size_a): (&Tensor, usize),
        (b, size_b): (&Tensor, usize),
        c: &Tensor,
        terms: &[Vec<(usize, usize)>],
        beta: Beta,
    ) -> Result<()> {
        let size_c = self.m * self.n;
        let most = terms.iter().map(Vec::len).max().unwrap_or(0);
        if most == 0 || terms.iter().any(|t| t.len() != most) {
            // INVARIANT: broadcasting gives every matrix equally many terms; none where it gives no matrices.
            debug_assert_eq!(most, 0, "matmul: uneven terms");
            if beta == Beta::Overwrite && c.numel() > 0 {
                let place = c.place()?;
                let bytes = c.size_bytes();
                let zeroed = gpu.memset(place.buffer, place.offset_bytes, bytes, 0);
                zeroed.map_err(|e| AutogradError::Tensor(e.into()))?;
            }
            return Ok(());
        }
        for t in 0..most {
            let beta = if t == 0 { beta } else { Beta::Accumulate };
            let mut first = 0;
            while first < terms.len() {
                let (i, j) = terms[first][t];
                let next = terms.get(first + 1).map_or((i, j), |n| n[t]);
                // Only steps forward can be a batch's stride.
                let step = (next.0.checked_sub(i), next.1.checked_sub(j));
                let mut len = 1;
                if let (Some(step_a), Some(step_b)) = step {
                    while let Some(term) = terms.get(first + len)
                        && term[t] == (i + len * step_a, j + len * step_b)
                    {
                        len += 1;
                    }
                }
                let (step_a, step_b) = (step.0.unwrap_or(0), step.1.unwrap_or(0));
                let places = [
                    (a, i * size_a, step_a * size_a),
                    (b, j * size_b, step_b * size_b),
                    (c, first * size_c, size_c),
                ];
                self.launch(gpu, places, len, beta)?;
                first += len;
            }
        }
        Ok(())
    }

    /// Each operand with its first element and the elements between its matrices.
    fn launch(
        self,
        gpu: Gpu,
        [a, b, c]: [(&Tensor, usize, usize); 3],
        batch: usize,
        beta: Beta,
    ) -> Result<()> {
        let ab = matrix_type("product", a.0)?;
        b.0.expect_dtype("product", "b", a.0.dtype())?;
        let spec = Matmul {
            m: self.m,
            n: self.n,
            k: self.k,
            trans_a: self.trans_a,
            trans_b: self.trans_b,
            batch,
            stride_a: a.2,
            stride_b: b.2,
            stride_c: c.2,
            ab,
            c: matrix_type("product", c.0)?,
            alpha: 1.0,
            beta: beta.factor(),
        };
        if self.m * self.n * batch == 0 {
            return Ok(());
        }
        let run = gpu.matmul(&spec, at(a.0, a.1)?, at(b.0, b.1)?, at(c.0, c.1)?);
        run.map_err(|e| AutogradError::Tensor(e.into()))
    }
}

/// Element `first` of a tensor.
fn at(tensor: &Tensor, first: usize) -> Result<Place<'_>> {
    let place = tensor.place()?;
    Ok(Place { offset_bytes: place.offset_bytes + first * tensor.dtype().size_bytes(), ..place })
}
