//! Weights in halves against whole ones.

use half::bf16;
use rb_autograd::{join_weight, split_weight};
use rb_optim::{Sgd, SgdConfig};

use super::*;

/// Two models get the same gradients: the weights of the split one keep the bits of the whole one's under both
/// optimizers, its working copy is what the halves say, a table is looked up with all bits, and so are they on another
/// device and back.
pub(super) fn split_weights(gpu: Gpu, seed: u64, steps: usize) -> Result<Check> {
    const NAME: &str = "device: split weights have the bits of whole ones";
    let config = small_model();
    let mut builder = ParamBuilder::default();
    let model = CausalLm::init(&config, &mut builder)?;
    let mut whole = builder.build(&Rng::new(seed), Device::Cpu)?.to_device(Device::Cuda(gpu))?;
    whole.set_precision(Precision::MIXED)?;
    let mut split = whole.to_device(Device::Cuda(gpu))?;
    split.set_precision(Precision::MIXED.with_master(MasterWeights::Split))?;
    let (mut grads, mut same_grads) = (GradStore::new(&whole)?, GradStore::new(&split)?);
    let mut ties = 0;
    for sgd in [false, true] {
        let make = |params: &ParamStore| -> Result<Box<dyn Optimizer>> {
            Ok(match sgd {
                true => Box::new(Sgd::new(SgdConfig::default(), params)?),
                false => Box::new(AdamW::new(AdamWConfig::default(), params)?),
            })
        };
        let (mut one, mut other) = (make(&whole)?, make(&split)?);
        for step in 0..steps {
            let (ids, labels) = rows(&config, step % 4)?;
            // Twice of the whole model, whose gradients have the same bits then.
            let backward = |grads: &mut GradStore| -> Result<Tensor> {
                let tape = Tape::new(&whole);
                let input = ModelInput::causal(ids.to_device(Device::Cuda(gpu))?);
                let labels = labels.to_device(Device::Cuda(gpu))?;
                let out = model.loss(&tape, &input, &labels, &CrossEntropyOptions::default())?;
                tape.backward(&out, grads)?;
                Ok(out.detach())
            };
            let (loss, _) = (backward(&mut grads)?, backward(&mut same_grads)?);
            one.clipped_step(&mut whole, &mut grads, LEARNING_RATE, 1.0, &loss)?;
            other.clipped_step(&mut split, &mut same_grads, LEARNING_RATE, 1.0, &loss)?;
        }
        let back = split.to_device(Device::Cpu)?.to_device(Device::Cuda(gpu))?;
        for (entry, part) in whole.layout().parts() {
            let want = whole.part(&part.name)?.to_vec::<f32>()?;
            for (what, params) in [("", &split), (", moved to the host and back,", &back)] {
                let got = params.part(&part.name)?.to_vec::<f32>()?;
                if let Some(at) = want.iter().zip(&got).position(|(a, b)| a.to_bits() != b.to_bits()) {
                    let detail = format!("{}[{at}]{what} is {}, expected {}", part.name, got[at], want[at]);
                    return Ok(Check::new(NAME, false, detail));
                }
            }
            let copy = split.tensor(split.id(&part.name)?)?.to_device(Device::Cpu)?.to_vec::<bf16>()?;
            let start = part.offset - entry.offset;
            for (x, high) in want.iter().zip(&copy[start..]) {
                let (expected, low) = if entry.decay { split_weight(*x) } else { (bf16::from_f32(*x), 0) };
                let wrong = *high != expected || entry.decay && join_weight(*high, low) != *x;
                if wrong {
                    let detail = format!("the copy of {x} in {} is {high}, expected {expected}", part.name);
                    return Ok(Check::new(NAME, false, detail));
                }
                ties += usize::from(expected != bf16::from_f32(*x));
            }
        }
    }
    let detail =
        format!("{steps} steps of AdamW and of SGD, {ties} weights half way between two of the copy");
    Ok(Check::new(NAME, true, detail))
}
