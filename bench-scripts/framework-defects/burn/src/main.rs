//! Which published defects of Burn can be seen in this release on a CPU: one line each. See `../../README.md`.

#[path = "../../common.rs"]
mod common;
mod gradients;
mod optimizers;
mod rope;
mod work;

use burn::tensor::{Device, Tensor, TensorData};
use common::Numbers;

fn main() {
    println!("burn 0.22.1, Flex backend, CPU");
    let device = &Device::flex().autodiff();
    gradients::run(device);
    work::run(device);
    optimizers::run(device);
    rope::run(device);
}

/// A tensor of numbers in -1 to 1 that are the same in every run.
fn random<const D: usize>(shape: [usize; D], seed: u64, device: &Device) -> Tensor<D> {
    let values = Numbers(seed).many(shape.iter().product());
    Tensor::from_data(TensorData::new(values, shape), device)
}

/// All elements.
fn values<const D: usize>(tensor: &Tensor<D>) -> Vec<f32> {
    tensor.to_data().iter::<f32>().collect()
}

/// The largest difference of two tensors.
fn difference<const D: usize>(a: &Tensor<D>, b: &Tensor<D>) -> f32 {
    values(a).iter().zip(values(b)).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

/// What `work` gave, or the first line of its panic.
fn caught<T>(work: impl FnOnce() -> T) -> Result<T, String> {
    std::panic::set_hook(Box::new(|_| {}));
    let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work));
    let _ = std::panic::take_hook();
    caught.map_err(|panic| {
        let text = panic.downcast_ref::<String>().cloned();
        let text = text.or_else(|| panic.downcast_ref::<&str>().map(|text| text.to_string()));
        text.unwrap_or_default().lines().next().unwrap_or_default().to_string()
    })
}
