//! What shows, on the host, that a parameter will never learn.

use rayon::prelude::*;
use rb_autograd::{GradStore, Layout, ParamStore, Part};
use rb_tensor::{DType, Tensor};

use crate::{OptimError, Result};

/// Steps of one process in which a parameter's gradient may be nothing but zeros.
const PATIENCE: u64 = 16;

/// Steps of one process after which a parameter must have other bits than before the first, once the rate rises no more.
const STILL_PATIENCE: u64 = 32;

/// Gradients up to this size are nothing: an update of Adam, whose `eps` is 1e-8, is then a ten-thousandth of its rate,
/// and one of gradient descent is lost in the weight's rounding. `rb-verify` has the same floor.
const FLOOR: f64 = 1e-12;

/// Watches the first steps of a process.
#[derive(Debug)]
pub(crate) struct Watch {
    /// Parts, in the order of the layout, that have had a gradient other than zero.
    alive: Vec<bool>,
    /// Steps since this was made.
    seen: u64,
    /// A hash of each trainable part before the first step; empty once they were found to have moved.
    before: Vec<u64>,
    /// Rate of the last step.
    last_rate: f64,
}

impl Watch {
    pub(crate) fn new(layout: &Layout) -> Watch {
        Watch { alive: vec![false; layout.parts().count()], seen: 0, before: Vec::new(), last_rate: 0.0 }
    }

    /// Looks at a step that is about to be made at this rate.
    ///
    /// # Errors
    /// A parameter that is read and yet gets zeros alone, step after step: it is behind a factor of zero, a dead activation
    /// or rows that nothing looks at. A parameter that has gradients and yet the bits it began with: the rate or a factor
    /// is zero, the steps are lost in rounding, or something puts the weights back.
    pub(crate) fn look(&mut self, params: &ParamStore, grads: &GradStore, rate: f64) -> Result<()> {
        self.seen += 1;
        let layout = params.layout();
        let mut dead = Vec::new();
        for ((entry, part), alive) in layout.parts().zip(&mut self.alive) {
            if !*alive && entry.trainable {
                *alive = grads.part(&part.name)?.is_some_and(|grad| has_a_value(&grad));
            }
            if !*alive && entry.trainable && self.seen >= PATIENCE {
                dead.push(part.name.clone());
            }
        }
        if !dead.is_empty() {
            return Err(OptimError::DeadParameters { names: dead, steps: self.seen });
        }
        // While the rate rises, small steps are no sign yet. The step of this call is not made.
        let rises = rate > self.last_rate;
        self.last_rate = rate;
        if self.seen == 1 {
            self.before = hashes(params)?;
        } else if self.seen > STILL_PATIENCE && !rises && !self.before.is_empty() {
            let same = hashes(params)?.into_iter().zip(&self.before).map(|(now, before)| now == *before);
            let still: Vec<String> =
                trainable(layout).zip(same).filter(|(_, same)| *same).map(|(p, _)| p.name.clone()).collect();
            if !still.is_empty() {
                return Err(OptimError::StillParameters { names: still, steps: self.seen - 1, rate });
            }
            self.before = Vec::new();
        }
        Ok(())
    }
}

fn trainable(layout: &Layout) -> impl Iterator<Item = &Part> {
    layout.parts().filter(|(entry, _)| entry.trainable).map(|(_, part)| part)
}

/// A hash of the bits of each trainable part.
fn hashes(params: &ParamStore) -> Result<Vec<u64>> {
    let mix = |hash: u64, word: u64| (hash.rotate_left(5) ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let values = trainable(params.layout()).map(|part| params.part(&part.name));
    let values: Vec<Tensor> = values.collect::<rb_autograd::Result<_>>()?;
    let hash = |tensor: &Tensor| -> Result<u64> {
        let words = tensor.as_bytes()?.chunks(8);
        let word = |bytes: &[u8]| bytes.iter().fold(0, |word, byte| (word << 8) | u64::from(*byte));
        Ok(words.fold(0, |hash, bytes| mix(hash, word(bytes))))
    };
    values.par_iter().map(hash).collect()
}

/// Whether any element is more than nothing; the search ends at the first.
fn has_a_value(grad: &Tensor) -> bool {
    match grad.dtype() {
        DType::F64 => grad.as_slice::<f64>().is_ok_and(|x| x.iter().any(|x| x.abs() > FLOOR)),
        _ => grad.as_slice::<f32>().is_ok_and(|x| x.iter().any(|x| f64::from(x.abs()) > FLOOR)),
    }
}
