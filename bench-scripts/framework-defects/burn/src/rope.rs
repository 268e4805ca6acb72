//! Traps of rotary positions.

use burn::nn::RotaryEncodingConfig;
use burn::tensor::{Device, Tensor, TensorData};

use crate::common::{exists, report};
use crate::{caught, difference, random, values};

const LEN: usize = 5;
const WIDTH: usize = 8;

pub fn run(device: &Device) {
    pairs(device);
    axes(device);
    gradient(device);
    too_long(device);
}

/// Rotates pairs of elements by their position, by the formula: neighbours, or halves as checkpoints of Llama have them.
fn by_formula(x: &[f32], neighbours: bool) -> Vec<f32> {
    let mut y = x.to_vec();
    for (at, row) in y.chunks_mut(WIDTH).enumerate() {
        let position = (at % LEN) as f64;
        let old = row.to_vec();
        for pair in 0..WIDTH / 2 {
            let angle = position * 10000f64.powf(-2.0 * pair as f64 / WIDTH as f64);
            let (i, j) = if neighbours { (2 * pair, 2 * pair + 1) } else { (pair, pair + WIDTH / 2) };
            let (a, b) = (f64::from(old[i]), f64::from(old[j]));
            row[i] = (a * angle.cos() - b * angle.sin()) as f32;
            row[j] = (a * angle.sin() + b * angle.cos()) as f32;
        }
    }
    y
}

/// Which elements are a pair.
fn pairs(device: &Device) {
    let rope = RotaryEncodingConfig::new(16, WIDTH).init(device);
    let x = random([1, 2, LEN, WIDTH], 1, device);
    let y = rope.forward(x.clone());
    let off = |neighbours: bool| {
        let want = Tensor::<4>::from_data(
            TensorData::new(by_formula(&values(&x), neighbours), [1, 2, LEN, WIDTH]),
            device,
        );
        difference(&y, &want)
    };
    let (neighbours, halves) = (off(true), off(false));
    report(
        "rope rotates neighbours, checkpoints of Llama pair halves",
        "RotaryEncoding against both formulas",
        &format!(
            "off by {neighbours:.0e} from neighbours and by {halves:.0e} from halves; the documentation names no pairing"
        ),
        exists(neighbours < 1e-4 && halves > 1e-2),
    );
}

/// Queries as `[B, T, H, D]`, the layout of a projection.
fn axes(device: &Device) {
    let rope = RotaryEncodingConfig::new(16, WIDTH).init(device);
    let token = random([1, 1, 2, WIDTH], 2, device);
    let same = token.clone().repeat_dim(1, LEN);
    let answer = caught(|| rope.forward(same));
    let (seen, bad) = match answer {
        Ok(y) => {
            let first = y.clone().slice([0..1, 0..1]);
            let last = y.slice([0..1, LEN - 1..LEN]);
            let off = difference(&first, &last);
            (format!("accepted; the same token at positions 0 and 4 differs by {off:.0e}"), off == 0.0)
        }
        Err(panic) => (format!("refused: {panic}"), false),
    };
    report(
        "rope on [B, T, H, D] rotates by head, not by position",
        "RotaryEncoding on the layout of a projection",
        &seen,
        exists(bad),
    );
}

/// The gradient through a rotation is the rotation back.
fn gradient(device: &Device) {
    let rope = RotaryEncodingConfig::new(16, WIDTH).init(device);
    let weight = random([1, 2, LEN, WIDTH], 3, device).require_grad();
    let norm = rope.forward(weight.clone()).square().sum();
    let got = weight.grad(&norm.backward());
    // A rotation keeps lengths, so the slope of the squared length is twice the weight.
    let off = got.map_or(f32::NAN, |got| difference(&got, &(weight.clone().inner() * 2.0)));
    report(
        "rope cuts gradients",
        "slope of the squared length of rotated weights",
        &format!("off by {off:.0e} from twice the weights"),
        exists(off.is_nan() || off > 1e-4),
    );
}

/// More positions than the table has.
fn too_long(device: &Device) {
    let rope = RotaryEncodingConfig::new(4, WIDTH).init(device);
    let answer = caught(|| values(&rope.forward(random([1, 2, LEN, WIDTH], 4, device))));
    let seen = match &answer {
        Ok(_) => "accepted".to_string(),
        Err(panic) => format!("panic: {panic}"),
    };
    report("positions beyond rope's table", "5 positions, a table of 4", &seen, exists(answer.is_ok()));
}
