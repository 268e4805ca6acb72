//! Gradients that are sums over the rows of partial results, taken for many parameters at once.
//!
//! A norm's backward leaves partial sums of the gradient of its weight. To add them takes a microsecond and launching
//! the kernel takes longer; so they wait in one buffer until all parameters of their size have theirs.

use rb_cuda::{Arg, Gpu, Kernel, Launch, kernel};
use rb_tensor::{DType, Tensor};

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

    /// Sums all beside into the flat gradients `y`, then enqueues `next` for the entry of each.
    pub(super) fn sum(self, y: &Tensor, mut next: impl FnMut(usize) -> Result<()>) -> Result<()> {
        let Later { gpu, slab, rows, columns, jobs, .. } = self;
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
        gpu.beside(slab.size_bytes(), slab.clone(), || {
            cuda::launch_on(gpu, launch)?;
            jobs.iter().try_for_each(|job| next(job.entry))
        })
    }
}

#[cfg(test)]
mod tests {
    use crate::ops::{linear, rms_norm};
    use crate::{GradStore, Init, ParamBuilder, ParamStore, Tape};
    use rb_cuda::{Gpu, GpuOptions};
    use rb_tensor::{DType, Device, Tensor};

    /// What a backward pass through norms and linear maps by these parameters launches.
    fn launches(params: &ParamStore, grads: &mut GradStore, gpu: Gpu, names: &[&str]) -> [u64; 3] {
        let count = || {
            let all = gpu.launches();
            ["column_sum_many", "column_sum", "matmul"].map(|name| all.get(name).copied().unwrap_or(0))
        };
        let tape = Tape::new(params);
        let mut h = tape.leaf(Tensor::zeros([6, 8], DType::F32, Device::Cuda(gpu)).unwrap());
        for name in names {
            let weight = tape.param(params.id(name).unwrap()).unwrap();
            let is_norm = weight.shape().rank() == 1;
            h = if is_norm { rms_norm(&h, &weight, 1e-6) } else { linear(&h, &weight, None) }.unwrap();
        }
        let dy = Tensor::zeros([6, 8], DType::F32, Device::Cuda(gpu)).unwrap();
        let before = count();
        tape.backward_from(&h, dy, grads).unwrap();
        let after = count();
        std::array::from_fn(|i| after[i] - before[i])
    }

    #[test]
    fn gradients_that_wait_are_made_once_and_in_time() {
        let gpu = Gpu::dry((9, 0), &GpuOptions::default());
        let mut b = ParamBuilder::default();
        for name in ["a", "b", "c"] {
            b.param(name, [8], Init::Ones).unwrap();
            b.param(format!("{name}w"), [8, 8], Init::Zeros).unwrap();
        }
        let params = b.build_zeros(DType::F32, Device::Cuda(gpu)).unwrap();
        let mut grads = GradStore::new(&params).unwrap();
        let mut launches = |names: &[&str]| launches(&params, &mut grads, gpu, names);
        assert_eq!(launches(&["a", "aw", "b", "bw", "c", "cw"]), [1, 0, 6]);
        assert_eq!(launches(&["a", "b"]), [1, 0, 0], "fewer than there are, added to those before");
        // The first sum must be there before the second adds to it.
        assert_eq!(launches(&["a", "b", "a"]), [2, 0, 0]);
        assert_eq!(launches(&["aw", "aw", "aw", "aw", "aw"]), [0, 0, 10]);
        grads.require_complete().unwrap();
    }
}
