//! [`Tape`] and [`Var`]: the record of one forward pass.

use std::cell::RefCell;
use std::collections::HashSet;
use std::fmt;

use rb_tensor::{DType, Shape, ShapeError, Tensor};

use crate::op::{BackwardState, Node};
use crate::{AutogradError, GradStore, ParamId, ParamStore, Result};

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

/// A record of operations on the values of one [`ParamStore`]. One tape serves one forward and backward.
pub struct Tape<'p> {
    params: &'p ParamStore,
    recording: bool,
    state: RefCell<State>,
}

#[derive(Default)]
pub(crate) struct State {
    pub(crate) nodes: Vec<Node>,
    leaves: usize,
    consumed: bool,
}

impl<'p> Tape<'p> {
    /// A tape that records for `backward`.
    pub fn new(params: &'p ParamStore) -> Self {
        Tape { params, recording: true, state: RefCell::default() }
    }

    /// A tape that records nothing: the same forward code, no memory held.
    pub fn inference(params: &'p ParamStore) -> Self {
        Tape { params, recording: false, state: RefCell::default() }
    }

    /// Whether operations are recorded for `backward`.
    pub fn is_recording(&self) -> bool {
        self.recording
    }

    /// The store this tape reads.
    pub fn params(&self) -> &'p ParamStore {
        self.params
    }

    /// A parameter as a variable; a constant if it is frozen.
    pub fn param(&self, id: ParamId) -> Result<Var<'_>> {
        let value = self.params.tensor(id)?;
        let trainable = self.recording && self.params.entry(id).trainable;
        let source = if trainable { Source::Param(id) } else { Source::Constant };
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
        let one = Tensor::from_vec(vec![1.0f64], loss.shape().clone())?.to_dtype(loss.dtype());
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
        let (nodes, leaves) = {
            let mut state = self.state.borrow_mut();
            let reason = match (self.recording, state.consumed, y.source) {
                (false, ..) => Some("this tape does not record; use `Tape::new`"),
                (_, true, _) => Some("this tape was used up by an earlier backward; record a new one"),
                (_, _, Source::Constant) => Some("nothing in the history of this value needs a gradient"),
                _ => None,
            };
            if let Some(reason) = reason {
                return Err(AutogradError::NoHistory { reason });
            }
            state.consumed = true;
            (std::mem::take(&mut state.nodes), state.leaves)
        };
        BackwardState::run(nodes, leaves, y.source, dy, grads)
    }

    pub(crate) fn var(&self, source: Source, value: Tensor) -> Var<'_> {
        Var { tape: self, source, value }
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
