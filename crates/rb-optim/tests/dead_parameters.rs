//! A parameter that never learns is not trained in silence: each way to lose one ends in an error that names it.

use rb_autograd::{
    Float, GradSinks, GradStore, Init, Op, ParamBuilder, ParamId, ParamStore, Result, Tape, Var, apply, ops,
};
use rb_cuda::Gpu;
use rb_optim::{AdamW, AdamWConfig, Optimizer, Sgd, SgdConfig};
use rb_tensor::{Device, Rng, Shape, Tensor};

/// `x [4, 3]` through `live.weight [3, 3]`, and through `dead.weight [6, 3]` as `way` says.
type Way = for<'t> fn(&'t Tape<'_>, &Var<'t>, ParamId) -> Result<Var<'t>>;

/// What is done after backward, with the number of the step and the loss.
type Step = fn(&mut dyn Optimizer, &mut ParamStore, &mut GradStore, u64, &Tensor) -> rb_optim::Result<()>;

/// A hundred steps; the error that ended them, if any did.
fn run(
    way: Way,
    mut optimizer: impl FnMut(&ParamStore) -> Box<dyn Optimizer>,
    step: Step,
) -> std::result::Result<(), String> {
    let mut builder = ParamBuilder::default();
    let live = builder.param("live.weight", [3, 3], Init::Normal(0.5)).unwrap();
    let rows = [("read.weight".to_string(), 3), ("dead.weight".to_string(), 3)];
    let dead = builder.packed(rows, &[6, 3].into(), Init::Normal(0.5)).unwrap();
    let mut params = builder.build(&Rng::new(0), Device::Cpu).unwrap();
    let mut optimizer = optimizer(&params);
    let mut grads = GradStore::new(&params).unwrap();
    let mut rng = Rng::new(1);
    for number in 0..100 {
        let x: Vec<f32> = (0..12).map(|_| rng.normal() as f32).collect();
        let loss = {
            let tape = Tape::new(&params);
            let x = tape.constant(Tensor::from_vec(x, [4, 3]).unwrap());
            let h = ops::linear(&x, &tape.param(live).unwrap(), None).unwrap();
            let y = way(&tape, &h, dead).unwrap();
            let flat = ops::reshape(&ops::mul(&y, &y).unwrap(), [y.shape().numel()]).unwrap();
            let loss = ops::mean(&flat, 0, false).unwrap();
            tape.backward(&loss, &mut grads).map_err(|error| error.to_string())?;
            loss.detach()
        };
        let before = params.part("live.weight").unwrap().to_owned_copy().unwrap();
        if let Err(error) = step(optimizer.as_mut(), &mut params, &mut grads, number, &loss) {
            let after = params.part("live.weight").unwrap();
            assert_eq!(before.as_bytes().unwrap(), after.as_bytes().unwrap(), "an error changed something");
            return Err(error.to_string());
        }
    }
    Ok(())
}

fn train(way: Way, optimizer: impl FnMut(&ParamStore) -> Box<dyn Optimizer>) -> String {
    let step: Step =
        |optimizer, params, grads, _, loss| optimizer.clipped_step(params, grads, 1e-3, 1.0, loss).map(drop);
    run(way, optimizer, step).expect_err("100 steps with a dead parameter and no word about it")
}

fn adamw(params: &ParamStore) -> Box<dyn Optimizer> {
    Box::new(AdamW::new(AdamWConfig::default(), params).unwrap())
}

/// Without decay, which moves weights whatever their gradients are.
fn bare(params: &ParamStore) -> Box<dyn Optimizer> {
    Box::new(AdamW::new(AdamWConfig { weight_decay: 0.0, ..AdamWConfig::default() }, params).unwrap())
}

fn sgd(params: &ParamStore) -> Box<dyn Optimizer> {
    Box::new(Sgd::new(SgdConfig { momentum: 0.9, weight_decay: 0.0 }, params).unwrap())
}

/// Everything is read.
const WHOLE: Way = |tape, h, dead| ops::linear(h, &tape.param(dead)?, None);

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
    // Far below zero, or far out, whatever the input.
    let dead_relu: Way = |tape, h, dead| {
        let y = ops::relu(&ops::scale(&ops::linear(h, &tape.param(dead)?, None)?, 1.0, -1e6)?)?;
        ops::concat(&[h, &y], -1)
    };
    let saturated: Way = |tape, h, dead| {
        let y = ops::tanh(&ops::scale(&ops::linear(h, &tape.param(dead)?, None)?, 1.0, 1e4)?)?;
        ops::concat(&[h, &y], -1)
    };
    for way in [dead_relu, saturated] {
        let message = train(way, adamw);
        assert!(
            message.contains("no gradient but zero in 16 steps") && message.contains("read.weight"),
            "{message}"
        );
    }
}

#[test]
fn rows_that_nothing_looks_at() {
    let way: Way = |tape, h, dead| ops::slice(&ops::linear(h, &tape.param(dead)?, None)?, -1, 0, 3);
    for optimizer in [adamw, sgd] {
        let message = train(way, optimizer);
        assert!(message.contains("1 parameter(s) had no gradient but zero"), "{message}");
        assert!(message.contains("dead.weight") && !message.contains("read.weight"), "{message}");
    }
}

#[test]
fn read_past_the_tape() {
    let leaf: Way = |tape, h, dead| {
        let weight = tape.leaf(tape.params().full_tensor(dead)?.to_owned_copy()?);
        ops::linear(h, &weight, None)
    };
    let recomputed: Way = |tape, h, dead| {
        tape.recompute(&[h], move |tape, inputs| {
            let weight = tape.constant(tape.param(dead)?.detach());
            ops::linear(&inputs[0], &weight, None)
        })
    };
    for way in [leaf, recomputed] {
        let message = train(way, adamw);
        assert!(message.contains("got no gradient this step: read.weight, dead.weight"), "{message}");
    }
}

#[test]
fn gradients_that_are_wiped() {
    let step: Step = |optimizer, params, grads, _, _| {
        grads.arena_mut().as_mut_slice::<f32>()?.fill(0.0);
        optimizer.step(params, grads, 1e-3, 1.0)
    };
    let message = run(WHOLE, adamw, step).unwrap_err();
    assert!(message.starts_with("3 parameter(s) had no gradient but zero in 16 steps"), "{message}");
}

/// The identity, with a backward of the user's own.
struct Own<const KIND: u8>;

impl<const KIND: u8> Op for Own<KIND> {
    const NAME: &'static str = "own";
    type Saved = ();

    fn out_shape(&self, inputs: &[&Shape]) -> Result<Shape> {
        Ok(inputs[0].clone())
    }

    fn host_forward<T: Float>(&self, inputs: &[Tensor], _: &Shape) -> Result<(Tensor, ())> {
        Ok((inputs[0].clone(), ()))
    }

    fn host_backward<T: Float>(&self, _: (), dy: Tensor, grads: &mut GradSinks<'_>) -> Result<()> {
        let filled =
            |value: f64| Tensor::from_vec(vec![T::from_f64(value); dy.shape().numel()], dy.shape().clone());
        match KIND {
            0 => Ok(()),
            1 => grads.add(0, filled(0.0)?),
            2 => grads.add(0, filled(1e-25)?),
            3 => grads.add(0, filled(f64::NAN)?),
            _ => grads.add(0, dy),
        }
    }

    fn cuda_forward(&self, _: Gpu, inputs: &[Tensor], _: &Shape) -> Result<(Tensor, ())> {
        Ok((inputs[0].clone(), ()))
    }

    fn cuda_backward(&self, _: Gpu, _: (), dy: Tensor, grads: &mut GradSinks<'_>) -> Result<()> {
        grads.add(0, dy)
    }
}

fn through_own<'t, const KIND: u8>(tape: &'t Tape<'_>, h: &Var<'t>, dead: ParamId) -> Result<Var<'t>> {
    let y = apply(Own::<KIND>, &[&ops::linear(h, &tape.param(dead)?, None)?])?;
    ops::concat(&[h, &y], -1)
}

#[test]
fn an_operation_of_ones_own() {
    let message = train(through_own::<0>, adamw);
    assert_eq!(message, "own: backward gave no gradient for input 0, which needs one");
    // Weight decay moves a weight whose gradient says nothing.
    for message in [train(through_own::<1>, adamw), train(through_own::<2>, adamw)] {
        assert!(message.contains("no gradient but zero in 16 steps"), "{message}");
        assert!(message.contains("read.weight, dead.weight;"), "{message}");
    }
    let step: Step = |optimizer, params, grads, _, _| optimizer.step(params, grads, 1e-3, 1.0);
    let message = run(through_own::<3>, adamw, step).unwrap_err();
    assert!(message.starts_with("the gradient of live.weight is not finite"), "{message}");
    run(through_own::<4>, adamw, step).unwrap();
}

/// A step that leaves every weight where it is.
#[test]
fn steps_that_move_nothing() {
    let steps: [Step; 4] = [
        |optimizer, params, grads, _, _| optimizer.step(params, grads, 0.0, 1.0),
        |optimizer, params, grads, _, _| optimizer.step(params, grads, 1e-3, 0.0),
        |optimizer, params, grads, _, _| optimizer.step(params, grads, 1e-14, 1.0),
        |optimizer, params, grads, _, loss| {
            optimizer.clipped_step(params, grads, 1e-3, 1e-30, loss).map(drop)
        },
    ];
    for step in steps {
        for optimizer in [bare, sgd] {
            let message = run(WHOLE, optimizer, step).unwrap_err();
            assert!(message.contains("the same bits as 32 steps ago"), "{message}");
            assert!(message.contains(": live.weight, read.weight, dead.weight;"), "{message}");
        }
    }
}

#[test]
fn weights_that_are_put_back() {
    let step: Step = |optimizer, params, grads, _, _| {
        let kept = params.part("dead.weight")?.to_owned_copy()?;
        optimizer.step(params, grads, 1e-3, 1.0)?;
        Ok(params.set_part("dead.weight", &kept)?)
    };
    let message = run(WHOLE, adamw, step).unwrap_err();
    assert!(message.contains("1 parameter(s) have gradients and the same bits"), "{message}");
    assert!(message.contains(": dead.weight;"), "{message}");
}

/// A long warm-up starts below the rounding of the weights; it is judged when it ends.
#[test]
fn a_slow_warm_up_is_no_alarm() {
    fn rate(number: u64) -> f64 {
        1e-14 * 1.5f64.powi(number.min(60) as i32)
    }
    assert!(rate(33) < 1e-8 && rate(60) > 1e-4);
    run(WHOLE, bare, |optimizer, params, grads, number, _| optimizer.step(params, grads, rate(number), 1.0))
        .unwrap();
}

#[test]
fn a_limit_of_the_norm_that_turns_the_gradient_round() {
    let step: Step =
        |optimizer, params, grads, _, loss| optimizer.clipped_step(params, grads, 1e-3, -1.0, loss).map(drop);
    let message = run(WHOLE, adamw, step).unwrap_err();
    assert_eq!(message, "adamw: max_norm is -1, expected a number of at least 0");
}
