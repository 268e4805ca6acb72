//! Whole optimizer steps against formulas written out again in scalar f64, and every refusal.

use std::collections::BTreeMap;

use rb_autograd::{GradStore, Init, ParamBuilder, ParamId, ParamStore, Tape};
use rb_optim::{AdamW, AdamWConfig, Optimizer, Sgd, SgdConfig};
use rb_tensor::{DType, Device, Rng, Tensor};

/// A matrix of two parts with padding rows, a vector, and a matrix larger than one parallel task.
struct Model {
    params: ParamStore,
    ids: Vec<ParamId>,
}

const NAMES: [&str; 4] = ["q", "k", "norm", "large"];

fn model() -> Model {
    let mut b = ParamBuilder::default();
    let parts = [("q".to_string(), 3), ("k".to_string(), 2)];
    let ids = vec![
        b.packed(parts, &[8, 5].into(), Init::Normal(1.0)).unwrap(),
        b.param("norm", [7], Init::Normal(1.0)).unwrap(),
        b.param("large", [129, 257], Init::Normal(1.0)).unwrap(),
    ];
    Model { params: b.build(&Rng::new(3), Device::Cpu).unwrap(), ids }
}

/// Writes random gradients into all entries, the padding rows too, but for those at `skip`.
fn random_grads(model: &Model, params: &ParamStore, grads: &mut GradStore, rng: &mut Rng, skip: &[usize]) {
    for (i, &id) in model.ids.iter().enumerate() {
        if skip.contains(&i) || !params.entry(id).trainable {
            continue;
        }
        let shape = params.entry(id).shape.clone();
        let values = (0..shape.numel()).map(|_| rng.normal()).collect::<Vec<f64>>();
        let dy = Tensor::from_vec(values, shape).unwrap().to_dtype(params.arena().dtype()).unwrap();
        let tape = Tape::new(params);
        tape.backward_from(&tape.param(id).unwrap(), dy, grads).unwrap();
    }
}

fn values(params: &ParamStore, name: &str) -> Vec<f64> {
    params.part(name).unwrap().to_dtype(DType::F64).unwrap().to_vec().unwrap()
}

fn grad(grads: &GradStore, name: &str) -> Vec<f64> {
    grads.part(name).unwrap().unwrap().to_dtype(DType::F64).unwrap().to_vec().unwrap()
}

/// Ten steps of `optimizer` beside `scalar(name, weights, gradients, step, lr)`, which updates one parameter.
fn compare_ten_steps(
    dtype: DType,
    tolerance: f64,
    make: impl Fn(&ParamStore) -> Box<dyn Optimizer>,
    mut scalar: impl FnMut(&str, &mut [f64], &[f64], u64, f64),
) {
    let model = model();
    let mut params = model.params.to_dtype(dtype).unwrap();
    let mut grads = GradStore::new(&params).unwrap();
    let mut optimizer = make(&params);
    let mut expected: BTreeMap<&str, Vec<f64>> = NAMES.iter().map(|n| (*n, values(&params, n))).collect();
    let mut rng = Rng::new(11);
    for step in 1..=10 {
        random_grads(&model, &params, &mut grads, &mut rng, &[]);
        let (lr, scale) = (0.01 / step as f64, 0.3 + 0.05 * step as f64);
        for (name, p) in &mut expected {
            let g: Vec<f64> = grad(&grads, name).iter().map(|g| g * scale).collect();
            scalar(name, p, &g, step, lr);
        }
        optimizer.step(&mut params, &mut grads, lr, scale).unwrap();
        assert_eq!(optimizer.steps_done().unwrap(), step);
        assert!(grads.part("q").unwrap().is_none(), "gradients are stale after a step");
    }
    for (name, want) in &expected {
        for (got, want) in values(&params, name).iter().zip(want) {
            assert!((got - want).abs() <= tolerance, "{name}: {got}, expected {want}");
        }
    }
    let all = params.tensor(model.ids[0]).unwrap().to_dtype(DType::F64).unwrap().to_vec::<f64>().unwrap();
    assert!(all[25..].iter().all(|&x| x == 0.0), "padding rows moved: {:?}", &all[25..]);
}

#[test]
fn adamw_follows_the_published_formula() {
    let config = AdamWConfig { weight_decay: 0.3, ..AdamWConfig::default() };
    for (dtype, tolerance) in [(DType::F64, 1e-13), (DType::F32, 2e-6)] {
        let mut moments: BTreeMap<String, Vec<[f64; 2]>> = BTreeMap::new();
        compare_ten_steps(
            dtype,
            tolerance,
            |params| Box::new(AdamW::new(config, params).unwrap()),
            |name, p, g, t, lr| {
                let state = moments.entry(name.into()).or_insert_with(|| vec![[0.0; 2]; p.len()]);
                for ((p, g), [m, v]) in p.iter_mut().zip(g).zip(state) {
                    // arXiv:1711.05101, algorithm 2, with matrices alone decayed.
                    *m = 0.9 * *m + 0.1 * g;
                    *v = 0.95 * *v + 0.05 * g * g;
                    let m_hat = *m / (1.0 - 0.9f64.powi(t as i32));
                    let v_hat = *v / (1.0 - 0.95f64.powi(t as i32));
                    let decay = if name == "norm" { 0.0 } else { 0.3 };
                    *p = *p - lr * decay * *p - lr * m_hat / (v_hat.sqrt() + 1e-8);
                }
            },
        );
    }
}

#[test]
fn eps_is_outside_the_root() {
    let model = model();
    let mut params = model.params.to_dtype(DType::F64).unwrap();
    let mut grads = GradStore::new(&params).unwrap();
    let config = AdamWConfig { eps: 0.5, weight_decay: 0.0, ..AdamWConfig::default() };
    let mut optimizer = AdamW::new(config, &params).unwrap();
    random_grads(&model, &params, &mut grads, &mut Rng::new(2), &[]);
    let (before, g) = (values(&params, "norm"), grad(&grads, "norm"));
    optimizer.step(&mut params, &mut grads, 0.1, 1.0).unwrap();
    for ((after, before), g) in values(&params, "norm").iter().zip(before).zip(g) {
        // At the first step the corrected moments are g and g^2.
        let want = before - 0.1 * g / (g.abs() + 0.5);
        assert!((after - want).abs() < 1e-14, "{after} {want}");
    }
}

#[test]
fn sgd_follows_its_formula() {
    let config = SgdConfig { momentum: 0.8, weight_decay: 0.2 };
    for (dtype, tolerance) in [(DType::F64, 1e-13), (DType::F32, 2e-6)] {
        let mut velocity: BTreeMap<String, Vec<f64>> = BTreeMap::new();
        compare_ten_steps(
            dtype,
            tolerance,
            |params| Box::new(Sgd::new(config, params).unwrap()),
            |name, p, g, _, lr| {
                let state = velocity.entry(name.into()).or_insert_with(|| vec![0.0; p.len()]);
                for ((p, g), b) in p.iter_mut().zip(g).zip(state) {
                    *b = 0.8 * *b + g;
                    let decay = if name == "norm" { 0.0 } else { 0.2 };
                    *p = *p * (1.0 - lr * decay) - lr * *b;
                }
            },
        );
    }
}

fn both(params: &ParamStore) -> [Box<dyn Optimizer>; 2] {
    [
        Box::new(AdamW::new(AdamWConfig::default(), params).unwrap()),
        Box::new(Sgd::new(SgdConfig { weight_decay: 0.1, ..SgdConfig::default() }, params).unwrap()),
    ]
}

#[test]
fn missing_gradients_are_named_and_nothing_changes() {
    let model = model();
    for which in 0..2 {
        let mut params = model.params.to_dtype(DType::F32).unwrap();
        let mut grads = GradStore::new(&params).unwrap();
        let mut optimizer = both(&params).into_iter().nth(which).unwrap();
        random_grads(&model, &params, &mut grads, &mut Rng::new(5), &[0]);
        let before = params.arena().as_slice::<f32>().unwrap().to_vec();
        let message = optimizer.step(&mut params, &mut grads, 0.1, 1.0).unwrap_err().to_string();
        assert!(message.starts_with("2 parameter(s) got no gradient this step: q, k;"), "{message}");
        assert_eq!(params.arena().as_slice::<f32>().unwrap(), before);
        assert_eq!(optimizer.steps_done().unwrap(), 0);
        assert!(
            optimizer.state().unwrap().iter().all(|(_, t)| t
                .to_vec::<f32>()
                .unwrap()
                .iter()
                .all(|&x| x == 0.0))
        );
        assert!(grads.part("norm").unwrap().is_some(), "good gradients are kept");

        // A second step without a new backward is the same error: stale gradients are never used twice.
        random_grads(&model, &params, &mut grads, &mut Rng::new(5), &[1, 2]);
        optimizer.step(&mut params, &mut grads, 0.1, 1.0).unwrap();
        let message = optimizer.step(&mut params, &mut grads, 0.1, 1.0).unwrap_err().to_string();
        assert!(message.starts_with("4 parameter(s)"), "{message}");
    }
}

#[test]
fn frozen_parameters_keep_their_bits() {
    let model = model();
    for which in 0..2 {
        let mut params = model.params.to_dtype(DType::F32).unwrap();
        params.set_trainable("norm", false).unwrap();
        params.set_trainable("large", false).unwrap();
        let mut grads = GradStore::new(&params).unwrap();
        let mut optimizer = both(&params).into_iter().nth(which).unwrap();
        let before: Vec<Vec<f64>> = NAMES.iter().map(|n| values(&params, n)).collect();
        random_grads(&model, &params, &mut grads, &mut Rng::new(5), &[]);
        optimizer.step(&mut params, &mut grads, 0.1, 1.0).unwrap();
        for (name, before) in NAMES.iter().zip(before) {
            let frozen = matches!(*name, "norm" | "large");
            assert_eq!(values(&params, name) == before, frozen, "{name}");
        }
        let names: Vec<String> = optimizer.state().unwrap().into_iter().map(|(name, _)| name).collect();
        assert!(names.iter().all(|n| n.ends_with("/q") || n.ends_with("/k")), "{names:?}");
    }
}

#[test]
fn a_rate_of_zero_changes_no_weight() {
    let model = model();
    for which in 0..2 {
        let mut params = model.params.to_dtype(DType::F32).unwrap();
        let mut grads = GradStore::new(&params).unwrap();
        let mut optimizer = both(&params).into_iter().nth(which).unwrap();
        let before = params.arena().as_slice::<f32>().unwrap().to_vec();
        random_grads(&model, &params, &mut grads, &mut Rng::new(5), &[]);
        optimizer.step(&mut params, &mut grads, 0.0, 1.0).unwrap();
        assert_eq!(params.arena().as_slice::<f32>().unwrap(), before);
    }
}

#[test]
fn numbers_that_would_poison_the_weights_are_refused() {
    let model = model();
    let mut params = model.params.to_dtype(DType::F32).unwrap();
    let mut grads = GradStore::new(&params).unwrap();
    let mut optimizer = AdamW::new(AdamWConfig::default(), &params).unwrap();
    random_grads(&model, &params, &mut grads, &mut Rng::new(5), &[]);
    let before = params.arena().as_slice::<f32>().unwrap().to_vec();
    for (lr, scale, what) in [(f64::NAN, 1.0, "lr"), (-1.0, 1.0, "lr"), (0.1, f64::NAN, "grad_scale")] {
        let message = optimizer.step(&mut params, &mut grads, lr, scale).unwrap_err().to_string();
        assert!(message.starts_with(&format!("adamw: {what} is ")), "{message}");
    }
    let view = params.part("q").unwrap();
    let message = optimizer.step(&mut params, &mut grads, 0.1, 1.0).unwrap_err().to_string();
    assert!(message.contains("weights: 1 tensor(s) still look"), "{message}");
    drop(view);
    assert_eq!(params.arena().as_slice::<f32>().unwrap(), before);
    assert!(optimizer.step(&mut params, &mut grads, 0.1, 1.0).is_ok());
    assert!(AdamW::new(AdamWConfig { beta2: 1.0, ..AdamWConfig::default() }, &params).is_err());
    assert!(Sgd::new(SgdConfig { momentum: -0.1, ..SgdConfig::default() }, &params).is_err());
}

#[test]
fn another_models_stores_are_refused() {
    let model = model();
    let mut other = ParamBuilder::default();
    other.param("w", [3], Init::Ones).unwrap();
    let other = other.build(&Rng::new(0), Device::Cpu).unwrap();
    let mut params = model.params.to_dtype(DType::F32).unwrap();
    let mut grads = GradStore::new(&params).unwrap();
    let message = AdamW::new(AdamWConfig::default(), &other)
        .unwrap()
        .step(&mut params, &mut grads, 0.1, 1.0)
        .unwrap_err()
        .to_string();
    assert!(message.contains("optimizer state has another parameter layout"), "{message}");
    let mut optimizer = AdamW::new(AdamWConfig::default(), &params).unwrap();
    let mut foreign = GradStore::new(&other).unwrap();
    let message = optimizer.step(&mut params, &mut foreign, 0.1, 1.0).unwrap_err().to_string();
    assert!(message.contains("gradient store has another parameter layout"), "{message}");
}

fn run(optimizer: &mut dyn Optimizer, params: &mut ParamStore, steps: std::ops::Range<u64>) {
    let mut grads = GradStore::new(params).unwrap();
    for step in steps {
        let twin = Model { params: params.to_dtype(DType::F32).unwrap(), ids: model().ids };
        random_grads(&twin, params, &mut grads, &mut Rng::new(step), &[]);
        optimizer.step(params, &mut grads, 0.01, 1.0).unwrap();
    }
}

#[test]
fn saved_state_resumes_bit_for_bit() {
    for which in 0..2 {
        let start = model().params;
        let mut whole = start.to_dtype(DType::F32).unwrap();
        let mut optimizer = both(&whole).into_iter().nth(which).unwrap();
        run(optimizer.as_mut(), &mut whole, 0..7);

        let mut halves = start.to_dtype(DType::F32).unwrap();
        let mut first = both(&halves).into_iter().nth(which).unwrap();
        run(first.as_mut(), &mut halves, 0..4);
        let saved: BTreeMap<String, Tensor> = first.state().unwrap().into_iter().collect();
        let mut second = both(&halves).into_iter().nth(which).unwrap();
        second.load_state(&saved, first.steps_done().unwrap()).unwrap();
        run(second.as_mut(), &mut halves, 4..7);
        assert_eq!(second.steps_done().unwrap(), 7);
        assert_eq!(whole.arena().as_slice::<f32>().unwrap(), halves.arena().as_slice::<f32>().unwrap());
    }
}

#[test]
fn foreign_state_is_refused_by_name() {
    let params = model().params;
    let adamw: AdamW = AdamW::new(AdamWConfig::default(), &params).unwrap();
    let mut sgd: Sgd = Sgd::new(SgdConfig::default(), &params).unwrap();
    let state: BTreeMap<String, Tensor> = adamw.state().unwrap().into_iter().collect();
    assert_eq!(state["exp_avg/k"].shape().dims(), &[2, 5], "padding is not saved");
    let message = sgd.load_state(&state, 3).unwrap_err().to_string();
    assert!(message.contains("missing [momentum_buffer/k,") && message.contains("exp_avg_sq/q"), "{message}");
    assert_eq!(sgd.steps_done().unwrap(), 0);

    let mut bad = sgd.state().unwrap().into_iter().collect::<BTreeMap<_, _>>();
    bad.insert("momentum_buffer/k".into(), Tensor::from_vec(vec![0f32; 3], [3]).unwrap());
    let message = sgd.load_state(&bad, 3).unwrap_err().to_string();
    assert_eq!(message, "load_state: momentum_buffer/k has shape [3], expected [2, 5]");
}
