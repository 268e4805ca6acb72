//! Differentiable operations on an explicit tape.
//!
//! | concept | type | note |
//! | --- | --- | --- |
//! | a value with a history | [`Var`] | leaves only through [`Var::detach`] |
//! | record of one forward pass | [`Tape`] | a value; `backward` empties it; [`Tape::recompute`] keeps less |
//! | an operation | [`Op`] | shape rule, forward and backward; the trait has no default backward |
//! | trainable values | [`ParamStore`], [`ParamId`] | one flat arena, Hugging Face names for its parts |
//! | their gradients | [`GradStore`] | never zeroed: the first writer of a step overwrites |
//! | the operations | [`ops`] | one file each, listed in one registry |
//! | checks | [`testing`] | finite differences and precision sweeps over the registry |

pub mod cuda;
mod error;
mod float;
#[cfg(test)]
pub(crate) mod golden;
mod grads;
pub mod host;
mod op;
pub mod ops;
mod params;
mod recompute;
mod tape;
pub mod testing;

pub use error::{AutogradError, Result};
pub use float::Float;
pub use grads::{Beta, GradStore};
pub use op::{GradSinks, Op, Saved, apply};
pub use params::{
    Init, Layout, MasterWeights, Masters, ParamBuilder, ParamEntry, ParamId, ParamStore, Part, Precision,
    join_weight, split_weight,
};
pub use tape::{LeafGrads, Seen, Tape, Var, Watch};
