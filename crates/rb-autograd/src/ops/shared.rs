//! Engines that several operation files share; no operations themselves.

#[cfg(test)]
pub mod arena_check;
pub mod attention;
pub mod broadcast;
pub mod broadcast_cuda;
#[cfg(test)]
mod cuda_check;
pub mod elementwise;
pub mod elementwise_cuda;
pub mod packs;
pub mod reduce;
pub mod reduce_cuda;
pub mod rows_cuda;
pub mod softmax;
pub mod softmax_cuda;
pub mod tiles;
