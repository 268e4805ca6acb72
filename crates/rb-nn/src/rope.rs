//! Rotary frequencies of each kind of `rope_scaling`.
//!
//! **Source** arXiv:2104.09864; `transformers.modeling_rope_utils` for linear and llama3.

use std::f64::consts::TAU;

use rb_autograd::ops::rope::RopeTable;

use crate::{LlamaConfig, RopeScaling};

/// The table of a config: `theta^(-2i/D)` for pair `i`, changed as `rope_scaling` says.
pub fn rope_table(config: &LlamaConfig) -> RopeTable {
    let d = config.head_dim() as f64;
    let plain = (0..config.head_dim() / 2).map(|i| config.rope_theta.powf(-2.0 * i as f64 / d));
    let inv_freq = match &config.rope_scaling {
        None => plain.collect(),
        Some(RopeScaling::Linear { factor }) => plain.map(|f| f / factor).collect(),
        Some(RopeScaling::Llama3 {
            factor,
            low_freq_factor,
            high_freq_factor,
            original_max_position_embeddings,
        }) => {
            let original = *original_max_position_embeddings as f64;
            let change = |frequency: f64| {
                let wavelength = TAU / frequency;
                if wavelength < original / high_freq_factor {
                    frequency
                } else if wavelength > original / low_freq_factor {
                    frequency / factor
                } else {
                    let smooth =
                        (original / wavelength - low_freq_factor) / (high_freq_factor - low_freq_factor);
                    (1.0 - smooth) * frequency / factor + smooth * frequency
                }
            };
            plain.map(change).collect()
        }
    };
    RopeTable { inv_freq, attention_scaling: 1.0 }
}
