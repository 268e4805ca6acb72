//! Optimizers, gradient clipping and learning-rate schedules.
//!
//! | concept | type | note |
//! | --- | --- | --- |
//! | what a trainer holds | [`Optimizer`] | object-safe: `Box<dyn Optimizer>` |
//! | Adam with decoupled weight decay | [`AdamWConfig`], [`AdamW`] | PyTorch's formula |
//! | gradient descent with momentum | [`SgdConfig`], [`Sgd`] | weight decay decoupled as in AdamW |
//! | clipping | [`clip_coefficient`] | a factor for `step`, so gradients are read once |
//! | learning rate | [`Schedule`] | a closed form of the step number, no state to lose |
//!
//! A step refuses to run while a trainable parameter has no gradient of this step, and names it.
//!
//! # Examples
//! A model is a plain struct of handles with a `forward`; nothing of `rb-nn` is needed.
//! ```
//! use rb_autograd::{GradStore, Init, ParamBuilder, ParamId, ParamStore, Tape, Var, ops};
//! use rb_optim::{AdamW, AdamWConfig, Optimizer, clip_coefficient};
//! use rb_tensor::{Device, Rng, Tensor};
//!
//! /// Two layers: `up [8, 4]`, SiLU, `down [3, 8]`.
//! struct Mlp {
//!     up: ParamId,
//!     down: ParamId,
//! }
//!
//! impl Mlp {
//!     fn forward<'t>(&self, tape: &'t Tape<'_>, x: &Var<'t>) -> rb_autograd::Result<Var<'t>> {
//!         let h = ops::linear(x, &tape.param(self.up)?, None)?;
//!         ops::linear(&ops::silu(&h)?, &tape.param(self.down)?, None)
//!     }
//! }
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let mut builder = ParamBuilder::default();
//! let up = builder.param("up.weight", [8, 4], Init::Normal(0.5))?;
//! let down = builder.param("down.weight", [3, 8], Init::Normal(0.5))?;
//! let model = Mlp { up, down };
//! let mut params: ParamStore = builder.build(&Rng::new(0), Device::Cpu)?;
//! let mut grads = GradStore::new(&params)?;
//! let mut optimizer = AdamW::new(AdamWConfig::default(), &params)?;
//!
//! let x = Tensor::from_vec(vec![1.0f32, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0], [2, 4])?;
//! let labels = Tensor::from_vec(vec![2i32, 0], [2])?;
//! let options = ops::cross_entropy::CrossEntropyOptions::default();
//! let mut losses = Vec::new();
//! for _ in 0..3 {
//!     {
//!         let tape = Tape::new(&params);
//!         let logits = model.forward(&tape, &tape.constant(x.clone()))?;
//!         let loss = ops::cross_entropy(&logits, &labels, &options)?;
//!         losses.push(loss.detach().item()?);
//!         tape.backward(&loss, &mut grads)?;
//!     }
//!     let scale = clip_coefficient(grads.global_norm()?, 1.0);
//!     optimizer.step(&mut params, &mut grads, 0.05, scale)?;
//! }
//! assert!(losses[2] < losses[0]);
//! # Ok(())
//! # }
//! ```

mod adamw;
mod clip;
mod cuda;
mod error;
mod optimizer;
mod schedule;
mod sgd;
mod update;
mod watch;

pub use adamw::{AdamW, AdamWConfig};
pub use clip::clip_coefficient;
pub use error::{OptimError, Result};
pub use optimizer::Optimizer;
pub use schedule::Schedule;
pub use sgd::{Sgd, SgdConfig};
