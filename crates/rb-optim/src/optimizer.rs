//! What every optimizer does, and the pieces they share.

use std::collections::BTreeMap;
use std::ops::Range;

use rb_autograd::{AutogradError, GradStore, Layout, ParamStore};
use rb_tensor::{Arena, DType, ShapeError, Tensor};

use crate::{OptimError, Result};

/// Updates parameters from gradients. Object-safe: a trainer holds a `Box<dyn Optimizer>`.
pub trait Optimizer: Send {
    /// One update with learning rate `lr`, with every gradient multiplied by `grad_scale` (the clip
    /// coefficient) as it is read. Marks the gradients stale.
    ///
    /// # Errors
    /// A trainable parameter without a gradient from this step: the error lists the names, and nothing has
    /// changed.
    fn step(
        &mut self,
        params: &mut ParamStore,
        grads: &mut GradStore,
        lr: f64,
        grad_scale: f64,
    ) -> Result<()>;

    /// Updates made so far.
    fn steps_done(&self) -> u64;

    /// State tensors, named `<slot>/<parameter>`; padding is not part of them.
    fn state(&self) -> Result<Vec<(String, Tensor)>>;

    /// Replaces the state by `tensors`, as after `steps_done` updates.
    ///
    /// # Errors
    /// [`OptimError::State`] naming tensors that are missing, unexpected or of another shape.
    fn load_state(&mut self, tensors: &BTreeMap<String, Tensor>, steps_done: u64) -> Result<()>;
}

/// A contiguous range of the arena under one weight decay.
pub(crate) struct Span {
    pub(crate) range: Range<usize>,
    pub(crate) decay: bool,
}

/// Ranges of all trainable entries, neighbours with equal decay joined (alignment gaps hold zeros and stay so).
pub(crate) fn spans(layout: &Layout) -> Vec<Span> {
    let mut entries: Vec<_> = layout.entries.iter().collect();
    entries.sort_by_key(|e| e.offset);
    let mut spans: Vec<Span> = Vec::new();
    let mut joinable = false;
    for entry in entries {
        if !entry.trainable {
            joinable = false;
            continue;
        }
        let range = entry.range();
        match spans.last_mut() {
            Some(last) if joinable && last.decay == entry.decay => last.range.end = range.end,
            _ => spans.push(Span { range, decay: entry.decay }),
        }
        joinable = true;
    }
    spans
}

/// Checks before an update that everything fits together; nothing has changed if it fails.
pub(crate) fn check(layout: &Layout, params: &ParamStore, grads: &GradStore) -> Result<()> {
    if params.layout().as_ref() != layout {
        return Err(AutogradError::LayoutMismatch { what: "the optimizer state" }.into());
    }
    if grads.layout() != params.layout() {
        return Err(AutogradError::LayoutMismatch { what: "the gradient store" }.into());
    }
    Ok(grads.require_complete()?)
}

/// The named parts of one state arena.
pub(crate) fn export(
    slot: &str,
    arena: &Arena,
    layout: &Layout,
    out: &mut Vec<(String, Tensor)>,
) -> Result<()> {
    for (_, part) in layout.parts() {
        out.push((format!("{slot}/{}", part.name), arena.view(part.offset, &part.shape)?));
    }
    Ok(())
}

/// Fills state arenas from named tensors; every slot and part must be there, and nothing else.
pub(crate) fn import(
    slots: &mut [(&str, &mut Arena)],
    layout: &Layout,
    tensors: &BTreeMap<String, Tensor>,
) -> Result<()> {
    let mut used = 0;
    for (slot, arena) in slots.iter_mut() {
        for (_, part) in layout.parts() {
            let name = format!("{slot}/{}", part.name);
            let value = tensors.get(&name).ok_or_else(|| OptimError::State {
                reason: format!("{name} is missing from the checkpoint"),
            })?;
            if value.shape() != &part.shape {
                let error = ShapeError::new("optimizer state", name, value.shape(), &part.shape);
                return Err(OptimError::Tensor(error.into()));
            }
            let range = part.offset..part.offset + part.shape.numel();
            if arena.dtype() == DType::F64 {
                let value = value.to_dtype(DType::F64);
                arena.as_mut_slice::<f64>()?[range].copy_from_slice(value.as_slice()?);
            } else {
                let value = value.to_dtype(DType::F32);
                arena.as_mut_slice::<f32>()?[range].copy_from_slice(value.as_slice()?);
            }
            used += 1;
        }
    }
    if used != tensors.len() {
        let known = |name: &String| {
            slots.iter().any(|(slot, _)| {
                name.strip_prefix(&format!("{slot}/"))
                    .is_some_and(|n| layout.parts().any(|(_, p)| p.name == n))
            })
        };
        let extra: Vec<&str> = tensors.keys().filter(|n| !known(n)).map(String::as_str).collect();
        let reason =
            format!("the checkpoint holds tensors of another model or optimizer: {}", extra.join(", "));
        return Err(OptimError::State { reason });
    }
    Ok(())
}

#[cfg(test)]
pub(crate) mod test_support {
    use super::*;
    use rb_autograd::ops::linear;
    use rb_autograd::{Init, ParamBuilder, Tape};
    use rb_tensor::{Device, Rng};

    /// `w` [2, 3] with one padding row, which decays, and `b` [3], which does not.
    pub(crate) fn model(dtype: DType) -> (ParamStore, GradStore) {
        let mut builder = ParamBuilder::default();
        builder.packed([("w".to_string(), 2)], &[3, 3].into(), Init::Normal(1.0)).unwrap();
        builder.param("b", [3], Init::Ones).unwrap();
        let params = builder.build(&Rng::new(3), Device::Cpu).unwrap().to_dtype(dtype).unwrap();
        let grads = GradStore::new(&params).unwrap();
        (params, grads)
    }

    /// Runs a backward pass that gives every named element a known random gradient; returns `[w, b]`'s.
    pub(crate) fn gradients(params: &ParamStore, grads: &mut GradStore, seed: i32) -> Vec<Vec<f64>> {
        let mut rng = Rng::new(seed as u64);
        let dw: Vec<f64> = (0..6).map(|_| rng.normal()).collect();
        let dtype = params.arena().dtype();
        let tensor = |v: Vec<f64>, shape: [usize; 2]| Tensor::from_vec(v, shape).unwrap().to_dtype(dtype);
        let ids = (params.id("w").unwrap(), params.id("b").unwrap());
        let tape = Tape::new(params);
        let eye = tape.constant(tensor(vec![1., 0., 0., 0., 1., 0., 0., 0., 1.], [3, 3]));
        let y = linear(&eye, &tape.param(ids.0).unwrap(), Some(&tape.param(ids.1).unwrap())).unwrap();
        // dW = dy^T I, so dy = dW^T; the bias then gets the column sums of dy.
        let mut dy = vec![0.0; 9];
        for r in 0..2 {
            for c in 0..3 {
                dy[c * 3 + r] = dw[r * 3 + c];
            }
        }
        tape.backward_from(&y, tensor(dy.clone(), [3, 3]), grads).unwrap();
        let bias = (0..3).map(|c| (0..3).map(|r| dy[r * 3 + c]).sum()).collect();
        vec![dw, bias]
    }

    /// Values of `[w, b]`.
    pub(crate) fn weights(params: &ParamStore) -> Vec<Vec<f64>> {
        ["w", "b"].map(|n| params.part(n).unwrap().to_dtype(DType::F64).to_vec().unwrap()).to_vec()
    }
}
