//! [`Tape`] and [`Var`]: the record of one forward pass.

use std::cell::RefCell;
use std::collections::HashSet;
use std::fmt;

use rb_tensor::{DType, Shape, ShapeError, Tensor};

use crate::op::{BackwardState, Node};
use crate::{AutogradError, GradStore, ParamId, ParamStore, Precision, Result};

/// Where a variable comes from, and so where its gradient goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Source {
    /// Nothing to differentiate.
    Constant,
    /// A parameter of the store.
    Param(ParamId),
    /// An input made by [`Tape::leaf`].
    Leaf(usize),
    /// The output of a recorded node.
    Node(usize),
}

impl Source {
    /// The parameter that it is, if it is one.
    pub(crate) fn param(&self) -> Option<ParamId> {
        if let Source::Param(id) = self { Some(*id) } else { None }
    }
}

/// The output of an operation, as a [`Watch`] sees it.
pub struct Seen<'a> {
    /// Name of the operation.
    pub op: &'static str,
    /// Its number in the forward pass, from 1.
    pub number: usize,
    /// The parameter that was read last before it.
    pub param: Option<&'a str>,
    /// What it gave.
    pub output: &'a Tensor,
}

/// Looks at the outputs of operations as they are made; see [`Tape::watched`].
pub trait Watch {
    /// An operation has run.
    fn seen(&self, seen: &Seen<'_>);
}

/// A record of operations on the values of one [`ParamStore`]. One tape serves one forward and backward.
pub struct Tape<'p> {
    params: &'p ParamStore,
    recording: bool,
    check_finite: bool,
    watch: Option<&'p dyn Watch>,
    state: RefCell<State>,
}

#[derive(Default)]
pub(crate) struct State {
    pub(crate) nodes: Vec<Node>,
    operations: usize,
    last_param: Option<ParamId>,
    read_trainable: bool,
    leaves: usize,
    consumed: bool,
}

impl<'p> Tape<'p> {
    /// A tape that records for `backward`.
    pub fn new(params: &'p ParamStore) -> Self {
        Tape { params, recording: true, check_finite: false, watch: None, state: RefCell::default() }
    }

    /// A tape that records nothing: the same forward code, no memory held.
    pub fn inference(params: &'p ParamStore) -> Self {
        Tape { params, recording: false, check_finite: false, watch: None, state: RefCell::default() }
    }

    /// The same tape, on which an operation whose output is not finite is an error that names it: slow, for
    /// finding where a bad step went wrong.
    pub fn checked(mut self) -> Self {
        self.check_finite = true;
        self
    }

    /// The same tape, on which `watch` sees the output of every operation.
    pub fn watched(mut self, watch: &'p dyn Watch) -> Self {
        self.watch = Some(watch);
        self
    }

    pub(crate) fn watcher(&self) -> Option<&'p dyn Watch> {
        self.watch
    }

    pub(crate) fn checks_finite(&self) -> bool {
        self.check_finite
    }

    /// Whether operations are recorded for `backward`.
    pub fn is_recording(&self) -> bool {
        self.recording
    }

    /// The store this tape reads.
    pub fn params(&self) -> &'p ParamStore {
        self.params
    }

    /// The element type in which the residual stream of a model should start.
    pub fn residual_dtype(&self) -> DType {
        match self.params.precision() {
            Precision::Full => self.params.arena().dtype(),
            Precision::Bf16 { residual, .. } => residual,
        }
    }

    /// The device of the parameters.
    pub fn device(&self) -> rb_tensor::Device {
        self.params.arena().device()
    }

    /// A parameter as a variable, in the element type that products compute in; a constant if it is frozen.
    pub fn param(&self, id: ParamId) -> Result<Var<'_>> {
        self.param_var(id, self.params.tensor(id)?)
    }

    /// As [`Tape::param`], in full precision: for norms and biases, which mixed precision leaves in fp32.
    pub fn param_full(&self, id: ParamId) -> Result<Var<'_>> {
        self.param_var(id, self.params.full_tensor(id)?)
    }

    /// A parameter for [`crate::ops::embedding::lookup`], which reads full precision: with the low halves of its
    /// elements where weights are split.
    pub fn param_table(&self, id: ParamId) -> Result<(Var<'_>, Option<Tensor>)> {
        let (table, low) = self.params.table(id)?;
        Ok((self.param_var(id, table)?, low))
    }

    /// The element type of activations between products.
    pub fn compute_dtype(&self) -> DType {
        match self.params.precision() {
            Precision::Full => self.params.arena().dtype(),
            Precision::Bf16 { .. } => DType::BF16,
        }
    }

    fn param_var(&self, id: ParamId, value: Tensor) -> Result<Var<'_>> {
        let trainable = self.params.entry(id).trainable;
        let mut state = self.state.borrow_mut();
        state.last_param = Some(id);
        state.read_trainable |= trainable;
        drop(state);
        let source = if self.recording && trainable { Source::Param(id) } else { Source::Constant };
        Ok(self.var(source, value))
    }

    /// A value that is not differentiated.
    pub fn constant(&self, value: Tensor) -> Var<'_> {
        self.var(Source::Constant, value)
    }

    /// An input whose gradient `backward` returns.
    pub fn leaf(&self, value: Tensor) -> Var<'_> {
        let mut state = self.state.borrow_mut();
        let source = if self.recording { Source::Leaf(state.leaves) } else { Source::Constant };
        state.leaves += 1;
        drop(state);
        self.var(source, value)
    }

    /// Bytes held for backward by what was recorded so far, each buffer counted once; weights are excluded.
    pub fn saved_bytes(&self) -> usize {
        let mut seen = HashSet::new();
        if let Ok(weights) = self.params.arena().view(0, [0]) {
            seen.insert(weights.buffer_id());
        }
        let state = self.state.borrow();
        let saved = state.nodes.iter().flat_map(|n| n.backward.saved());
        saved.filter(|t| seen.insert(t.buffer_id())).map(Tensor::size_bytes).sum()
    }

    /// Differentiates the scalar `loss`: parameter gradients go to `grads`, gradients of leaves are
    /// returned. The record is used up.
    ///
    /// # Errors
    /// A loss that is not a scalar or has no history; a second call; gradients of another model.
    pub fn backward(&self, loss: &Var<'_>, grads: &mut GradStore) -> Result<LeafGrads> {
        if loss.value.numel() != 1 {
            return Err(ShapeError::new("backward", "loss", loss.shape(), "one element").into());
        }
        let one = Tensor::filled(loss.shape().clone(), 1.0, loss.value.device())?.to_dtype(loss.dtype())?;
        self.backward_from(loss, one, grads)
    }

    /// As [`Tape::backward`], from any variable and a given upstream gradient `dy` of its shape.
    pub fn backward_from(&self, y: &Var<'_>, dy: Tensor, grads: &mut GradStore) -> Result<LeafGrads> {
        if grads.layout() != self.params.layout() {
            return Err(AutogradError::LayoutMismatch { what: "the gradient store" });
        }
        if dy.shape() != y.shape() {
            return Err(ShapeError::new("backward", "dy", dy.shape(), y.shape()).into());
        }
        {
            let state = self.state.borrow();
            let reason = match (self.recording, state.consumed, y.source) {
                (false, ..) => Some("this tape does not record; use `Tape::new`"),
                (_, true, _) => Some("this tape was used up by an earlier backward; record a new one"),
                (_, _, Source::Constant) => Some("nothing in the history of this value needs a gradient"),
                _ => None,
            };
            if let Some(reason) = reason {
                return Err(AutogradError::NoHistory { reason });
            }
        }
        self.backward_within(y.source, dy, grads, Vec::new())
    }

    /// Backward from `root` with gradients of the first leaves that are added to.
    pub(crate) fn backward_within(
        &self,
        root: Source,
        dy: Tensor,
        grads: &mut GradStore,
        mut seeds: Vec<Option<Tensor>>,
    ) -> Result<LeafGrads> {
        let nodes = {
            let mut state = self.state.borrow_mut();
            state.consumed = true;
            seeds.resize(state.leaves, None);
            std::mem::take(&mut state.nodes)
        };
        BackwardState::run(nodes, seeds, root, dy, (self.params, self.check_finite), grads)
    }

    /// A tape on the same parameters that records nothing, and checks as this one does.
    pub(crate) fn unrecorded(&self) -> Tape<'p> {
        let inner =
            Tape { check_finite: self.check_finite, watch: self.watch, ..Tape::inference(self.params) };
        inner.continue_from(self);
        inner
    }

    /// Counts operations on from where `other` is.
    pub(crate) fn continue_from(&self, other: &Tape<'_>) {
        let (operations, last_param) = {
            let other = other.state.borrow();
            (other.operations, other.last_param)
        };
        let mut state = self.state.borrow_mut();
        (state.operations, state.last_param) = (operations, last_param);
    }

    /// Whether a parameter that is not frozen was asked for.
    pub(crate) fn read_trainable(&self) -> bool {
        self.state.borrow().read_trainable
    }

    pub(crate) fn var(&self, source: Source, value: Tensor) -> Var<'_> {
        Var { tape: self, source, value }
    }

    /// Counts an operation; gives its number and the parameter that was read last before it.
    pub(crate) fn count_operation(&self) -> (usize, Option<&str>) {
        let mut state = self.state.borrow_mut();
        state.operations += 1;
        let part = state.last_param.and_then(|id| self.params.entry(id).parts.first());
        (state.operations, part.map(|p| p.name.as_str()))
    }

    pub(crate) fn push(&self, node: Node) -> Source {
        let mut state = self.state.borrow_mut();
        state.nodes.push(node);
        Source::Node(state.nodes.len() - 1)
    }
}

impl fmt::Debug for Tape<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Tape({} nodes)", self.state.borrow().nodes.len())
    }
}

/// A value on a tape.
#[derive(Clone)]
pub struct Var<'t> {
    pub(crate) tape: &'t Tape<'t>,
    pub(crate) source: Source,
    pub(crate) value: Tensor,
}

impl<'t> Var<'t> {
    /// The value without its history. The only way from a `Var` to a `Tensor`: what is computed from the
    /// result has no gradient.
    pub fn detach(&self) -> Tensor {
        self.value.clone()
    }

    /// The shape.
    pub fn shape(&self) -> &Shape {
        self.value.shape()
    }

    /// The element type.
    pub fn dtype(&self) -> DType {
        self.value.dtype()
    }

    /// The device of the value.
    pub fn device(&self) -> rb_tensor::Device {
        self.value.device()
    }

    /// The tape this variable is on.
    pub fn tape(&self) -> &'t Tape<'t> {
        self.tape
    }

    /// Whether a gradient flows through this variable.
    pub fn requires_grad(&self) -> bool {
        self.source != Source::Constant
    }
}

impl fmt::Debug for Var<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Var({:?}, {:?})", self.source, self.value)
    }
}

/// Gradients of the leaves of a tape, in order of creation.
#[derive(Debug)]
pub struct LeafGrads {
    pub(crate) grads: Vec<Option<Tensor>>,
    /// Which of them the pass has written.
    pub(crate) written: Vec<bool>,
}

impl LeafGrads {
    /// The gradient of `leaf`; `None` if the loss does not depend on it.
    pub fn get(&self, leaf: &Var<'_>) -> Option<&Tensor> {
        match leaf.source {
            Source::Leaf(index) => self.grads.get(index)?.as_ref(),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::{linear, rms_norm};
    use crate::{Init, ParamBuilder};
    use rb_tensor::{Device, Rng};

    /// x [2, 3] -> norm -> tied weight [3, 3] used twice.
    fn tied() -> (ParamStore, ParamId, ParamId) {
        let mut b = ParamBuilder::default();
        let w = b.param("w", [3, 3], Init::Normal(1.0)).unwrap();
        let g = b.param("g", [3], Init::Ones).unwrap();
        (b.build(&Rng::new(5), Device::Cpu).unwrap(), w, g)
    }

    fn x() -> Tensor {
        Tensor::from_vec(vec![0.5f32, -1.0, 2.0, 1.5, 0.25, -0.75], [2, 3]).unwrap()
    }

    fn run(params: &ParamStore, grads: &mut GradStore, w: ParamId, g: ParamId, uses: usize) -> Result<()> {
        let tape = Tape::new(params);
        let mut h = tape.constant(x());
        for _ in 0..uses {
            h = linear(&h, &tape.param(w)?, None)?;
        }
        let y = rms_norm(&h, &tape.param(g)?, 1e-6)?;
        let dy = Tensor::from_vec(vec![1f32, -2.0, 0.5, 0.25, 3.0, -1.0], [2, 3])?;
        tape.backward_from(&y, dy, grads).map(drop)
    }

    fn gradient(grads: &GradStore, name: &str) -> Vec<f32> {
        grads.part(name).unwrap().unwrap().to_vec().unwrap()
    }

    #[test]
    fn stale_gradients_are_overwritten_and_fresh_ones_accumulated() {
        let (params, w, g) = tied();
        let mut grads = GradStore::new(&params).unwrap();
        grads.arena_mut().as_mut_slice::<f32>().unwrap().fill(1e9);
        run(&params, &mut grads, w, g, 1).unwrap();
        let once = gradient(&grads, "w");
        assert!(once.iter().all(|x| x.abs() < 1e6), "a stale value leaked: {once:?}");
        run(&params, &mut grads, w, g, 1).unwrap();
        let twice = gradient(&grads, "w");
        // The accumulating product rounds once less, hence one ulp.
        let close = |a: f32, b: f32| (2.0 * a - b).abs() <= f32::EPSILON * b.abs();
        assert!(once.iter().zip(&twice).all(|(&a, &b)| close(a, b)), "{once:?} {twice:?}");
        grads.mark_stale();
        run(&params, &mut grads, w, g, 1).unwrap();
        assert_eq!(gradient(&grads, "w"), once);
    }

    #[test]
    fn a_parameter_used_twice_gets_both_contributions() {
        let (params, w, g) = tied();
        let mut grads = GradStore::new(&params).unwrap();
        run(&params, &mut grads, w, g, 2).unwrap();
        let tied = gradient(&grads, "w");
        // The same computation with two separate leaves for the two uses.
        let mut sum = vec![0f32; 9];
        for active in 0..2 {
            let tape = Tape::new(&params);
            let value = params.tensor(w).unwrap();
            let (leaf, fixed) = (tape.leaf(value.clone()), tape.constant(value));
            let uses = if active == 0 { [&leaf, &fixed] } else { [&fixed, &leaf] };
            let h = linear(&tape.constant(x()), uses[0], None).unwrap();
            let h = linear(&h, uses[1], None).unwrap();
            let y = rms_norm(&h, &tape.param(g).unwrap(), 1e-6).unwrap();
            let dy = Tensor::from_vec(vec![1f32, -2.0, 0.5, 0.25, 3.0, -1.0], [2, 3]).unwrap();
            let leaves = tape.backward_from(&y, dy, &mut GradStore::new(&params).unwrap()).unwrap();
            let part = leaves.get(&leaf).unwrap().to_vec::<f32>().unwrap();
            sum.iter_mut().zip(part).for_each(|(s, p)| *s += p);
        }
        for (a, b) in tied.iter().zip(&sum) {
            assert!((a - b).abs() <= 1e-5 * b.abs().max(1.0), "{tied:?} {sum:?}");
        }
    }

    #[test]
    fn missing_gradients_are_named_and_frozen_ones_are_not_missed() {
        let (mut params, w, g) = tied();
        let mut grads = GradStore::new(&params).unwrap();
        let message = grads.require_complete().unwrap_err().to_string();
        assert!(message.starts_with("2 parameter(s) got no gradient this step: w, g"), "{message}");
        params.set_trainable("w", false).unwrap();
        grads = GradStore::new(&params).unwrap();
        run(&params, &mut grads, w, g, 1).unwrap();
        grads.require_complete().unwrap();
        assert!(grads.part("w").unwrap().is_none());
    }

    #[test]
    fn misuse_is_an_error() {
        let (params, w, _) = tied();
        let mut grads = GradStore::new(&params).unwrap();
        let inference = Tape::inference(&params);
        let y = linear(&inference.constant(x()), &inference.param(w).unwrap(), None).unwrap();
        assert!(!y.requires_grad());
        let dy = || Tensor::from_vec(vec![1f32; 6], [2, 3]).unwrap();
        let message = inference.backward_from(&y, dy(), &mut grads).unwrap_err().to_string();
        assert!(message.contains("does not record"), "{message}");

        let tape = Tape::new(&params);
        let y = linear(&tape.constant(x()), &tape.param(w).unwrap(), None).unwrap();
        assert!(tape.backward(&y, &mut grads).unwrap_err().to_string().contains("one element"));
        tape.backward_from(&y, dy(), &mut grads).unwrap();
        let message = tape.backward_from(&y, dy(), &mut grads).unwrap_err().to_string();
        assert!(message.contains("used up"), "{message}");
        let foreign = linear(&tape.constant(x()), &inference.param(w).unwrap(), None).unwrap_err();
        assert!(foreign.to_string().contains("another tape"), "{foreign}");
        let mut other = GradStore::new(&ParamStore::empty()).unwrap();
        let tape = Tape::new(&params);
        let y = linear(&tape.constant(x()), &tape.param(w).unwrap(), None).unwrap();
        let message = tape.backward_from(&y, dy(), &mut other).unwrap_err().to_string();
        assert!(message.contains("another parameter layout"), "{message}");
    }

    #[test]
    fn a_checked_tape_names_the_operation() {
        let (mut params, w, _) = tied();
        params.set_part("w", &Tensor::from_vec(vec![f32::MAX; 9], [3, 3]).unwrap()).unwrap();
        let tape = Tape::inference(&params).checked();
        let h = linear(&tape.constant(x()), &tape.param(w).unwrap(), None);
        let message = h.unwrap_err().to_string();
        assert!(message.contains("output 0 of linear") && message.contains("after reading w"), "{message}");
    }

    #[test]
    fn saved_memory_is_counted_once_and_freed() {
        let (params, w, g) = tied();
        let tape = Tape::new(&params);
        let y = linear(&tape.constant(x()), &tape.param(w).unwrap(), None).unwrap();
        let z = rms_norm(&y, &tape.param(g).unwrap(), 1e-6).unwrap();
        // x and y (6 f32 each) and rstd (2 f32); the weights are not counted.
        assert_eq!(tape.saved_bytes(), (6 + 6 + 2) * 4);
        let dy = Tensor::from_vec(vec![1f32; 6], [2, 3]).unwrap();
        tape.backward_from(&z, dy, &mut GradStore::new(&params).unwrap()).unwrap();
        assert_eq!(tape.saved_bytes(), 0);
    }
}
