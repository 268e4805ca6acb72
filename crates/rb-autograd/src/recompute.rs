//! Recomputation: a part of the forward pass that keeps its inputs alone and runs again in backward.

use rb_tensor::{ShapeError, Tensor};

use crate::op::{GradSinks, Node, RecordedOp};
use crate::tape::{Source, Tape, Var};
use crate::{AutogradError, ParamStore, Result};

const NAME: &str = "recompute";

/// A part of a model: what it computes from its inputs and from parameters of the tape.
type Part = dyn for<'a> Fn(&'a Tape<'a>, &[Var<'a>]) -> Result<Var<'a>>;

impl Tape<'_> {
    /// What `part` gives for `inputs`, without its intermediate values: forward keeps the inputs, and backward
    /// runs `part` a second time to differentiate it. Values and gradients have the bits that calling
    /// `part` directly gives.
    ///
    /// `part` must be a function: the same inputs and parameters always give the same bits. It may use the
    /// tape and the variables it is given, and no others; what is not differentiated it captures as tensors.
    ///
    /// # Errors
    /// Those of `part`; an input of another tape; in backward, an input that wants a gradient and gets none.
    ///
    /// # Examples
    /// ```
    /// use rb_autograd::{GradStore, Init, ParamBuilder, Tape, ops};
    /// use rb_tensor::{Device, Rng, Tensor};
    ///
    /// let mut builder = ParamBuilder::default();
    /// let w = builder.param("w", [8, 4], Init::Normal(1.0))?;
    /// let params = builder.build(&Rng::new(0), Device::Cpu)?;
    /// let tape = Tape::new(&params);
    /// let x = tape.leaf(Tensor::from_vec(vec![1f32, 2.0, 3.0, 4.0], [1, 4])?);
    /// let y = tape.recompute(&[&x], move |tape, inputs| {
    ///     let wide = ops::linear(&inputs[0], &tape.param(w)?, None)?;
    ///     ops::swiglu(&wide)
    /// })?;
    /// assert_eq!(tape.saved_bytes(), 4 * 4); // x alone
    /// let dy = Tensor::from_vec(vec![1f32; 4], [1, 4])?;
    /// let leaves = tape.backward_from(&y, dy, &mut GradStore::new(&params)?)?;
    /// assert!(leaves.get(&x).is_some());
    /// # Ok::<(), rb_autograd::AutogradError>(())
    /// ```
    pub fn recompute<'t>(
        &'t self,
        inputs: &[&Var<'t>],
        part: impl for<'a> Fn(&'a Tape<'a>, &[Var<'a>]) -> Result<Var<'a>> + 'static,
    ) -> Result<Var<'t>> {
        if let Some(input) = inputs.iter().position(|v| !std::ptr::eq(v.tape, self)) {
            return Err(AutogradError::ForeignVar { op: NAME, input });
        }
        if !self.is_recording() {
            let inputs: Vec<Var<'t>> = inputs.iter().map(|&v| v.clone()).collect();
            return part(self, &inputs);
        }
        let values: Vec<Tensor> = inputs.iter().map(|v| v.value.clone()).collect();
        let (y, trains) = {
            let inner = self.unrecorded();
            let inputs: Vec<Var<'_>> = values.iter().map(|v| inner.constant(v.clone())).collect();
            let y = part(&inner, &inputs)?.value;
            self.continue_from(&inner);
            (y, inner.read_trainable())
        };
        if !trains && !inputs.iter().any(|v| v.requires_grad()) {
            return Ok(self.var(Source::Constant, y));
        }
        let sources: Vec<Source> = inputs.iter().map(|v| v.source).collect();
        let places = values.iter().map(|v| (v.shape().clone(), v.dtype())).collect();
        let backward = Box::new(Recomputed { part: Box::new(part), inputs: values });
        Ok(self.var(self.push(Node::new(backward, sources, places)), y))
    }
}

struct Recomputed {
    part: Box<Part>,
    inputs: Vec<Tensor>,
}

impl RecordedOp for Recomputed {
    fn name(&self) -> &'static str {
        NAME
    }

    fn saved(&self) -> Vec<&Tensor> {
        self.inputs.iter().collect()
    }

    fn run(self: Box<Self>, params: &ParamStore, dy: Tensor, grads: &mut GradSinks<'_>) -> Result<()> {
        let Recomputed { part, inputs: values } = *self;
        let tape = Tape::new(params);
        let firsts: Vec<usize> = (0..values.len()).map(|i| grads.first_alike(i)).collect();
        // Inputs that own a leaf of the inner tape, in the order of the leaves.
        let mut owners = Vec::new();
        let mut inputs: Vec<Var<'_>> = Vec::new();
        for (i, value) in values.into_iter().enumerate() {
            let var = match grads.source(i) {
                Source::Constant => tape.constant(value),
                // The gradient goes to the store without a stop.
                source @ Source::Param(_) => {
                    grads.mark_written(i);
                    tape.var(source, value)
                }
                // One variable outside is one leaf inside: gradients add up in the same order.
                _ if firsts[i] < i => inputs[firsts[i]].clone(),
                _ => {
                    owners.push(i);
                    tape.leaf(value)
                }
            };
            inputs.push(var);
        }
        let y = part(&tape, &inputs)?;
        if y.shape() != dy.shape() {
            return Err(ShapeError::new(NAME, "second output", y.shape(), dy.shape()).into());
        }
        let root = y.source;
        // Only the record holds values from here on, so that each is freed when its operation is done.
        drop((y, inputs));
        if root == Source::Constant {
            return match owners.first() {
                None => Ok(()),
                Some(&input) => Err(AutogradError::BackwardIncomplete { op: NAME, input }),
            };
        }
        // What the inputs' gradients hold already is added to, not added afterwards: rounding is that of one tape.
        let seeds = owners.iter().map(|&i| grads.take(i)).collect();
        let done = tape.backward_within(root, dy, grads.params(), seeds)?;
        for ((input, grad), written) in owners.into_iter().zip(done.grads).zip(done.written) {
            match grad {
                Some(grad) if written => {
                    for alike in (input..firsts.len()).filter(|&i| firsts[i] == input) {
                        grads.mark_written(alike);
                    }
                    grads.add(input, grad)?;
                }
                _ => return Err(AutogradError::BackwardIncomplete { op: NAME, input }),
            }
        }
        Ok(())
    }
}
