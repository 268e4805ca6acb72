//! Models of a user's own that lose a gradient where every parameter still gets one: the checks refuse them, and pass the
//! same model without the fault.

use rb_autograd::ops::attention::AttentionOptions;
use rb_autograd::ops::cross_entropy::CrossEntropyOptions;
use rb_autograd::ops::rope::RopeTable;
use rb_autograd::{Init, ParamBuilder, ParamId, ParamStore, Tape, Var, ops};
use rb_nn::{Embedding, Linear, LlamaConfig, ModelInput, Result, RmsNorm, rope_table};
use rb_tensor::{Device, Rng, Tensor};
use rb_verify::{LanguageModel, Report, verify_model};

const VOCABULARY: usize = 29;
const WIDTH: usize = 16;
const HEADS: usize = 2;
const POSITIONS: usize = 12;

#[derive(Clone, Copy, Debug, PartialEq)]
enum Fault {
    None,
    /// The feed-forward layer reads the stream without its history; the path beside it hides that.
    DetachedBranch,
    /// The head reads a copy of the table, which still learns as an embedding.
    TiedToACopy,
    /// A bias that shifts all scores of a softmax alike: its gradient is rounding noise, and Adam follows it.
    ShiftOfASoftmax,
}

/// One layer by hand: attention, a feed-forward layer whose columns a softmax weighs, a tied head.
struct Own {
    fault: Fault,
    table: Embedding,
    qkv: Linear,
    up: Linear,
    weigh: Linear,
    shift: ParamId,
    norms: [RmsNorm; 3],
    rope: RopeTable,
}

impl Own {
    fn init(fault: Fault, builder: &mut ParamBuilder) -> Result<Own> {
        let norm = |builder: &mut ParamBuilder, name| RmsNorm::init(builder, name, WIDTH, 1e-6);
        let config = LlamaConfig {
            max_position_embeddings: POSITIONS,
            ..LlamaConfig::new(VOCABULARY, WIDTH, WIDTH, 1, HEADS)
        };
        let qkv = [("q", WIDTH), ("k", WIDTH), ("v", WIDTH)];
        Ok(Own {
            fault,
            table: Embedding::init(builder, "table", VOCABULARY, VOCABULARY, WIDTH, 0.05)?,
            qkv: Linear::init(builder, "attention", &qkv, WIDTH, false, 0.2)?,
            up: Linear::init(builder, "mlp", &[("up", WIDTH)], WIDTH, false, 0.2)?,
            weigh: Linear::init(builder, "mlp", &[("weigh", WIDTH)], WIDTH, false, 0.2)?,
            shift: builder.param("mlp.shift", [WIDTH], Init::Zeros)?,
            norms: [norm(builder, "first")?, norm(builder, "second")?, norm(builder, "last")?],
            rope: rope_table(&config),
        })
    }

    /// Scores `[B, T, V]`.
    fn forward<'t>(&self, tape: &'t Tape<'t>, input: &ModelInput) -> Result<Var<'t>> {
        let (rows, len) = (input.input_ids.shape()[0], input.input_ids.shape()[1]);
        let positions = match &input.position_ids {
            Some(positions) => positions.clone(),
            None => Tensor::from_vec((0..rows).flat_map(|_| 0..len as i32).collect(), [rows, len])?,
        };
        let x = self.table.forward(tape, &input.input_ids)?;
        let heads = [rows, len, 3 * HEADS, WIDTH / HEADS];
        let qkv = ops::reshape(&self.qkv.forward(tape, &self.norms[0].forward(tape, &x)?)?, heads)?;
        let qkv = ops::rope(&qkv, &positions, &self.rope, 2 * HEADS)?;
        let options =
            AttentionOptions { scale: ((WIDTH / HEADS) as f64).powf(-0.5), softcap: None, window: None };
        let y = ops::attention_packed(&qkv, HEADS, HEADS, &input.mask, options)?;
        let x = ops::add(&x, &ops::reshape(&y, [rows, len, WIDTH])?)?;

        let stream = if self.fault == Fault::DetachedBranch { tape.constant(x.detach()) } else { x.clone() };
        let h = self.norms[1].forward(tape, &stream)?;
        let shift = tape.param_full(self.shift)?;
        let shift = if self.fault == Fault::ShiftOfASoftmax { ops::sum(&shift, 0, true)? } else { shift };
        let weights = ops::softmax(&ops::add(&self.weigh.forward(tape, &h)?, &shift)?, -1)?;
        let x = ops::add(&x, &ops::mul(&self.up.forward(tape, &h)?, &weights)?)?;

        let x = self.norms[2].forward(tape, &x)?;
        if self.fault == Fault::TiedToACopy {
            let table = tape.params().id("table.weight")?;
            let copy = tape.constant(tape.param(table)?.detach());
            return Ok(ops::linear(&x, &copy, None)?);
        }
        self.table.logits(tape, &x)
    }
}

impl LanguageModel for Own {
    fn loss<'t>(
        &self,
        tape: &'t Tape<'t>,
        input: &ModelInput,
        labels: &Tensor,
        options: &CrossEntropyOptions,
    ) -> Result<Var<'t>> {
        Ok(ops::cross_entropy(&self.forward(tape, input)?, labels, options)?)
    }

    fn logits(&self, params: &ParamStore, input: &ModelInput) -> Result<Tensor> {
        Ok(self.forward(&Tape::inference(params), input)?.detach())
    }

    fn vocab_size(&self) -> usize {
        VOCABULARY
    }

    fn max_positions(&self) -> usize {
        POSITIONS
    }
}

fn verified(fault: Fault) -> Report {
    let mut builder = ParamBuilder::default();
    let model = Own::init(fault, &mut builder).unwrap();
    let mut params = builder.build(&Rng::new(5), Device::Cpu).unwrap();
    verify_model(&model, &mut params, 5).unwrap()
}

#[test]
fn a_model_of_ones_own_passes() {
    let report = verified(Fault::None);
    assert!(report.passed(), "{report}");
    assert!(report.checks.len() >= 15, "{report}");
}

/// Every parameter gets a finite gradient that is not zero, and moves.
#[test]
fn lost_gradients_are_refused_by_name() {
    let cases = [
        (Fault::DetachedBranch, "gradients are slopes", "slope"),
        (Fault::TiedToACopy, "gradients are slopes", "table.weight"),
        (Fault::ShiftOfASoftmax, "every parameter matters", "mlp.shift"),
    ];
    for (fault, check, named) in cases {
        let report = verified(fault);
        let passed = |name: &str| report.checks.iter().any(|c| c.name == name && c.passed);
        assert!(passed("gradient flow") && passed("optimizer moves parameters"), "{fault:?}\n{report}");
        let refused = report.checks.iter().find(|c| c.name == check && !c.passed);
        assert!(refused.is_some_and(|c| c.detail.contains(named)), "{fault:?}\n{report}");
    }
}
