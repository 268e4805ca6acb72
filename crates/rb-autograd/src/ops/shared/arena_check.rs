//! A check for operations whose backward writes gradients in place: what arrives in the arena of parameters.

use rb_tensor::{Device, Rng, Shape};

use crate::testing::{Fill, random};
use crate::{GradStore, Init, ParamBuilder, Result, Tape, Var};

/// Differentiates `op` with parameters as its inputs: the stale (poisoned) arena is overwritten, a second
/// pass accumulates, and both agree with the gradients of leaves to the last bit or to one rounding.
pub fn check(shapes: &[&[usize]], op: impl for<'t> Fn(&[Var<'t>]) -> Result<Var<'t>>) {
    let mut builder = ParamBuilder::default();
    let names: Vec<String> = (0..shapes.len()).map(|i| format!("p{i}")).collect();
    let ids: Vec<_> = names
        .iter()
        .zip(shapes)
        .map(|(name, &shape)| builder.param(name, shape, Init::Normal(1.0)).unwrap())
        .collect();
    let params = builder.build(&Rng::new(11), Device::Cpu).unwrap();
    let mut grads = GradStore::new(&params).unwrap();

    let tape = Tape::new(&params);
    let leaves: Vec<Var<'_>> = ids.iter().map(|&id| tape.leaf(params.tensor(id).unwrap())).collect();
    let y = op(&leaves).unwrap();
    let dy = random(y.shape(), Fill::Normal, &mut Rng::new(12)).unwrap().to_dtype(y.dtype()).unwrap();
    let truth = tape.backward_from(&y, dy.clone(), &mut grads).unwrap();

    grads.arena_mut().as_mut_slice::<f32>().unwrap().fill(f32::NAN);
    for (step, factor) in [(0, 1.0), (1, 2.0), (2, 1.0)] {
        if step == 2 {
            grads.mark_stale();
        }
        let tape = Tape::new(&params);
        let vars: Vec<Var<'_>> = ids.iter().map(|&id| tape.param(id).unwrap()).collect();
        tape.backward_from(&op(&vars).unwrap(), dy.clone(), &mut grads).unwrap();
        for (name, leaf) in names.iter().zip(&leaves) {
            let got = grads.part(name).unwrap().expect("a fresh gradient").to_vec::<f32>().unwrap();
            let want = truth.get(leaf).unwrap().to_vec::<f32>().unwrap();
            for (i, (g, w)) in got.iter().zip(&want).enumerate() {
                let w = w * factor;
                assert!((g - w).abs() <= 1e-6 * w.abs().max(1.0), "step {step}, {name}[{i}]: {g}, leaf {w}");
            }
        }
    }
    // One input of several may be a constant: the others still get their gradients.
    for constant in (0..shapes.len()).filter(|_| shapes.len() > 1) {
        let tape = Tape::new(&params);
        let value = |id| params.tensor(id).unwrap();
        let vars: Vec<Var<'_>> = ids
            .iter()
            .enumerate()
            .map(|(i, &id)| if i == constant { tape.constant(value(id)) } else { tape.leaf(value(id)) })
            .collect();
        let got = tape.backward_from(&op(&vars).unwrap(), dy.clone(), &mut grads).unwrap();
        for (i, (var, leaf)) in vars.iter().zip(&leaves).enumerate() {
            let want = (i != constant).then(|| truth.get(leaf).unwrap().as_bytes().unwrap());
            let what = Shape::from(shapes[i]);
            assert_eq!(
                got.get(var).map(|t| t.as_bytes().unwrap()),
                want,
                "input {i} {what}, {constant} constant"
            );
        }
    }
}
