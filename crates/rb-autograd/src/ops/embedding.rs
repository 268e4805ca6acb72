//! Rows of a table, by index.
//!
//! - **Computes** `y[i] = weight[ids[i]]`.
//! - **Shapes** `weight [V, C]`, `ids [..]` (i32) -> `y [.., C]`.
//! - **Dtypes** `weight` any float type, `ids` i32.
//! - **Backward** `dweight[v] = sum(dy[i])` over all `i` with `ids[i] = v`, in order of `i`: no atomics.
//! - **Saves** `ids` (shared).
//! - **Kernels** `embedding_fwd`, `embedding_mark`, `embedding_bwd`.
//! - **Errors** `IndexOutOfRange` for an id outside `0..num_embeddings`; `ShapeError` if `weight` is not `[V, C]`
//!   with `V >= num_embeddings`; `DType` if `ids` is not i32.
//! - **Source** PyTorch `torch.nn.functional.embedding`.

use rayon::prelude::*;
use rb_cuda::{Arg, Gpu, Kernel, Launch, kernel};
use rb_planted::{Defect, active};
use rb_tensor::{DType, Device, Shape, ShapeError, Tensor};

use crate::{cuda, host};
use crate::testing::Case;
use crate::{AutogradError, Beta, Float, GradSinks, Op, Result, Var, apply, saved};

/// The rows `ids` of `weight`, of whose rows the first `num_embeddings` may be read (the rest is padding).
pub fn embedding<'t>(weight: &Var<'t>, ids: &Tensor, num_embeddings: usize) -> Result<Var<'t>> {
    embedding_as(weight, ids, num_embeddings, weight.dtype())
}

/// As [`embedding`], with vectors in element type `dtype`: on a GPU an fp32 residual stream may start at a bf16
/// table. On the host it must be the table's type.
///
/// Ids in host memory are checked here; ids on a GPU were checked where they were made, and one that is out of
/// range all the same gives NaN.
pub fn embedding_as<'t>(
    weight: &Var<'t>,
    ids: &Tensor,
    num_embeddings: usize,
    dtype: DType,
) -> Result<Var<'t>> {
    lookup(weight, None, ids, num_embeddings, dtype)
}

/// As [`embedding_as`], of a table whose fp32 elements are in halves where `low` has the low ones: then `weight` is bf16,
/// and the gradient is as without ([`crate::Tape::param_table`] gives both).
pub fn lookup<'t>(
    weight: &Var<'t>,
    low: Option<Tensor>,
    ids: &Tensor,
    num_embeddings: usize,
    dtype: DType,
) -> Result<Var<'t>> {
    ids.expect_dtype(Embedding::NAME, "ids", DType::I32)?;
    if ids.device() == Device::Cpu {
        check_indices(Embedding::NAME, "ids", ids.as_slice::<i32>()?, num_embeddings)?;
    }
    apply(Embedding { ids: ids.clone(), low, num_embeddings, dtype }, &[weight])
}

/// Checks that every index is in `0..bound`.
fn check_indices(op: &'static str, argument: &'static str, ids: &[i32], bound: usize) -> Result<()> {
    match ids.iter().position(|&id| usize::try_from(id).map_or(true, |id| id >= bound)) {
        None => Ok(()),
        Some(position) => {
            let index = i64::from(ids[position]);
            Err(AutogradError::IndexOutOfRange { op, argument, position, index, bound })
        }
    }
}

struct Embedding {
    ids: Tensor,
    /// Low halves of the table.
    low: Option<Tensor>,
    num_embeddings: usize,
    dtype: DType,
}

saved!(
    struct EmbeddingSaved { ids }
);

impl Op for Embedding {
    const NAME: &'static str = "embedding";
    type Saved = EmbeddingSaved;

    fn out_shape(&self, inputs: &[&Shape]) -> Result<Shape> {
        let weight = inputs[0];
        if weight.rank() != 2 || weight[0] < self.num_embeddings {
            let expected = format!("[V, C] with V at least {}", self.num_embeddings);
            return Err(ShapeError::new(Self::NAME, "weight", weight, expected).into());
        }
        let mut dims = self.ids.shape().to_vec();
        dims.push(weight[1]);
        Ok(dims.into())
    }

    fn host_forward<T: Float>(&self, inputs: &[Tensor], out: &Shape) -> Result<(Tensor, EmbeddingSaved)> {
        let (weight, ids) = (inputs[0].as_slice::<T>()?, self.ids.as_slice::<i32>()?);
        let c = out.last();
        let mut y = vec![T::ZERO; out.numel()];
        host::par_rows(&mut y, c, |i, y| y.copy_from_slice(&weight[ids[i] as usize * c..][..c]));
        Ok((Tensor::from_vec(y, out.clone())?, EmbeddingSaved { ids: self.ids.clone() }))
    }

    fn host_backward<T: Float>(&self, saved: EmbeddingSaved, dy: Tensor, grads: &mut GradSinks<'_>) -> Result<()> {
        let c = dy.shape().last();
        let (ids, dy) = (saved.ids.as_slice::<i32>()?, dy.as_slice::<T>()?);
        // Tokens sorted by id, stably: each table row is then one task's, and adds its tokens in order.
        let mut order: Vec<u32> = (0..ids.len() as u32).collect();
        order.sort_by_key(|&i| ids[i as usize]);
        let runs: Vec<&[u32]> = order.chunk_by(|&a, &b| ids[a as usize] == ids[b as usize]).collect();
        grads.write::<T>(0, |dw, beta| {
            if beta == Beta::Overwrite {
                dw.fill(T::ZERO);
            }
            if c == 0 {
                return;
            }
            let mut rows: Vec<Option<&mut [T]>> = dw.chunks_mut(c).map(Some).collect();
            let mut tasks: Vec<(&mut [T], &[u32])> = Vec::with_capacity(runs.len());
            for run in runs {
                tasks.extend(rows[ids[run[0] as usize] as usize].take().map(|row| (row, run)));
            }
            tasks.into_par_iter().with_min_len(64).for_each(|(row, run)| {
                let lost = if active(Defect::RepeatedTokensLost) { run.len() - 1 } else { 0 };
                for &i in &run[lost..] {
                    row.iter_mut().zip(&dy[i as usize * c..][..c]).for_each(|(r, &d)| *r += d);
                }
            });
        })
    }

    fn cuda_forward(&self, gpu: Gpu, inputs: &[Tensor], out: &Shape) -> Result<(Tensor, EmbeddingSaved)> {
        let weight = &inputs[0];
        let ids = self.ids.to_device(Device::Cuda(gpu))?;
        let y = cuda::output(gpu, out, self.dtype)?;
        let vector = cuda::vector_width(out.last());
        let items = out.numel() / vector;
        if items > 0 {
            let launch = Launch::for_items(&EMBEDDING_FWD, items, 256)
                .define("TW", weight.dtype().cuda_name())
                .define("TY", y.dtype().cuda_name())
                .define("C", out.last())
                .define("VEC", vector)
                .define("SPLIT", u8::from(self.low.is_some()))
                .arg(weight.arg()?)
                .arg(ids.arg()?)
                .arg(y.arg()?)
                .arg(Arg::I64(items as i64))
                .arg(Arg::I32(self.num_embeddings as i32))
                .arg(self.low.as_ref().map_or(Ok(Arg::Null), Tensor::arg)?);
            cuda::launch_on(gpu, launch)?;
        }
        Ok((y, EmbeddingSaved { ids }))
    }

    fn cuda_backward(
        &self,
        gpu: Gpu,
        saved: EmbeddingSaved,
        dy: Tensor,
        grads: &mut GradSinks<'_>,
    ) -> Result<()> {
        let c = dy.shape().last();
        grads.write_cuda(gpu, 0, |dw, beta| {
            if dw.numel() == 0 {
                return Ok(());
            }
            let (rows, tokens) = (dw.shape()[0], saved.ids.numel());
            // For each row of the table a bit for each of 64 chunks of the tokens: in which of them it occurs.
            let chunk = tokens.div_ceil(64).next_multiple_of(256).max(256);
            let marks = Tensor::zeros([2 * rows], DType::I32, Device::Cuda(gpu))?;
            if tokens > 0 {
                let launch = Launch::for_items(&EMBEDDING_MARK, tokens, 256)
                    .arg(saved.ids.arg()?)
                    .arg(marks.arg()?)
                    .arg(Arg::I64(tokens as i64))
                    .arg(Arg::I64(chunk as i64))
                    .arg(Arg::I32(rows as i32));
                cuda::launch_on(gpu, launch)?;
            }
            let grid = [rows.div_ceil(TABLE_ROWS) as u32, c.div_ceil(1024) as u32, 1];
            let launch = Launch::new(&EMBEDDING_BWD, grid, [256, 1, 1])
                .define("TW", dw.dtype().cuda_name())
                .define("TY", dy.dtype().cuda_name())
                .define("C", c)
                .define("ROWS", TABLE_ROWS)
                .define("BETA", beta.define())
                .arg(saved.ids.arg()?)
                .arg(marks.arg()?)
                .arg(dy.arg()?)
                .arg(dw.arg()?)
                .arg(Arg::I64(tokens as i64))
                .arg(Arg::I64(chunk as i64))
                .arg(Arg::I32(rows as i32));
            cuda::launch_on(gpu, launch.moves(dy.size_bytes()))
        })
    }
}

/// Rows of the table for one block of backward, most of which no token of a small batch names: a block for each of them
/// would spend its time beginning and ending.
const TABLE_ROWS: usize = 8;

const EMBEDDING_FWD: Kernel = kernel!("embedding_fwd", "split");
const EMBEDDING_MARK: Kernel = kernel!("embedding_mark");
const EMBEDDING_BWD: Kernel = kernel!("embedding_bwd");

/// Cases for gradient checks and device comparisons.
pub fn cases() -> Vec<Case> {
    let case = |name: &str, ids: Vec<i32>, shape: &'static [usize], table: &'static [usize], n: usize| {
        Case::normal(name, &[table], move |v| embedding(&v[0], &Tensor::from_vec(ids.clone(), shape)?, n))
    };
    vec![
        case("repeated ids", vec![2, 0, 2, 2, 4, 1], &[2, 3], &[5, 7], 5),
        case("padding rows", vec![1, 0], &[2], &[64, 3], 2),
        case("many", (0..300).map(|i| i * 7 % 33).collect(), &[300], &[33, 31], 33),
        case("no ids", vec![], &[0], &[3, 2], 3),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{ParamStore, Tape};

    #[test]
    fn shape_rule() {
        let ids = Tensor::from_vec(vec![0i32; 6], [2, 3]).unwrap();
        let op = Embedding { ids, low: None, num_embeddings: 4, dtype: DType::F32 };
        assert_eq!(op.out_shape(&[&[4, 5].into()]).unwrap().dims(), &[2, 3, 5]);
        let message = op.out_shape(&[&[3, 5].into()]).unwrap_err().to_string();
        assert_eq!(message, "embedding: weight has shape [3, 5], expected [V, C] with V at least 4");
    }

    #[test]
    fn ids_outside_the_table_are_named() {
        let params = ParamStore::empty();
        let tape = Tape::new(&params);
        let weight = tape.constant(Tensor::from_vec(vec![0f32; 8], [4, 2]).unwrap());
        for id in [3, -1, 65535] {
            let ids = Tensor::from_vec(vec![0, 1, id], [3]).unwrap();
            let message = embedding(&weight, &ids, 3).unwrap_err().to_string();
            assert_eq!(message, format!("embedding: ids[2] is {id}, expected 0..3"));
        }
    }

    /// Rows of the table without a token get zeros, whatever the arena held; width 1 is no special case.
    #[test]
    fn gradients_in_an_arena() {
        use crate::ops::shared::arena_check;
        let ids = Tensor::from_vec(vec![4i32, 0, 4], [3]).unwrap();
        arena_check::check(&[&[5, 3]], |v| embedding(&v[0], &ids, 5));
        let narrow = Case::normal("width 1", &[&[5, 1]], move |v| embedding(&v[0], &ids, 5));
        crate::testing::gradcheck("embedding", &narrow, 0).unwrap();
    }

    #[test]
    fn gradcheck() {
        crate::testing::check_op("embedding").unwrap();
    }

    #[test]
    fn golden() {
        for case in crate::golden::load("embedding") {
            let rows = case.tensor("in0").shape()[0];
            crate::golden::check(&case, |v| embedding(&v[0], case.tensor("ids"), rows), 1e-12);
        }
    }
}
