//! Small matrix products whose right factor is packed in panels: what attention multiplies with inside a task.
//!
//! Operands are tens to hundreds of rows, so a general product would spend its time on packing them again at
//! each call. Here the caller packs a factor once and uses it for every block of queries.

use std::array::from_fn;
use std::ops::Range;

use crate::Float;

/// Columns of a panel: two AVX2 registers of f32.
pub const WIDTH: usize = 16;

/// Rows of a tile: with two registers a row, eight sums are in flight, as many as two multiply-add units of
/// latency 4 need.
pub const HEIGHT: usize = 4;

/// A matrix `[rows, columns]` in panels of [`WIDTH`] columns, each row-major; the last is filled with zeros.
pub struct Panels<T> {
    rows: usize,
    data: Vec<[T; WIDTH]>,
}

impl<T: Float> Panels<T> {
    /// Zeros.
    pub fn zeros(rows: usize, columns: usize) -> Self {
        Panels { rows, data: vec![[T::ZERO; WIDTH]; rows * columns.div_ceil(WIDTH)] }
    }

    /// A matrix whose columns are given, `rows` elements each.
    pub fn from_columns<'a>(rows: usize, columns: usize, column: impl Fn(usize) -> &'a [T]) -> Self
    where
        T: 'a,
    {
        let mut panels = Panels::zeros(rows, columns);
        if rows == 0 {
            return panels;
        }
        for (first, panel) in (0..columns).step_by(WIDTH).zip(panels.data.chunks_exact_mut(rows)) {
            if first + WIDTH <= columns {
                let columns: [&[T]; WIDTH] = from_fn(|c| &column(first + c)[..rows]);
                panel.iter_mut().enumerate().for_each(|(r, row)| *row = from_fn(|c| columns[c][r]));
                continue;
            }
            for c in first..columns {
                panel.iter_mut().zip(column(c)).for_each(|(row, &x)| row[c % WIDTH] = x);
            }
        }
        panels
    }

    /// Writes the first elements of a row.
    pub fn set_row(&mut self, row: usize, values: &[T]) {
        let (full, tail) = values.as_chunks::<WIDTH>();
        let mut rows = self.data.iter_mut().skip(row).step_by(self.rows.max(1));
        // The tail's length is not known when this is compiled, so it is the slower copy.
        full.iter().zip(&mut rows).for_each(|(values, row)| *row = *values);
        if let Some(row) = rows.next() {
            row[..tail.len()].copy_from_slice(tail);
        }
    }

    fn panel(&self, panel: usize, rows: Range<usize>) -> &[[T; WIDTH]] {
        &self.data[panel * self.rows..][rows]
    }
}

/// A row-major matrix: its values and the distance of its rows.
pub type Rows<'a, T> = (&'a [T], usize);

/// `c = a b`: `m` rows of `a` (a multiple of [`HEIGHT`]) by rows `inner` and panels `panels` of `b`. The first of
/// these panels goes to column 0 of `c`.
pub fn product<T: Float>(
    (a, a_stride): Rows<'_, T>,
    m: usize,
    b: &Panels<T>,
    inner: Range<usize>,
    panels: Range<usize>,
    (c, c_stride): (&mut [T], usize),
) {
    let k = inner.len();
    for (column, panel) in panels.enumerate() {
        let b = b.panel(panel, inner.clone());
        for i in (0..m).step_by(HEIGHT) {
            let rows: [&[T]; HEIGHT] = from_fn(|r| &a[(i + r) * a_stride..][..k]);
            let sums = tile((0..k).map(|k| from_fn(|r| rows[r][k])), b);
            for (r, sum) in sums.iter().enumerate() {
                c[(i + r) * c_stride + column * WIDTH..][..WIDTH].copy_from_slice(sum);
            }
        }
    }
}

/// `c += a^T b`: the first `m` columns of `a` (a multiple of [`HEIGHT`]) by the first `inner` rows and all panels
/// of `b`.
pub fn add_transposed_product<T: Float>(
    (a, a_stride): Rows<'_, T>,
    m: usize,
    b: &Panels<T>,
    inner: usize,
    (c, c_stride): (&mut [T], usize),
) {
    let panels = b.data.len() / b.rows.max(1);
    for i in (0..m).step_by(HEIGHT) {
        for panel in 0..panels {
            let b = b.panel(panel, 0..inner);
            let columns =
                a[i..].chunks(a_stride).map(|a| a.first_chunk().copied().unwrap_or([T::ZERO; HEIGHT]));
            let sums = tile(columns, b);
            for (r, sum) in sums.iter().enumerate() {
                let c = &mut c[(i + r) * c_stride + panel * WIDTH..][..WIDTH];
                c.iter_mut().zip(sum).for_each(|(c, &s)| *c += s);
            }
        }
    }
}

/// The sum over `k` of column `a[k]` times row `b[k]`, kept in registers.
#[inline(always)]
fn tile<T: Float>(a: impl Iterator<Item = [T; HEIGHT]>, b: &[[T; WIDTH]]) -> [[T; WIDTH]; HEIGHT] {
    let mut sums = [[T::ZERO; WIDTH]; HEIGHT];
    for (b, a) in b.iter().zip(a) {
        for r in 0..HEIGHT {
            for w in 0..WIDTH {
                sums[r][w] = a[r].mul_add(b[w], sums[r][w]);
            }
        }
    }
    sums
}

#[cfg(test)]
mod tests {
    use super::*;
    use rb_tensor::Rng;

    fn random(n: usize, rng: &mut Rng) -> Vec<f64> {
        (0..n).map(|_| rng.normal()).collect()
    }

    #[test]
    fn products_match_the_triple_loop() {
        let mut rng = Rng::new(4);
        for (m, k, n) in [(4, 1, 1), (8, 5, 16), (12, 33, 37), (4, 7, 64)] {
            let (a, b) = (random(m * (k + 3), &mut rng), random(k * n, &mut rng));
            let mut by_rows = Panels::zeros(k, n);
            (0..k).for_each(|r| by_rows.set_row(r, &b[r * n..][..n]));
            let columns: Vec<Vec<f64>> = (0..n).map(|c| (0..k).map(|r| b[r * n + c]).collect()).collect();
            let by_columns = Panels::from_columns(k, n, |c| &columns[c]);
            assert_eq!(by_rows.data, by_columns.data);
            // From the second row and the last panel of b on.
            for (inner, panels) in
                [(0..k, 0..n.div_ceil(WIDTH)), (k / 2..k, n.div_ceil(WIDTH) - 1..n.div_ceil(WIDTH))]
            {
                let stride = panels.len() * WIDTH + 1;
                let mut c = random(m * stride, &mut rng);
                product((&a, k + 3), m, &by_rows, inner.clone(), panels.clone(), (&mut c, stride));
                for i in 0..m {
                    for j in panels.start * WIDTH..n.min(panels.end * WIDTH) {
                        let want: f64 =
                            inner.clone().map(|l| a[i * (k + 3) + l - inner.start] * b[l * n + j]).sum();
                        let got = c[i * stride + j - panels.start * WIDTH];
                        assert!((got - want).abs() < 1e-12, "{got} {want}");
                    }
                }
            }
        }
    }

    #[test]
    fn transposed_products_add() {
        let mut rng = Rng::new(5);
        for (m, k, n) in [(4, 1, 1), (8, 5, 16), (12, 33, 37)] {
            let (a, b) = (random(k * (m + 2), &mut rng), random(k * n, &mut rng));
            let mut panels = Panels::zeros(k + 2, n);
            (0..k).for_each(|r| panels.set_row(r, &b[r * n..][..n]));
            let stride = n.next_multiple_of(WIDTH);
            let old = random(m * stride, &mut rng);
            let mut c = old.clone();
            add_transposed_product((&a, m + 2), m, &panels, k, (&mut c, stride));
            for i in 0..m {
                for j in 0..n {
                    let want: f64 = (0..k).map(|l| a[l * (m + 2) + i] * b[l * n + j]).sum();
                    assert!((c[i * stride + j] - old[i * stride + j] - want).abs() < 1e-12);
                }
            }
        }
    }
}
