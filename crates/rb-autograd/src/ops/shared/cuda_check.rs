//! Every case of the operations that run on a GPU, on a dry run of one: launches are checked, nothing is computed.

use rb_cuda::{Gpu, GpuOptions};
use rb_tensor::{DType, Device, Rng, Tensor};

use crate::ops::{REGISTRY, add, layer_norm};
use crate::testing::{Case, Fill, random};

const ON_GPU: &[&str] = &[
    "add",
    "cast",
    "concat",
    "div",
    "dropout",
    "exp",
    "gelu_erf",
    "gelu_tanh",
    "layer_norm",
    "log",
    "log_softmax",
    "max",
    "mean",
    "mul",
    "permute",
    "relu",
    "reshape",
    "scale",
    "sigmoid",
    "silu",
    "slice",
    "softmax",
    "sqrt",
    "sub",
    "sum",
    "tanh",
];

fn dry() -> (Gpu, Device) {
    let gpu = Gpu::dry((9, 0), &GpuOptions::default());
    (gpu, Device::Cuda(gpu))
}

#[test]
fn every_case_runs_both_ways() {
    let (_, device) = dry();
    for entry in REGISTRY.iter().filter(|entry| ON_GPU.contains(&entry.name)) {
        for (case, dtype) in (entry.cases)().iter().flat_map(|c| [(c, DType::F32), (c, DType::BF16)]) {
            let name = format!("{}/{} in {dtype}", entry.name, case.name);
            let mut rng = Rng::new(3);
            let place = |t: &Tensor| t.to_dtype(dtype).unwrap().to_device(device).unwrap();
            let inputs: Vec<Tensor> = case.sample(&mut rng).unwrap().iter().map(place).collect();
            let y = case.run(&inputs, None).unwrap_or_else(|e| panic!("{name}: {e}")).y;
            assert_eq!(y.device(), device, "{name}");
            let dy = random(y.shape(), Fill::Normal, &mut rng).unwrap();
            let dy = dy.to_dtype(y.dtype()).unwrap().to_device(device).unwrap();
            let outcome = case.run(&inputs, Some(&dy)).unwrap_or_else(|e| panic!("{name}: {e}"));
            for (i, (dx, x)) in outcome.dx.iter().zip(&inputs).enumerate() {
                let dx = dx.as_ref().unwrap_or_else(|| panic!("{name}: input {i} got no gradient"));
                assert_eq!((dx.shape(), dx.dtype()), (x.shape(), dtype), "{name}: input {i}");
            }
        }
    }
}

/// An fp32 residual stream plus a bf16 branch.
#[test]
fn mixed_element_types() {
    let (gpu, device) = dry();
    let tensor = |shape: &[usize], dtype| Tensor::zeros(shape, dtype, device).unwrap();
    for branch in [&[4, 16][..], &[16], &[4, 1]] {
        let case = Case::normal("", &[], |v| add(&v[0], &v[1]));
        let inputs = [tensor(&[4, 16], DType::F32), tensor(branch, DType::BF16)];
        let outcome = case.run(&inputs, Some(&tensor(&[4, 16], DType::F32))).unwrap();
        assert_eq!(outcome.y.dtype(), DType::F32);
        assert_eq!(outcome.dx[1].as_ref().unwrap().dtype(), DType::BF16);
    }
    assert!(gpu.launches()["sum_columns"] > 0);

    let norm = Case::normal("", &[], |v| layer_norm(&v[0], &v[1], None, 1e-5));
    let inputs = [tensor(&[4, 16], DType::F32), tensor(&[16], DType::BF16)];
    let outcome = norm.run(&inputs, Some(&tensor(&[4, 16], DType::BF16))).unwrap();
    let dtypes: Vec<DType> = outcome.dx.iter().map(|dx| dx.as_ref().unwrap().dtype()).collect();
    assert_eq!((outcome.y.dtype(), dtypes), (DType::BF16, vec![DType::F32, DType::BF16]));

    // A gradient of two sums: the second one is added in place.
    let twice = Case::normal("", &[], |v| add(&add(&v[0], &v[1])?, &v[1]));
    let inputs = [tensor(&[4, 16], DType::F32), tensor(&[16], DType::BF16)];
    twice.run(&inputs, Some(&tensor(&[4, 16], DType::F32))).unwrap();
    let betas =
        gpu.units().into_iter().filter(|unit| unit.name == "sum_columns" && unit.defines.contains("BETA 1"));
    assert_eq!(betas.count(), 1, "one kernel that adds");
}
