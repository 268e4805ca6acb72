//! Matrix product over the last two axes.
//!
//! - **Computes** `y = a b`.
//! - **Shapes** `a [.., M, K]`, `b [.., K, N]` -> `y [.., M, N]`; the axes before the last two broadcast.
//! - **Dtypes** both of one float type; sums are accumulated in it.
//! - **Backward** `da = dy b^T`, `db = a^T dy`; each summed over the axes along which its input was
//!   broadcast.
//! - **Saves** `a` and `b` (shared).
//! - **Kernels** cuBLASLt, one strided batch where neighbours allow.
//! - **Errors** `ShapeError` for fewer than two axes, inner sizes that differ, or batch axes that do not
//!   broadcast.
//! - **Source** PyTorch `torch.matmul`, which also takes vectors.

use rb_cuda::Gpu;
use rb_tensor::{Shape, ShapeError, Tensor, rules};

use crate::cuda::{self, Product};
use crate::host::{self, Mat, MatMut};
use crate::testing::Case;
use crate::{Beta, Float, GradSinks, Op, Result, Var, apply, saved};

/// `a b`, for each matrix of the batch axes.
pub fn matmul<'t>(a: &Var<'t>, b: &Var<'t>) -> Result<Var<'t>> {
    apply(Matmul, &[a, b])
}

struct Matmul;

saved!(
    struct MatmulSaved { a, b }
);

impl Op for Matmul {
    const NAME: &'static str = "matmul";
    type Saved = MatmulSaved;

    fn out_shape(&self, inputs: &[&Shape]) -> Result<Shape> {
        let (a, b) = (inputs[0], inputs[1]);
        if a.rank() < 2 {
            return Err(ShapeError::new(Self::NAME, "a", a, "[.., M, K]").into());
        }
        let k = a.last();
        if b.rank() < 2 || b[b.rank() - 2] != k {
            let expected = format!("[.., {k}, N] for a {a}");
            return Err(ShapeError::new(Self::NAME, "b", b, expected).into());
        }
        let (batch_a, batch_b) = (batch(a), batch(b));
        let Ok(out) = rules::broadcast(Self::NAME, &batch_a, &batch_b) else {
            let expected = format!("batch axes {batch_b} that broadcast with {batch_a} of a {a}");
            return Err(ShapeError::new(Self::NAME, "b", b, expected).into());
        };
        let mut dims = out.to_vec();
        dims.extend([a[a.rank() - 2], b.last()]);
        Ok(dims.into())
    }

    fn host_forward<T: Float>(&self, inputs: &[Tensor], out: &Shape) -> Result<(Tensor, MatmulSaved)> {
        let (a, b) = (&inputs[0], &inputs[1]);
        let plan = Plan::new(a.shape(), b.shape(), out);
        let (xs, ys) = (a.as_slice::<T>()?, b.as_slice::<T>()?);
        let terms: Vec<Vec<_>> =
            plan.pairs.iter().map(|&(i, j)| vec![(plan.a(xs, i), plan.b(ys, j))]).collect();
        let mut y = vec![T::ZERO; out.numel()];
        products(&mut y, (plan.m, plan.n), &terms, plan.k, Beta::Overwrite);
        Ok((Tensor::from_vec(y, out.clone())?, MatmulSaved { a: a.clone(), b: b.clone() }))
    }

    fn host_backward<T: Float>(
        &self,
        saved: MatmulSaved,
        dy: Tensor,
        grads: &mut GradSinks<'_>,
    ) -> Result<()> {
        let plan = Plan::new(saved.a.shape(), saved.b.shape(), dy.shape());
        let (a, b, dy) = (saved.a.as_slice::<T>()?, saved.b.as_slice::<T>()?, dy.as_slice::<T>()?);
        if grads.wanted(0) {
            let mut terms = vec![Vec::new(); plan.batch_a];
            for (c, &(i, j)) in plan.pairs.iter().enumerate() {
                terms[i].push((plan.y(dy, c), plan.b(b, j).t()));
            }
            grads.write::<T>(0, |da, beta| products(da, (plan.m, plan.k), &terms, plan.n, beta))?;
        }
        if grads.wanted(1) {
            let mut terms = vec![Vec::new(); plan.batch_b];
            for (c, &(i, j)) in plan.pairs.iter().enumerate() {
                terms[j].push((plan.a(a, i).t(), plan.y(dy, c)));
            }
            grads.write::<T>(1, |db, beta| products(db, (plan.k, plan.n), &terms, plan.m, beta))?;
        }
        Ok(())
    }

    fn cuda_forward(&self, gpu: Gpu, inputs: &[Tensor], out: &Shape) -> Result<(Tensor, MatmulSaved)> {
        let (a, b) = (&inputs[0], &inputs[1]);
        let plan = Plan::new(a.shape(), b.shape(), out);
        let y = cuda::output(gpu, out, a.dtype())?;
        let terms: Vec<Vec<_>> = plan.pairs.iter().map(|&pair| vec![pair]).collect();
        let product = Product::new(plan.m, plan.n, plan.k);
        product.run_terms(gpu, (a, plan.m * plan.k), (b, plan.k * plan.n), &y, &terms, Beta::Overwrite)?;
        Ok((y, MatmulSaved { a: a.clone(), b: b.clone() }))
    }

    fn cuda_backward(
        &self,
        gpu: Gpu,
        saved: MatmulSaved,
        dy: Tensor,
        grads: &mut GradSinks<'_>,
    ) -> Result<()> {
        let MatmulSaved { a, b } = &saved;
        let plan = Plan::new(a.shape(), b.shape(), dy.shape());
        let (size_a, size_b, size_y) = (plan.m * plan.k, plan.k * plan.n, plan.m * plan.n);
        let mut terms_a = vec![Vec::new(); plan.batch_a];
        let mut terms_b = vec![Vec::new(); plan.batch_b];
        for (c, &(i, j)) in plan.pairs.iter().enumerate() {
            terms_a[i].push((c, j));
            terms_b[j].push((i, c));
        }
        grads.write_cuda(gpu, 0, |da, beta| {
            let product = Product::new(plan.m, plan.k, plan.n).b_transposed();
            product.run_terms(gpu, (&dy, size_y), (b, size_b), da, &terms_a, beta)
        })?;
        grads.write_cuda(gpu, 1, |db, beta| {
            let product = Product::new(plan.k, plan.n, plan.m).a_transposed();
            product.run_terms(gpu, (a, size_a), (&dy, size_y), db, &terms_b, beta)
        })
    }
}

/// The axes before the last two.
fn batch(shape: &Shape) -> Shape {
    shape[..shape.rank() - 2].into()
}

/// Which matrix of `a` meets which matrix of `b`.
struct Plan {
    m: usize,
    k: usize,
    n: usize,
    batch_a: usize,
    batch_b: usize,
    /// For each matrix of the result, in order: the matrices of `a` and `b`.
    pairs: Vec<(usize, usize)>,
}

impl Plan {
    fn new(a: &Shape, b: &Shape, out: &Shape) -> Plan {
        let (m, k, n) = (a[a.rank() - 2], a.last(), b.last());
        let (a, b, out) = (batch(a), batch(b), batch(out));
        if b.numel() == 1 {
            // One matrix `b`: the rows of all matrices `a` are one matrix.
            let m = a.numel() * m;
            return Plan { m, k, n, batch_a: 1, batch_b: 1, pairs: vec![(0, 0)] };
        }
        let pairs = (0..out.numel()).map(|c| (place(&a, &out, c), place(&b, &out, c))).collect();
        Plan { m, k, n, batch_a: a.numel(), batch_b: b.numel(), pairs }
    }

    fn a<'a, T: Float>(&self, a: &'a [T], i: usize) -> Mat<'a, T> {
        Mat::new(&a[i * self.m * self.k..][..self.m * self.k], self.m, self.k)
    }

    fn b<'a, T: Float>(&self, b: &'a [T], i: usize) -> Mat<'a, T> {
        Mat::new(&b[i * self.k * self.n..][..self.k * self.n], self.k, self.n)
    }

    fn y<'a, T: Float>(&self, y: &'a [T], i: usize) -> Mat<'a, T> {
        Mat::new(&y[i * self.m * self.n..][..self.m * self.n], self.m, self.n)
    }
}

/// The flat position in `input` of position `flat` in `out`, to which it broadcasts.
fn place(input: &Shape, out: &Shape, mut flat: usize) -> usize {
    let (mut place, mut stride) = (0, 1);
    for (&size, &own) in out.iter().rev().zip(input.iter().rev()) {
        if own != 1 {
            place += flat % size * stride;
        }
        stride *= own;
        flat /= size;
    }
    place
}

/// Multiply-adds of one result from which all threads share one product instead of each taking its own.
const LARGE_PRODUCT: usize = 1 << 24;

/// `c[i] = sum(a b)` over the pairs of `terms[i]`, added in order. `inner` is what a product sums over.
fn products<T: Float>(
    c: &mut [T],
    (rows, cols): (usize, usize),
    terms: &[Vec<(Mat<'_, T>, Mat<'_, T>)>],
    inner: usize,
    beta: Beta,
) {
    let beta_of = |term: usize| if term == 0 { beta } else { Beta::Accumulate };
    let size = rows * cols;
    if terms.iter().any(Vec::is_empty) {
        // Broadcast to no matrices at all.
        if beta == Beta::Overwrite {
            c.fill(T::ZERO);
        }
        return;
    }
    let work = size.saturating_mul(inner).saturating_mul(terms.first().map_or(0, Vec::len));
    if terms.len() == 1 || work >= LARGE_PRODUCT {
        for (c, terms) in c.chunks_mut(size.max(1)).zip(terms) {
            for (t, &(a, b)) in terms.iter().enumerate() {
                host::matmul(a, b, MatMut::new(c, rows, cols), beta_of(t));
            }
        }
        return;
    }
    host::par_row_groups(c, size, work, |i, c| {
        for (t, &(a, b)) in terms[i].iter().enumerate() {
            host::matmul_local(a, b, MatMut::new(c, rows, cols), T::ONE, beta_of(t));
        }
    });
}

/// Cases for gradient checks and device comparisons.
pub fn cases() -> Vec<Case> {
    let case =
        |a: &[usize], b: &[usize]| Case::normal(format!("{a:?} {b:?}"), &[a, b], |v| matmul(&v[0], &v[1]));
    vec![
        case(&[1, 1], &[1, 1]),
        case(&[31, 33], &[33, 7]),
        case(&[2, 3, 4, 5], &[2, 3, 5, 7]),
        case(&[2, 3, 4, 5], &[5, 7]),
        case(&[4, 5], &[3, 5, 2]),
        case(&[4, 5], &[1, 1, 5, 2]),
        case(&[2, 1, 3, 5], &[3, 5, 1]),
        case(&[3, 1, 1, 4], &[1, 2, 4, 3]),
        case(&[2, 2, 5], &[1, 5, 3]),
        case(&[40, 31, 33], &[40, 33, 31]),
        case(&[2, 3, 2, 2, 3], &[3, 1, 3, 2]),
        case(&[3, 0], &[0, 2]),
        case(&[0, 2, 3], &[3, 4]),
        case(&[2, 3], &[0, 3, 4]),
        case(&[2, 0, 3], &[2, 3, 4]),
        Case::normal("squared", &[&[2, 5, 5]], |v| matmul(&v[0], &v[0])),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::shared::arena_check;

    #[test]
    fn shape_rule() {
        let rule = |a: &[usize], b: &[usize]| Matmul.out_shape(&[&a.into(), &b.into()]);
        assert_eq!(rule(&[2, 1, 3, 4], &[5, 4, 6]).unwrap().dims(), &[2, 5, 3, 6]);
        let message = |a: &[usize], b: &[usize]| rule(a, b).unwrap_err().to_string();
        assert_eq!(message(&[3], &[3, 4]), "matmul: a has shape [3], expected [.., M, K]");
        assert_eq!(message(&[2, 3], &[3]), "matmul: b has shape [3], expected [.., 3, N] for a [2, 3]");
        assert_eq!(message(&[2, 3], &[4, 3]), "matmul: b has shape [4, 3], expected [.., 3, N] for a [2, 3]");
        assert_eq!(
            message(&[2, 5, 3], &[4, 3, 7]),
            "matmul: b has shape [4, 3, 7], expected batch axes [4] that broadcast with [2] of a [2, 5, 3]"
        );
    }

    #[test]
    fn gradcheck() {
        crate::testing::check_op("matmul").unwrap();
    }

    #[test]
    fn arena() {
        arena_check::check(&[&[2, 3, 5], &[5, 7]], |v| matmul(&v[0], &v[1]));
        arena_check::check(&[&[3, 5], &[4, 5, 2]], |v| matmul(&v[0], &v[1]));
        arena_check::check(&[&[3, 5], &[0, 5, 2]], |v| matmul(&v[0], &v[1]));
        arena_check::check(&[&[2, 1, 3, 5], &[3, 5, 2]], |v| matmul(&v[0], &v[1]));
    }
}
