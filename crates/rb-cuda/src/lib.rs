//! CUDA: what of it this machine has.
//!
//! The only crate that will call CUDA. Today it finds the driver and the libraries that the backend needs,
//! without loading any of them, so that `rb doctor` and errors can say what is there and what is missing.

mod discover;

pub use discover::{Component, Found, discover, probe};
