//! Whole models.

pub mod causal_lm;
