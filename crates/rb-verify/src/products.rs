//! Our own kernel for matrix products on a GPU, beside the host, in every tile that it is used with.

use half::bf16;
use rb_cuda::{Buffer, Gpu, GpuOptions, Matmul, Place, ProductTile, Unit};
use rb_tensor::{Rng, TensorError};

use crate::{Check, Result};

/// Most that the error may be of what rounding the exact result, and summing in fp32, gives.
const BUDGET: f64 = 2.0;

/// The kernels of the comparison on a card of this capability, found on a dry run.
pub(crate) fn product_units(capability: (u32, u32)) -> Vec<Unit> {
    let gpu = Gpu::dry(capability, &GpuOptions::default());
    for (tile, trans_b) in ProductTile::in_use() {
        for spec in specs(tile, trans_b) {
            // A card without this kernel has no units of it.
            let _ = enqueue(gpu, &spec, tile);
        }
    }
    gpu.units()
}

/// Each tile with products that end inside it and beyond it, in their rows, columns and sums.
pub(crate) fn verify_products(gpu: Gpu, seed: u64) -> Result<Check> {
    let name = "device: own products";
    if gpu.info().capability != (9, 0) {
        return Ok(Check::new(name, true, "none: they are for compute capability 9.0"));
    }
    let before = gpu.launches().get("product_wgmma").copied().unwrap_or(0);
    let (mut products, mut worst, mut wrong) = (0, 0.0f64, Vec::new());
    for (tile, trans_b) in ProductTile::in_use() {
        for (at, spec) in specs(tile, trans_b).iter().enumerate() {
            let found = compare(gpu, spec, tile, &Rng::new(seed).fork(&at.to_string()))?;
            products += 1;
            worst = worst.max(found.part);
            if !found.good() {
                wrong.push(format!("{spec} with {tile:?}: {found:?}"));
            }
        }
    }
    let launched = gpu.launches().get("product_wgmma").copied().unwrap_or(0) - before;
    let ran = launched == 2 * products;
    let detail = match wrong.first() {
        Some(first) => format!("{} of {products} products are wrong, first {first}", wrong.len()),
        None => format!("{products} products, {launched} launches, at most {worst:.2} of the budget"),
    };
    Ok(Check::new(name, wrong.is_empty() && ran && products > 0, detail))
}

/// Sizes around the tile's, and sums shorter and longer than what it holds at once.
fn specs(tile: ProductTile, trans_b: bool) -> Vec<Matmul> {
    let (rows, columns) = (tile.rows(), tile.columns);
    let sizes = [(1, 8, 8), (rows + 1, columns + 8, 72), (rows - 7, 2 * columns - 8, 264), (130, 200, 776)];
    sizes.map(|(m, n, k)| Matmul::plain([m, n, k], trans_b)).to_vec()
}

/// Launches a product whose operands nobody has written.
fn enqueue(gpu: Gpu, spec: &Matmul, tile: ProductTile) -> rb_cuda::Result<()> {
    let buffers = [spec.m * spec.k, spec.k * spec.n, spec.m * spec.n].map(|len| gpu.alloc(2 * len));
    let [a, b, c] = buffers;
    let (a, b, c) = (a?, b?, c?);
    gpu.matmul_in_tiles(spec, tile, [&a, &b, &c].map(at_start))
}

fn at_start(buffer: &Buffer) -> Place<'_> {
    Place { buffer, offset_bytes: 0 }
}

#[derive(Debug)]
struct Found {
    /// Error as a part of the budget.
    part: f64,
    /// Whether a second run gives the same bits.
    repeats: bool,
    /// Whether memory behind the result is as before.
    stays_inside: bool,
}

impl Found {
    fn good(&self) -> bool {
        self.part <= 1.0 && self.repeats && self.stays_inside
    }
}

/// Elements behind the result that must stay as they are.
const BEHIND: usize = 64;

fn compare(gpu: Gpu, spec: &Matmul, tile: ProductTile, rng: &Rng) -> Result<Found> {
    let (m, n, k) = (spec.m, spec.n, spec.k);
    let values = |of: &str, len: usize| -> Vec<bf16> {
        let mut rng = rng.fork(of);
        (0..len).map(|_| bf16::from_f64(rng.normal())).collect()
    };
    let (a, b) = (values("a", m * k), values("b", k * n));
    let run = || -> rb_cuda::Result<Vec<bf16>> {
        let put = |values: &[bf16]| {
            let buffer = gpu.alloc(2 * values.len())?;
            let bytes: Vec<u8> = values.iter().flat_map(|x| x.to_bits().to_le_bytes()).collect();
            gpu.upload(&buffer, 0, &bytes)?;
            Ok::<_, rb_cuda::CudaError>(buffer)
        };
        let (on_a, on_b, on_c) = (put(&a)?, put(&b)?, put(&vec![bf16::NAN; m * n + BEHIND])?);
        gpu.matmul_in_tiles(spec, tile, [&on_a, &on_b, &on_c].map(at_start))?;
        let mut bytes = vec![0u8; 2 * (m * n + BEHIND)];
        gpu.download(&on_c, 0, &mut bytes)?;
        Ok(bytes.chunks_exact(2).map(|b| bf16::from_bits(u16::from_le_bytes([b[0], b[1]]))).collect())
    };
    let (first, second) = (run().map_err(TensorError::from)?, run().map_err(TensorError::from)?);
    let bits = |values: &[bf16]| values.iter().map(|x| x.to_bits()).collect::<Vec<u16>>();
    Ok(Found {
        part: part_of_budget(spec, &a, &b, &first),
        repeats: bits(&first) == bits(&second),
        stays_inside: first[m * n..].iter().all(|x| x.to_bits() == bf16::NAN.to_bits()),
    })
}

/// Error of the first elements of `found`, as a part of what is allowed: NaN counts as infinite.
fn part_of_budget(spec: &Matmul, a: &[bf16], b: &[bf16], found: &[bf16]) -> f64 {
    let (mut error, mut naive) = (0.0f64, 0.0f64);
    for i in 0..spec.m {
        for j in 0..spec.n {
            let (mut exact, mut plain) = (0.0f64, 0.0f32);
            for l in 0..spec.k {
                let x = a[i * spec.k + l].to_f32();
                let y = b[if spec.trans_b { j * spec.k + l } else { l * spec.n + j }].to_f32();
                exact += f64::from(x) * f64::from(y);
                plain += x * y;
            }
            error += (found[i * spec.n + j].to_f64() - exact).powi(2);
            naive += (bf16::from_f32(plain).to_f64() - exact).powi(2);
        }
    }
    let part = (error / naive.max(f64::MIN_POSITIVE)).sqrt() / BUDGET;
    if part.is_nan() { f64::INFINITY } else { part }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernel_is_compiled_for_hopper_in_every_tile() {
        let units = product_units((9, 0));
        assert!(
            units.len() >= ProductTile::in_use().len() && units.iter().all(|u| u.name == "product_wgmma")
        );
        assert!(product_units((8, 0)).is_empty() && product_units((12, 0)).is_empty());
    }

    #[test]
    fn a_result_that_is_a_little_wrong_is_noticed() {
        let (tile, _) = ProductTile::in_use()[0];
        for trans_b in [false, true] {
            let spec = specs(tile, trans_b)[1];
            let mut rng = Rng::new(3);
            let mut values =
                |len: usize| -> Vec<bf16> { (0..len).map(|_| bf16::from_f64(rng.normal())).collect() };
            let (a, b) = (values(spec.m * spec.k), values(spec.k * spec.n));
            let mut right = vec![bf16::ZERO; spec.m * spec.n];
            for (at, out) in right.iter_mut().enumerate() {
                let (i, j) = (at / spec.n, at % spec.n);
                let of_b = |l: usize| if trans_b { b[j * spec.k + l] } else { b[l * spec.n + j] };
                *out =
                    bf16::from_f32((0..spec.k).map(|l| a[i * spec.k + l].to_f32() * of_b(l).to_f32()).sum());
            }
            let part = |found: &[bf16]| part_of_budget(&spec, &a, &b, found);
            assert!((part(&right) - 0.5).abs() < 0.01, "{}", part(&right));
            let mut swapped = right.clone();
            swapped.swap(0, 1);
            let mut unwritten = right.clone();
            unwritten[spec.m * spec.n - 1] = bf16::NAN;
            for wrong in [swapped, unwritten] {
                assert!(part(&wrong) > 1.0, "{}", part(&wrong));
            }
        }
    }
}
