//! A parameter that never learns is not trained in silence: each way to lose one ends in an error that names it.

use rb_autograd::{GradStore, Init, ParamBuilder, ParamId, ParamStore, Result, Tape, Var, ops};
use rb_optim::{AdamW, AdamWConfig, Optimizer, Sgd, SgdConfig};
use rb_tensor::{Device, Rng, Tensor};

/// `x [4, 3]` through `live.weight [3, 3]`, and through `dead.weight [6, 3]` as `way` says.
type Way = for<'t> fn(&'t Tape<'_>, &Var<'t>, ParamId) -> Result<Var<'t>>;

fn train(way: Way, mut optimizer: impl FnMut(&ParamStore) -> Box<dyn Optimizer>) -> String {
    let mut builder = ParamBuilder::default();
    let live = builder.param("live.weight", [3, 3], Init::Normal(0.5)).unwrap();
    let rows = [("read.weight".to_string(), 3), ("dead.weight".to_string(), 3)];
    let dead = builder.packed(rows, &[6, 3].into(), Init::Normal(0.5)).unwrap();
    let mut params = builder.build(&Rng::new(0), Device::Cpu).unwrap();
    let mut optimizer = optimizer(&params);
    let mut grads = GradStore::new(&params).unwrap();
    let mut rng = Rng::new(1);
    for _ in 0..100 {
        let x: Vec<f32> = (0..12).map(|_| rng.normal() as f32).collect();
        let loss = {
            let tape = Tape::new(&params);
            let x = tape.constant(Tensor::from_vec(x, [4, 3]).unwrap());
            let h = ops::linear(&x, &tape.param(live).unwrap(), None).unwrap();
            let y = way(&tape, &h, dead).unwrap();
            let flat = ops::reshape(&ops::mul(&y, &y).unwrap(), [y.shape().numel()]).unwrap();
            let loss = ops::mean(&flat, 0, false).unwrap();
            tape.backward(&loss, &mut grads).unwrap();
            loss.detach()
        };
        let before = params.part("live.weight").unwrap().to_owned_copy().unwrap();
        if let Err(error) = optimizer.clipped_step(&mut params, &mut grads, 1e-3, 1.0, &loss) {
            let after = params.part("live.weight").unwrap();
            assert_eq!(before.as_bytes().unwrap(), after.as_bytes().unwrap(), "an error changed something");
            return error.to_string();
        }
    }
    panic!("100 steps with a dead parameter and no word about it");
}

fn adamw(params: &ParamStore) -> Box<dyn Optimizer> {
    Box::new(AdamW::new(AdamWConfig::default(), params).unwrap())
}

#[test]
fn never_read() {
    let message = train(|_, h, _| Ok(h.clone()), adamw);
    assert!(message.contains("got no gradient this step: read.weight, dead.weight"), "{message}");
}

#[test]
fn detached() {
    let message = train(
        |tape, h, dead| {
            let weight = tape.constant(tape.param(dead)?.detach());
            ops::linear(h, &weight, None)
        },
        adamw,
    );
    assert!(message.contains("got no gradient this step: read.weight, dead.weight"), "{message}");
}

#[test]
fn times_zero() {
    let message = train(
        |tape, h, dead| {
            let y = ops::scale(&ops::linear(h, &tape.param(dead)?, None)?, 0.0, 0.0)?;
            ops::concat(&[h, &y], -1)
        },
        adamw,
    );
    assert!(
        message.contains("no gradient but zero in 16 steps") && message.contains("dead.weight"),
        "{message}"
    );
}

#[test]
fn behind_a_dead_activation() {
    let message = train(
        |tape, h, dead| {
            // Far below zero, whatever the input.
            let y = ops::relu(&ops::scale(&ops::linear(h, &tape.param(dead)?, None)?, 1.0, -1e6)?)?;
            ops::concat(&[h, &y], -1)
        },
        adamw,
    );
    assert!(
        message.contains("no gradient but zero in 16 steps") && message.contains("read.weight"),
        "{message}"
    );
}

#[test]
fn rows_that_nothing_looks_at() {
    let way: Way = |tape, h, dead| ops::slice(&ops::linear(h, &tape.param(dead)?, None)?, -1, 0, 3);
    for optimizer in [adamw, |params: &ParamStore| -> Box<dyn Optimizer> {
        Box::new(Sgd::new(SgdConfig { momentum: 0.9, weight_decay: 0.0 }, params).unwrap())
    }] {
        let message = train(way, optimizer);
        assert!(message.contains("1 parameter(s) had no gradient but zero"), "{message}");
        assert!(message.contains("dead.weight") && !message.contains("read.weight"), "{message}");
    }
}
