//! One step is one step, however its sequences are spread over forward passes, also with unequal numbers of
//! valid tokens; what is logged is the norm before clipping.

use std::path::Path;
use std::sync::atomic::AtomicBool;

use rb_autograd::{GradStore, ParamBuilder, ParamStore};
use rb_data::Batch;
use rb_nn::{CausalLm, LlamaConfig};
use rb_optim::{AdamW, AdamWConfig, Optimizer, clip_coefficient};
use rb_tensor::{DType, Device, Rng};
use rb_train::observe::Record;
use rb_train::step::{LossTerms, evaluate, forward_backward};
use rb_train::{Override, Trainer};

const ROWS: usize = 8;
const LEN: usize = 12;

fn model() -> (CausalLm, ParamStore) {
    let config = LlamaConfig {
        num_key_value_heads: Some(2),
        max_position_embeddings: LEN,
        initializer_range: 0.2,
        ..LlamaConfig::new(50, 16, 20, 2, 4)
    };
    let mut builder = ParamBuilder::default();
    let model = CausalLm::init(&config, &mut builder).unwrap();
    let params = builder.build(&Rng::new(1), Device::Cpu).unwrap();
    (model, params.to_dtype(DType::F64).unwrap())
}

/// Eight sequences of which row `r` has `r + 1` valid tokens and the last has none, in batches of `rows`.
fn batches(rows: usize) -> Vec<Batch> {
    let mut rng = Rng::new(2).fork("tokens");
    let ids: Vec<i32> = (0..ROWS * LEN).map(|_| rng.below(50) as i32).collect();
    let label =
        |i: usize| if i / LEN < ROWS - 1 && i % LEN <= i / LEN { ids[(i + 1) % ids.len()] } else { -100 };
    let labels: Vec<i32> = (0..ids.len()).map(label).collect();
    let size = rows * LEN;
    let part = |(input_ids, labels): (&[i32], &[i32])| Batch {
        batch_size: rows,
        seq_len: LEN,
        input_ids: input_ids.to_vec(),
        labels: labels.to_vec(),
        position_ids: (0..size).map(|i| (i % LEN) as i32).collect(),
        doc_start: vec![0; size],
        valid_tokens: labels.iter().filter(|l| **l != -100).count(),
        dropped_targets: 0,
        epoch: 0,
    };
    ids.chunks(size).zip(labels.chunks(size)).map(part).collect()
}

/// Loss, gradient norm and weights of one AdamW step that clips.
fn step(batches: &[Batch]) -> (f64, f64, Vec<f64>) {
    let (model, mut params) = model();
    let mut grads = GradStore::new(&params).unwrap();
    let terms = LossTerms { label_smoothing: 0.1, z_loss: 1e-2 };
    let loss = forward_backward(&model, &params, &mut grads, batches, false, terms).unwrap();
    let norm = grads.global_norm().unwrap();
    let mut adam = AdamW::new(AdamWConfig::default(), &params).unwrap();
    adam.step(&mut params, &mut grads, 1e-2, clip_coefficient(norm, 0.1)).unwrap();
    (loss.item().unwrap(), norm, params.arena().as_slice::<f64>().unwrap().to_vec())
}

#[test]
fn accumulation_is_the_large_batch() {
    let (loss, norm, weights) = step(&batches(8));
    for rows in [1, 2, 4] {
        let (part_loss, part_norm, part_weights) = step(&batches(rows));
        assert!(
            (loss / part_loss - 1.0).abs() < 1e-12,
            "{rows} rows at a time: loss {part_loss}, not {loss}"
        );
        assert!(
            (norm / part_norm - 1.0).abs() < 1e-12,
            "{rows} rows at a time: norm {part_norm}, not {norm}"
        );
        // AdamW's first step is about the sign of the gradient, which magnifies a rounding where it is near zero.
        let worst = weights.iter().zip(&part_weights).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
        assert!(worst < 1e-8, "{rows} rows at a time: weights differ by {worst:e}");
    }
}

#[test]
fn held_out_loss_does_not_depend_on_the_batch() {
    let (model, params) = model();
    let loss = |rows| evaluate(&model, &params, batches(rows).into_iter(), false).unwrap();
    let (whole, tokens) = loss(8);
    assert_eq!(tokens, (1..ROWS as u64).sum::<u64>());
    for rows in [1, 2, 4] {
        let (value, count) = loss(rows);
        assert!((value / whole - 1.0).abs() < 1e-12 && count == tokens, "{rows} rows: {value}, not {whole}");
    }
}

const CONFIG: &str = r#"
[data]
paths = ["text.txt"]
validation_fraction = 0.2
[tokenizer]
vocab_size = 280
[model]
hidden_size = 8
intermediate_size = 12
num_hidden_layers = 1
num_attention_heads = 2
max_position_embeddings = 16
tie_word_embeddings = true
[train]
max_steps = 2
seq_len = 16
warmup_steps = 0
logging_steps = 1
eval_steps = 1
"#;

/// Training and held-out losses, and norms, of a run.
fn run(dir: &Path, name: &str, overrides: &[&str]) -> (Vec<[f64; 2]>, Vec<f64>) {
    let out = dir.join(name);
    let mut all = vec![Override::new("run.out", out.to_str().unwrap())];
    all.extend(overrides.iter().map(|o| o.parse::<Override>().unwrap()));
    let mut trainer = Trainer::create(&dir.join("tiny.toml"), &all).unwrap();
    trainer.run(&AtomicBool::new(false)).unwrap();
    let (mut train, mut eval) = (Vec::new(), Vec::new());
    for record in rb_train::observe::read(&out.join("metrics.jsonl")).unwrap() {
        match record {
            Record::Train(t) => train.push([t.loss.get(), t.grad_norm.get()]),
            Record::Eval(e) => eval.push(e.loss.get()),
            _ => {}
        }
    }
    (train, eval)
}

#[test]
fn runs_log_the_same_whatever_the_accumulation_and_the_clipping() {
    let dir = tempfile::tempdir().unwrap();
    let text: String =
        (0..60).map(|i| format!("line {i} of the river and the boat number {}\n", i * 7 % 11)).collect();
    std::fs::write(dir.path().join("text.txt"), text).unwrap();
    std::fs::write(dir.path().join("tiny.toml"), CONFIG).unwrap();
    let size = |rows: usize, times: usize| {
        [
            format!("train.per_device_train_batch_size={rows}"),
            format!("train.gradient_accumulation_steps={times}"),
        ]
    };
    let sized = |name: &str, rows, times| {
        let size = size(rows, times);
        run(dir.path(), name, &[size[0].as_str(), size[1].as_str()])
    };
    let (train, eval) = sized("one", 4, 1);
    assert_eq!((train.len(), eval.len()), (2, 2));
    for (name, rows, times) in [("two", 2, 2), ("four", 1, 4)] {
        let (other_train, other_eval) = sized(name, rows, times);
        let pairs =
            train.iter().flatten().zip(other_train.iter().flatten()).chain(eval.iter().zip(&other_eval));
        for (a, b) in pairs {
            // f32: a hundred roundings.
            assert!(
                (a / b - 1.0).abs() < 1e-5,
                "{name}: {other_train:?} {other_eval:?}, not {train:?} {eval:?}"
            );
        }
    }
    // A limit far below the norm changes the weights, and not the norm that is logged for the step.
    let norm = |name: &str, limit: &str| run(dir.path(), name, &[limit]).0[0][1];
    let (free, clipped) =
        (norm("free", "train.max_grad_norm=0"), norm("clipped", "train.max_grad_norm=1e-3"));
    assert!(free == clipped && free > 0.1, "{free} {clipped}");
}
