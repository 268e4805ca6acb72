//! rb-cuda
