//! Models, gradients and AdamW against PyTorch: the folders that `bench-scripts/golden/llama.py` wrote.
//!
//! f32 is compared with transformers' f32, and the same model in f64 with that script's f64 twin. The latter
//! leaves no room for a wrong epsilon, scale or order of operations.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use rb_autograd::ops::cross_entropy::CrossEntropyOptions;
use rb_autograd::{GradStore, ParamBuilder, ParamStore, Tape};
use rb_nn::{CausalLm, LlamaConfig, ModelInput, weights};
use rb_optim::{AdamW, AdamWConfig, Optimizer, Schedule, clip_coefficient};
use rb_tensor::{DType, Device, Rng, Tensor, io};

/// Largest difference of a logit in f32; logits have a standard deviation above 1.
const F32_LOGITS: f64 = 1e-4;
/// Relative to the largest magnitude of a tensor.
const F32: f64 = 1e-4;
const F64: f64 = 1e-9;

struct Golden {
    name: String,
    dir: PathBuf,
    tensors: BTreeMap<String, Tensor>,
    model: CausalLm,
    params: ParamStore,
}

fn goldens() -> Vec<Golden> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("golden");
    let mut dirs: Vec<PathBuf> = std::fs::read_dir(&root).unwrap().map(|e| e.unwrap().path()).collect();
    dirs.sort();
    let load = |dir: PathBuf| {
        let config = LlamaConfig::from_json(&dir.join("config.json")).unwrap();
        let mut builder = ParamBuilder::default();
        let model = CausalLm::init(&config, &mut builder).unwrap();
        let mut params = builder.build(&Rng::new(0), Device::Cpu).unwrap();
        weights::load_hf(&mut params, &dir).unwrap();
        let tensors = io::read_safetensors(&dir.join("golden.safetensors")).unwrap();
        Golden { name: dir.file_name().unwrap().to_string_lossy().into(), dir, tensors, model, params }
    };
    let all: Vec<Golden> = dirs.into_iter().map(load).collect();
    assert_eq!(all.len(), 8, "a golden folder is missing");
    all
}

/// The two models with stored training.
fn trained() -> Vec<Golden> {
    let all: Vec<Golden> = goldens().into_iter().filter(|g| g.tensors.contains_key("train_ids")).collect();
    assert_eq!(all.len(), 2);
    all
}

fn f64s(tensor: &Tensor) -> Vec<f64> {
    tensor.to_dtype(DType::F64).unwrap().to_vec().unwrap()
}

fn worst(got: &[f64], want: &[f64]) -> f64 {
    assert_eq!(got.len(), want.len());
    let differences = got.iter().zip(want).map(|(a, b)| (a - b).abs());
    differences.fold(0.0, |m, d| if d > m || d.is_nan() { d } else { m })
}

/// Fails unless all of `got` is within `tolerance` of `want`'s largest magnitude.
#[track_caller]
fn close(what: &str, got: &[f64], want: &[f64], tolerance: f64) {
    let scale = want.iter().fold(0.0f64, |m, x| m.max(x.abs()));
    let difference = worst(got, want);
    assert!(difference <= tolerance * scale, "{what}: off by {difference:e}, largest value {scale:e}");
}

fn backward(
    golden: &Golden,
    params: &ParamStore,
    grads: &mut GradStore,
    ids: Tensor,
    labels: &Tensor,
) -> f64 {
    let tape = Tape::new(params);
    let input = ModelInput::causal(ids);
    let loss = golden.model.loss(&tape, &input, labels, &CrossEntropyOptions::default()).unwrap();
    tape.backward(&loss, grads).unwrap();
    loss.detach().item().unwrap()
}

#[test]
fn logits_match_transformers() {
    for golden in goldens() {
        let wide = golden.params.to_dtype(DType::F64).unwrap();
        let mut compared = 0;
        for len in [1, 7, 63, 65, 200] {
            let input = ModelInput::causal(golden.tensors[&format!("ids_{len}")].clone());
            let logits = golden.model.logits(&golden.params, &input).unwrap();
            let want = &golden.tensors[&format!("logits_{len}")];
            assert_eq!(logits.shape(), want.shape());
            let difference = worst(&f64s(&logits), &f64s(want));
            assert!(difference <= F32_LOGITS, "{} T {len}: off by {difference:e}", golden.name);
            if let Some(want) = golden.tensors.get(&format!("logits64_{len}")) {
                let logits = golden.model.logits(&wide, &input).unwrap();
                close(&format!("{} T {len} in f64", golden.name), &f64s(&logits), &f64s(want), F64);
                compared += 1;
            }
        }
        assert!(compared >= 4, "{}: f64 logits are missing", golden.name);
    }
}

#[test]
fn loss_and_every_gradient_match() {
    for golden in trained() {
        let (ids, labels) = (&golden.tensors["train_ids"], &golden.tensors["train_labels"]);
        for (dtype, suffix, tolerance) in [(DType::F32, "", F32), (DType::F64, "64", F64)] {
            let params = golden.params.to_dtype(dtype).unwrap();
            let mut grads = GradStore::new(&params).unwrap();
            let loss = backward(&golden, &params, &mut grads, ids.clone(), labels);
            let want = golden.tensors[&format!("loss{suffix}")].item().unwrap();
            close(&format!("{} loss{suffix}", golden.name), &[loss], &[want], tolerance);
            let prefix = format!("grad{suffix}/");
            let stored = golden.tensors.keys().filter(|k| k.starts_with(&prefix)).count();
            assert_eq!(stored, params.layout().parts().count());
            for (_, part) in params.layout().parts() {
                let grad = grads.part(&part.name).unwrap().unwrap();
                let want = &golden.tensors[&format!("{prefix}{}", part.name)];
                assert_eq!(grad.shape(), want.shape());
                let what = format!("{} {prefix}{}", golden.name, part.name);
                close(&what, &f64s(&grad), &f64s(want), tolerance);
            }
        }
    }
}

#[test]
fn ten_adamw_steps_match() {
    // The script's rates: three steps of warm-up to 1e-3, then a cosine to 1e-4.
    let schedule = Schedule::cosine(1e-3, 1e-4, 3, 10);
    for golden in trained() {
        let lrs = f64s(&golden.tensors["step_lrs"]);
        let ours: Vec<f64> = (0..10).map(|step| schedule.lr(step)).collect();
        assert!(worst(&ours, &lrs) < 1e-15, "{ours:?} {lrs:?}");
        for (dtype, suffix, tolerance) in [(DType::F32, "", F32), (DType::F64, "64", F64)] {
            let mut params = golden.params.to_dtype(dtype).unwrap();
            let mut grads = GradStore::new(&params).unwrap();
            let config = AdamWConfig { beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1 };
            let mut optimizer = AdamW::new(config, &params).unwrap();
            let (mut losses, mut norms) = (Vec::new(), Vec::new());
            for (step, &lr) in lrs.iter().enumerate() {
                let batch =
                    |name: &str| golden.tensors[name].narrow(step, 1).unwrap().reshape([4, 33]).unwrap();
                losses.push(backward(&golden, &params, &mut grads, batch("step_ids"), &batch("step_labels")));
                norms.push(grads.global_norm().unwrap());
                let scale = clip_coefficient(norms[step], 1.0);
                optimizer.step(&mut params, &mut grads, lr, scale).unwrap();
            }
            let want = |name: &str| f64s(&golden.tensors[&format!("{name}{suffix}")]);
            close(&format!("{} losses{suffix}", golden.name), &losses, &want("step_losses"), tolerance);
            close(&format!("{} norms{suffix}", golden.name), &norms, &want("step_norms"), tolerance);
            for (_, part) in params.layout().parts() {
                // Stored in f32 alone.
                let want = &golden.tensors[&format!("final/{}", part.name)];
                let what = format!("{} final{suffix}/{}", golden.name, part.name);
                let value = params.part(&part.name).unwrap();
                close(&what, &f64s(&value), &f64s(want), F32);
                let start = golden.params.part(&part.name).unwrap();
                assert!(worst(&f64s(&value), &f64s(&start)) > 1e-4, "{what} never moved");
            }
        }
    }
}

#[test]
fn files_written_by_transformers_are_written_back_unchanged() {
    let dir = tempfile::tempdir().unwrap();
    for golden in goldens() {
        let path = dir.path().join("model.safetensors");
        weights::save_hf(&golden.params, &path).unwrap();
        let (ours, theirs) = (
            io::read_safetensors(&path).unwrap(),
            io::read_safetensors(&golden.dir.join("model.safetensors")).unwrap(),
        );
        assert!(ours.keys().eq(theirs.keys()), "{}", golden.name);
        assert!(
            ours.iter().all(|(name, t)| t.as_bytes().unwrap() == theirs[name].as_bytes().unwrap()),
            "{}",
            golden.name
        );

        let json = serde_json::to_string(&golden.model.config().to_json_value()).unwrap();
        std::fs::write(dir.path().join("config.json"), json).unwrap();
        let back = LlamaConfig::from_json(&dir.path().join("config.json")).unwrap();
        assert_eq!(&back, golden.model.config(), "{}", golden.name);
    }
}
