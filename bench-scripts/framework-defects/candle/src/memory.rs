//! What is kept, and for how long.

use candle::{D, DType, Device, Result, Tensor, Var};
use candle_nn::{AdamW, Optimizer, ParamsAdamW, ops};

use crate::common::{Numbers, Verdict, exists, live, mib, peak_above, report, resident_mib};

pub fn run() -> Result<()> {
    fill_thread_buffers()?;
    optimizer_growth()?;
    optimizer_peak()?;
    intermediates()?;
    gradients_keep_the_graph()?;
    gradients_of_inputs()?;
    softmax()?;
    cross_entropy()
}

fn random(rows: usize, columns: usize, seed: u64) -> Result<Tensor> {
    Tensor::from_vec(Numbers(seed).many(rows * columns), (rows, columns), &Device::Cpu)
}

/// Each thread keeps a buffer for products from its first one on; those are not what is measured.
fn fill_thread_buffers() -> Result<()> {
    let (a, b) = (random(512, 256, 20)?, random(256, 256, 21)?);
    (0..200).try_for_each(|_| a.matmul(&b).and_then(|y| y.t()?.matmul(&a)).map(drop))
}

/// Bytes alive after steps 20 and 400 of AdamW.
fn optimizer_growth() -> Result<()> {
    let input = random(32, 64, 1)?;
    let weights: Vec<Var> = (0..4).map(|i| Var::from_tensor(&random(64, 64, i)?)).collect::<Result<_>>()?;
    let mut adam = AdamW::new(weights.clone(), ParamsAdamW::default())?;
    let mut step = || -> Result<()> {
        let mut x = input.clone();
        for weight in &weights {
            x = x.matmul(weight)?.silu()?;
        }
        adam.backward_step(&x.sqr()?.mean_all()?)
    };
    (0..20).try_for_each(|_| step())?;
    let (early, early_resident) = (live(), resident_mib());
    (20..400).try_for_each(|_| step())?;
    let grown = live() as i64 - early as i64;
    let seen = format!(
        "live bytes {early} -> {} ({grown:+}), resident {early_resident:.1} -> {:.1} MiB",
        live(),
        resident_mib()
    );
    report(
        "optimizer's host memory grows",
        "AdamW on four 64x64 matrices, bytes alive after steps 20 and 400",
        &seen,
        exists(grown > 4096),
    );
    Ok(())
}

/// What one step of AdamW needs for a moment.
fn optimizer_peak() -> Result<()> {
    let weight = Var::from_tensor(&random(1024, 1024, 3)?)?;
    let bytes = weight.elem_count() * 4;
    let mut adam = AdamW::new(vec![weight.clone()], ParamsAdamW::default())?;
    let grads = weight.sqr()?.sum_all()?.backward()?;
    adam.step(&grads)?;
    let (peak, stepped) = peak_above(|| adam.step(&grads));
    stepped?;
    let times = peak as f64 / bytes as f64;
    report(
        "a step of the optimizer allocates",
        "AdamW on one 1024x1024 matrix: bytes above weights, moments and gradient",
        &format!("{:.1} MiB, {times:.1} times the matrix", mib(peak)),
        exists(times > 0.5),
    );
    Ok(())
}

/// What a graph holds after forward, beside the values that backward reads.
fn intermediates() -> Result<()> {
    let (rows, width) = (512, 256);
    let input = random(rows, width, 5)?;
    let weight = Var::from_tensor(&random(width, width, 6)?)?;
    let before = live();
    let h = input.matmul(&weight)?;
    // One SiLU, an RMSNorm in its differentiable form, and a softmax: three operations that need one saved value each.
    let h = ops::silu(&h)?;
    let norm = candle_nn::RmsNorm::new(Tensor::ones(width, DType::F32, &Device::Cpu)?, 1e-5);
    let h = norm.forward_diff(&h)?;
    let y = ops::softmax(&h, D::Minus1)?;
    let held = (live() - before) as f64 / (rows * width * 4) as f64;
    let loss = y.sqr()?.sum_all()?;
    drop((h, y));
    let (peak, grads) = peak_above(|| loss.backward());
    drop(grads?);
    let peak = peak as f64 / (rows * width * 4) as f64;
    report(
        "intermediates are kept (#1241)",
        "matmul, SiLU, RmsNorm::forward_diff, softmax on [512, 256]: activations held for backward",
        &format!(
            "{held:.1} arrays of that size held after forward, {peak:.1} more at the peak of backward; 4 outputs would do"
        ),
        exists(held > 6.0),
    );
    Ok(())
}

/// Gradients of micro-batches, summed as a user would.
fn gradients_keep_the_graph() -> Result<()> {
    let input = random(256, 256, 8)?;
    let weight = Var::from_tensor(&random(256, 256, 9)?)?;
    let scale = Var::from_tensor(&random(256, 256, 10)?)?;
    let bytes = 256 * 256 * 4;
    let gradient = || -> Result<Tensor> {
        let loss = (input.matmul(&weight)? * scale.as_tensor())?.tanh()?.sqr()?.sum_all()?;
        let mut grads = loss.backward()?;
        grads.remove(&scale).ok_or_else(|| candle::Error::Msg("no gradient".into()))
    };
    let before = live();
    let mut sum = gradient()?;
    let mut after = Vec::new();
    for _ in 0..8 {
        sum = (sum + gradient()?)?;
        after.push((live() - before) as f64 / bytes as f64);
    }
    let grown = (after[7] - after[3]) / 4.0;
    report(
        "a kept gradient keeps the graph (#1241)",
        "the gradient of one 256x256 weight, summed over 9 micro-batches; the losses are dropped",
        &format!(
            "{:.1} arrays held after 2, {:.1} after 9: {grown:.1} more with each; 1 would do",
            after[0], after[7]
        ),
        exists(grown > 0.5),
    );
    Ok(())
}

/// Gradients of what nobody trains.
fn gradients_of_inputs() -> Result<()> {
    let input = random(256, 256, 11)?;
    let weight = Var::from_tensor(&random(256, 256, 12)?)?;
    let grads = input.matmul(&weight)?.sqr()?.sum_all()?.backward()?;
    let computed = grads.get(&input).is_some();
    let word = if computed { "computed and kept" } else { "not computed" };
    report(
        "gradients that nobody asked for (#3508)",
        "constant input times a weight: is the input's gradient computed?",
        &format!("gradient of the constant input: {word}"),
        exists(computed),
    );
    Ok(())
}

/// The two forms of softmax: one has no gradient, the other needs several times the memory.
fn softmax() -> Result<()> {
    let scores = Var::from_tensor(&random(1024, 1024, 13)?)?;
    let bytes = (1024 * 1024 * 4) as f64;
    let (fused_peak, fused) = peak_above(|| ops::softmax_last_dim(&scores));
    drop(fused?);
    let before = live();
    let (peak, y) = peak_above(|| ops::softmax(&scores, D::Minus1));
    let y = y?;
    let held = (live() - before) as f64 / bytes;
    let loss = y.sqr()?.sum_all()?;
    let (back, grads) = peak_above(|| loss.backward());
    drop(grads?);
    let seen = format!(
        "fused {:.1} arrays and no gradient; with a gradient {:.1} at the peak of forward, {held:.1} held, {:.1} more in backward",
        fused_peak as f64 / bytes,
        peak as f64 / bytes,
        back as f64 / bytes
    );
    report(
        "softmax has a form without a gradient and one of several times the memory",
        "[1024, 1024] scores: arrays of that size that each form allocates (no memory was filled to its end)",
        &seen,
        exists(held > 1.5),
    );
    report(
        "softmax runs out of a card's memory",
        "not run: there is no card",
        "no claim is made here",
        Verdict::NotOnCpu,
    );
    Ok(())
}

/// The loss over a vocabulary.
fn cross_entropy() -> Result<()> {
    let (rows, vocabulary) = (128, 8192);
    let logits = Var::from_tensor(&random(rows, vocabulary, 14)?)?;
    let labels = Tensor::arange(0u32, rows as u32, &Device::Cpu)?;
    let bytes = (rows * vocabulary * 4) as f64;
    let before = live();
    let loss = candle_nn::loss::cross_entropy(&logits, &labels)?;
    let held = (live() - before) as f64 / bytes;
    let (peak, grads) = peak_above(|| loss.backward());
    drop(grads?);
    report(
        "the loss keeps arrays of the size of the scores",
        "cross_entropy of [128, 8192]",
        &format!(
            "{held:.1} arrays held after forward, {:.1} more at the peak of backward",
            peak as f64 / bytes
        ),
        exists(held > 1.5),
    );
    Ok(())
}
