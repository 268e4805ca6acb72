//! Checks that make silent failures loud: run by every training run, by `rb verify` and by
//! `cargo xtask verify`.
//!
//! | file | holds |
//! | --- | --- |
//! | `report.rs` | one check's result, and a list of them |
//! | `arbiter.rs` | every trainable parameter gets a finite, non-zero gradient and moves in one step |
//! | `language_model.rs` | what the checks ask of a model |
//! | `model.rs` | causality, position sensitivity, initial loss, tied weights, overfitting one batch |
//! | `reference.rs` | scores and loss by the formulas, in f64 |
//! | `cached.rs` | a cache of keys and values changes no scores |
//! | `slopes.rs` | gradients against the slope of the loss, against f64, and accumulated; every part matters |
//! | `independence.rs` | other documents, rows and padding change nothing |
//! | `stepping.rs` | optimizer against its formula, schedule against its promises |
//! | `unfused.rs` | 200 steps beside a model of elementary operations |
//! | `work.rs` | memory, launches and copies of a step, recomputation |
//! | `suite.rs` | all checks over all model variants |
//! | `device.rs` | a GPU against the host: operations, training, repeatability, resume, kernels that ran |
//! | `attention.rs` | attention's paths on a GPU against f64, within twice the error of a naive bf16 run |
//! | `run_gate.rs` | no figure of a run whose loss is not finite or does not fall |
//! | `gates.rs` | runs that must be refused are refused |

mod arbiter;
mod attention;
mod batches;
mod cached;
mod device;
mod error;
mod gates;
mod independence;
mod language_model;
mod model;
mod products;
mod reference;
mod report;
mod run_gate;
mod slopes;
mod stepping;
mod suite;
mod unfused;
mod work;

pub use arbiter::{GRADIENT_FLOOR, gradient_flow, moved_after_step};
pub use attention::verify_attention;
pub use cached::cached_scores;
pub use device::{Extent, kernel_units, verify_device};
pub use error::{Result, VerifyError};
pub use gates::loss_gates;
pub use independence::independence;
pub use language_model::LanguageModel;
pub use model::{causality, initial_loss, overfit, position_sensitivity, tied_weights};
pub use reference::follows_formulas;
pub use report::{Check, Report};
pub use run_gate::{Figure, Pass, Refusal, RunGate, Verdict};
pub use slopes::{accumulation, every_part_matters, gradients_are_slopes, gradients_follow_f64};
pub use stepping::{optimizer_follows_formula, schedule_keeps_its_promises};
pub use suite::{
    check_before_training, verify_config, verify_config_on, verify_model, verify_operations, verify_variants,
    verify_variants_on,
};
pub use unfused::fused_trains_as_unfused;
pub use work::{LAUNCHES_PER_LAYER, recomputation, step_work};
