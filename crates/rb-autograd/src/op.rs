//! The operation trait and the one place where device and element type select an implementation.

use rb_cuda::Gpu;
use rb_planted::{Defect, active};
use rb_tensor::{DType, Device, Shape, ShapeError, Tensor, TensorError};

use crate::cuda;
use crate::host;
use crate::tape::{LeafGrads, Seen, Source, Var};
use crate::{AutogradError, Beta, Float, GradStore, ParamStore, Result};

/// A differentiable operation: its attributes are the fields of the implementing struct.
///
/// There is no default backward and no way to register an operation without one.
pub trait Op: Sized + Send + Sync + 'static {
    /// Name in errors, profiles and the registry.
    const NAME: &'static str;
    /// Whether the host code does not read elements by its type parameter (a cast), so that it runs for
    /// every element type; `T` is then `f32` for types that are not [`Float`].
    const ANY_DTYPE: bool = false;
    /// Whether inputs after the first may have another element type than the first on a GPU: a residual
    /// stream in fp32 beside bf16 weights.
    const MIXED_DTYPES: bool = false;
    /// What forward keeps for backward.
    type Saved: Saved;

    /// The shape rule: checks the inputs and gives the output's shape. Device-independent.
    fn out_shape(&self, inputs: &[&Shape]) -> Result<Shape>;

    /// The output's element type; the first input's unless an operation says otherwise.
    fn out_dtype(&self, inputs: &[Tensor]) -> DType {
        inputs[0].dtype()
    }

    /// Host forward. `T` is the first input's element type and `out` what [`Op::out_shape`] gave.
    fn host_forward<T: Float>(&self, inputs: &[Tensor], out: &Shape) -> Result<(Tensor, Self::Saved)>;

    /// Host backward: turns the upstream gradient `dy` into gradients of the inputs, one call of a method
    /// of `grads` for each input that [`GradSinks::wanted`] names. `T` is `dy`'s element type.
    fn host_backward<T: Float>(
        &self,
        saved: Self::Saved,
        dy: Tensor,
        grads: &mut GradSinks<'_>,
    ) -> Result<()>;

    /// Enqueues forward on a GPU. Inputs are f32 or bf16; arithmetic is fp32.
    fn cuda_forward(&self, gpu: Gpu, inputs: &[Tensor], out: &Shape) -> Result<(Tensor, Self::Saved)>;

    /// Enqueues backward on a GPU, as [`Op::host_backward`].
    fn cuda_backward(
        &self,
        gpu: Gpu,
        saved: Self::Saved,
        dy: Tensor,
        grads: &mut GradSinks<'_>,
    ) -> Result<()>;
}

/// What an operation keeps for backward: a named struct, so that held memory can be counted.
pub trait Saved: 'static {
    /// The tensors held.
    fn tensors(&self) -> Vec<&Tensor>;
}

impl Saved for () {
    fn tensors(&self) -> Vec<&Tensor> {
        Vec::new()
    }
}

/// Declares a struct of tensors that implements [`Saved`]: `saved!(struct RmsNormSaved { x, rstd });`
#[macro_export]
macro_rules! saved {
    ($(#[$meta:meta])* pub(super) struct $name:ident { $($field:ident),* $(,)? }) => {
        $(#[$meta])*
        pub struct $name { $(pub(super) $field: rb_tensor::Tensor),* }
        $crate::saved!(@impl $name { $($field),* });
    };
    ($(#[$meta:meta])* struct $name:ident { $($field:ident),* $(,)? }) => {
        $(#[$meta])*
        pub struct $name { $($field: rb_tensor::Tensor),* }
        $crate::saved!(@impl $name { $($field),* });
    };
    (@impl $name:ident { $($field:ident),* }) => {
        impl $crate::Saved for $name {
            fn tensors(&self) -> Vec<&rb_tensor::Tensor> {
                vec![$(&self.$field),*]
            }
        }
    };
}

/// Runs `op` on `inputs` and records it if any input needs a gradient.
///
/// # Errors
/// Inputs of different tapes, devices or element types; the shape rule; no implementation.
pub fn apply<'t, O: Op>(op: O, inputs: &[&Var<'t>]) -> Result<Var<'t>> {
    let tape = inputs[0].tape;
    for (i, input) in inputs.iter().enumerate() {
        if !std::ptr::eq(input.tape, tape) {
            return Err(AutogradError::ForeignVar { op: O::NAME, input: i });
        }
        let device = inputs[0].value.device();
        if input.value.device() != device {
            let (got, argument) = (input.value.device(), format!("input {i}"));
            return Err(TensorError::DeviceMismatch { op: O::NAME, argument, got, expected: device }.into());
        }
        if !(O::MIXED_DTYPES && matches!(device, Device::Cuda(_))) {
            input.value.expect_dtype(O::NAME, &format!("input {i}"), inputs[0].dtype())?;
        }
    }
    let shapes: Vec<&Shape> = inputs.iter().map(|v| v.shape()).collect();
    let out = op.out_shape(&shapes)?;
    out.checked_numel(O::NAME)?;
    let values: Vec<Tensor> = inputs.iter().map(|v| v.value.clone()).collect();
    let (y, saved) = forward(&op, &values, &out)?;
    debug_assert_eq!(y.shape(), &out, "{}: forward disagrees with its shape rule", O::NAME);
    if tape.checks_finite() || tape.watcher().is_some() {
        let (number, param) = tape.count_operation();
        if let Some(watch) = tape.watcher() {
            watch.seen(&Seen { op: O::NAME, number, param, output: &y });
        }
        if tape.checks_finite() {
            check_finite::<O>((number, param), &y)?;
        }
    }
    let detached = O::NAME == "rope" && active(Defect::OperationWithoutBackward);
    if detached || !inputs.iter().any(|v| v.requires_grad()) {
        return Ok(tape.var(Source::Constant, y));
    }
    let sources = inputs.iter().map(|v| v.source).collect();
    let places = inputs.iter().map(|v| (v.shape().clone(), v.dtype())).collect();
    let node = Node::new(Box::new(Recorded { op, saved }), sources, places);
    Ok(tape.var(tape.push(node), y))
}

fn check_finite<O: Op>((number, param): (usize, Option<&str>), y: &Tensor) -> Result<()> {
    match y.first_non_finite()? {
        None => Ok(()),
        Some(index) => Err(AutogradError::NonFinite {
            op: O::NAME,
            index,
            shape: y.shape().clone(),
            number,
            param: param.unwrap_or("no parameter").to_string(),
        }),
    }
}

/// Dispatch of forward: with [`backward`], the only match on device and element type above storage.
fn forward<O: Op>(op: &O, inputs: &[Tensor], out: &Shape) -> Result<(Tensor, O::Saved)> {
    match (inputs[0].device(), inputs[0].dtype()) {
        (Device::Cpu, DType::F32) => op.host_forward::<f32>(inputs, out),
        (Device::Cpu, DType::F64) => op.host_forward::<f64>(inputs, out),
        (Device::Cpu, _) if O::ANY_DTYPE => op.host_forward::<f32>(inputs, out),
        (Device::Cuda(gpu), dtype) if O::ANY_DTYPE || matches!(dtype, DType::F32 | DType::BF16) => {
            let _holder = gpu.holding(O::NAME);
            op.cuda_forward(gpu, inputs, out)
        }
        (device, dtype) => Err(AutogradError::Unsupported { op: O::NAME, dtype, device }),
    }
}

fn backward<O: Op>(op: O, saved: O::Saved, dy: Tensor, grads: &mut GradSinks<'_>) -> Result<()> {
    if O::NAME == "rms_norm" && active(Defect::BackwardReturnsNothing) {
        return Ok(());
    }
    match (dy.device(), dy.dtype()) {
        (Device::Cpu, DType::F32) => op.host_backward::<f32>(saved, dy, grads),
        (Device::Cpu, DType::F64) => op.host_backward::<f64>(saved, dy, grads),
        (Device::Cpu, _) if O::ANY_DTYPE => op.host_backward::<f32>(saved, dy, grads),
        (Device::Cuda(gpu), dtype) if O::ANY_DTYPE || matches!(dtype, DType::F32 | DType::BF16) => {
            let _holder = gpu.holding("gradients in flight");
            op.cuda_backward(gpu, saved, dy, grads)
        }
        (device, dtype) => Err(AutogradError::Unsupported { op: O::NAME, dtype, device }),
    }
}

/// Sums two gradients; reuses `a`'s buffer if nobody else holds it.
fn add(a: Tensor, b: &Tensor) -> Result<Tensor> {
    fn typed<T: Float>(mut a: Tensor, b: &Tensor) -> Result<Tensor> {
        let b = b.as_slice::<T>()?;
        if let Some(values) = a.as_mut_slice::<T>() {
            host::par_update(values, b, |x, y| x + y);
            return Ok(a);
        }
        Ok(Tensor::from_vec(host::par_zip(a.as_slice::<T>()?, b, |x, y| x + y), a.shape().clone())?)
    }
    match (a.device(), a.dtype()) {
        (Device::Cpu, DType::F32) => typed::<f32>(a, b),
        (Device::Cpu, DType::F64) => typed::<f64>(a, b),
        // A bf16 value with several readers: the sum is rounded once.
        (Device::Cpu, DType::BF16) => {
            let sum = typed::<f32>(a.to_dtype(DType::F32)?, &b.to_dtype(DType::F32)?)?;
            Ok(sum.to_dtype(DType::BF16)?)
        }
        (Device::Cuda(_), _) if a.is_unshared() => {
            cuda::accumulate(&a, b, Beta::Accumulate)?;
            Ok(a)
        }
        (Device::Cuda(_), _) => {
            let sum = a.to_owned_copy()?;
            cuda::accumulate(&sum, b, Beta::Accumulate)?;
            Ok(sum)
        }
        (device, dtype) => Err(AutogradError::Unsupported { op: "accumulate", dtype, device }),
    }
}

/// One recorded operation.
pub(crate) struct Node {
    pub(crate) backward: Box<dyn RecordedOp>,
    sources: Vec<Source>,
    /// Shape and element type of each input.
    places: Vec<(Shape, DType)>,
}

impl Node {
    pub(crate) fn new(
        backward: Box<dyn RecordedOp>,
        sources: Vec<Source>,
        places: Vec<(Shape, DType)>,
    ) -> Node {
        Node { backward, sources, places }
    }
}

impl Node {
    /// The parameters that the operation reads.
    fn params(&self) -> impl Iterator<Item = crate::ParamId> {
        self.sources.iter().filter_map(Source::param)
    }

    /// Name of the first parameter that the operation reads.
    fn param(&self, weights: &ParamStore) -> Option<String> {
        let read =
            self.sources.iter().find_map(|s| if let Source::Param(id) = s { Some(*id) } else { None })?;
        weights.entry(read).parts.first().map(|part| part.name.clone())
    }
}

pub(crate) trait RecordedOp {
    fn name(&self) -> &'static str;
    fn saved(&self) -> Vec<&Tensor>;
    /// `params` are those of the tape.
    fn run(self: Box<Self>, params: &ParamStore, dy: Tensor, grads: &mut GradSinks<'_>) -> Result<()>;
}

struct Recorded<O: Op> {
    op: O,
    saved: O::Saved,
}

impl<O: Op> RecordedOp for Recorded<O> {
    fn name(&self) -> &'static str {
        O::NAME
    }
    fn saved(&self) -> Vec<&Tensor> {
        self.saved.tensors()
    }
    fn run(self: Box<Self>, _: &ParamStore, dy: Tensor, grads: &mut GradSinks<'_>) -> Result<()> {
        backward(self.op, self.saved, dy, grads)
    }
}

/// Gradients in flight during one backward pass.
pub(crate) struct BackwardState<'g> {
    nodes: Vec<Option<Tensor>>,
    leaves: Vec<Option<Tensor>>,
    /// Leaves that got a gradient in this pass.
    written: Vec<bool>,
    params: &'g mut GradStore,
}

impl BackwardState<'_> {
    /// Walks the nodes from last to first; each is freed as soon as it has run. `leaves` are gradients that the
    /// pass adds to.
    pub(crate) fn run(
        nodes: Vec<Node>,
        leaves: Vec<Option<Tensor>>,
        root: Source,
        dy: Tensor,
        (weights, check_finite): (&ParamStore, bool),
        params: &mut GradStore,
    ) -> Result<LeafGrads> {
        params.begin_pass();
        let done = BackwardState::walk(nodes, leaves, root, dy, (weights, check_finite), params);
        params.end_pass(done.is_ok())?;
        let done = done?;
        if let Device::Cuda(gpu) = params.device() {
            gpu.join()?;
        }
        Ok(done)
    }

    fn walk(
        mut nodes: Vec<Node>,
        leaves: Vec<Option<Tensor>>,
        root: Source,
        dy: Tensor,
        (weights, check_finite): (&ParamStore, bool),
        params: &mut GradStore,
    ) -> Result<LeafGrads> {
        let written = vec![false; leaves.len()];
        let mut state = BackwardState { nodes: vec![None; nodes.len()], leaves, written, params };
        let mut uses = vec![0usize; weights.layout().entries.len()];
        nodes.iter().flat_map(Node::params).for_each(|id| uses[id.0 as usize] += 1);
        state.add(root, dy)?;
        while let Some(node) = nodes.pop() {
            node.params().for_each(|id| uses[id.0 as usize] -= 1);
            let Some(dy) = state.nodes.pop().flatten() else { continue };
            let op = node.backward.name();
            if check_finite && dy.first_non_finite()?.is_some() {
                return Err(AutogradError::NonFiniteGradient { op, param: node.param(weights) });
            }
            if active(Defect::MemoryRetained) {
                std::mem::forget(dy.clone());
            }
            let mut sinks = GradSinks {
                op,
                written: vec![false; node.sources.len()],
                sources: &node.sources,
                places: &node.places,
                state: &mut state,
            };
            let param = if check_finite { node.param(weights) } else { None };
            node.backward.run(weights, dy, &mut sinks)?;
            if let Some(input) = (0..node.sources.len()).find(|&i| sinks.wanted(i) && !sinks.written[i]) {
                return Err(AutogradError::BackwardIncomplete { op, input });
            }
            if param.is_some()
                && let Device::Cuda(gpu) = state.params.device()
            {
                state.params.sum_waiting()?;
                gpu.join()?;
            }
            if let Some(name) = param
                && let Some(grad) = state.params.part(&name)?
                && grad.first_non_finite()?.is_some()
            {
                return Err(AutogradError::NonFiniteParameterGradient { op, param: name });
            }
            // After the last operation there is nothing left beside which something could be done.
            if !nodes.is_empty() {
                let mut finished =
                    node.sources.iter().filter_map(Source::param).filter(|id| uses[id.0 as usize] == 0);
                finished.try_for_each(|id| state.params.finish(id))?;
                state.params.sum_if_full()?;
            }
        }
        Ok(LeafGrads { grads: state.leaves, written: state.written })
    }

    fn add(&mut self, source: Source, grad: Tensor) -> Result<()> {
        let slot = match source {
            Source::Constant => return Ok(()),
            Source::Param(id) => return self.add_param(id, &grad),
            Source::Leaf(i) => {
                self.written[i] = true;
                &mut self.leaves[i]
            }
            Source::Node(i) => &mut self.nodes[i],
        };
        *slot = Some(match slot.take() {
            Some(_) if active(Defect::SecondReaderReplacesFirst) => grad,
            Some(old) => add(old, &grad)?,
            None => grad,
        });
        Ok(())
    }

    fn add_param(&mut self, id: crate::ParamId, grad: &Tensor) -> Result<()> {
        match (self.params.device(), grad.dtype()) {
            (Device::Cpu, DType::F64) => {
                let (dst, beta) = self.params.slot::<f64>(id)?;
                host::store(dst, grad.as_slice()?, beta);
            }
            (Device::Cpu, DType::F32) => {
                let (dst, beta) = self.params.slot::<f32>(id)?;
                host::store(dst, grad.as_slice()?, beta);
            }
            (Device::Cuda(_), _) => {
                let (dst, beta) = self.params.device_slot(id)?;
                cuda::accumulate(&dst, grad, beta)?;
            }
            (device, dtype) => return Err(AutogradError::Unsupported { op: "gradient", dtype, device }),
        }
        Ok(())
    }
}

/// Where an operation's backward puts the gradients of its inputs.
pub struct GradSinks<'a> {
    op: &'static str,
    written: Vec<bool>,
    sources: &'a [Source],
    places: &'a [(Shape, DType)],
    state: &'a mut dyn Sink,
}

impl GradSinks<'_> {
    /// Whether input `i` exists and needs a gradient. Work for one that does not is wasted, not wrong.
    pub fn wanted(&self, i: usize) -> bool {
        self.sources.get(i).is_some_and(|s| *s != Source::Constant)
    }

    /// Whether the gradient of input `i` goes to the store, where nothing reads it before the pass is over.
    pub fn goes_to_store(&self, i: usize) -> bool {
        matches!(self.sources.get(i), Some(Source::Param(_)))
    }

    /// If the gradient of input `i` goes to the store: a place for partial sums of it, `[rows, columns]` flat f32, over
    /// whose rows the store sums in time; what writes them is enqueued before the operation ends.
    pub(crate) fn partial_sums(
        &mut self,
        gpu: Gpu,
        i: usize,
        rows: usize,
        columns: usize,
    ) -> Result<Option<Tensor>> {
        let Some(Source::Param(id)) = self.sources.get(i).copied() else { return Ok(None) };
        self.written[i] = true;
        self.state.params().partial_sums(gpu, id, rows, columns).map(Some)
    }

    /// Where the gradient of input `i` goes.
    pub(crate) fn source(&self, i: usize) -> Source {
        self.sources[i]
    }

    /// The first input that is the same variable as input `i`.
    pub(crate) fn first_alike(&self, i: usize) -> usize {
        self.sources.iter().position(|s| *s == self.sources[i]).unwrap_or(i)
    }

    /// Takes the gradient that input `i` has so far.
    pub(crate) fn take(&mut self, i: usize) -> Option<Tensor> {
        self.state.take(self.sources[i])
    }

    /// Says that the gradient of input `i` is part of another input's.
    pub(crate) fn mark_written(&mut self, i: usize) {
        self.written[i] = true;
    }

    /// Gradients of the parameters.
    pub(crate) fn params(&mut self) -> &mut GradStore {
        self.state.params()
    }

    /// The shape of input `i`.
    pub fn shape(&self, i: usize) -> &Shape {
        &self.places[i].0
    }

    /// The element type of input `i`.
    pub fn dtype(&self, i: usize) -> DType {
        self.places[i].1
    }

    /// Gives input `i` its gradient as a tensor (moved, not copied, where it is the first).
    pub fn add(&mut self, i: usize, grad: Tensor) -> Result<()> {
        if !self.wanted(i) {
            return Ok(());
        }
        let (shape, dtype) = &self.places[i];
        if grad.shape() != shape {
            return Err(ShapeError::new(self.op, format!("gradient {i}"), grad.shape(), shape).into());
        }
        if !matches!(self.sources[i], Source::Param(_)) {
            grad.expect_dtype(self.op, &format!("gradient {i}"), *dtype)?;
        }
        self.written[i] = true;
        self.state.add(self.sources[i], grad)
    }

    /// Lets `f` write the gradient of input `i` in place: the parameter's place in the arena, or a buffer.
    /// With [`Beta::Overwrite`] `f` must write every element (a new buffer holds zeros, an arena holds
    /// the last step's values); with [`Beta::Accumulate`] it must add.
    pub fn write<T: Float>(&mut self, i: usize, f: impl FnOnce(&mut [T], Beta)) -> Result<()> {
        if !self.wanted(i) {
            return Ok(());
        }
        self.written[i] = true;
        let source = self.sources[i];
        if let Source::Param(id) = source {
            let (dst, beta) = self.state.params().slot::<T>(id)?;
            f(dst, beta);
            return Ok(());
        }
        if let Some(mut old) = self.state.take(source) {
            if let Some(dst) = old.as_mut_slice::<T>() {
                f(dst, Beta::Accumulate);
                return self.state.add(source, old);
            }
            self.state.add(source, old)?;
        }
        let shape = &self.places[i].0;
        let mut fresh = vec![T::ZERO; shape.numel()];
        f(&mut fresh, Beta::Overwrite);
        self.state.add(source, Tensor::from_vec(fresh, shape.clone())?)
    }

    /// As [`GradSinks::write`] on a GPU: `f` enqueues work that writes (or adds to) every element of the tensor
    /// it is given, whose element type may be fp32 where the input's is bf16 (a parameter's gradient).
    pub fn write_cuda(
        &mut self,
        gpu: Gpu,
        i: usize,
        f: impl FnOnce(&Tensor, Beta) -> Result<()>,
    ) -> Result<()> {
        if !self.wanted(i) {
            return Ok(());
        }
        self.written[i] = true;
        let source = self.sources[i];
        if let Source::Param(id) = source {
            let (dst, beta) = self.state.params().device_slot(id)?;
            return f(&dst, beta);
        }
        if let Some(old) = self.state.take(source) {
            // Adding to a copy rounds as adding in place does: bits do not depend on who else holds the gradient.
            let sum = if old.is_unshared() { old } else { old.to_owned_copy()? };
            f(&sum, Beta::Accumulate)?;
            return self.state.add(source, sum);
        }
        let (shape, dtype) = &self.places[i];
        let fresh = Tensor::uninit(shape.clone(), *dtype, Device::Cuda(gpu))?;
        f(&fresh, Beta::Overwrite)?;
        self.state.add(source, fresh)
    }
}

/// What [`GradSinks`] needs of the pass; a trait object keeps its lifetime out of every op's signature.
trait Sink {
    fn add(&mut self, source: Source, grad: Tensor) -> Result<()>;
    fn take(&mut self, source: Source) -> Option<Tensor>;
    fn params(&mut self) -> &mut GradStore;
}

impl Sink for BackwardState<'_> {
    fn add(&mut self, source: Source, grad: Tensor) -> Result<()> {
        BackwardState::add(self, source, grad)
    }
    fn take(&mut self, source: Source) -> Option<Tensor> {
        match source {
            Source::Leaf(i) => self.leaves[i].take(),
            Source::Node(i) => self.nodes[i].take(),
            Source::Constant | Source::Param(_) => None,
        }
    }
    fn params(&mut self) -> &mut GradStore {
        self.params
    }
}
