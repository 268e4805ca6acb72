//! Cross entropy on a GPU.

use rb_cuda::{Arg, Gpu, Kernel, Launch, kernel};
use rb_tensor::{DType, Shape, Tensor};

use super::{CrossEntropy, CrossEntropySaved};
use crate::{GradSinks, Result, cuda};

const CROSS_ENTROPY_FWD: Kernel = kernel!("cross_entropy_fwd");
const CROSS_ENTROPY_BWD: Kernel = kernel!("cross_entropy_bwd");
const CROSS_ENTROPY_SUM: Kernel = kernel!("cross_entropy_sum");

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
        let column = || cuda::output(gpu, self.labels.shape(), DType::F32);
        let (max, sum, losses) = (column()?, column()?, column()?);
        if rows > 0 {
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
        let factor = (1.0 / self.denominator) as f32;
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
        // The scores are the largest tensor of a step: their gradient takes their place where nobody else reads them.
        let unshared = logits.is_unshared();
        let dx =
            if unshared { logits.clone() } else { cuda::output(gpu, logits.shape(), logits.dtype())? };
        if dx.numel() > 0 {
            let factor = (1.0 / self.denominator) as f32;
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

    /// One block for each row of scores.
    fn rows<'a>(&self, kernel: &Kernel, logits: &Tensor, width: usize) -> Launch<'a> {
        let rows = u32::try_from(self.labels.numel()).unwrap_or(u32::MAX);
        Launch::new(kernel, [rows, 1, 1], [row_threads(logits.shape().last()), 1, 1])
            .define("T", logits.dtype().cuda_name())
            .define("VEC", width)
    }

    /// The arguments that both kernels take after their tensors.
    fn attributes<'a>(&self, launch: Launch<'a>, logits: &Tensor) -> Launch<'a> {
        launch
            .arg(Arg::I64(logits.shape().last() as i64))
            .arg(Arg::I32(self.classes as i32))
            .arg(Arg::I32(self.ignore_index))
            .arg(Arg::F32(self.smoothing as f32))
            .arg(Arg::F32(self.z_loss as f32))
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
