//! Modules and models, built from the operations of `rb-autograd`.
//!
//! A module is a plain struct of [`rb_autograd::ParamId`]s with a `forward`; its parameters are declared in a
//! [`rb_autograd::ParamBuilder`] under Hugging Face's names.
//!
//! | file | holds |
//! | --- | --- |
//! | `config.rs` | [`LlamaConfig`], `config.json` |
//! | `linear.rs`, `norm.rs`, `embedding.rs`, `attention.rs`, `mlp.rs`, `block.rs` | modules |
//! | `models/causal_lm.rs` | [`CausalLm`] |
//! | `kv_cache.rs` | [`KvCache`], for generation |
//! | `rope.rs` | rotary frequencies of each `rope_scaling` |
//! | `weights.rs` | `model.safetensors` in and out |
//! | `flops.rs` | the FLOP of a token and the number of parameters, with their formulas |

mod attention;
mod block;
mod config;
mod embedding;
mod error;
mod flops;
mod kv_cache;
mod linear;
mod mlp;
mod models;
mod norm;
mod rope;
pub mod weights;

pub use attention::{AttentionContext, SelfAttention};
pub use block::{DecoderBlock, Recompute, Stream};
pub use config::{LlamaConfig, RopeScaling};
pub use embedding::Embedding;
pub use error::{NnError, Result};
pub use flops::{flops_per_token, num_parameters};
pub use kv_cache::{KvCache, LayerView};
pub use linear::Linear;
pub use mlp::SwigluMlp;
pub use models::causal_lm::{CausalLm, ModelInput};
pub use norm::RmsNorm;
pub use rope::rope_table;
