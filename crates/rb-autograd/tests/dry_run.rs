//! Launch code of operations on a GPU, run without one.

use rb_autograd::ops;
use rb_cuda::{Gpu, GpuOptions};
use rb_tensor::{DType, Device, Rng, Tensor};

/// Runs every case of these operations forward and backward; the gradients must have the inputs' shapes and
/// types.
#[test]
fn every_case_launches() {
    for capability in [(8, 0), (8, 6), (9, 0), (12, 0)] {
        let gpu = Gpu::dry(capability, &GpuOptions::default());
        for name in ["rope", "cross_entropy", "attention", "attention_packed"] {
            let entry = ops::REGISTRY.iter().find(|entry| entry.name == name).unwrap();
            for case in (entry.cases)() {
                for dtype in [DType::F32, DType::BF16] {
                    run(Device::Cuda(gpu), &case, dtype, &format!("{name}, {}, {dtype}", case.name));
                }
            }
        }
    }
}

fn run(device: Device, case: &rb_autograd::testing::Case, dtype: DType, what: &str) {
    let on_device = |x: &Tensor| x.to_dtype(dtype).unwrap().to_device(device).unwrap();
    let inputs: Vec<Tensor> = case.sample(&mut Rng::new(0)).unwrap().iter().map(on_device).collect();
    let y = case.run(&inputs, None).unwrap_or_else(|e| panic!("{what}: {e}")).y;
    let dy = Tensor::zeros(y.shape(), y.dtype(), device).unwrap();
    let outcome = case.run(&inputs, Some(&dy)).unwrap_or_else(|e| panic!("{what}: {e}"));
    for (x, dx) in inputs.iter().zip(&outcome.dx) {
        let dx = dx.as_ref().unwrap_or_else(|| panic!("{what}: no gradient"));
        assert_eq!((dx.shape(), dx.dtype()), (x.shape(), dtype), "{what}");
    }
}
