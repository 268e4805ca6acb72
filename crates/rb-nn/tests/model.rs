//! The whole decoder: gradients of every parameter, grouped heads, tied tables, padding, masks, errors.

use rb_autograd::ops::attention::AttentionMask;
use rb_autograd::ops::cross_entropy::CrossEntropyOptions;
use rb_autograd::{GradStore, ParamBuilder, ParamStore, Tape};
use rb_nn::{CausalLm, LlamaConfig, ModelInput, RopeScaling, num_parameters};
use rb_tensor::{DType, Device, Rng, Tensor};

/// Two layers, 12 heads of 4, weights large enough for an error to show.
fn config(vocab_size: usize, kv_heads: usize) -> LlamaConfig {
    LlamaConfig {
        num_key_value_heads: Some(kv_heads),
        head_dim: Some(4),
        max_position_embeddings: 64,
        initializer_range: 0.3,
        ..LlamaConfig::new(vocab_size, 24, 20, 2, 12)
    }
}

fn variants() -> Vec<(String, LlamaConfig)> {
    let mut all = Vec::new();
    for kv_heads in [12, 6, 4, 3, 1] {
        for tied in [false, true] {
            let name = format!("{kv_heads} key heads, tied {tied}");
            all.push((name, LlamaConfig { tie_word_embeddings: tied, ..config(61, kv_heads) }));
        }
    }
    all.push(("bias".into(), LlamaConfig { attention_bias: true, ..config(61, 4) }));
    all.push(("qk norm".into(), LlamaConfig { use_qk_norm: true, ..config(61, 4) }));
    let both = LlamaConfig { use_qk_norm: true, attention_bias: true, ..config(61, 3) };
    all.push(("qk norm and bias".into(), both));
    let linear = Some(RopeScaling::Linear { factor: 2.0 });
    all.push(("linear".into(), LlamaConfig { rope_scaling: linear, ..config(61, 4) }));
    all
}

fn build(config: &LlamaConfig, seed: u64) -> (CausalLm, ParamStore) {
    let mut builder = ParamBuilder::default();
    let model = CausalLm::init(config, &mut builder).unwrap();
    let mut params = builder.build(&Rng::new(seed), Device::Cpu).unwrap();
    // Norms of one and biases of zero would hide a missing factor or term.
    let mut rng = Rng::new(seed).fork("vectors");
    for (_, part) in params.layout().clone().parts() {
        if part.shape.rank() == 1 {
            let start = if part.name.ends_with("norm.weight") { 1.0 } else { 0.0 };
            let values = (0..part.shape.numel()).map(|_| (start + 0.3 * rng.normal()) as f32).collect();
            params
                .set_part(&part.name, &Tensor::from_vec::<f32>(values, part.shape.clone()).unwrap())
                .unwrap();
        }
    }
    (model, params)
}

fn ids(rows: usize, columns: usize, below: usize, seed: u64) -> Tensor {
    let mut rng = Rng::new(seed).fork("ids");
    let values = (0..rows * columns).map(|_| rng.below(below as u64) as i32).collect();
    Tensor::from_vec::<i32>(values, [rows, columns]).unwrap()
}

fn loss_and_grads(
    model: &CausalLm,
    params: &ParamStore,
    input: &ModelInput,
    labels: &Tensor,
) -> (f64, GradStore) {
    let mut grads = GradStore::new(params).unwrap();
    let tape = Tape::new(params);
    let loss = model.loss(&tape, input, labels, &CrossEntropyOptions::default()).unwrap();
    tape.backward(&loss, &mut grads).unwrap();
    (loss.detach().item().unwrap(), grads)
}

fn loss_of(model: &CausalLm, params: &ParamStore, input: &ModelInput, labels: &Tensor) -> f64 {
    let tape = Tape::inference(params);
    let loss = model.loss(&tape, input, labels, &CrossEntropyOptions::default()).unwrap();
    loss.detach().item().unwrap()
}

fn f64s(tensor: &Tensor) -> Vec<f64> {
    tensor.to_dtype(DType::F64).unwrap().to_vec().unwrap()
}

fn grad(grads: &GradStore, name: &str) -> Vec<f64> {
    f64s(&grads.part(name).unwrap().unwrap_or_else(|| panic!("{name} got no gradient")))
}

fn worst(a: &[f64], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len());
    // NaN must not compare as small.
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, |m, d| if d > m || d.is_nan() { d } else { m })
}

fn norm(x: &[f64]) -> f64 {
    x.iter().map(|x| x * x).sum::<f64>().sqrt()
}

fn names(params: &ParamStore) -> Vec<String> {
    params.layout().parts().map(|(_, p)| p.name.clone()).collect()
}

#[test]
fn every_parameter_of_every_variant_gets_a_gradient() {
    for (name, config) in variants() {
        let (model, params) = build(&config, 1);
        let input = ModelInput::causal(ids(2, 9, 61, 2));
        let (loss, grads) = loss_and_grads(&model, &params, &input, &ids(2, 9, 61, 3));
        assert!(loss.is_finite(), "{name}");
        for part in names(&params) {
            let g = grad(&grads, &part);
            assert!(g.iter().all(|g| g.is_finite()), "{name}: {part}");
            assert!(g.iter().any(|g| *g != 0.0), "{name}: {part} has gradient zero");
        }
        assert_eq!(params.layout().num_parameters(), num_parameters(&config), "{name}");
    }
}

/// Every gradient of the whole model, residual branches and shared tables included, against central
/// differences of the loss in f64.
#[test]
fn gradients_are_those_of_the_loss() {
    const STEP: f64 = 1e-5;
    for (name, config) in variants() {
        let (model, params) = build(&config, 4);
        let params = params.to_dtype(DType::F64).unwrap();
        let (input, labels) = (ModelInput::causal(ids(2, 7, 61, 5)), ids(2, 7, 61, 6));
        let (_, grads) = loss_and_grads(&model, &params, &input, &labels);
        let mut rng = Rng::new(7);
        for part in names(&params) {
            let start = f64s(&params.part(&part).unwrap());
            let shape = params.part(&part).unwrap().shape().clone();
            let mut direction: Vec<f64> = start.iter().map(|_| rng.normal()).collect();
            let length = norm(&direction);
            direction.iter_mut().for_each(|d| *d /= length);
            let at = |step: f64| {
                let moved = start.iter().zip(&direction).map(|(x, d)| x + step * d).collect();
                let mut twin = params.to_dtype(DType::F64).unwrap();
                twin.set_part(&part, &Tensor::from_vec::<f64>(moved, shape.clone()).unwrap()).unwrap();
                loss_of(&model, &twin, &input, &labels)
            };
            let numeric = (at(STEP) - at(-STEP)) / (2.0 * STEP);
            let exact = grad(&grads, &part);
            let along: f64 = exact.iter().zip(&direction).map(|(g, d)| g * d).sum();
            let error = (numeric - along).abs() / norm(&exact);
            assert!(
                error < 1e-7,
                "{name}: {part}: {numeric:e}, backward {along:e}, off by {error:e} of the gradient"
            );
        }
    }
}

#[test]
fn f32_agrees_with_f64_at_awkward_lengths() {
    for config in [config(61, 4), LlamaConfig { use_qk_norm: true, ..config(61, 3) }] {
        let (model, params) = build(&config, 8);
        let wide = params.to_dtype(DType::F64).unwrap();
        for len in [1, 2, 7, 31, 33, 63, 64] {
            let (input, labels) = (ModelInput::causal(ids(2, len, 61, 9)), ids(2, len, 61, 10));
            let (loss, grads) = loss_and_grads(&model, &params, &input, &labels);
            let (loss64, grads64) = loss_and_grads(&model, &wide, &input, &labels);
            assert!((loss - loss64).abs() < 1e-5 * loss64, "T {len}: {loss} {loss64}");
            for part in names(&params) {
                let (g, g64) = (grad(&grads, &part), grad(&grads64, &part));
                let scale = g64.iter().fold(1e-2f64, |m, g| m.max(g.abs()));
                assert!(
                    worst(&g, &g64) < 1e-4 * scale,
                    "T {len}: {part}: {:e} of {scale:e}",
                    worst(&g, &g64)
                );
            }
        }
    }
}

#[test]
fn grouped_heads_equal_repeated_heads() {
    for kv_heads in [4, 1] {
        let grouped = config(61, kv_heads);
        let (model, params) = build(&grouped, 11);
        let (full_model, mut full) = build(&config(61, 12), 11);
        for name in names(&params) {
            let value = params.part(&name).unwrap();
            if !(name.contains("k_proj") || name.contains("v_proj")) {
                full.set_part(&name, &value).unwrap();
                continue;
            }
            // Rows of head g serve query heads g * group .. (g + 1) * group.
            let rows = value.to_vec::<f32>().unwrap();
            let head = 4 * 24;
            let repeated =
                (0..12).flat_map(|h| rows[h / (12 / kv_heads) * head..][..head].to_vec()).collect();
            full.set_part(&name, &Tensor::from_vec::<f32>(repeated, [48, 24]).unwrap()).unwrap();
        }
        let input = ModelInput::causal(ids(2, 13, 61, 12));
        let (a, b) = (model.logits(&params, &input).unwrap(), full_model.logits(&full, &input).unwrap());
        assert!(worst(&f64s(&a), &f64s(&b)) < 1e-5, "{kv_heads}: {:e}", worst(&f64s(&a), &f64s(&b)));
    }
}

#[test]
fn a_tied_table_gets_both_gradients() {
    let untied = config(61, 4);
    let (untied_model, params) = build(&untied, 13);
    let mut params = params.to_dtype(DType::F64).unwrap();
    let table = params.part("model.embed_tokens.weight").unwrap().to_owned_copy().unwrap();
    params.set_part("lm_head.weight", &table).unwrap();
    let (tied_model, tied) = build(&LlamaConfig { tie_word_embeddings: true, ..untied }, 13);
    let mut tied = tied.to_dtype(DType::F64).unwrap();
    for name in names(&tied) {
        tied.set_part(&name, &params.part(&name).unwrap().to_owned_copy().unwrap()).unwrap();
    }
    let (input, labels) = (ModelInput::causal(ids(3, 8, 61, 14)), ids(3, 8, 61, 15));
    let (loss, apart) = loss_and_grads(&untied_model, &params, &input, &labels);
    let (tied_loss, together) = loss_and_grads(&tied_model, &tied, &input, &labels);
    assert!((loss - tied_loss).abs() < 1e-12);
    let (head, embedding) = (grad(&apart, "lm_head.weight"), grad(&apart, "model.embed_tokens.weight"));
    assert!(head.iter().any(|g| *g != 0.0) && embedding.iter().any(|g| *g != 0.0));
    let sum: Vec<f64> = head.iter().zip(&embedding).map(|(a, b)| a + b).collect();
    assert!(worst(&grad(&together, "model.embed_tokens.weight"), &sum) < 1e-12);
}

#[test]
fn padding_of_the_vocabulary_never_counts() {
    for vocab in [1, 2, 63, 64, 65, 257, 32003, 50257] {
        for tied in [false, true] {
            let config = LlamaConfig { tie_word_embeddings: tied, ..config(vocab, 4) };
            let (model, mut params) = build(&config, 16);
            let (input, labels) = (ModelInput::causal(ids(2, 6, vocab, 17)), ids(2, 6, vocab, 18));
            let (loss, grads) = loss_and_grads(&model, &params, &input, &labels);
            let logits = model.logits(&params, &input).unwrap();
            assert_eq!(logits.shape().dims(), &[2, 6, vocab]);
            if vocab == 1 {
                assert_eq!(loss, 0.0, "one class has probability 1");
            }

            // Whatever the padding rows hold, nothing else changes, and they get gradient zero.
            let table = if tied { "model.embed_tokens.weight" } else { "lm_head.weight" };
            let layout = params.layout().clone();
            let entry = layout.entries.iter().find(|e| e.parts[0].name == table).unwrap();
            let padding = entry.offset + vocab * 24..entry.range().end;
            assert_eq!(padding.len(), (vocab.next_multiple_of(64) - vocab) * 24);
            params.arena_mut().as_mut_slice::<f32>().unwrap()[padding.clone()].fill(50.0);
            let (poisoned_loss, poisoned) = loss_and_grads(&model, &params, &input, &labels);
            assert_eq!(loss, poisoned_loss, "V {vocab}, tied {tied}");
            assert_eq!(
                logits.as_bytes().unwrap(),
                model.logits(&params, &input).unwrap().as_bytes().unwrap()
            );
            for name in names(&params) {
                let (a, b) = (grad(&grads, &name), grad(&poisoned, &name));
                assert!(worst(&a, &b) == 0.0, "V {vocab}, tied {tied}: {name}");
            }
            for grads in [&grads, &poisoned] {
                let all = grads.arena().as_slice::<f32>().unwrap();
                assert!(all[padding.clone()].iter().all(|g| *g == 0.0), "V {vocab}, tied {tied}");
            }
        }
    }
}

#[test]
fn the_future_does_not_change_the_past() {
    for (name, config) in variants() {
        let (model, params) = build(&config, 19);
        let mut values = ids(1, 20, 61, 20).to_vec::<i32>().unwrap();
        let scores = |values: &[i32]| {
            let input = ModelInput::causal(Tensor::from_vec(values.to_vec(), [1, 20]).unwrap());
            f64s(&model.logits(&params, &input).unwrap())
        };
        let before = scores(&values);
        values[13] = (values[13] + 1) % 61;
        let after = scores(&values);
        assert!(worst(&before[..13 * 61], &after[..13 * 61]) < 1e-5, "{name}");
        assert!(worst(&before[13 * 61..14 * 61], &after[13 * 61..14 * 61]) > 1e-3, "{name}");
        assert!(
            worst(&before[19 * 61..], &after[19 * 61..]) > 1e-4,
            "{name}: the last token sees the change"
        );
    }
}

#[test]
fn packed_documents_equal_separate_ones() {
    for config in [config(61, 4), LlamaConfig { use_qk_norm: true, ..config(61, 4) }] {
        let (model, params) = build(&config, 21);
        // Row 0 holds documents of 5 and 7 tokens, the second ending exactly at T; row 1 holds 12, 1 and so on.
        let rows: [&[usize]; 2] = [&[5, 7], &[1, 3, 8]];
        let tokens = ids(2, 12, 61, 22);
        let (mut starts, mut positions) = (Vec::new(), Vec::new());
        for lengths in rows {
            let mut start = 0;
            for &len in lengths {
                starts.extend(std::iter::repeat_n(start as i32, len));
                positions.extend(0..len as i32);
                start += len;
            }
        }
        let starts = Tensor::from_vec(starts, [2, 12]).unwrap();
        let packed = ModelInput {
            input_ids: tokens.clone(),
            position_ids: Some(Tensor::from_vec(positions, [2, 12]).unwrap()),
            mask: AttentionMask::documents(&starts).unwrap(),
        };
        let together = f64s(&model.logits(&params, &packed).unwrap());
        let flat = tokens.to_vec::<i32>().unwrap();
        let mut at = 0;
        for len in rows.concat() {
            let document = Tensor::from_vec(flat[at..at + len].to_vec(), [1, len]).unwrap();
            let alone = f64s(&model.logits(&params, &ModelInput::causal(document)).unwrap());
            assert!(worst(&together[at * 61..(at + len) * 61], &alone) < 1e-5, "document at {at}");
            at += len;
        }
    }
}

/// Any way of cutting a text into pieces gives the scores of the whole.
#[test]
fn a_cache_of_keys_and_values_changes_no_scores() {
    let mut all = variants();
    all.push(("window".into(), LlamaConfig { sliding_window: Some(5), ..config(61, 4) }));
    all.push(("cap".into(), LlamaConfig { attn_logit_softcapping: Some(2.0), ..config(61, 4) }));
    for (name, config) in all {
        let (model, params) = build(&config, 26);
        let tokens = ids(2, 20, 61, 27).to_vec::<i32>().unwrap();
        let rows = |range: std::ops::Range<usize>| {
            let rows = tokens.chunks(20).flat_map(|row| row[range.clone()].to_vec()).collect();
            Tensor::from_vec::<i32>(rows, [2, range.len()]).unwrap()
        };
        for pieces in [&[1; 20][..], &[13, 1, 6], &[20], &[3, 17]] {
            let mut cache = model.new_cache(&params, 2, 23).unwrap();
            for &piece in pieces {
                let read = cache.len();
                let new = rows(read..read + piece);
                let scores = model.next_token_logits_cached(&params, &mut cache, &new).unwrap();
                let whole = ModelInput::causal(rows(0..read + piece));
                let want = model.next_token_logits(&params, &whole).unwrap();
                assert_eq!(scores.shape().dims(), &[2, 1, 61]);
                let off = worst(&f64s(&scores), &f64s(&want));
                assert!(off < 2e-5, "{name}: {piece} tokens after {read}: {off:e}");
            }
            assert_eq!(cache.len(), 20);
        }
    }
}

#[test]
fn a_cache_holds_what_it_was_made_for() {
    let (model, params) = build(&config(61, 4), 28);
    let mut cache = model.new_cache(&params, 1, 6).unwrap();
    assert_eq!(cache.size_bytes(), 2 * 2 * 6 * 4 * 4 * 4);
    let read = |cache: &mut rb_nn::KvCache, tokens: Tensor| {
        model.next_token_logits_cached(&params, cache, &tokens).map_err(|e| e.to_string())
    };
    let first = read(&mut cache, ids(1, 4, 61, 1)).unwrap();
    assert!(read(&mut cache, ids(1, 3, 61, 2)).unwrap_err().contains("the input has 7 positions, above"));
    assert!(read(&mut cache, ids(2, 1, 61, 2)).unwrap_err().contains("input_ids has shape [2, 1]"));
    assert!(read(&mut cache, ids(1, 0, 61, 2)).unwrap_err().contains("both at least 1"));
    assert_eq!(cache.len(), 4, "a refused piece counts for nothing");
    read(&mut cache, ids(1, 2, 61, 3)).unwrap();
    cache.truncate(0);
    assert!(cache.is_empty());
    assert_eq!(f64s(&read(&mut cache, ids(1, 4, 61, 1)).unwrap()), f64s(&first));
    assert!(model.new_cache(&params, 1, 65).unwrap_err().to_string().contains("65 positions"));
}

#[test]
fn row_losses_are_the_parts_of_the_loss() {
    let (model, params) = build(&config(61, 4), 29);
    let (input, mut labels) =
        (ModelInput::causal(ids(3, 9, 61, 30)), ids(3, 9, 61, 31).to_vec::<i32>().unwrap());
    labels[..4].fill(-100);
    labels[9..18].fill(-100);
    labels[26] = -100;
    let labels = Tensor::from_vec(labels, [3, 9]).unwrap();
    let rows = model.row_losses(&params, &input, &labels).unwrap();
    let mean = loss_of(&model, &params, &input, &labels);
    assert_eq!(rows[1], 0.0);
    assert!(rows[0] > 1.0 && rows[2] > 1.0);
    assert!((rows.iter().sum::<f64>() - 13.0 * mean).abs() < 1e-4, "{rows:?}, mean {mean}");
    // One row alone costs what it costs among others.
    let alone = |x: &Tensor| x.narrow(2, 1).unwrap();
    let one = ModelInput::causal(alone(&input.input_ids));
    assert!((model.row_losses(&params, &one, &alone(&labels)).unwrap()[0] - rows[2]).abs() < 1e-4);
}

#[test]
fn bad_input_is_an_error_with_its_place() {
    let (model, params) = build(&config(61, 4), 23);
    let with = |at: usize, id: i32| {
        let mut values = vec![0; 12];
        values[at] = id;
        Tensor::from_vec(values, [2, 6]).unwrap()
    };
    for id in [61, 63, 64, -1, 65535] {
        // 61 to 63 are rows of the padded table and yet no tokens.
        let message = model.logits(&params, &ModelInput::causal(with(8, id))).unwrap_err().to_string();
        assert!(message.starts_with(&format!("input_ids[1, 2] is {id}, but vocab_size is 61")), "{message}");
        let tape = Tape::new(&params);
        let input = ModelInput::causal(with(0, 0));
        let loss = model.loss(&tape, &input, &with(11, id), &CrossEntropyOptions::default());
        let message = loss.unwrap_err().to_string();
        assert!(message.starts_with(&format!("labels[1, 5] is {id}, but vocab_size is 61")), "{message}");
    }
    let message = |ids: Tensor| model.logits(&params, &ModelInput::causal(ids)).unwrap_err().to_string();
    assert!(message(ids(1, 65, 61, 0)).contains("max_position_embeddings 64"));
    assert!(message(ids(0, 4, 61, 0)).contains("input_ids has shape [0, 4]"));
    assert!(message(ids(2, 0, 61, 0)).contains("input_ids has shape [2, 0]"));
    assert!(message(ids(1, 4, 61, 0).reshape([4]).unwrap()).contains("expected [B, T]"));
    assert!(message(ids(1, 4, 61, 0).to_dtype(DType::F32).unwrap()).contains("ids is f32"));
    let mut input = ModelInput::causal(ids(1, 4, 61, 0));
    input.position_ids = Some(ids(1, 3, 4, 0));
    assert!(model.logits(&params, &input).unwrap_err().to_string().contains("positions has shape [1, 3]"));
}

#[test]
fn residual_projections_start_smaller() {
    let std = |name: &str, scaled: bool| {
        let base = LlamaConfig { residual_init_scale: scaled, ..LlamaConfig::new(61, 96, 128, 2, 12) };
        let mut builder = ParamBuilder::default();
        CausalLm::init(&base, &mut builder).unwrap();
        let params = builder.build(&Rng::new(24), Device::Cpu).unwrap();
        let values = f64s(&params.part(name).unwrap());
        (values.iter().map(|x| x * x).sum::<f64>() / values.len() as f64).sqrt()
    };
    for name in ["self_attn.o_proj.weight", "mlp.down_proj.weight"] {
        let name = format!("model.layers.1.{name}");
        // 9216 values: the estimate is good to about 1 %.
        assert!((std(&name, true) - 0.01).abs() < 4e-4, "0.02 / sqrt(2 * 2 layers): {}", std(&name, true));
        assert!((std(&name, false) - 0.02).abs() < 8e-4);
    }
    assert!((std("model.layers.1.self_attn.q_proj.weight", true) - 0.02).abs() < 8e-4);
}
