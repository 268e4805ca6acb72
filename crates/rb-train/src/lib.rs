//! Training runs: config, run directory, loop, checkpoints, metrics.
//!
//! | module | holds |
//! | --- | --- |
//! | [`config`] | the TOML file, overrides, errors that guess what was meant |
//! | [`prepare`] | text to tokens |
//! | [`step`] | the arithmetic of one step and one evaluation |
//! | [`stepper`] | steps launch by launch, or captured once and replayed |
//! | [`plan`] | what a step needs of a GPU, without one |
//! | [`forecast`] | time and cost of a run |
//! | [`trainer`] | the loop |
//! | [`checkpoint`] | whole, checked, atomic checkpoints |
//! | [`verify`] | checks of the loop's parts |
//! | [`guard`] | spikes of loss and gradient norm |
//! | [`held_out`] | where the held-out loss was lowest, and whether it rises |
//! | [`statistics`] | sizes of activations, gradients and weights by layer |
//! | [`observe`] | metrics, TensorBoard, progress, report |

pub mod checkpoint;
pub mod config;
mod device;
mod error;
pub mod forecast;
pub mod guard;
pub mod held_out;
mod host_memory;
pub mod observe;
pub mod plan;
pub mod prepare;
mod resume;
pub mod run_dir;
mod start;
pub mod statistics;
pub mod step;
pub mod stepper;
pub mod trainer;
pub mod verify;

pub use config::{Config, Override};
pub use device::select as select_device;
pub use error::{Result, TrainError};
pub use trainer::{Outcome, Trainer};
