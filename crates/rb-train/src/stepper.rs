//! Whole optimizer steps: launch by launch, or on a GPU captured once and replayed.
//!
//! A step that is captured reads what differs from step to step (tokens, labels, the number of valid tokens, the learning
//! rate) from fixed places in device memory, which are written before it is launched. The same code makes the steps that
//! are not captured, so that both have the same bits.

use rb_autograd::ops::attention::AttentionMask;
use rb_autograd::ops::cross_entropy::CrossEntropyOptions;
use rb_autograd::{GradStore, ParamStore};
use rb_cuda::{Gpu, Graph};
use rb_data::{Batch, IGNORE};
use rb_nn::{CausalLm, ModelInput};
use rb_optim::Optimizer;
use rb_tensor::{Arena, DType, Device, Tensor};

use crate::Result;
use crate::step::{self, LossTerms};

/// What a step changes and what it reads.
pub struct Parts<'a> {
    /// The model.
    pub model: &'a CausalLm,
    /// Its weights.
    pub params: &'a mut ParamStore,
    /// Their gradients.
    pub grads: &'a mut GradStore,
    /// What turns these into changes of those.
    pub optimizer: &'a mut dyn Optimizer,
}

/// Numbers of a step that are the same for many steps; `lr` is not.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Settings {
    /// Whether attention stays inside each document.
    pub document_mask: bool,
    /// Terms of the loss besides cross entropy.
    pub terms: LossTerms,
    /// Global norm to which gradients are clipped; 0 turns it off.
    pub max_grad_norm: f64,
    /// Learning rate of this step.
    pub lr: f64,
}

/// Loss and gradient norm of a step, scalars on the device of the weights. Read them, or begin to, before the next step:
/// a captured step writes to the same place again.
pub struct Numbers {
    /// Mean loss over the valid tokens.
    pub loss: Tensor,
    /// Norm of the gradients before clipping.
    pub grad_norm: Tensor,
}

/// What makes one captured step another.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Key {
    micro_batches: usize,
    batch_size: usize,
    seq_len: usize,
    document_mask: bool,
    terms: LossTerms,
    max_grad_norm: f64,
}

/// Makes steps. One of it serves one run.
#[derive(Default)]
pub struct Stepper {
    eager_only: bool,
    key: Option<Key>,
    /// Steps made with this key.
    steps: u64,
    inputs: Option<Inputs>,
    captured: Option<Captured>,
    captures: u32,
    refusal: Option<String>,
}

struct Captured {
    graph: Graph,
    numbers: [Tensor; 2],
}

/// Another owner of a step's memory makes a new capture necessary; if that goes on, steps are not captured any more.
const MOST_CAPTURES: u32 = 16;

impl Stepper {
    /// Steps are captured where that can be done, or never.
    pub fn new(capture: bool) -> Stepper {
        Stepper { eager_only: !capture, ..Stepper::default() }
    }

    /// Nodes of the captured step, if there is one.
    pub fn captured_nodes(&self) -> Option<usize> {
        self.captured.as_ref().map(|captured| captured.graph.nodes())
    }

    /// Why steps are not captured though they were to be; said once.
    pub fn take_refusal(&mut self) -> Option<String> {
        self.refusal.take()
    }

    /// One step over `batches`, enqueued on a GPU and made on the CPU.
    ///
    /// # Errors
    /// Those of the model, the optimizer and the device; a token or label outside the vocabulary.
    pub fn step(&mut self, parts: &mut Parts<'_>, batches: &[Batch], settings: &Settings) -> Result<Numbers> {
        let Settings { document_mask, terms, max_grad_norm, lr } = *settings;
        let uniform = batches
            .windows(2)
            .all(|pair| (pair[0].batch_size, pair[0].seq_len) == (pair[1].batch_size, pair[1].seq_len));
        let (Device::Cuda(gpu), Some(first), true) =
            (parts.params.arena().device(), batches.first(), uniform)
        else {
            let loss = step::forward_backward(
                parts.model,
                parts.params,
                parts.grads,
                batches,
                document_mask,
                terms,
            )?;
            let grad_norm =
                parts.optimizer.clipped_step(parts.params, parts.grads, lr, max_grad_norm, &loss)?;
            return Ok(Numbers { loss, grad_norm });
        };
        let key = Key {
            micro_batches: batches.len(),
            batch_size: first.batch_size,
            seq_len: first.seq_len,
            document_mask,
            terms,
            max_grad_norm,
        };
        if self.key != Some(key) {
            (self.captured, self.inputs) = (None, None);
            self.inputs = Some(Inputs::new(&key, parts.model.config().vocab_size, gpu)?);
            (self.key, self.steps) = (Some(key), 0);
        }
        let Some(inputs) = &mut self.inputs else { return Err(missing_inputs()) };
        inputs.write(batches)?;
        parts.optimizer.set_rate(lr)?;
        if self.captured.as_ref().is_some_and(|captured| !captured.graph.holds()) {
            self.captured = None;
        }
        // The first step of a shape loads kernels and finds algorithms; it is not captured.
        if self.captured.is_none() && self.steps > 0 && !self.eager_only {
            self.capture(gpu, parts)?;
        }
        self.steps += 1;
        match (&self.captured, &self.inputs) {
            (Some(Captured { graph, numbers: [loss, grad_norm] }), _) => {
                graph.launch()?;
                Ok(Numbers { loss: loss.clone(), grad_norm: grad_norm.clone() })
            }
            (None, Some(inputs)) => {
                let [loss, grad_norm] = enqueue(parts, inputs)?;
                Ok(Numbers { loss, grad_norm })
            }
            _ => Err(missing_inputs()),
        }
    }

    /// Captures the step; where that fails, this and all later steps go launch by launch.
    fn capture(&mut self, gpu: Gpu, parts: &mut Parts<'_>) -> Result<()> {
        let Some(inputs) = &self.inputs else { return Err(missing_inputs()) };
        self.captures += 1;
        if self.captures > MOST_CAPTURES {
            self.eager_only = true;
            self.refusal = Some("its memory was wanted by others again and again".into());
            return Ok(());
        }
        match gpu.capture(|| enqueue(parts, inputs)) {
            Ok((graph, numbers)) => self.captured = Some(Captured { graph, numbers }),
            Err(error) => {
                self.eager_only = true;
                self.refusal = Some(error.to_string());
            }
        }
        Ok(())
    }
}

fn missing_inputs() -> crate::TrainError {
    crate::TrainError::Gate { reason: "a step without inputs: this is a defect of the program".into() }
}

/// Enqueues everything from the inputs to the new weights; gives loss and gradient norm.
fn enqueue(parts: &mut Parts<'_>, inputs: &Inputs) -> Result<[Tensor; 2]> {
    let options = inputs.loss_options()?;
    let micro_batches = (0..inputs.key.micro_batches).map(|at| inputs.micro_batch(at));
    let loss = step::accumulate(parts.model, parts.params, parts.grads, micro_batches, |_| options.clone())?;
    let grad_norm = parts.optimizer.rated_step(parts.params, parts.grads, inputs.key.max_grad_norm, &loss)?;
    Ok([loss, grad_norm])
}

/// What differs from step to step, in device memory.
struct Inputs {
    key: Key,
    vocab_size: usize,
    /// For each micro-batch: ids, labels and positions `[B, T]` each, and with documents ranges `[B, T, 2]`.
    integers: Arena,
    /// `1 / valid tokens of the step`.
    factor: Arena,
}

impl Inputs {
    fn new(key: &Key, vocab_size: usize, gpu: Gpu) -> Result<Inputs> {
        let _holder = gpu.holding("batch");
        let device = Device::Cuda(gpu);
        let integers = key.micro_batches * fields(key) * key.batch_size * key.seq_len;
        Ok(Inputs {
            key: *key,
            vocab_size,
            integers: Arena::zeros("batch", integers, DType::I32, device)?,
            factor: Arena::zeros("loss factor", 1, DType::F32, device)?,
        })
    }

    /// Checks the batches and starts to copy them.
    fn write(&mut self, batches: &[Batch]) -> Result<()> {
        let mut all = Vec::with_capacity(self.integers.numel());
        for batch in batches {
            // Kernels cannot raise an error, so what they index with is checked before it leaves the host.
            step::check_range("input_ids", &batch.input_ids, 0, self.vocab_size)?;
            step::check_range("labels", &batch.labels, IGNORE, self.vocab_size)?;
            all.extend_from_slice(&batch.input_ids);
            all.extend_from_slice(&batch.labels);
            if self.key.document_mask {
                all.extend_from_slice(&batch.position_ids);
                let shape = [batch.batch_size, batch.seq_len];
                let starts = Tensor::from_vec(batch.doc_start.clone(), shape)?;
                match AttentionMask::documents(&starts)? {
                    AttentionMask::Ranges(ranges) => all.extend_from_slice(ranges.as_slice::<i32>()?),
                    _ => return Err(missing_inputs()),
                }
            } else {
                all.extend((0..batch.batch_size).flat_map(|_| 0..batch.seq_len as i32));
            }
        }
        let len = all.len();
        self.integers.write(0, &Tensor::from_vec(all, [len])?)?;
        let valid = step::valid_tokens(batches);
        let factor = (1.0 / valid.max(1) as f64) as f32;
        Ok(self.factor.write(0, &Tensor::from_vec(vec![factor], [1])?)?)
    }

    fn loss_options(&self) -> Result<CrossEntropyOptions> {
        Ok(CrossEntropyOptions {
            factor: Some(self.factor.view(0, [1])?),
            ..step::loss_options(1, self.key.terms)
        })
    }

    fn micro_batch(&self, at: usize) -> Result<(ModelInput, Tensor)> {
        let (batch, len) = (self.key.batch_size, self.key.seq_len);
        let n = batch * len;
        let start = at * fields(&self.key) * n;
        let field = |i: usize| self.integers.view(start + i * n, [batch, len]);
        let mask = match self.key.document_mask {
            true => AttentionMask::Ranges(self.integers.view(start + 3 * n, [batch, len, 2])?),
            false => AttentionMask::Causal,
        };
        let input = ModelInput { input_ids: field(0)?, position_ids: Some(field(2)?), mask };
        Ok((input, field(1)?))
    }
}

/// Integers for each token.
fn fields(key: &Key) -> usize {
    if key.document_mask { 5 } else { 3 }
}

#[cfg(test)]
mod tests {
    use rb_autograd::{ParamBuilder, Precision};
    use rb_cuda::GpuOptions;
    use rb_nn::LlamaConfig;
    use rb_optim::{AdamW, AdamWConfig};

    use super::*;

    fn batch(rows: usize, len: usize) -> Batch {
        let n = rows * len;
        Batch {
            batch_size: rows,
            seq_len: len,
            input_ids: (0..n as i32).map(|i| i % 50).collect(),
            labels: (0..n as i32).map(|i| (i + 1) % 50).collect(),
            doc_start: vec![0; n],
            position_ids: (0..n).map(|i| (i % len) as i32).collect(),
            valid_tokens: n,
            dropped_targets: 0,
            epoch: 0,
        }
    }

    struct Run {
        model: CausalLm,
        params: ParamStore,
        grads: GradStore,
        adam: AdamW,
        stepper: Stepper,
    }

    impl Run {
        fn new(device: Device, capture: bool) -> Run {
            let mut builder = ParamBuilder::default();
            let config = LlamaConfig {
                num_key_value_heads: Some(2),
                tie_word_embeddings: true,
                ..LlamaConfig::new(50, 64, 96, 2, 4)
            };
            let model = CausalLm::init(&config, &mut builder).unwrap();
            let mut params = builder.build_zeros(DType::F32, device).unwrap();
            if device != Device::Cpu {
                params.set_precision(Precision::MIXED).unwrap();
            }
            let grads = GradStore::new(&params).unwrap();
            let adam = AdamW::new(AdamWConfig::default(), &params).unwrap();
            Run { model, params, grads, adam, stepper: Stepper::new(capture) }
        }

        fn step(&mut self, batches: &[Batch], document_mask: bool) -> Result<Numbers> {
            let Run { model, params, grads, adam, stepper } = self;
            let settings =
                Settings { document_mask, terms: LossTerms::default(), max_grad_norm: 1.0, lr: 1e-3 };
            stepper.step(&mut Parts { model, params, grads, optimizer: adam }, batches, &settings)
        }
    }

    fn dry() -> Gpu {
        Gpu::dry((9, 0), &GpuOptions::default())
    }

    #[test]
    fn the_second_step_of_a_shape_is_captured_and_launches_as_much() {
        let gpu = dry();
        let mut run = Run::new(Device::Cuda(gpu), true);
        let launches = || gpu.launches().values().sum::<u64>();
        let mut gained = Vec::new();
        for (batches, mask) in
            [(1, false), (1, false), (1, false), (2, false), (2, false), (1, true), (1, true), (1, true)]
        {
            let before = launches();
            drop(run.step(&vec![batch(2, 8); batches], mask).unwrap());
            gained.push((launches() - before, run.stepper.captured.is_some()));
        }
        let captured: Vec<bool> = gained.iter().map(|(_, captured)| *captured).collect();
        assert_eq!(captured, [false, true, true, false, true, false, true, true], "{gained:?}");
        let counts: Vec<u64> = gained.iter().map(|(count, _)| *count).collect();
        assert_eq!(
            [counts[1], counts[2], counts[4], counts[6]],
            [counts[0], counts[0], counts[3], counts[5]]
        );
        assert_eq!(run.stepper.take_refusal(), None);
    }

    /// What a plan measures of one step holds for all.
    #[test]
    fn later_steps_take_no_more_memory_than_the_first() {
        for micro_batches in [1, 2] {
            let gpu = dry();
            let mut run = Run::new(Device::Cuda(gpu), true);
            let peaks: Vec<usize> = (0..4)
                .map(|_| {
                    drop(run.step(&vec![batch(2, 8); micro_batches], false).unwrap());
                    gpu.memory().peak
                })
                .collect();
            assert_eq!(peaks, [peaks[0]; 4]);
        }
    }

    #[test]
    fn evaluation_between_steps_uses_the_same_memory() {
        let gpu = dry();
        let mut run = Run::new(Device::Cuda(gpu), true);
        for _ in 0..3 {
            drop(run.step(&[batch(2, 8)], false).unwrap());
        }
        let reserved = gpu.memory().reserved;
        for _ in 0..3 {
            step::evaluate(&run.model, &run.params, std::iter::once(batch(2, 8)), false).unwrap();
            drop(run.step(&[batch(2, 8)], false).unwrap());
        }
        assert_eq!((gpu.memory().reserved, run.stepper.captures), (reserved, 1));
        // A tensor that outlives a step where the captured one writes: the step is captured again.
        let stays = Tensor::uninit([4 << 20], DType::F32, Device::Cuda(gpu)).unwrap();
        drop(run.step(&[batch(2, 8)], false).unwrap());
        assert_eq!((run.stepper.captures, run.stepper.captured.is_some()), (2, true));
        drop(stays);
    }

    #[test]
    fn without_capture_and_on_the_host_steps_are_plain() {
        let mut run = Run::new(Device::Cuda(dry()), false);
        for _ in 0..3 {
            drop(run.step(&[batch(2, 8)], false).unwrap());
        }
        assert!(run.stepper.captured.is_none());
        let mut run = Run::new(Device::Cpu, true);
        for _ in 0..3 {
            assert!(run.step(&[batch(2, 8)], false).unwrap().loss.item().unwrap().is_finite());
        }
        let mut wrong = batch(2, 8);
        wrong.input_ids[3] = 50;
        let mut run = Run::new(Device::Cuda(dry()), true);
        let message = run.step(&[wrong], false).err().unwrap().to_string();
        assert!(message.contains("input_ids[3] is 50"), "{message}");
    }
}
