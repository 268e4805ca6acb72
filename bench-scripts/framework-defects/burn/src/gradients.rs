//! Does every parameter get its gradient?

use burn::module::{Module, ModuleVisitor, Param, ParamId};
use burn::nn::attention::generate_autoregressive_mask;
use burn::nn::transformer::{TransformerEncoderConfig, TransformerEncoderInput};
use burn::nn::{LayerNormConfig, RmsNormConfig};
use burn::optim::{AdamWConfig, GradientsParams};
use burn::tensor::activation::softmax;
use burn::tensor::{Device, FloatDType, Tensor};

use crate::common::{exists, report};
use crate::{difference, random, values};

pub fn run(device: &Device) {
    norms(device);
    encoder(device);
    casts_and_concatenation(device);
    empty_row(device);
    not_finite(device);
}

/// Norms by the module against norms by elementary operations.
fn norms(device: &Device) {
    let (x, upstream) = (random([4, 6, 8], 1, device), random([4, 6, 8], 2, device));
    let rms = RmsNormConfig::new(8).init(device);
    let layer = LayerNormConfig::new(8).init(device);
    let gradient = |operation: &dyn Fn(Tensor<3>) -> Tensor<3>| -> Option<Tensor<3>> {
        let weight = random([4, 6, 8], 3, device).require_grad();
        let loss = (operation(weight.clone() * x.clone()) * upstream.clone()).sum();
        weight.grad(&loss.backward())
    };
    let rms_plainly = |x: Tensor<3>| {
        let mean = x.clone().square().mean_dim(2);
        x / (mean + 1e-5).sqrt()
    };
    let layer_plainly = |x: Tensor<3>| {
        let x = x.clone() - x.mean_dim(2);
        let mean = x.clone().square().mean_dim(2);
        x / (mean + 1e-5).sqrt()
    };
    let exp = |x: Tensor<3>| {
        let e = x.exp();
        e.clone() / e.sum_dim(2)
    };
    type Case<'a> = (&'a str, &'a dyn Fn(Tensor<3>) -> Tensor<3>, &'a dyn Fn(Tensor<3>) -> Tensor<3>);
    let cases: [Case<'_>; 3] = [
        ("RmsNorm", &|x| rms.forward(x), &rms_plainly),
        ("LayerNorm", &|x| layer.forward(x), &layer_plainly),
        ("softmax", &|x| softmax(x, 2), &exp),
    ];
    for (name, module, plain) in cases {
        let (seen, bad) = match (gradient(module), gradient(plain)) {
            (Some(a), Some(b)) => {
                let off = difference(&a, &b);
                (format!("gradients differ by {off:.0e}"), off.is_nan() || off > 1e-4)
            }
            (a, b) => (format!("gradient there: {} (plain form: {})", a.is_some(), b.is_some()), true),
        };
        report(
            &format!("operation without backward: {name}"),
            "weight -> operation -> loss, backward, beside the plain form",
            &seen,
            exists(bad),
        );
    }
}

/// Names nothing, counts everything.
#[derive(Default)]
struct Ids(Vec<(ParamId, Vec<f32>)>);

impl ModuleVisitor for Ids {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.0.push((param.id, values(&param.val())));
    }
}

/// A transformer of `burn::nn`, one step of AdamW: which parameters moved?
fn encoder(device: &Device) {
    let config = TransformerEncoderConfig::new(16, 32, 4, 2).with_dropout(0.0).with_norm_first(true);
    let model = config.init(device);
    let mask = generate_autoregressive_mask(2, 6, device);
    let input = TransformerEncoderInput::new(random([2, 6, 16], 5, device)).mask_attn(mask);
    let loss = (model.forward(input) * random([2, 6, 16], 6, device)).sum();
    let mut before = Ids::default();
    model.visit(&mut before);
    let grads = GradientsParams::from_grads(loss.backward(), &model);
    let with_gradient = grads.len();
    let model = AdamWConfig::new().with_weight_decay(0.0).init().step(1e-3, model, grads);
    let mut after = Ids::default();
    model.visit(&mut after);
    let still = before.0.iter().zip(&after.0).filter(|(a, b)| a.1 == b.1).count();
    report(
        "part of a model learns",
        "TransformerEncoder of 2 layers, causal mask, one step of AdamW",
        &format!("{with_gradient} of {} parameters had a gradient, {still} did not move", before.0.len()),
        exists(with_gradient != before.0.len()),
    );
}

/// A cast passes gradients on, and a concatenation gives each input its own slice (#4069).
fn casts_and_concatenation(device: &Device) {
    let weight = random([2, 3], 7, device).require_grad();
    let loss = (weight.clone().cast(FloatDType::F64).cast(FloatDType::F32) * 3.0).sum();
    let cast = weight.grad(&loss.backward()).map(|g| values(&g));
    let (a, b) = (random([2, 3], 8, device).require_grad(), random([2, 3], 9, device).require_grad());
    let (c, d) = (random([2, 3], 10, device), random([2, 3], 11, device));
    let upstream = random([8, 3], 12, device);
    let joined = Tensor::cat(vec![c, a.clone(), d, b.clone()], 0);
    let grads = (joined * upstream.clone()).sum().backward();
    let off = |x: &Tensor<2>, rows: std::ops::Range<usize>| {
        let want = upstream.clone().slice([rows, 0..3]);
        x.grad(&grads).map_or(f32::NAN, |got| difference(&got, &want.inner()))
    };
    let (first, second) = (off(&a, 2..4), off(&b, 6..8));
    let good_cast = cast.as_ref().is_some_and(|g| g.iter().all(|g| *g == 3.0));
    report(
        "a cast detaches, a concatenation gives the wrong slice (#4069)",
        "f32 -> f64 -> f32; cat of constant, weight, constant, weight",
        &format!(
            "through the cast: {}; slices off by {first:.0e} and {second:.0e}",
            if good_cast { "right" } else { "lost or wrong" }
        ),
        exists(!good_cast || !(first == 0.0 && second == 0.0)),
    );
}

/// A row that sees nothing.
fn empty_row(device: &Device) {
    let row = softmax(Tensor::<2>::full([1, 4], f32::NEG_INFINITY, device), 1);
    let first = values(&row)[0];
    report(
        "a fully masked row is NaN (#4697)",
        "softmax of a row of -inf",
        &format!("{first}"),
        exists(first.is_nan()),
    );
}

/// A loss that is not a number.
fn not_finite(device: &Device) {
    let model = burn::nn::LinearConfig::new(4, 4).init(device);
    let loss = (model.forward(random([2, 4], 13, device)) * f32::NAN).sum();
    let grads = GradientsParams::from_grads(loss.backward(), &model);
    let model = AdamWConfig::new().init().step(1e-3, model, grads);
    let now = values(&model.weight.val())[0];
    report(
        "a step on NaN is taken",
        "AdamW on a NaN loss",
        &format!("the optimizer said nothing, a weight is now {now}"),
        exists(now.is_nan()),
    );
}
