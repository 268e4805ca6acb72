//! A recomputed part gives the bits that the part gives when it is recorded, for less memory.

use rb_autograd::{GradStore, Init, ParamBuilder, ParamId, ParamStore, Precision, Result, Tape, Var, ops};
use rb_cuda::{Gpu, GpuOptions};
use rb_tensor::{DType, Device, Rng, Tensor};

const ROWS: usize = 24;
const WIDTH: usize = 16;

#[derive(Clone, Copy)]
struct Net {
    w: ParamId,
    wide: ParamId,
    gain: ParamId,
}

impl Net {
    fn declare(builder: &mut ParamBuilder) -> Net {
        Net {
            w: builder.param("w", [WIDTH, WIDTH], Init::Normal(0.4)).unwrap(),
            wide: builder.param("wide", [2 * WIDTH, WIDTH], Init::Normal(0.4)).unwrap(),
            gain: builder.param("gain", [WIDTH], Init::Normal(1.0)).unwrap(),
        }
    }

    fn build() -> (Net, ParamStore) {
        let mut builder = ParamBuilder::default();
        let net = Net::declare(&mut builder);
        (net, builder.build(&Rng::new(7), Device::Cpu).unwrap())
    }

    /// Two inputs, a tied weight, a residual.
    fn part<'a>(self, tape: &'a Tape<'a>, inputs: &[Var<'a>]) -> Result<Var<'a>> {
        let a = ops::rms_norm(&inputs[0], &tape.param(self.gain)?, 1e-6)?;
        let b = ops::swiglu(&ops::linear(&a, &tape.param(self.wide)?, None)?)?;
        ops::add(&ops::add(&b, &inputs[1])?, &ops::linear(&inputs[0], &tape.param(self.w)?, None)?)
    }

    /// The part twice beside a residual, between two uses of the tied weight. `depth` 0 records it all, 1
    /// recomputes the part, 2 recomputes a part that recomputes it.
    fn forward<'t>(self, tape: &'t Tape<'t>, x: &Var<'t>, depth: usize) -> Result<Var<'t>> {
        let mut h = ops::linear(x, &tape.param(self.w)?, None)?;
        for _ in 0..2 {
            let y = self.nested(tape, &[h.clone(), h.clone()], depth)?;
            h = ops::add(&h, &y)?;
        }
        ops::linear(&h, &tape.param(self.w)?, None)
    }

    fn nested<'a>(self, tape: &'a Tape<'a>, inputs: &[Var<'a>], depth: usize) -> Result<Var<'a>> {
        match depth {
            0 => self.part(tape, inputs),
            _ => tape.recompute(&[&inputs[0], &inputs[1]], move |tape, inputs| {
                self.nested(tape, inputs, depth - 1)
            }),
        }
    }
}

fn values(rng: &mut Rng) -> Tensor {
    Tensor::from_vec((0..ROWS * WIDTH).map(|_| rng.normal() as f32).collect(), [ROWS, WIDTH]).unwrap()
}

fn bits(tensor: &Tensor) -> Vec<u32> {
    tensor.to_vec::<f32>().unwrap().iter().map(|x| x.to_bits()).collect()
}

/// Outputs, gradients of the input and of the parameters after two accumulated passes, and bytes held.
fn run(net: Net, params: &ParamStore, depth: usize) -> (Vec<Vec<u32>>, usize) {
    let mut grads = GradStore::new(params).unwrap();
    let (mut all, mut held) = (Vec::new(), 0);
    let mut rng = Rng::new(3);
    for _ in 0..2 {
        let tape = Tape::new(params);
        let x = tape.leaf(values(&mut rng));
        let y = net.forward(&tape, &x, depth).unwrap();
        held = tape.saved_bytes();
        all.push(bits(&y.detach()));
        let leaves = tape.backward_from(&y, values(&mut rng), &mut grads).unwrap();
        all.push(bits(leaves.get(&x).unwrap()));
    }
    grads.require_complete().unwrap();
    let frozen = params.layout().parts().filter(|(entry, _)| !entry.trainable);
    frozen.for_each(|(_, part)| assert!(grads.part(&part.name).unwrap().is_none()));
    all.push(bits(&grads.arena().view(0, [grads.layout().numel]).unwrap()));
    (all, held)
}

#[test]
fn the_bits_are_those_of_one_tape() {
    let (net, mut params) = Net::build();
    for frozen in [None, Some("wide")] {
        if let Some(name) = frozen {
            params.set_trainable(name, false).unwrap();
        }
        let (flat, most) = run(net, &params, 0);
        for depth in [1, 2] {
            let (again, held) = run(net, &params, depth);
            assert!(flat == again, "depth {depth}, frozen {frozen:?}");
            assert!(held < most, "{held} of {most} bytes");
        }
    }
}

#[test]
fn constants_stay_constant_and_inference_holds_nothing() {
    let (net, mut params) = Net::build();
    let input = || values(&mut Rng::new(1));
    let inference = Tape::inference(&params);
    let y = net.forward(&inference, &inference.constant(input()), 1).unwrap();
    assert!(!y.requires_grad() && inference.saved_bytes() == 0);
    ["w", "wide", "gain"].into_iter().for_each(|name| params.set_trainable(name, false).unwrap());
    let tape = Tape::new(&params);
    let y = net.forward(&tape, &tape.constant(input()), 1).unwrap();
    assert!(!y.requires_grad() && tape.saved_bytes() == 0);
}

#[test]
fn an_input_without_a_gradient_is_an_error() {
    let (net, params) = Net::build();
    let tape = Tape::new(&params);
    let (x, unused) = (tape.leaf(values(&mut Rng::new(1))), tape.leaf(values(&mut Rng::new(2))));
    let other = Tape::new(&params);
    let foreign = other.leaf(values(&mut Rng::new(2)));
    let message = tape.recompute(&[&x, &foreign], |_, inputs| Ok(inputs[0].clone())).unwrap_err().to_string();
    assert!(message.contains("input 1 belongs to another tape"), "{message}");
    let y = tape
        .recompute(&[&x, &unused], move |tape, inputs| ops::linear(&inputs[0], &tape.param(net.w)?, None))
        .unwrap();
    // The gradient that `unused` has from elsewhere does not hide that the part gave none.
    let z = ops::add(&y, &unused).unwrap();
    let error = tape.backward_from(&z, values(&mut Rng::new(3)), &mut GradStore::new(&params).unwrap());
    let message = error.unwrap_err().to_string();
    assert!(message.contains("recompute: backward gave no gradient for input 1"), "{message}");
}

#[test]
fn a_checked_tape_looks_inside() {
    let (net, mut params) = Net::build();
    let huge = Tensor::from_vec(vec![f32::MAX; 2 * WIDTH * WIDTH], [2 * WIDTH, WIDTH]).unwrap();
    params.set_part("wide", &huge).unwrap();
    let message = |depth: usize, tape: Tape<'_>| {
        let x = tape.constant(values(&mut Rng::new(1)));
        net.forward(&tape, &x, depth).map(drop).unwrap_err().to_string()
    };
    let flat = message(0, Tape::new(&params).checked());
    assert!(flat.contains("operation 3 of the step, after reading wide"), "{flat}");
    assert_eq!(message(1, Tape::new(&params).checked()), flat);
    assert_eq!(message(2, Tape::inference(&params).checked()), flat);
}

#[test]
fn a_gpu_holds_less() {
    for precision in [Precision::Full, Precision::MIXED.with_residual(DType::BF16)] {
        let measure = |depth: usize| {
            let gpu = Gpu::dry((9, 0), &GpuOptions::default());
            let mut builder = ParamBuilder::default();
            let net = Net::declare(&mut builder);
            let mut params = builder.build_zeros(DType::F32, Device::Cuda(gpu)).unwrap();
            params.set_precision(precision).unwrap();
            let mut grads = GradStore::new(&params).unwrap();
            let tape = Tape::new(&params);
            let input = || Tensor::zeros([8192, WIDTH], tape.residual_dtype(), Device::Cuda(gpu)).unwrap();
            // Scratch memory of products is taken with the first on each stream, and stays.
            let in_use = || {
                let holders = gpu.memory().holders;
                holders
                    .iter()
                    .filter(|(holder, _)| *holder != "workspace")
                    .map(|(_, bytes)| bytes)
                    .sum::<usize>()
            };
            let before = in_use();
            let y = net.forward(&tape, &tape.constant(input()), depth).unwrap();
            let held = in_use() - before;
            tape.backward_from(&y, input(), &mut grads).unwrap();
            grads.require_complete().unwrap();
            drop(y);
            assert!(in_use() - before < held, "backward frees what forward held");
            (held, gpu.launches().values().sum::<u64>())
        };
        let ((most, once), (held, more)) = (measure(0), measure(1));
        assert!(held < most && more > once, "{held} of {most} bytes, {more} and {once} launches");
    }
}
