//! Rotary frequencies of each kind of `rope_scaling`, in f64.
//!
//! transformers computes them, and the angles, in f32: at position 8191 its angles are off by up to 5e-4.
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::tests::tiny;

    const PLAIN: [f64; 8] = [
        1.0,
        0.316_227_763_9,
        0.100_000_001_5,
        0.031_622_778_6,
        0.009_999_999_78,
        0.003_162_277_86,
        0.001_000_000_05,
        0.000_316_227_786,
    ];
    const LLAMA3: [f64; 8] = [
        1.0,
        0.244_384_586_8,
        0.013_042_256_2,
        0.003_952_847_33,
        0.001_249_999_97,
        0.000_395_284_733,
        0.000_125_000_006,
        0.000_039_528_473_3,
    ];

    /// Values of transformers 5.24.0 for a config with head_dim 16: `ROPE_INIT_FUNCTIONS["llama3"]` and
    /// `LlamaRotaryEmbedding.compute_default_rope_parameters`.
    #[test]
    fn matches_transformers() {
        let table = |scaling: Option<RopeScaling>| {
            let mut config = tiny(10, 4, 4);
            (config.head_dim, config.rope_scaling) = (Some(16), scaling);
            rope_table(&config).inv_freq
        };
        let close = |got: &[f64], want: &[f64]| {
            assert_eq!(got.len(), want.len());
            for (g, w) in got.iter().zip(want) {
                // The expected values are f32; the interpolated ones cancel a little.
                assert!((g - w).abs() <= 5e-7 * w.abs(), "{g:e}, expected {w:e}");
            }
        };
        close(&table(None), &PLAIN);
        close(&table(Some(RopeScaling::Linear { factor: 4.0 })), &PLAIN.map(|f| f / 4.0));
        let llama3 = RopeScaling::Llama3 {
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_max_position_embeddings: 64,
        };
        close(&table(Some(llama3)), &LLAMA3);
    }
}
