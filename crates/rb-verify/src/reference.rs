//! A decoder by its formulas: plain loops in f64 over the named weights, sharing nothing with the operations.
//!
//! - **Source** arXiv:2302.13971 (the model), arXiv:1910.07467 (norm), arXiv:2104.09864 (rotation), arXiv:2002.05202
//!   (feed-forward layer), arXiv:2305.13245 (grouped heads); norms of queries and keys as in Qwen3.

use rb_autograd::ops::cross_entropy::CrossEntropyOptions;
use rb_autograd::{ParamStore, Tape};
use rb_nn::{CausalLm, LlamaConfig, ModelInput, rope_table};
use rb_tensor::{DType, Device};

use crate::batches::packed_documents;
use crate::model::difference;
use crate::{Check, Result};

/// Rounding in f64 over the sums of a model; any other formula is off by far more.
const TOLERANCE: f64 = 1e-9;

/// Checks scores and loss of packed documents, padding and ignored labels included, against the formulas.
///
/// The model runs in f64 on the host, so that agreement is to the last digits and not to a rounding that could hide a
/// wrong formula.
///
/// # Errors
/// The model cannot run at all.
pub fn follows_formulas(model: &CausalLm, params: &ParamStore, seed: u64) -> Result<Vec<Check>> {
    let wide = params.to_device(Device::Cpu)?.to_dtype(DType::F64)?;
    let batch = packed_documents(model, seed)?;
    let (input, labels) = (&batch.input, &batch.labels);
    let expected = scores(model.config(), &wide, input, &batch.doc_start)?;
    let got = model.logits(&wide, input)?.to_vec::<f64>()?;
    let scale = expected.iter().fold(f64::MIN_POSITIVE, |m, x| m.max(x.abs()));
    let off = difference(&got, &expected) / scale;
    let detail = format!("{} scores, largest difference {off:.1e} of the largest", got.len());
    let mut checks = vec![Check::new(
        "scores follow the formulas",
        off <= TOLERANCE && got.len() == expected.len(),
        detail,
    )];

    let tape = Tape::inference(&wide);
    let loss = model.loss(&tape, input, labels, &CrossEntropyOptions::default())?.detach().item()?;
    let vocab = model.config().vocab_size;
    let mut sum = 0.0;
    let labels = labels.to_vec::<i32>()?;
    for (row, &label) in expected.chunks(vocab).zip(&labels).filter(|(_, label)| **label >= 0) {
        let top = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        sum += top + row.iter().map(|x| (x - top).exp()).sum::<f64>().ln() - row[label as usize];
    }
    let valid = labels.iter().filter(|l| **l >= 0).count();
    let mean = sum / valid as f64;
    let off = ((loss - mean) / mean.max(f64::MIN_POSITIVE)).abs();
    let detail = format!("loss {loss:.6} over {valid} of {} labels, by the formula {mean:.6}", labels.len());
    checks.push(Check::new("loss follows its formula", off <= TOLERANCE, detail));
    Ok(checks)
}

/// Scores `[B * T, vocabulary]`, row-major. `doc_start [B, T]` is where the document of each token begins; a token
/// whose document begins behind it sees nothing.
fn scores(
    config: &LlamaConfig,
    params: &ParamStore,
    input: &ModelInput,
    doc_start: &[i32],
) -> Result<Vec<f64>> {
    let (c, d, h, g) = (config.hidden_size, config.head_dim(), config.num_attention_heads, config.kv_heads());
    let weight = |name: &str| -> Result<Vec<f64>> { Ok(params.part(name)?.to_vec::<f64>()?) };
    let eps = config.rms_norm_eps;
    let shape = input.input_ids.shape();
    let (batch, len) = (shape[0], shape[1]);
    let ids = input.input_ids.to_vec::<i32>()?;
    let positions = match &input.position_ids {
        Some(positions) => positions.to_vec::<i32>()?,
        None => (0..batch).flat_map(|_| 0..len as i32).collect(),
    };
    let frequencies = rope_table(config).inv_freq;
    let table = weight("model.embed_tokens.weight")?;
    let mut x: Vec<Vec<f64>> = ids.iter().map(|&id| table[id as usize * c..][..c].to_vec()).collect();
    for layer in 0..config.num_hidden_layers {
        let part = |name: &str| weight(&format!("model.layers.{layer}.{name}"));
        let map = |name: &str| -> Result<Map> {
            let bias = config.attention_bias.then(|| part(&format!("self_attn.{name}.bias"))).transpose()?;
            Ok(Map { weight: part(&format!("self_attn.{name}.weight"))?, bias })
        };
        let [q_map, k_map, v_map, o_map] = [map("q_proj")?, map("k_proj")?, map("v_proj")?, map("o_proj")?];
        let head_norm = |name: &str| -> Result<Option<Vec<f64>>> {
            config.use_qk_norm.then(|| part(&format!("self_attn.{name}.weight"))).transpose()
        };
        let head_norms = [head_norm("q_norm")?, head_norm("k_norm")?];
        let (norm, post_norm) = (part("input_layernorm.weight")?, part("post_attention_layernorm.weight")?);
        let mut heads: Vec<[Vec<f64>; 3]> = Vec::with_capacity(x.len());
        for (row, &position) in x.iter().zip(&positions) {
            let y = rms_norm(row, &norm, eps);
            let mut qkv = [q_map.apply(&y), k_map.apply(&y), v_map.apply(&y)];
            for (values, norm) in qkv.iter_mut().zip(&head_norms) {
                for head in values.chunks_mut(d) {
                    if let Some(norm) = norm {
                        let normed = rms_norm(head, norm, eps);
                        head.copy_from_slice(&normed);
                    }
                    rotate(head, position, &frequencies);
                }
            }
            heads.push(qkv);
        }
        for at in 0..x.len() {
            let (row, t) = (at / len * len, at % len);
            let start = usize::try_from(doc_start[at]).unwrap_or(0);
            let mut mixed = vec![0.0; h * d];
            for head in 0..h {
                let key = head / (h / g);
                let q = &heads[at][0][head * d..][..d];
                let window = config.sliding_window.map_or(0, |window| (t + 1).saturating_sub(window));
                let seen = start.max(window)..t + 1;
                let dot = |s: usize| -> f64 {
                    let k = &heads[row + s][1][key * d..][..d];
                    let score = q.iter().zip(k).map(|(q, k)| q * k).sum::<f64>() / (d as f64).sqrt();
                    config.attn_logit_softcapping.map_or(score, |cap| cap * (score / cap).tanh())
                };
                let weights: Vec<f64> = seen.clone().map(dot).collect();
                let top = weights.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let total: f64 = weights.iter().map(|w| (w - top).exp()).sum();
                for (s, w) in seen.zip(&weights) {
                    let v = &heads[row + s][2][key * d..][..d];
                    let share = (w - top).exp() / total;
                    mixed[head * d..][..d].iter_mut().zip(v).for_each(|(m, v)| *m += share * v);
                }
            }
            add(&mut x[at], &o_map.apply(&mixed));
        }
        let mlp = |name: &str| -> Result<Map> {
            Ok(Map { weight: part(&format!("mlp.{name}.weight"))?, bias: None })
        };
        let (gate, up, down) = (mlp("gate_proj")?, mlp("up_proj")?, mlp("down_proj")?);
        for row in &mut x {
            let y = rms_norm(row, &post_norm, eps);
            let (gates, ups) = (gate.apply(&y), up.apply(&y));
            let inner: Vec<f64> = gates.iter().zip(&ups).map(|(g, u)| g / (1.0 + (-g).exp()) * u).collect();
            add(row, &down.apply(&inner));
        }
    }
    let norm = weight("model.norm.weight")?;
    let head = if config.tie_word_embeddings { table } else { weight("lm_head.weight")? };
    let head = Map { weight: head, bias: None };
    Ok(x.iter().flat_map(|row| head.apply(&rms_norm(row, &norm, eps))).collect())
}

/// A linear map.
struct Map {
    /// `[out, in]`
    weight: Vec<f64>,
    bias: Option<Vec<f64>>,
}

impl Map {
    fn apply(&self, x: &[f64]) -> Vec<f64> {
        let rows = self.weight.chunks(x.len()).map(|row| row.iter().zip(x).map(|(w, x)| w * x).sum::<f64>());
        match &self.bias {
            None => rows.collect(),
            Some(bias) => rows.zip(bias).map(|(y, b)| y + b).collect(),
        }
    }
}

fn rms_norm(x: &[f64], weight: &[f64], eps: f64) -> Vec<f64> {
    let mean = x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64;
    x.iter().zip(weight).map(|(x, w)| x / (mean + eps).sqrt() * w).collect()
}

/// Turns pairs `(i, i + D/2)`.
fn rotate(head: &mut [f64], position: i32, frequencies: &[f64]) {
    let half = head.len() / 2;
    for (i, frequency) in frequencies.iter().enumerate() {
        let (sin, cos) = (f64::from(position) * frequency).sin_cos();
        let (a, b) = (head[i], head[i + half]);
        (head[i], head[i + half]) = (a * cos - b * sin, b * cos + a * sin);
    }
}

fn add(x: &mut [f64], y: &[f64]) {
    x.iter_mut().zip(y).for_each(|(x, y)| *x += y);
}
