//! Launch code of operations on a GPU, run without one.

use rb_autograd::ops;
use rb_autograd::ops::attention::AttentionMask;
use rb_autograd::ops::rope::RopeTable;
use rb_autograd::{GradStore, ParamStore, Tape, Var};
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

/// What forward and backward of a function of one input launch.
fn launches(
    gpu: Gpu,
    shape: &[usize],
    f: impl for<'t> Fn(&Var<'t>) -> rb_autograd::Result<Var<'t>>,
) -> Vec<(&'static str, u64)> {
    let params = ParamStore::empty();
    let tape = Tape::new(&params);
    let x = tape.leaf(Tensor::zeros(shape, DType::BF16, Device::Cuda(gpu)).unwrap());
    let before = gpu.launches();
    let y = f(&x).unwrap();
    let dy = Tensor::zeros(y.shape(), y.dtype(), Device::Cuda(gpu)).unwrap();
    tape.backward_from(&y, dy, &mut GradStore::new(&params).unwrap()).unwrap();
    let gained = |(name, n): (&'static str, u64)| (name, n - before.get(name).copied().unwrap_or(0));
    gpu.launches().into_iter().map(gained).filter(|(_, n)| *n > 0).collect()
}

#[test]
fn scores_are_overwritten_where_nobody_else_holds_them() {
    use ops::cross_entropy::{CrossEntropyOptions, cross_entropy_consuming};
    let gpu = Gpu::dry((9, 0), &GpuOptions::default());
    let names = |columns: usize, held: bool| -> Vec<&str> {
        let labels = Tensor::from_vec(vec![1i32, 2, 3], [3]).unwrap();
        let all = launches(gpu, &[3, columns], |x| {
            let scores = ops::scale(x, 2.0, 0.0)?;
            let keeps = held.then(|| scores.clone());
            let loss = cross_entropy_consuming(scores, &labels, &CrossEntropyOptions::default());
            drop(keeps);
            loss
        });
        all.into_iter().map(|(name, _)| name).filter(|name| name.starts_with("cross_entropy")).collect()
    };
    let once = ["cross_entropy_fwd_bwd", "cross_entropy_scale", "cross_entropy_sum"];
    let twice = ["cross_entropy_bwd", "cross_entropy_fwd", "cross_entropy_sum"];
    assert_eq!(names(64, false), once);
    assert_eq!(names(64, true), twice);
    // A row that shared memory does not hold.
    assert_eq!(names(1 << 17, false), twice);
}

#[test]
fn gradients_are_turned_back_where_they_are_made() {
    let table = |half: usize| RopeTable { inv_freq: vec![1.0; half].into(), attention_scaling: 1.0 };
    let count = |capability, d: usize, name: &str| {
        let gpu = Gpu::dry(capability, &GpuOptions::default());
        let positions = Tensor::from_vec((0..70).collect(), [1, 70]).unwrap();
        let all = launches(gpu, &[1, 70, 5, d], |x| {
            let qkv = ops::scale(x, 1.0, 0.0)?;
            let turn = (&positions, &table(d / 2));
            ops::attention_packed::rotated_attention(qkv, turn, [3, 1], &AttentionMask::Causal, 0.1)
        });
        all.into_iter().find(|(kernel, _)| *kernel == name).map_or(0, |(_, n)| n)
    };
    for (capability, d, back) in [((9, 0), 64, 0), ((9, 0), 32, 1), ((8, 0), 64, 1)] {
        assert_eq!(count(capability, d, "rope"), 1 + back, "{capability:?}, heads of {d}");
        assert_eq!(count(capability, d, "rope_angles"), 1);
    }
}
