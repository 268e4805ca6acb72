//! Engines that several operation files share; no operations themselves.

pub mod attention;
pub mod broadcast;
pub mod softmax;
