//! Time and memory of forward and backward.

use std::time::Instant;

use burn::module::Module;
use burn::nn::attention::{MhaInput, MultiHeadAttentionConfig, generate_autoregressive_mask};
use burn::nn::transformer::{TransformerEncoder, TransformerEncoderConfig, TransformerEncoderInput};
use burn::optim::{AdamWConfig, GradientsParams};
use burn::tensor::Device;
use burn::tensor::activation::softmax;

use crate::common::{Verdict, allocations_of, exists, live, peak_above, report, resident_mib};
use crate::random;

pub fn run(device: &Device) {
    report(
        "fusion crash: \"Should have handle for tensor\" (#4347)",
        "not run: Flex has no fusion",
        "fusion belongs to the CubeCL backends (GPUs, and a CPU one that needs LLVM); no claim is made here",
        Verdict::NotOnCpu,
    );
    backward_time(device);
    growth(device);
    dropped_graphs(device);
    softmax_memory(device);
    mask_copies(device);
}

fn model(device: &Device, width: usize) -> TransformerEncoder {
    TransformerEncoderConfig::new(width, 4 * width, 4, 2).with_dropout(0.0).with_norm_first(true).init(device)
}

/// How many times forward does backward take? The arithmetic says 2.
fn backward_time(device: &Device) {
    let (rows, len, width) = (4, 128, 128);
    let model = model(device, width);
    let plain = model.valid();
    let inner = device.clone().inner();
    let mask = generate_autoregressive_mask(rows, len, device);
    let inner_mask = generate_autoregressive_mask(rows, len, &inner);
    let (x, inner_x) = (random([rows, len, width], 1, device), random([rows, len, width], 1, &inner));
    let input = || TransformerEncoderInput::new(x.clone()).mask_attn(mask.clone());
    let inference = median_ms(9, || {
        let input = TransformerEncoderInput::new(inner_x.clone()).mask_attn(inner_mask.clone());
        let _ = plain.forward(input).into_data();
    });
    let forward = median_ms(9, || {
        let _ = model.forward(input()).inner().into_data();
    });
    let both = median_ms(9, || {
        let grads = GradientsParams::from_grads(model.forward(input()).square().sum().backward(), &model);
        assert!(!grads.is_empty());
    });
    let ratio = (both - forward) / forward;
    report(
        "slow backward (#4598)",
        "TransformerEncoder, 2 layers, width 128, [4, 128]: median of 9; forward alone, forward with a graph, and both",
        &format!(
            "{inference:.1} ms, {forward:.1} ms, {both:.1} ms: backward takes {ratio:.1} times forward, 2 by the arithmetic"
        ),
        exists(ratio > 4.0),
    );
}

/// Bytes alive after steps 20 and 300.
fn growth(device: &Device) {
    let mut model = model(device, 16);
    let mut adam = AdamWConfig::new().init();
    let x = random([2, 8, 16], 2, device);
    let mut step = |model: TransformerEncoder| {
        let loss = model.forward(TransformerEncoderInput::new(x.clone())).square().mean();
        let grads = GradientsParams::from_grads(loss.backward(), &model);
        adam.step(1e-3, model, grads)
    };
    for _ in 0..20 {
        model = step(model);
    }
    let (early, early_resident) = (live(), resident_mib());
    for _ in 20..300 {
        model = step(model);
    }
    let grown = live() as i64 - early as i64;
    let resident = resident_mib();
    report(
        "memory grows with every step (#2333, #2743)",
        "AdamW on a small TransformerEncoder, bytes alive after steps 20 and 300",
        &format!("{grown:+} bytes, resident {early_resident:.1} -> {resident:.1} MiB"),
        exists(grown > 280 * 64),
    );
}

/// Losses that nobody differentiates.
fn dropped_graphs(device: &Device) {
    let model = model(device, 16);
    let x = random([2, 8, 16], 3, device);
    let forward = || drop(model.forward(TransformerEncoderInput::new(x.clone())).square().mean());
    (0..20).for_each(|_| forward());
    let early = live();
    (0..200).for_each(|_| forward());
    let grown = live() as i64 - early as i64;
    report(
        "memory of a graph without backward is kept (#4302)",
        "200 forward passes whose losses are dropped",
        &format!("{grown:+} bytes"),
        exists(grown > 200 * 64),
    );
}

/// Arrays that a softmax and its backward take.
fn softmax_memory(device: &Device) {
    let scores = random([1024, 1024], 4, device).require_grad();
    let bytes = (1024 * 1024 * 4) as f64;
    let before = live();
    let (peak, y) = peak_above(|| softmax(scores.clone(), 1));
    let held = (live() - before) as f64 / bytes;
    let loss = y.square().sum();
    let (back, grads) = peak_above(|| loss.backward());
    drop(grads);
    report(
        "softmax keeps arrays of the size of the scores",
        "[1024, 1024] scores: arrays of that size",
        &format!(
            "{:.1} at the peak of forward, {held:.1} held, {:.1} more in backward",
            peak as f64 / bytes,
            back as f64 / bytes
        ),
        exists(held > 1.5),
    );
}

/// A causal mask for each row of a batch, copied by each layer.
fn mask_copies(device: &Device) {
    // Odd, so that the size of a mask is no other tensor's.
    let (rows, len) = (3, 37);
    let attention = MultiHeadAttentionConfig::new(16, 4).with_dropout(0.0).init(device);
    let x = random([rows, len, 16], 5, device);
    let mask = generate_autoregressive_mask(rows, len, device);
    let (count, _) = allocations_of(rows * len * len, || {
        for _ in 0..10 {
            let _ = attention.forward(MhaInput::self_attn(x.clone()).mask_attn(mask.clone()));
        }
    });
    report(
        "causal mask made again",
        "one mask, 10 passes through MultiHeadAttention: allocations of a byte for each row and pair of positions",
        &format!("{count} in 10 passes"),
        exists(count >= 10),
    );
}

/// Median milliseconds of `times` runs, after one that is not counted.
fn median_ms(times: usize, mut work: impl FnMut()) -> f64 {
    work();
    let mut all: Vec<f64> = (0..times)
        .map(|_| {
            let start = Instant::now();
            work();
            start.elapsed().as_secs_f64() * 1e3
        })
        .collect();
    all.sort_by(f64::total_cmp);
    all[all.len() / 2]
}
