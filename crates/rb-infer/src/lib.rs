//! What is done with a trained model: text from it, and folders and files for other programs.
//!
//! | file | holds |
//! | --- | --- |
//! | `generate.rs` | the loop: one token at a time, with or without a cache of keys and values |
//! | `sample.rs` | choosing a token from scores |
//! | `export.rs` | Hugging Face folders |
//! | `export/gguf.rs`, `gguf_tokenizer.rs`, `q8_0.rs` | GGUF files |

pub mod export;
mod generate;
mod sample;

pub use generate::{Generated, context_start, generate, generate_ids};
pub use sample::{SampleError, SampleOptions};

/// Errors of generation.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum InferError {
    /// Sampling settings.
    #[error(transparent)]
    Sample(#[from] SampleError),
    /// Model.
    #[error(transparent)]
    Nn(#[from] rb_nn::NnError),
    /// Tensors.
    #[error(transparent)]
    Tensor(#[from] rb_tensor::TensorError),
    /// Tokenizer.
    #[error(transparent)]
    Data(#[from] rb_data::DataError),
}
