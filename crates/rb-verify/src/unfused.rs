//! The decoder made of elementary operations alone: what fused operations are trained beside.

use rb_autograd::ops::attention::AttentionMask;
use rb_autograd::ops::cross_entropy::{CrossEntropyOptions, Denominator};
use rb_autograd::{ParamStore, Tape, Var, ops};
use rb_nn::{CausalLm, LlamaConfig, ModelInput, rope_table};
use rb_optim::{AdamW, AdamWConfig, Optimizer};
use rb_tensor::{DType, Device, Tensor};

use crate::batches::{IGNORE, random_batch};
use crate::model::backward;
use crate::{Check, LanguageModel, Result};

/// Steps of the comparison.
const STEPS: usize = 200;
/// How far two curves may part that differ in rounding alone: training multiplies a rounding by up to 1e5 in so many
/// steps, and more where heads are two wide and normalised.
const TOLERANCE_F64: f64 = 1e-6;
/// The same on a GPU, which has no f64 path.
const TOLERANCE_F32: f64 = 3e-2;

/// Checks that a model of fused operations and one of elementary operations, with the same weights, losses and
/// optimizer, give the same losses for 200 steps: in f64 on the host, in f32 on a GPU. The weights of `params` do not
/// change.
///
/// # Errors
/// A model cannot run at all.
pub fn fused_trains_as_unfused(model: &CausalLm, params: &ParamStore, seed: u64) -> Result<Check> {
    let batches = (0..4).map(|i| random_batch(model, 1, seed + i)).collect::<Result<Vec<_>>>()?;
    let device = params.arena().device();
    let (dtype, tolerance) =
        if device == Device::Cpu { (DType::F64, TOLERANCE_F64) } else { (DType::F32, TOLERANCE_F32) };
    let train = |model: &dyn LanguageModel| -> Result<Vec<f64>> {
        let mut params = params.to_dtype(dtype)?;
        let mut grads = rb_autograd::GradStore::new(&params)?;
        let mut adam = AdamW::new(AdamWConfig::default(), &params)?;
        let mut losses = Vec::with_capacity(STEPS);
        for step in 0..STEPS {
            losses.push(backward(model, &params, &mut grads, &batches[step % batches.len()])?);
            // Low enough that rounding alone does not part two runs.
            adam.step(&mut params, &mut grads, 3e-4, 1.0)?;
        }
        Ok(losses)
    };
    let fused = train(model)?;
    let plain = train(&Unfused { config: model.config().clone() })?;
    let (mut worst, mut at) = (0.0f64, 0);
    for (step, (a, b)) in fused.iter().zip(&plain).enumerate() {
        let off = (a - b).abs() / b.abs().max(0.1);
        if off.is_nan() || off > worst {
            (worst, at) = (off, step + 1);
        }
        if off.is_nan() {
            break;
        }
    }
    let learned = fused[STEPS - 1] < fused[0];
    let detail = format!(
        "{STEPS} steps, loss {:.4} -> {:.4}, unfused {:.4}; largest relative difference {worst:.0e} in step {at}",
        fused[0],
        fused[STEPS - 1],
        plain[STEPS - 1]
    );
    Ok(Check::new("fused trains as unfused", worst <= tolerance && learned, detail))
}

/// The same function as [`CausalLm`] on the same parameters.
struct Unfused {
    config: LlamaConfig,
}

impl Unfused {
    fn param<'t>(tape: &'t Tape<'t>, name: &str) -> rb_nn::Result<Var<'t>> {
        Ok(tape.param_full(tape.params().id(name)?)?)
    }

    /// The rows of an entry from the first of part `name` on, transposed: `[in, rows]`.
    fn linear<'t>(tape: &'t Tape<'t>, x: &Var<'t>, name: &str) -> rb_nn::Result<Var<'t>> {
        let weight = Unfused::param(tape, &format!("{name}.weight"))?;
        let y = ops::matmul(x, &ops::permute(&weight, &[1, 0])?)?;
        match tape.params().id(&format!("{name}.bias")) {
            Ok(bias) => Ok(ops::add(&y, &tape.param_full(bias)?)?),
            Err(_) => Ok(y),
        }
    }

    fn norm<'t>(&self, tape: &'t Tape<'t>, x: &Var<'t>, name: &str) -> rb_nn::Result<Var<'t>> {
        let mean = ops::mean(&ops::mul(x, x)?, -1, true)?;
        let rms = ops::sqrt(&ops::scale(&mean, 1.0, self.config.rms_norm_eps)?)?;
        Ok(ops::mul(&ops::div(x, &rms)?, &Unfused::param(tape, &format!("{name}.weight"))?)?)
    }

    /// A constant in the element type and on the device of the weights.
    fn constant<'t>(tape: &'t Tape<'t>, values: Vec<f64>, shape: Vec<usize>) -> rb_nn::Result<Var<'t>> {
        let dtype = tape.params().arena().dtype();
        let value = Tensor::from_vec(values, shape)?.to_dtype(dtype)?.to_device(tape.device())?;
        Ok(tape.constant(value))
    }

    fn rotate<'t>(tape: &'t Tape<'t>, x: &Var<'t>, angles: &[f64], half: usize) -> rb_nn::Result<Var<'t>> {
        let shape = vec![angles.len() / half, 1, half];
        let cos = Unfused::constant(tape, angles.iter().map(|a| a.cos()).collect(), shape.clone())?;
        let sin = Unfused::constant(tape, angles.iter().map(|a| a.sin()).collect(), shape)?;
        let (a, b) = (ops::slice(x, -1, 0, half)?, ops::slice(x, -1, half, half)?);
        let low = ops::sub(&ops::mul(&a, &cos)?, &ops::mul(&b, &sin)?)?;
        let high = ops::add(&ops::mul(&b, &cos)?, &ops::mul(&a, &sin)?)?;
        Ok(ops::concat(&[&low, &high], -1)?)
    }

    fn attention<'t>(&self, tape: &'t Tape<'t>, x: &Var<'t>, prefix: &str) -> rb_nn::Result<Var<'t>> {
        let config = &self.config;
        let (h, g, d) = (config.num_attention_heads, config.kv_heads(), config.head_dim());
        let (batch, len) = (x.shape()[0], x.shape()[1]);
        let frequencies = rope_table(config).inv_freq;
        let angles: Vec<f64> = (0..len).flat_map(|t| frequencies.iter().map(move |f| t as f64 * f)).collect();
        // Queries, keys and values are one parameter, which the name of its first part finds.
        let qkv = Unfused::linear(tape, x, &format!("{prefix}.q_proj"))?;
        let qkv = ops::reshape(&qkv, [batch, len, h + 2 * g, d])?;
        let mut q = ops::slice(&qkv, 2, 0, h)?;
        let mut k = ops::slice(&qkv, 2, h, g)?;
        let v = ops::slice(&qkv, 2, h + g, g)?;
        if config.use_qk_norm {
            q = self.norm(tape, &q, &format!("{prefix}.q_norm"))?;
            k = self.norm(tape, &k, &format!("{prefix}.k_norm"))?;
        }
        let q = Unfused::rotate(tape, &q, &angles, d / 2)?;
        let k = Unfused::rotate(tape, &k, &angles, d / 2)?;
        // A key head for each query head.
        let spread = |x: &Var<'t>| -> rb_nn::Result<Var<'t>> {
            let heads = (0..h).map(|i| ops::slice(x, 2, i / (h / g), 1)).collect::<Result<Vec<_>, _>>()?;
            Ok(ops::concat(&heads.iter().collect::<Vec<_>>(), 2)?)
        };
        let (q, k, v) = (
            ops::permute(&q, &[0, 2, 1, 3])?,
            ops::permute(&spread(&k)?, &[0, 2, 3, 1])?,
            ops::permute(&spread(&v)?, &[0, 2, 1, 3])?,
        );
        let scores = ops::scale(&ops::matmul(&q, &k)?, 1.0 / (d as f64).sqrt(), 0.0)?;
        let scores = match config.attn_logit_softcapping {
            Some(cap) => ops::scale(&ops::tanh(&ops::scale(&scores, 1.0 / cap, 0.0)?)?, cap, 0.0)?,
            None => scores,
        };
        let window = config.sliding_window.unwrap_or(len);
        let hides = |i: usize| i % len > i / len || i % len + window <= i / len;
        let hidden = (0..len * len).map(|i| if hides(i) { -1e30 } else { 0.0 }).collect();
        let scores = ops::add(&scores, &Unfused::constant(tape, hidden, vec![len, len])?)?;
        let y = ops::matmul(&ops::softmax(&scores, -1)?, &v)?;
        let y = ops::reshape(&ops::permute(&y, &[0, 2, 1, 3])?, [batch, len, h * d])?;
        Unfused::linear(tape, &y, &format!("{prefix}.o_proj"))
    }

    fn mlp<'t>(&self, tape: &'t Tape<'t>, x: &Var<'t>, prefix: &str) -> rb_nn::Result<Var<'t>> {
        let f = self.config.intermediate_size;
        let both = Unfused::linear(tape, x, &format!("{prefix}.gate_proj"))?;
        let (gate, up) = (ops::slice(&both, -1, 0, f)?, ops::slice(&both, -1, f, f)?);
        let inner = ops::mul(&ops::silu(&gate)?, &up)?;
        Unfused::linear(tape, &inner, &format!("{prefix}.down_proj"))
    }

    fn scores<'t>(&self, tape: &'t Tape<'t>, input: &ModelInput) -> rb_nn::Result<Var<'t>> {
        if !matches!(input.mask, AttentionMask::Causal) || input.position_ids.is_some() {
            let key = "input";
            let (value, expected) = ("documents".to_string(), "plain causal rows".to_string());
            return Err(rb_nn::NnError::Config { key, value, expected });
        }
        let vocab = self.config.vocab_size;
        let table = Unfused::param(tape, "model.embed_tokens.weight")?;
        let mut x = ops::embedding(&table, &input.input_ids, vocab)?;
        for layer in 0..self.config.num_hidden_layers {
            let name = |part: &str| format!("model.layers.{layer}.{part}");
            let y = self.norm(tape, &x, &name("input_layernorm"))?;
            x = ops::add(&x, &self.attention(tape, &y, &name("self_attn"))?)?;
            let y = self.norm(tape, &x, &name("post_attention_layernorm"))?;
            x = ops::add(&x, &self.mlp(tape, &y, &name("mlp"))?)?;
        }
        let x = self.norm(tape, &x, "model.norm")?;
        let head = if self.config.tie_word_embeddings { "model.embed_tokens" } else { "lm_head" };
        Ok(ops::slice(&Unfused::linear(tape, &x, head)?, -1, 0, vocab)?)
    }
}

impl LanguageModel for Unfused {
    fn loss<'t>(
        &self,
        tape: &'t Tape<'t>,
        input: &ModelInput,
        labels: &Tensor,
        options: &CrossEntropyOptions,
    ) -> rb_nn::Result<Var<'t>> {
        let logits = self.scores(tape, input)?;
        let (vocab, labels) = (self.config.vocab_size, labels.to_vec::<i32>()?);
        let valid = labels.iter().filter(|l| **l != IGNORE).count();
        let share = match options.denominator {
            Denominator::ValidTokens => 1.0 / valid.max(1) as f64,
            Denominator::Fixed(n) => 1.0 / n,
        };
        let mut chosen = vec![0.0; labels.len() * vocab];
        for (row, &label) in labels.iter().enumerate().filter(|(_, l)| **l != IGNORE) {
            chosen[row * vocab + label as usize] = -share;
        }
        let rows = ops::reshape(&logits, [labels.len(), vocab])?;
        let chosen = Unfused::constant(tape, chosen, vec![labels.len(), vocab])?;
        let terms = ops::mul(&ops::log_softmax(&rows, -1)?, &chosen)?;
        Ok(ops::sum(&ops::sum(&terms, -1, false)?, 0, false)?)
    }

    fn logits(&self, params: &ParamStore, input: &ModelInput) -> rb_nn::Result<Tensor> {
        Ok(self.scores(&Tape::inference(params), input)?.detach().to_dtype(DType::F32)?)
    }

    fn vocab_size(&self) -> usize {
        self.config.vocab_size
    }

    fn max_positions(&self) -> usize {
        self.config.max_position_embeddings
    }
}
