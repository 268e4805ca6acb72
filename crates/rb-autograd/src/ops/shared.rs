//! Engines that several operation files share; no operations themselves.

#[cfg(test)]
pub mod arena_check;
pub mod attention;
pub mod broadcast;
pub mod elementwise;
pub mod reduce;
pub mod softmax;
pub mod tiles;
