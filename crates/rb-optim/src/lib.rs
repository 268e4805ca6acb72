//! Optimizers over flat arenas, schedules and clipping.
//!
//! ```
//! use rb_autograd::ops::{linear, rms_norm};
//! use rb_autograd::{GradStore, Init, ParamBuilder, Tape};
//! use rb_optim::{AdamW, AdamWConfig, Optimizer, clip_coefficient};
//! use rb_tensor::{Device, Rng, Tensor};
//!
//! let mut builder = ParamBuilder::default();
//! let norm = builder.param("norm.weight", [3], Init::Ones)?;
//! let head = builder.param("head.weight", [1, 3], Init::Normal(0.5))?;
//! let mut params = builder.build(&Rng::new(1), Device::Cpu)?;
//! let mut grads = GradStore::new(&params)?;
//! let mut optimizer = AdamW::new(AdamWConfig::default(), &params)?;
//!
//! let mut losses = Vec::new();
//! for _ in 0..3 {
//!     {
//!         let tape = Tape::new(&params);
//!         let x = tape.constant(Tensor::from_vec(vec![1.0f32, 2.0, -1.0], [1, 3])?);
//!         let normed = rms_norm(&x, &tape.param(norm)?, 1e-6)?;
//!         let loss = linear(&normed, &tape.param(head)?, None)?; // drive the output down
//!         losses.push(loss.detach().item()?);
//!         tape.backward(&loss, &mut grads)?;
//!     } // the tape is gone: the optimizer changes weights in place, so nothing may look at them
//!     let scale = clip_coefficient(grads.global_norm()?, 1.0);
//!     optimizer.step(&mut params, &mut grads, 0.1, scale)?;
//! }
//! assert!(losses[2] < losses[0]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod adamw;
mod clip;
mod error;
mod optimizer;
mod schedule;
mod sgd;

pub use adamw::{AdamW, AdamWConfig};
pub use clip::clip_coefficient;
pub use error::{OptimError, Result};
pub use optimizer::Optimizer;
pub use schedule::Schedule;
pub use sgd::{Sgd, SgdConfig};
