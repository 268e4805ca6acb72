//! Kin of the published defects: what else goes wrong without a word.

use candle::{D, DType, Device, Result, Tensor, Var};
use candle_nn::{AdamW, Optimizer, ParamsAdamW, ops};

use crate::common::{exists, report};

pub fn run() -> Result<()> {
    skipped_parameter()?;
    lost_update()?;
    empty_row()?;
    not_finite()?;
    activations()
}

/// A parameter that the loss does not depend on.
fn skipped_parameter() -> Result<()> {
    let used = Var::ones(4, DType::F32, &Device::Cpu)?;
    let dead = Var::ones(4, DType::F32, &Device::Cpu)?;
    let mut adam = AdamW::new(vec![used.clone(), dead.clone()], ParamsAdamW::default())?;
    let loss = (used.as_tensor() + dead.detach())?.sqr()?.sum_all()?;
    let answer = adam.backward_step(&loss);
    let still = dead.to_vec1::<f32>()? == vec![1.0; 4];
    report(
        "an optimizer skips what has no gradient",
        "AdamW over two parameters, one detached",
        &format!(
            "step returned {answer:?}, the detached one {}",
            if still { "did not move" } else { "moved" }
        ),
        exists(answer.is_ok() && still),
    );
    Ok(())
}

/// A step that is smaller than the spacing of bf16 numbers.
fn lost_update() -> Result<()> {
    let weight = Var::ones(64, DType::BF16, &Device::Cpu)?;
    let settings = ParamsAdamW { lr: 1e-3, weight_decay: 0.0, ..ParamsAdamW::default() };
    let mut adam = AdamW::new(vec![weight.clone()], settings)?;
    let mut failed = None;
    for _ in 0..100 {
        if let Err(error) = adam.backward_step(&weight.sum_all()?) {
            failed = Some(error.to_string());
            break;
        }
    }
    let now = weight.to_dtype(DType::F32)?.to_vec1::<f32>()?[0];
    let seen = match &failed {
        Some(error) => format!("error: {error}"),
        None => format!("weight 1 -> {now} after 100 steps of 1e-3 with a constant gradient of 1"),
    };
    report(
        "updates of a bf16 weight are lost to rounding",
        "AdamW, lr 1e-3, weight 1.0 in bf16",
        &seen,
        exists(failed.is_none() && now == 1.0),
    );
    Ok(())
}

/// A row that sees nothing.
fn empty_row() -> Result<()> {
    let scores = Tensor::full(f32::NEG_INFINITY, (1, 4), &Device::Cpu)?;
    let values = |y: Tensor| y.flatten_all()?.to_vec1::<f32>();
    let fused = values(ops::softmax_last_dim(&scores)?)?;
    let plain = values(ops::softmax(&scores, D::Minus1)?)?;
    report(
        "a fully masked row is NaN (#3625)",
        "softmax of a row of -inf",
        &format!("softmax_last_dim {:?}, softmax {:?}", fused[0], plain[0]),
        exists(fused[0].is_nan() || plain[0].is_nan()),
    );
    Ok(())
}

/// A loss that is not a number.
fn not_finite() -> Result<()> {
    let weight = Var::ones(4, DType::F32, &Device::Cpu)?;
    let mut adam = AdamW::new(vec![weight.clone()], ParamsAdamW::default())?;
    let loss = (weight.as_tensor() * f64::NAN)?.sum_all()?;
    let answer = adam.backward_step(&loss);
    let now = weight.to_vec1::<f32>()?[0];
    report(
        "a step on NaN is taken",
        "AdamW on a NaN loss",
        &format!("step returned {answer:?}, weight 1 -> {now}"),
        exists(answer.is_ok() && now.is_nan()),
    );
    Ok(())
}

/// Gradients of activations where their formulas are delicate (#2083, #2114, #2328, #2337).
fn activations() -> Result<()> {
    let points = [0.0f32, -0.0, 1e-30, 88.0, -88.0, 1e4, -1e4];
    let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
    type Case<'a> = (&'a str, &'a dyn Fn(&Tensor) -> Result<Tensor>, &'a dyn Fn(f64) -> f64);
    let cases: [Case<'_>; 3] = [
        ("silu", &|x| x.silu(), &|x| sigmoid(x) * (1.0 + x * (1.0 - sigmoid(x)))),
        ("sigmoid", &|x| ops::sigmoid(x), &|x| sigmoid(x) * (1.0 - sigmoid(x))),
        ("elu", &|x| x.elu(1.0), &|x| if x > 0.0 { 1.0 } else { x.exp() }),
    ];
    let mut wrong = Vec::new();
    for (name, operation, slope) in cases {
        for point in points {
            let x = Var::new(&[point], &Device::Cpu)?;
            let grads = operation(x.as_tensor())?.sum_all()?.backward()?;
            let got = grads.get(&x).map(|g| g.to_vec1::<f32>()).transpose()?.map_or(f32::NAN, |g| g[0]);
            let want = slope(f64::from(point));
            if !((f64::from(got) - want).abs() <= 1e-5) {
                wrong.push(format!("{name}'({point}) = {got}, expected {want:.3}"));
            }
        }
    }
    report(
        "gradients of SiLU, sigmoid and ELU at 0 and far out (#2083, #2114, #2328, #2337)",
        "slopes at 0, -0, 1e-30, +-88, +-1e4 against the formulas",
        &if wrong.is_empty() { "all 21 agree".to_string() } else { wrong.join("; ") },
        exists(!wrong.is_empty()),
    );
    Ok(())
}
