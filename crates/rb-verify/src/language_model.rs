//! [`LanguageModel`]: what the checks ask of a model.

use rb_autograd::ops::cross_entropy::CrossEntropyOptions;
use rb_autograd::{ParamStore, Tape, Var};
use rb_nn::{CausalLm, ModelInput};
use rb_tensor::Tensor;

/// A decoder that the checks can run: [`CausalLm`], or any struct made of `rb-nn`'s modules.
///
/// # Examples
/// One line checks a model and its parameters:
/// ```
/// use rb_autograd::ParamBuilder;
/// use rb_nn::{CausalLm, LlamaConfig};
/// use rb_tensor::{Device, Rng};
///
/// let config = LlamaConfig { initializer_range: 0.1, ..LlamaConfig::new(31, 16, 20, 1, 2) };
/// let mut builder = ParamBuilder::default();
/// let model = CausalLm::init(&config, &mut builder)?;
/// let mut params = builder.build(&Rng::new(0), Device::Cpu)?;
///
/// let report = rb_verify::verify_model(&model, &mut params, 0)?;
/// assert!(report.passed(), "{report}");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub trait LanguageModel {
    /// Cross entropy against `labels [B, T]` (i32, already shifted; -100 is ignored), as a scalar.
    fn loss<'t>(
        &self,
        tape: &'t Tape<'t>,
        input: &ModelInput,
        labels: &Tensor,
        options: &CrossEntropyOptions,
    ) -> rb_nn::Result<Var<'t>>;

    /// Scores `[B, T, vocabulary]` without a history.
    fn logits(&self, params: &ParamStore, input: &ModelInput) -> rb_nn::Result<Tensor>;

    /// Entries of the vocabulary.
    fn vocab_size(&self) -> usize;

    /// Positions that a sequence can have.
    fn max_positions(&self) -> usize;

    /// The model as a decoder of this crate's reference, where it is one.
    fn as_causal_lm(&self) -> Option<&CausalLm> {
        None
    }
}

impl LanguageModel for CausalLm {
    fn loss<'t>(
        &self,
        tape: &'t Tape<'t>,
        input: &ModelInput,
        labels: &Tensor,
        options: &CrossEntropyOptions,
    ) -> rb_nn::Result<Var<'t>> {
        CausalLm::loss(self, tape, input, labels, options)
    }

    fn logits(&self, params: &ParamStore, input: &ModelInput) -> rb_nn::Result<Tensor> {
        CausalLm::logits(self, params, input)
    }

    fn vocab_size(&self) -> usize {
        self.config().vocab_size
    }

    fn max_positions(&self) -> usize {
        self.config().max_position_embeddings
    }

    fn as_causal_lm(&self) -> Option<&CausalLm> {
        Some(self)
    }
}
