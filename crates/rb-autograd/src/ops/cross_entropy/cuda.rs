//! Cross entropy on a GPU.

use rb_cuda::{Arg, Gpu, Kernel, Launch, kernel};
use rb_tensor::{DType, Shape, Tensor};

use super::{CrossEntropy, CrossEntropySaved};
use crate::{GradSinks, Result, cuda};

const CROSS_ENTROPY_FWD: Kernel = kernel!("cross_entropy_fwd");
const CROSS_ENTROPY_BWD: Kernel = kernel!("cross_entropy_bwd");
const CROSS_ENTROPY_FWD_BWD: Kernel = kernel!("cross_entropy_fwd_bwd");
const CROSS_ENTROPY_SCALE: Kernel = kernel!("cross_entropy_scale");
const CROSS_ENTROPY_SUM: Kernel = kernel!("cross_entropy_sum");

/// Blocks of a launch; what does not fit is refused by it.
fn blocks_u32(blocks: usize) -> u32 {
    u32::try_from(blocks).unwrap_or(u32::MAX)
}

/// Threads of a kernel that reads a row of scores of this length.
fn row_threads(columns: usize) -> u32 {
    if columns <= 8192 { 256 } else { 512 }
}

impl CrossEntropy {
    pub(super) fn forward_on(
        &self,
        gpu: Gpu,
        logits: &Tensor,
        out: &Shape,
    ) -> Result<(Tensor, CrossEntropySaved)> {
        let rows = self.labels.numel();
        // A row is kept in shared memory between the two reads of it.
        const OTHER_SHARED_BYTES: usize = 2048;
        let row_bytes = logits.shape().last() * logits.dtype().size_bytes();
        let consume = self.consume && row_bytes + OTHER_SHARED_BYTES <= gpu.info().shared_bytes_per_block;
        let losses = cuda::output(gpu, self.labels.shape(), DType::F32)?;
        let statistics: Shape = if consume { [0].into() } else { self.labels.shape().clone() };
        let column = || cuda::output(gpu, &statistics, DType::F32);
        let (max, sum) = (column()?, column()?);
        if consume && rows > 0 {
            let threads = row_threads(logits.shape().last());
            let launch = Launch::new(&CROSS_ENTROPY_FWD_BWD, [blocks_u32(rows), 1, 1], [threads, 1, 1])
                .shared_bytes(row_bytes)
                .define("T", logits.dtype().cuda_name())
                .define("VEC", cuda::pack_width(logits.shape().last(), &[logits])?)
                .define("COLUMNS", logits.shape().last())
                .define("THREADS", threads)
                .arg(logits.arg()?)
                .arg(self.labels.arg()?)
                .arg(self.weights_arg()?)
                .arg(losses.arg()?);
            let launch = self.numbers(launch).arg(self.factor_arg()?).arg(Arg::F32(self.constant_factor()));
            cuda::launch_on(gpu, launch.moves(2 * logits.size_bytes()))?;
        } else if rows > 0 {
            let launch = self
                .rows(&CROSS_ENTROPY_FWD, logits, cuda::pack_width(logits.shape().last(), &[logits])?)
                .arg(logits.arg()?)
                .arg(self.labels.arg()?)
                .arg(max.arg()?)
                .arg(sum.arg()?)
                .arg(losses.arg()?);
            cuda::launch_on(gpu, self.attributes(launch, logits).moves(logits.size_bytes()))?;
        }
        let saved = CrossEntropySaved { logits: logits.clone(), max, sum };
        // Up to 2048 rows a block are added by one launch; more by blocks, whose sums a second launch adds.
        let blocks = rows.div_ceil(2048).clamp(1, 256);
        let y = cuda::output(gpu, out, DType::F32)?;
        let factor = self.constant_factor();
        if blocks == 1 {
            self.add_up(gpu, (&losses, self.weights.as_ref()), &y, 1, (self.factor_arg()?, factor))?;
        } else {
            let partial = cuda::output(gpu, &Shape::from([blocks]), DType::F32)?;
            self.add_up(gpu, (&losses, self.weights.as_ref()), &partial, blocks, (Arg::Null, 1.0))?;
            self.add_up(gpu, (&partial, None), &y, 1, (self.factor_arg()?, factor))?;
        }
        Ok((y, saved))
    }

    pub(super) fn backward_on(
        &self,
        gpu: Gpu,
        saved: CrossEntropySaved,
        dy: &Tensor,
        grads: &mut GradSinks<'_>,
    ) -> Result<()> {
        let CrossEntropySaved { logits, max, sum } = saved;
        if max.numel() != self.labels.numel() {
            return self.scale(gpu, logits, dy, grads);
        }
        // The scores are the largest tensor of a step: their gradient takes their place where nobody else reads them.
        let unshared = logits.is_unshared();
        let dx =
            if unshared { logits.clone() } else { cuda::output(gpu, logits.shape(), logits.dtype())? };
        if dx.numel() > 0 {
            let factor = self.constant_factor();
            let width = cuda::pack_width(logits.shape().last(), &[&logits, &dx])?;
            let launch = self
                .rows(&CROSS_ENTROPY_BWD, &logits, width)
                .arg(logits.arg()?)
                .arg(self.labels.arg()?)
                .arg(max.arg()?)
                .arg(sum.arg()?)
                .arg(self.weights_arg()?)
                .arg(dy.arg()?)
                .arg(dx.arg()?);
            let launch = self.attributes(launch, &logits).arg(self.factor_arg()?).arg(Arg::F32(factor));
            cuda::launch_on(gpu, launch.moves(2 * dx.size_bytes()))?;
        }
        drop(logits);
        grads.add(0, dx)
    }

    /// Multiplies a finished gradient by `dy`, which is 1 where the loss is what is differentiated.
    fn scale(&self, gpu: Gpu, gradient: Tensor, dy: &Tensor, grads: &mut GradSinks<'_>) -> Result<()> {
        /// Blocks of a kernel that mostly has nothing to do.
        const BLOCKS: usize = 256;
        let width = cuda::pack_width(gradient.numel(), &[&gradient])?;
        let packs = gradient.numel() / width;
        let launch =
            Launch::new(&CROSS_ENTROPY_SCALE, [blocks_u32(packs.div_ceil(256).min(BLOCKS)), 1, 1], [256, 1, 1])
                .define("T", gradient.dtype().cuda_name())
                .define("VEC", width)
                .arg(gradient.arg()?)
                .arg(dy.arg()?)
                .arg(Arg::I64(packs as i64));
        cuda::launch_on(gpu, launch)?;
        grads.add(0, gradient)
    }

    /// One block for each row of scores.
    fn rows<'a>(&self, kernel: &Kernel, logits: &Tensor, width: usize) -> Launch<'a> {
        let rows = blocks_u32(self.labels.numel());
        Launch::new(kernel, [rows, 1, 1], [row_threads(logits.shape().last()), 1, 1])
            .define("T", logits.dtype().cuda_name())
            .define("VEC", width)
    }

    /// The arguments that both kernels take after their tensors.
    fn attributes<'a>(&self, launch: Launch<'a>, logits: &Tensor) -> Launch<'a> {
        self.numbers(launch.arg(Arg::I64(logits.shape().last() as i64)))
    }

    /// What all kernels know of the loss.
    fn numbers<'a>(&self, launch: Launch<'a>) -> Launch<'a> {
        launch
            .arg(Arg::I32(self.classes as i32))
            .arg(Arg::I32(self.ignore_index))
            .arg(Arg::F32(self.smoothing as f32))
            .arg(Arg::F32(self.z_loss as f32))
    }

    /// What the sum of row losses is multiplied by, where nothing on the device says so.
    fn constant_factor(&self) -> f32 {
        (1.0 / self.denominator) as f32
    }

    fn weights_arg(&self) -> Result<Arg<'_>> {
        match &self.weights {
            Some(weights) => Ok(weights.arg()?),
            None => Ok(Arg::Null),
        }
    }

    fn factor_arg(&self) -> Result<Arg<'_>> {
        match &self.factor {
            Some(factor) => Ok(factor.arg()?),
            None => Ok(Arg::Null),
        }
    }

    fn add_up(
        &self,
        gpu: Gpu,
        (x, weights): (&Tensor, Option<&Tensor>),
        y: &Tensor,
        blocks: usize,
        (on_device, factor): (Arg<'_>, f32),
    ) -> Result<()> {
        let launch = Launch::new(&CROSS_ENTROPY_SUM, [blocks as u32, 1, 1], [256, 1, 1])
            .arg(x.arg()?)
            .arg(weights.map_or(Ok(Arg::Null), Tensor::arg)?)
            .arg(y.arg()?)
            .arg(Arg::I64(x.numel() as i64))
            .arg(on_device)
            .arg(Arg::F32(factor));
        cuda::launch_on(gpu, launch)
    }
}
