//! Gradients that are sums over the rows of partial results, taken for many parameters at once.
//!
//! A norm's backward leaves partial sums of the gradient of its weight. To add them takes a microsecond and launching
//! the kernel takes longer; so they wait in one buffer until all parameters of their size have theirs.

use rb_cuda::{Arg, Gpu, Kernel, Launch, kernel};
use rb_tensor::{Arena, DType, Tensor};

use crate::params::ALIGN;
use crate::{Beta, Result, cuda};

const COLUMN_SUM_MANY: Kernel = kernel!("column_sum_many");

/// Sums of one launch: what its arguments have places for.
const MOST_JOBS: usize = 64;
/// Bytes that may wait, more only where one parameter has more.
const MOST_BYTES: usize = 32 << 20;

/// Partial sums that wait.
#[derive(Debug)]
pub(super) struct Later {
    gpu: Gpu,
    /// `[most, rows, columns]`, flat.
    slab: Tensor,
    rows: usize,
    columns: usize,
    most: usize,
    jobs: Vec<Job>,
}

#[derive(Debug)]
struct Job {
    entry: usize,
    /// Place in the arena, in elements.
    offset: usize,
    beta: Beta,
}

impl Later {
    /// Space for `[rows, columns]` partial sums of up to `alike` parameters.
    pub(super) fn new(gpu: Gpu, rows: usize, columns: usize, alike: usize) -> Result<Later> {
        let each = rows * columns;
        let most = (MOST_BYTES / (4 * each).max(1)).clamp(1, MOST_JOBS).min(alike.max(1));
        let slab = cuda::output(gpu, &[most * each].into(), DType::F32)?;
        Ok(Later { gpu, slab, rows, columns, most, jobs: Vec::new() })
    }

    pub(super) fn takes(&self, rows: usize, columns: usize) -> bool {
        self.jobs.len() < self.most && (rows, columns) == (self.rows, self.columns)
    }

    pub(super) fn is_full(&self) -> bool {
        self.jobs.len() == self.most
    }

    pub(super) fn holds(&self, entry: usize) -> bool {
        self.jobs.iter().any(|job| job.entry == entry)
    }

    /// The place for the partial sums of one more parameter.
    pub(super) fn add(&mut self, entry: usize, offset: usize, beta: Beta) -> Result<Tensor> {
        let each = self.rows * self.columns;
        let place = self.slab.narrow(self.jobs.len() * each, each)?;
        self.jobs.push(Job { entry, offset, beta });
        Ok(place)
    }

    /// Sums all beside.
    pub(super) fn sum(self, arena: &Arena) -> Result<()> {
        let Later { gpu, slab, rows, columns, jobs, .. } = self;
        let y = arena.view(0, [arena.numel()])?;
        let (mut places, mut betas) = ([[0u64; 16]; MOST_JOBS / 16], 0u64);
        for (i, job) in jobs.iter().enumerate() {
            debug_assert_eq!(job.offset % ALIGN, 0, "entries are aligned");
            places[i / 16][i % 16] = job.offset as u64;
            betas |= u64::from(job.beta.define()) << i;
        }
        let grid = [columns.div_ceil(32) as u32, jobs.len() as u32, 1];
        let mut launch = Launch::new(&COLUMN_SUM_MANY, grid, [32, 32, 1])
            .define("TY", y.dtype().cuda_name())
            .arg(slab.arg()?)
            .arg(y.arg()?);
        for words in places {
            launch = launch.arg(Arg::Words(words));
        }
        let launch = launch
            .arg(Arg::U64(betas))
            .arg(Arg::I64(rows as i64))
            .arg(Arg::I64(columns as i64))
            .moves(4 * jobs.len() * rows * columns);
        gpu.beside(slab.size_bytes(), slab.clone(), || cuda::launch_on(gpu, launch))
    }
}
