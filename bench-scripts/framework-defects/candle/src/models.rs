//! Whole models of candle-transformers, trained as a user would: how many parameters learn, and does the loss say it?

use std::collections::HashMap;

use candle::{DType, Device, Result, Tensor};
use candle_nn::{AdamW, Optimizer, ParamsAdamW, VarBuilder, VarMap};
use candle_transformers::models::{llama, mistral, qwen3};

use crate::common::{Numbers, allocations_of, exists, report};

const VOCABULARY: usize = 61;
/// Odd, so that a mask's size in bytes is no other tensor's.
const LEN: usize = 23;
const ROWS: usize = 2;
const STEPS: usize = 60;

type Forward = Box<dyn FnMut(&Tensor) -> Result<Tensor>>;

pub fn run() -> Result<()> {
    train("llama::Llama", |vb| {
        let config = llama::Config {
            hidden_size: 32,
            intermediate_size: 48,
            vocab_size: VOCABULARY,
            num_hidden_layers: 2,
            num_attention_heads: 4,
            num_key_value_heads: 2,
            max_position_embeddings: 64,
            ..llama::Config::config_7b_v2(false)
        };
        let model = llama::Llama::load(vb, &config)?;
        let mut cache = llama::Cache::new(false, DType::F32, &config, &Device::Cpu)?;
        Ok(Box::new(move |ids| model.forward(ids, 0, &mut cache)))
    })?;
    train("mistral::Model", |vb| {
        let config = mistral::Config {
            hidden_size: 32,
            intermediate_size: 48,
            vocab_size: VOCABULARY,
            num_hidden_layers: 2,
            num_attention_heads: 4,
            num_key_value_heads: 2,
            max_position_embeddings: 64,
            sliding_window: None,
            ..mistral::Config::config_7b_v0_1(false)
        };
        let mut model = mistral::Model::new(&config, vb)?;
        Ok(Box::new(move |ids| {
            model.clear_kv_cache();
            model.forward(ids, 0)?.squeeze(1)
        }))
    })?;
    train("qwen3::ModelForCausalLM", |vb| {
        let config = qwen3::Config {
            hidden_size: 32,
            intermediate_size: 48,
            vocab_size: VOCABULARY,
            num_hidden_layers: 2,
            num_attention_heads: 4,
            head_dim: 8,
            num_key_value_heads: 2,
            attention_bias: false,
            max_position_embeddings: 64,
            sliding_window: None,
            max_window_layers: 0,
            tie_word_embeddings: false,
            rope_theta: 1e4,
            rms_norm_eps: 1e-6,
            use_sliding_window: false,
            hidden_act: candle_nn::Activation::Silu,
        };
        let mut model = qwen3::ModelForCausalLM::new(&config, vb)?;
        Ok(Box::new(move |ids| {
            model.clear_kv_cache();
            model.forward(ids, 0)?.squeeze(1)
        }))
    })
}

/// Trains one model with AdamW on one fixed batch and reports what moved and how often a mask was made.
fn train(name: &str, build: impl Fn(VarBuilder) -> Result<Forward>) -> Result<()> {
    let device = &Device::Cpu;
    let map = VarMap::new();
    let mut forward = build(VarBuilder::from_varmap(&map, DType::F32, device))?;
    let mut numbers = Numbers(7);
    let vars = {
        let data = map.data().lock().map_err(|_| candle::Error::Msg("the variables are locked".into()))?;
        let mut vars: Vec<_> = data.iter().map(|(name, var)| (name.clone(), var.clone())).collect();
        vars.sort_by(|a, b| a.0.cmp(&b.0));
        vars
    };
    for (name, var) in &vars {
        if name.contains("norm") {
            var.set(&var.ones_like()?)?;
        } else {
            let values: Vec<f32> = numbers.many(var.elem_count()).iter().map(|x| x * 0.1).collect();
            var.set(&Tensor::from_vec(values, var.shape(), device)?)?;
        }
    }
    let before: HashMap<&str, Vec<f32>> = vars
        .iter()
        .map(|(name, var)| Ok((name.as_str(), var.flatten_all()?.to_vec1()?)))
        .collect::<Result<_>>()?;
    let id =
        |numbers: &mut Numbers| ((numbers.next() + 1.0) * 0.5 * VOCABULARY as f32) as u32 % VOCABULARY as u32;
    let ids: Vec<u32> = (0..ROWS * LEN).map(|_| id(&mut numbers)).collect();
    let ids = Tensor::from_vec(ids, (ROWS, LEN), device)?;
    let labels = Tensor::from_vec(vec![id(&mut numbers), id(&mut numbers)], ROWS, device)?;
    let settings = ParamsAdamW { lr: 1e-2, weight_decay: 0.0, ..ParamsAdamW::default() };
    let mut adam = AdamW::new(map.all_vars(), settings)?;
    let (mut losses, mut with_gradient) = (Vec::new(), 0);
    let mut step = || -> Result<()> {
        let loss = candle_nn::loss::cross_entropy(&forward(&ids)?, &labels)?;
        let grads = loss.backward()?;
        with_gradient = vars.iter().filter(|(_, var)| grads.get(var).is_some()).count();
        adam.step(&grads)?;
        losses.push(loss.to_scalar::<f32>()?);
        Ok(())
    };
    step()?;
    // Both kinds of mask: one byte or one f32 for each pair of positions.
    let (bytes, _) = allocations_of(LEN * LEN, || (0..10).try_for_each(|_| step()));
    let (floats, _) = allocations_of(LEN * LEN * 4, || (0..10).try_for_each(|_| step()));
    (21..STEPS).try_for_each(|_| step())?;
    let still: Vec<&str> = vars
        .iter()
        .filter_map(|(name, var)| {
            let now: Vec<f32> = var.flatten_all().and_then(|x| x.to_vec1()).ok()?;
            (now == before[name.as_str()]).then_some(name.as_str())
        })
        .collect();
    let seen = format!(
        "{with_gradient} of {} parameters had a gradient, {} never moved (such as {}), loss {:.3} -> {:.4}, no warning",
        vars.len(),
        still.len(),
        still.first().copied().unwrap_or("none"),
        losses[0],
        losses[losses.len() - 1],
    );
    report(
        &format!("part of a model learns: candle_transformers {name} (#3011, #3752)"),
        &format!("AdamW, {STEPS} steps on one batch"),
        &seen,
        exists(!still.is_empty()),
    );
    report(
        &format!("causal mask made again: candle_transformers {name}"),
        "passes of 2 layers after the first: allocations of a byte, and of an f32, for each pair of positions",
        &format!("{bytes} of bytes in 10 passes, {floats} of f32 in 10 passes"),
        exists(bytes.max(floats) >= 10),
    );
    Ok(())
}
