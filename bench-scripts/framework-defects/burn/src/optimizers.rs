//! Traps of optimizers and schedules.

use burn::grad_clipping::GradientClippingConfig;
use burn::lr_scheduler::cosine::CosineAnnealingLrSchedulerConfig;
use burn::module::{Module, Param};
use burn::optim::{AdamWConfig, GradientsParams, SgdConfig};
use burn::tensor::{Device, FloatDType, Tensor};

use crate::common::{exists, mib, peak_above, report};
use crate::{caught, random, values};

pub fn run(device: &Device) {
    skipped(device);
    tied(device);
    clipping(device);
    decay(device);
    epsilon(device);
    lost_update(device);
    schedule();
    peak(device);
}

#[derive(Module, Debug)]
struct Two {
    first: Param<Tensor<2>>,
    second: Param<Tensor<2>>,
}

impl Two {
    fn new(device: &Device) -> Two {
        let ones = || Param::from_tensor(Tensor::ones([2, 2], device));
        Two { first: ones(), second: ones() }
    }
}

/// A parameter that the loss does not depend on.
fn skipped(device: &Device) {
    let model = Two::new(device);
    let loss = (model.first.val() + model.second.val().detach()).square().sum();
    let grads = GradientsParams::from_grads(loss.backward(), &model);
    let count = grads.len();
    let model = AdamWConfig::new().init().step(1e-2, model, grads);
    let still = values(&model.second.val()) == [1.0; 4];
    report(
        "an optimizer skips what has no gradient",
        "AdamW over two parameters, one detached",
        &format!(
            "{count} gradients for 2 parameters, no error, the detached one {}",
            if still { "did not move" } else { "moved" }
        ),
        exists(still),
    );
}

/// One table in two places, as a tied head is written.
fn tied(device: &Device) {
    let table = Param::from_tensor(random([2, 2], 1, device));
    let mut model = Two { first: table.clone(), second: table };
    let mut adam = AdamWConfig::new().init();
    for _ in 0..3 {
        let loss = (model.first.val() * 2.0).square().sum() + model.second.val().exp().sum();
        let grads = GradientsParams::from_grads(loss.backward(), &model);
        model = adam.step(1e-2, model, grads);
    }
    let (first, second) = (values(&model.first.val()), values(&model.second.val()));
    report(
        "tied weights come apart",
        "one Param cloned into two fields, three steps of AdamW",
        &format!("first element {:.4} in one place and {:.4} in the other, no error", first[0], second[0]),
        exists(first != second),
    );
}

/// The norm that a gradient is clipped to.
fn clipping(device: &Device) {
    let model = Two::new(device);
    let loss = (model.first.val() * 3.0).sum() + (model.second.val() * 4.0).sum();
    let grads = GradientsParams::from_grads(loss.backward(), &model);
    let mut sgd = SgdConfig::new().with_gradient_clipping(Some(GradientClippingConfig::Norm(1.0))).init();
    let model = sgd.step(1.0, model, grads);
    let moved =
        |x: &Param<Tensor<2>>| values(&x.val()).iter().map(|x| f64::from(1.0 - x).powi(2)).sum::<f64>();
    let (first, second) = (moved(&model.first), moved(&model.second));
    let all = (first + second).sqrt();
    report(
        "clipping by norm is by parameter, not global",
        "gradients of norm 6 and 8 (10 together), clipped to 1, plain SGD with rate 1",
        &format!(
            "changes of norm {:.3} and {:.3}, {all:.3} together; a global norm would give 0.6 and 0.8",
            first.sqrt(),
            second.sqrt()
        ),
        exists(all > 1.001),
    );
}

/// Weight decay of norms and biases.
fn decay(device: &Device) {
    let norm = burn::nn::RmsNormConfig::new(4).init(device);
    let loss = (norm.forward(random([2, 4], 2, device)) * 0.0).sum();
    let grads = GradientsParams::from_grads(loss.backward(), &norm);
    let norm = AdamWConfig::new().with_weight_decay(0.1).init().step(1e-1, norm, grads);
    let now = values(&norm.gamma.val())[0];
    report(
        "weight decay reaches norms",
        "AdamW with decay 0.1 and rate 0.1 on RmsNorm, gradient zero",
        &format!("the scale went from 1 to {now}; parameter groups have to be made by hand"),
        exists(now != 1.0),
    );
}

/// The default epsilon of AdamW.
fn epsilon(device: &Device) {
    let model = Two::new(device);
    let loss = (model.first.val() + model.second.val()).sum() * 1e-6;
    let grads = GradientsParams::from_grads(loss.backward(), &model);
    let model = AdamWConfig::new().with_weight_decay(0.0).init().step(1e-2, model, grads);
    let share = f64::from(1.0 - values(&model.first.val())[0]) / 1e-2;
    report(
        "default epsilon of AdamW mutes small gradients",
        "first step with gradients of 1e-6, default settings (epsilon 1e-5, where PyTorch has 1e-8)",
        &format!("the step is {share:.2} of the learning rate; with 1e-8 it would be 0.99"),
        exists(share < 0.5),
    );
}

/// A step that is smaller than the spacing of bf16 numbers.
fn lost_update(device: &Device) {
    let answer = caught(|| {
        let weight = || Param::from_tensor(Tensor::<2>::ones([2, 2], device).cast(FloatDType::BF16).detach());
        let mut model = Two { first: weight(), second: weight() };
        let mut adam = AdamWConfig::new().with_weight_decay(0.0).init();
        for _ in 0..100 {
            let loss = (model.first.val() + model.second.val()).sum();
            let grads = GradientsParams::from_grads(loss.backward(), &model);
            model = adam.step(1e-3, model, grads);
        }
        values(&model.first.val())[0]
    });
    let (seen, bad) = match answer {
        Ok(now) => {
            (format!("weight 1 -> {now} after 100 steps of 1e-3 with a constant gradient of 1"), now == 1.0)
        }
        Err(panic) => (format!("panic: {panic}"), false),
    };
    report(
        "updates of a bf16 weight are lost to rounding",
        "AdamW, lr 1e-3, weight 1.0 in bf16",
        &seen,
        exists(bad),
    );
}

/// The learning rate after the end (#4617, #5191).
fn schedule() {
    let rates = CosineAnnealingLrSchedulerConfig::new(1e-3, 10).init().map(|mut schedule| {
        let all: Vec<f64> = (0..22).map(|_| schedule.step().base()).collect();
        all
    });
    let (seen, bad) = match rates {
        Ok(all) => (
            format!(
                "rate {:.1e} at step 10, {:.1e} at step 15, {:.1e} at step 20",
                all[10], all[15], all[20]
            ),
            all[15] > all[10],
        ),
        Err(error) => (error, false),
    };
    report(
        "the learning rate rises again after the end",
        "CosineAnnealing over 10 steps, read to step 21",
        &seen,
        exists(bad),
    );
}

/// What one step of AdamW needs for a moment.
fn peak(device: &Device) {
    let weight = || Param::from_tensor(random([1024, 1024], 3, device));
    let mut model = Two { first: weight(), second: Param::from_tensor(Tensor::ones([1, 1], device)) };
    let bytes = 1024 * 1024 * 4;
    let mut adam = AdamWConfig::new().init();
    let step = |model: Two, adam: &mut burn::optim::ModuleOptimizer| {
        let loss = model.first.val().sum() + model.second.val().sum();
        let grads = GradientsParams::from_grads(loss.backward(), &model);
        let start = std::time::Instant::now();
        let (peak, model) = peak_above(|| adam.step(1e-3, model, grads));
        (peak, model, start.elapsed().as_secs_f64() * 1e3)
    };
    let (mut peaks, mut times) = (0, Vec::new());
    for _ in 0..10 {
        let (peak, next, ms) = step(model, &mut adam);
        (peaks, model) = (peak, next);
        times.push(ms);
    }
    times.sort_by(f64::total_cmp);
    drop(model);
    let share = peaks as f64 / bytes as f64;
    report(
        "a step of the optimizer allocates",
        "AdamW on one 1024x1024 matrix: bytes above weights, moments and gradient",
        &format!("{:.1} MiB, {share:.1} times the matrix; a step takes {:.1} ms", mib(peaks), times[5]),
        exists(share > 0.5),
    );
}
