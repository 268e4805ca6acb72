//! Checks that make silent failures loud: run by every training run, by `rb verify` and by
//! `cargo xtask verify`.
//!
//! | file | holds |
//! | --- | --- |
//! | `report.rs` | one check's result, and a list of them |
//! | `arbiter.rs` | every trainable parameter gets a finite, non-zero gradient and moves in one step |
//! | `model.rs` | causality, position sensitivity, initial loss, overfitting one batch |
//! | `suite.rs` | all checks over all model variants |
//! | `device.rs` | a GPU against the host: operations, training, repeatability, resume, kernels that ran |
//! | `gates.rs` | runs that must be refused are refused |

mod arbiter;
mod device;
mod error;
mod gates;
mod model;
mod report;
mod suite;

pub use arbiter::{GRADIENT_FLOOR, gradient_flow, moved_after_step};
pub use device::{Extent, kernel_units, verify_device};
pub use error::{Result, VerifyError};
pub use gates::loss_gates;
pub use model::{causality, initial_loss, overfit, position_sensitivity};
pub use report::{Check, Report};
pub use suite::{
    check_before_training, verify_config, verify_config_on, verify_operations, verify_variants,
    verify_variants_on,
};
