//! Our own matrix product for Hopper, where it was measured to be faster than the library's (decision 0018).

use crate::kernel::{Arg, Kernel, Launch, Tiles};
use crate::matmul::{Matmul, MatrixType, Place};
use crate::{CudaError, Gpu, GpuInfo, Result, kernel};

const PRODUCT: Kernel = kernel!("product_wgmma", "mma", "hopper");

/// Which products run on our own kernel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OwnProducts {
    /// Those that were measured to be faster there.
    #[default]
    Measured,
    /// None: all go to cuBLASLt.
    Never,
}

/// How our own kernel divides a product: each block computes `64 * height * workers` rows of `columns` columns, and
/// `down` such tiles below each other share what they read of the second matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProductTile {
    /// Warpgroups of a block that compute.
    pub workers: usize,
    /// Times 64 rows of each.
    pub height: usize,
    /// Columns of a block: 48, 64, 80, 88, 96, 128, 160, 176 or 192.
    pub columns: usize,
    /// Tiles of a cluster.
    pub down: usize,
}

/// Shared memory of a multiprocessor, and of a block where two are to share one.
const SHARED_BYTES: usize = 227 << 10;
const HALF_SHARED_BYTES: usize = 113 << 10;
/// Shared memory of a block beside its tiles: barriers, and what the driver keeps.
const SET_ASIDE: usize = 2048;
/// Most steps of 64 summed elements under way.
const MOST_STAGES: usize = 8;

/// A product that is faster on our own kernel, and with which tile.
struct Measured {
    trans_b: bool,
    m: usize,
    n: usize,
    k: usize,
    tile: ProductTile,
}

/// Least part of the measured rows for which a choice holds.
const LEAST_PART: f64 = 0.75;

const fn x_w_transposed([m, n, k]: [usize; 3], tile: ProductTile) -> Measured {
    Measured { trans_b: true, m, n, k, tile }
}

const fn dy_w([m, n, k]: [usize; 3], tile: ProductTile) -> Measured {
    Measured { trans_b: false, m, n, k, tile }
}

const fn tile(workers: usize, height: usize, columns: usize) -> ProductTile {
    ProductTile { workers, height, columns, down: 1 }
}

const fn pairs_of(tile: ProductTile) -> ProductTile {
    ProductTile { down: 2, ..tile }
}

/// Chosen on an H200, in chains of such a product and a kernel of elements in a CUDA graph (docs/log.md).
const MEASURED: &[Measured] = &[
    x_w_transposed([512, 1280, 768], tile(1, 1, 80)),
    x_w_transposed([512, 768, 768], tile(1, 1, 64)),
    x_w_transposed([512, 2816, 768], pairs_of(tile(1, 1, 176))),
    x_w_transposed([512, 768, 1408], tile(1, 1, 64)),
    dy_w([512, 768, 1280], tile(1, 1, 64)),
    dy_w([512, 768, 768], tile(1, 1, 64)),
    dy_w([512, 1408, 768], tile(2, 1, 64)),
    x_w_transposed([1024, 1280, 768], tile(2, 1, 80)),
    x_w_transposed([1024, 768, 768], tile(2, 1, 64)),
    x_w_transposed([1024, 2816, 768], pairs_of(tile(2, 1, 176))),
    x_w_transposed([1024, 768, 1408], tile(2, 1, 64)),
    dy_w([1024, 768, 1280], tile(1, 1, 128)),
    dy_w([1024, 768, 768], tile(1, 1, 128)),
    dy_w([1024, 1408, 768], tile(2, 1, 128)),
    x_w_transposed([2048, 1280, 768], tile(2, 1, 160)),
    x_w_transposed([2048, 768, 768], tile(2, 1, 96)),
    x_w_transposed([2048, 768, 1408], tile(2, 1, 96)),
    dy_w([2048, 768, 1280], tile(1, 1, 192)),
    dy_w([2048, 768, 768], tile(1, 1, 192)),
    dy_w([2048, 768, 2816], tile(1, 1, 192)),
    dy_w([2048, 1408, 768], pairs_of(tile(2, 1, 176))),
    x_w_transposed([4096, 1280, 768], tile(2, 2, 160)),
    x_w_transposed([4096, 768, 768], tile(2, 1, 96)),
    x_w_transposed([4096, 768, 1408], pairs_of(tile(2, 1, 192))),
    dy_w([4096, 768, 1280], pairs_of(tile(2, 1, 192))),
    dy_w([4096, 768, 768], pairs_of(tile(2, 1, 192))),
    dy_w([4096, 768, 2816], pairs_of(tile(2, 1, 192))),
    dy_w([4096, 1408, 768], pairs_of(tile(2, 2, 176))),
];

/// The tile of a product that is faster on our own kernel, on a card with so many multiprocessors.
fn choice(multiprocessors: u32, spec: &Matmul) -> Option<ProductTile> {
    // Tiles are sized to fill this many at once.
    if multiprocessors != 132 {
        return None;
    }
    let fits = |row: &&Measured| {
        let rows = row.m as f64 * LEAST_PART..=row.m as f64;
        (row.trans_b, row.n, row.k) == (spec.trans_b, spec.n, spec.k) && rows.contains(&(spec.m as f64))
    };
    MEASURED.iter().find(fits).map(|row| row.tile)
}

impl ProductTile {
    /// Every tile that some product runs with, with whether its second matrix is stored transposed.
    pub fn in_use() -> Vec<(ProductTile, bool)> {
        let mut all: Vec<(ProductTile, bool)> = Vec::new();
        for row in MEASURED {
            if !all.contains(&(row.tile, row.trans_b)) {
                all.push((row.tile, row.trans_b));
            }
        }
        all
    }

    /// Rows of a block.
    pub fn rows(&self) -> usize {
        64 * self.height * self.workers
    }

    /// Threads that copy, and the registers of a computing and of a copying thread where they differ from what a launch
    /// gives: large tiles need more than their share.
    fn copiers(&self) -> (usize, [usize; 2]) {
        if self.height * self.columns >= 320 { (128, [240, 24]) } else { (32, [0, 0]) }
    }

    fn step_bytes(&self, trans_b: bool) -> usize {
        128 * (self.rows() + if trans_b { self.columns } else { self.columns.next_multiple_of(64) })
    }

    fn blocks(&self, m: usize, n: usize) -> usize {
        m.div_ceil(self.rows() * self.down) * n.div_ceil(self.columns) * self.down
    }

    /// Steps under way: as many as fit, for two blocks to a multiprocessor where there are more than multiprocessors
    /// and their registers allow it.
    fn stages(&self, spec: &Matmul, multiprocessors: usize) -> usize {
        let two = self.blocks(spec.m, spec.n) > multiprocessors
            && self.height == 1
            && self.workers <= 2
            && self.columns <= 160;
        let room = if two { HALF_SHARED_BYTES } else { SHARED_BYTES } - SET_ASIDE;
        (room / self.step_bytes(spec.trans_b)).min(MOST_STAGES).min(spec.k.div_ceil(64)).max(2)
    }

    fn shared_bytes(&self, trans_b: bool, stages: usize) -> usize {
        1024 + (stages * self.step_bytes(trans_b)).max(self.rows() * (2 * self.columns + 16))
    }

    /// Whether the next launch may begin while the results are written: where that takes long, its blocks would all end
    /// up on the multiprocessors that are done first.
    fn lets_next(&self) -> bool {
        self.height == 1 && self.columns <= 160
    }

    /// Whether the kernel knows such a tile.
    fn is_known(&self, trans_b: bool) -> bool {
        let rows_of_b = if trans_b { self.columns } else { 64 };
        matches!(self.columns, 48 | 64 | 80 | 88 | 96 | 128 | 160 | 176 | 192)
            && matches!((self.workers, self.height), (1..=3, 1) | (2, 2))
            && self.height * self.columns <= 352
            && matches!(self.down, 1..=8)
            && rows_of_b.is_multiple_of(8 * self.down)
    }
}

/// Why the kernel cannot compute a product on a card; nothing if it can.
fn refusal(info: &GpuInfo, spec: &Matmul, offsets: [usize; 3]) -> Option<&'static str> {
    let plain = spec.batch == 1 && !spec.trans_a && spec.alpha == 1.0 && spec.beta == 0.0;
    let reasons = [
        (info.capability != (9, 0), "the card is not of compute capability 9.0"),
        (spec.ab != MatrixType::Bf16 || spec.c != MatrixType::Bf16, "not all matrices are bf16"),
        (!plain, "it is batched, scaled, added to its result, or its first matrix is transposed"),
        (!spec.n.is_multiple_of(8) || !spec.k.is_multiple_of(8), "its columns or sums are no multiple of 8"),
        (offsets.iter().any(|offset| !offset.is_multiple_of(16)), "a matrix is not aligned to 16 bytes"),
        (spec.m.max(spec.n).max(spec.k) > i32::MAX as usize / 2, "it is too large"),
    ];
    reasons.into_iter().find_map(|(holds, reason)| holds.then_some(reason))
}

/// A row-major matrix, copied in boxes of so many rows.
fn matrix(place: Place<'_>, rows: usize, columns: usize, box_rows: usize) -> Arg<'_> {
    Arg::Tiles(Tiles {
        buffer: place.buffer,
        offset_bytes: place.offset_bytes,
        shape: [1, rows, 1, columns],
        token_stride: columns,
        box_tokens: box_rows,
    })
}

impl Gpu {
    /// Which products run on our own kernel from now on: they differ in the order of their sums, so in their last bits.
    pub fn use_own_products(&self, which: OwnProducts) {
        self.0.library_products.store(which == OwnProducts::Never, std::sync::atomic::Ordering::Relaxed);
    }

    /// The tile that a product runs with on our own kernel; nothing where the library is faster, or nobody has measured.
    pub(crate) fn own_tile(&self, spec: &Matmul, offsets: [usize; 3]) -> Option<ProductTile> {
        if self.0.library_products.load(std::sync::atomic::Ordering::Relaxed)
            || refusal(self.info(), spec, offsets).is_some()
        {
            return None;
        }
        choice(self.info().multiprocessors, spec)
    }

    /// Enqueues a product on our own kernel, with this tile.
    ///
    /// # Errors
    /// A product or a tile that the kernel does not know, a matrix that reaches past its buffer, a driver error.
    pub fn matmul_in_tiles(&self, spec: &Matmul, tile: ProductTile, [a, b, c]: [Place<'_>; 3]) -> Result<()> {
        let refused = |reason: String| {
            Err(CudaError::Unsupported { what: format!("product_wgmma for product {spec}"), reason })
        };
        if let Some(reason) = refusal(self.info(), spec, [a, b, c].map(|place| place.offset_bytes)) {
            return refused(reason.into());
        }
        if !tile.is_known(spec.trans_b) || spec.m * spec.n * spec.k == 0 {
            return refused(format!("{tile:?}"));
        }
        c.buffer.check(c.offset_bytes, 2 * spec.m * spec.n)?;
        let stages = tile.stages(spec, self.info().multiprocessors as usize);
        let (copiers, [share, spare]) = tile.copiers();
        let blocks = tile.blocks(spec.m, spec.n);
        let Ok(grid) = u32::try_from(blocks) else { return refused(format!("{blocks} blocks")) };
        let (b_rows, b_columns, b_box) = match spec.trans_b {
            true => (spec.n, spec.k, tile.columns / tile.down),
            false => (spec.k, spec.n, 64 / tile.down),
        };
        let launch = Launch::new(&PRODUCT, [grid, 1, 1], [(128 * tile.workers + copiers) as u32, 1, 1])
            .shared_bytes(tile.shared_bytes(spec.trans_b, stages))
            .define("WORKERS", tile.workers)
            .define("HEIGHT", tile.height)
            .define("COLS", tile.columns)
            .define("DOWN", tile.down)
            .define("STAGES", stages)
            .define("TRANS_B", u8::from(spec.trans_b))
            .define("LETS_NEXT", u8::from(tile.lets_next()))
            .define("COPIERS", copiers)
            .define("SHARE", share)
            .define("SPARE", spare)
            .about(format!("{spec}, product_wgmma"))
            .computes(spec.flops())
            .moves(spec.moved_bytes() as usize)
            .arg(matrix(a, spec.m, spec.k, tile.rows()))
            .arg(matrix(b, b_rows, b_columns, b_box))
            .arg(Arg::Buffer(c.buffer, c.offset_bytes))
            .arg(Arg::I32(spec.m as i32))
            .arg(Arg::I32(spec.n as i32))
            .arg(Arg::I32(spec.k as i32));
        self.launch(launch)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::GpuOptions;

    /// The kernels that a product launches on a card of this capability.
    fn launched(
        capability: (u32, u32),
        spec: &Matmul,
        offset_bytes: usize,
        which: OwnProducts,
    ) -> Vec<&'static str> {
        let gpu = Gpu::dry(capability, &GpuOptions::default());
        gpu.use_own_products(which);
        let buffer = gpu.alloc(64 << 20).unwrap();
        let at = |offset_bytes| Place { buffer: &buffer, offset_bytes };
        gpu.matmul(spec, at(0), at(offset_bytes), at(0)).unwrap();
        gpu.launches().into_keys().collect()
    }

    #[test]
    fn measured_products_run_on_the_own_kernel_and_all_else_on_the_library() {
        let (here, library) = (vec!["product_wgmma"], vec!["matmul"]);
        for row in MEASURED {
            let of = |m| Matmul::plain([m, row.n, row.k], row.trans_b);
            let run = |spec: &Matmul| launched((9, 0), spec, 0, OwnProducts::Measured);
            assert_eq!(run(&of(row.m)), here);
            assert_eq!(run(&of(row.m - 100)), here, "a few rows less");
            assert_eq!(run(&of(row.m + 1)), library, "a row more than was measured");
            assert_eq!(run(&of(row.m * 5 / 8)), library, "far fewer rows");
            assert_eq!(launched((9, 0), &of(row.m), 0, OwnProducts::Never), library);
            assert_eq!(launched((9, 0), &of(row.m), 2, OwnProducts::Measured), library, "odd address");
            assert_eq!(launched((10, 0), &of(row.m), 0, OwnProducts::Measured), library);
            let others = [
                Matmul { beta: 1.0, ..of(row.m) },
                Matmul { alpha: 0.5, ..of(row.m) },
                Matmul { c: MatrixType::F32, ..of(row.m) },
                Matmul { ab: MatrixType::F32, c: MatrixType::F32, ..of(row.m) },
                Matmul { trans_a: true, ..of(row.m) },
                Matmul { n: row.n + 8, ..of(row.m) },
                Matmul { trans_b: !row.trans_b, n: row.k + 64, ..of(row.m) },
            ];
            for other in others {
                assert_eq!(run(&other), library, "{other}");
            }
        }
    }

    #[test]
    fn no_product_is_measured_twice() {
        for (i, row) in MEASURED.iter().enumerate() {
            let same = |other: &&Measured| {
                (other.trans_b, other.m, other.n, other.k) == (row.trans_b, row.m, row.n, row.k)
            };
            assert_eq!(MEASURED.iter().skip(i).filter(same).count(), 1, "{} {} {}", row.m, row.n, row.k);
        }
    }

    #[test]
    fn every_tile_fits_shared_memory_and_registers() {
        for row in MEASURED {
            let (tile, spec) = (row.tile, Matmul::plain([row.m, row.n, row.k], row.trans_b));
            assert!(tile.is_known(row.trans_b), "{tile:?}");
            let stages = tile.stages(&spec, 132);
            let barriers = 16 * stages;
            let taken = tile.shared_bytes(row.trans_b, stages) + barriers + 1024;
            assert!(taken <= 228 << 10, "{tile:?} takes {taken} bytes");
            let (copiers, [share, spare]) = tile.copiers();
            let threads = 128 * tile.workers + copiers;
            // What a launch gives a thread, of 65536 for all; more would be waited for without end.
            let given = 65536 / threads / 8 * 8 * threads;
            assert!(128 * tile.workers * share + copiers * spare <= given, "{tile:?}");
            assert!(share == 0 || copiers == 128);
            // Sums take a register each, and some forty hold addresses.
            let registers = if share == 0 { 65536 / threads } else { share };
            assert!(tile.height * tile.columns / 2 + 40 <= registers, "{tile:?}");
        }
    }

    #[test]
    fn what_the_kernel_does_not_know_is_refused_by_name() {
        let gpu = Gpu::dry((9, 0), &GpuOptions::default());
        let buffer = gpu.alloc(1 << 20).unwrap();
        let at = |offset_bytes| Place { buffer: &buffer, offset_bytes };
        let run = |spec: &Matmul, tile: ProductTile, offset: usize| {
            gpu.matmul_in_tiles(spec, tile, [at(offset), at(0), at(0)])
        };
        let good = Matmul::plain([130, 200, 72], true);
        run(&good, tile(1, 1, 64), 0).unwrap();
        run(&good, tile(2, 2, 176), 16).unwrap();
        let refused = |spec: &Matmul, tile: ProductTile, offset: usize| {
            run(spec, tile, offset).unwrap_err().to_string()
        };
        let odd = Matmul { k: 71, ..good };
        assert!(refused(&odd, tile(1, 1, 64), 0).contains("no multiple of 8"));
        assert!(refused(&good, tile(1, 1, 64), 2).contains("not aligned to 16 bytes"));
        assert!(refused(&Matmul { beta: 1.0, ..good }, tile(1, 1, 64), 0).contains("added to its result"));
        assert!(refused(&good, tile(1, 1, 72), 0).contains("columns: 72"));
        assert!(refused(&good, tile(4, 1, 64), 0).contains("workers: 4"));
        assert!(refused(&good, ProductTile { down: 4, ..tile(1, 1, 80) }, 0).contains("down: 4"));
        let long = Matmul { m: 10_000, ..good };
        assert!(refused(&long, tile(1, 1, 64), 0).contains("bytes"), "past the end of its buffer");
        let ampere = Gpu::dry((8, 0), &GpuOptions::default());
        let there = ampere.alloc(1 << 20).unwrap();
        let at = Place { buffer: &there, offset_bytes: 0 };
        let message = ampere.matmul_in_tiles(&good, tile(1, 1, 64), [at; 3]).unwrap_err().to_string();
        assert!(message.contains("compute capability 9.0"), "{message}");
    }
}
