//! Switches of planted defects: faults that the product's own checks must catch.
//!
//! A seam in the code under test reads `if rb_planted::active(Defect::X)`. Without the feature `planted-defects` that is
//! the constant `false`, and the compiler removes the branch. With it one defect at a time is on for the whole process,
//! and it is known whether a seam of it was reached: a defect whose seam never ran proves nothing.
//!
//! | file | holds |
//! | --- | --- |
//! | `defect.rs` | the defects |
//! | `switch.rs` | the switch, with the feature alone |
//! | `kernels.rs` | changes of kernel sources, with the feature alone |

mod defect;
#[cfg(feature = "planted-defects")]
mod kernels;
#[cfg(feature = "planted-defects")]
mod switch;

pub use defect::Defect;
#[cfg(feature = "planted-defects")]
pub use kernels::{KernelChange, kernel_source};
#[cfg(feature = "planted-defects")]
pub use switch::{Planted, active, plant};

/// What only a program with the switches holds, so that a shipped file can be searched for it.
#[cfg(feature = "planted-defects")]
pub use switch::MARK;

/// Whether the switches are compiled in.
pub const COMPILED: bool = cfg!(feature = "planted-defects");

/// Whether `defect` is on: never, without the feature.
#[cfg(not(feature = "planted-defects"))]
#[inline(always)]
pub const fn active(_: Defect) -> bool {
    false
}

/// The source of a kernel: as it is, without the feature.
#[cfg(not(feature = "planted-defects"))]
#[inline(always)]
pub const fn kernel_source(_: &'static str, source: &'static str) -> &'static str {
    source
}
