//! [`LlamaConfig`]: the shape of a model, with Hugging Face's keys.

mod hf;

use serde::{Deserialize, Serialize};

use crate::{NnError, Result};

/// Layers at most: some hundred times those of the deepest models.
const MOST_LAYERS: usize = 1 << 16;

/// Shape of a Llama-style decoder. Written in TOML under `[model]` and in `config.json`.
///
/// **Source** `transformers.LlamaConfig`, `MistralConfig` and `Qwen3Config`; defaults are Llama's where one exists.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LlamaConfig {
    /// Entries of the vocabulary, as tokenizer and files see it. 0 in a training config: the tokenizer's.
    #[serde(default)]
    pub vocab_size: usize,
    /// Width `C` of the residual stream.
    pub hidden_size: usize,
    /// Width `F` of the feed-forward layer.
    pub intermediate_size: usize,
    /// Blocks `L`.
    pub num_hidden_layers: usize,
    /// Query heads `H`.
    pub num_attention_heads: usize,
    /// Key and value heads `G`; the query heads if left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub num_key_value_heads: Option<usize>,
    /// Width `D` of a head; `hidden_size / num_attention_heads` if left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub head_dim: Option<usize>,
    /// Positions a sequence can have.
    #[serde(default = "default_positions")]
    pub max_position_embeddings: usize,
    /// Standard deviation of new weights.
    #[serde(default = "default_range")]
    pub initializer_range: f64,
    /// Added to the mean square inside the root of each norm.
    #[serde(default = "default_eps")]
    pub rms_norm_eps: f64,
    /// Base of the rotary frequencies.
    #[serde(default = "default_theta")]
    pub rope_theta: f64,
    /// Change of the rotary frequencies for longer texts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rope_scaling: Option<RopeScaling>,
    /// Whether the four attention products have a bias.
    #[serde(default)]
    pub attention_bias: bool,
    /// Whether queries and keys are normalised for each head (Qwen3).
    #[serde(default)]
    pub use_qk_norm: bool,
    /// Tokens that a token sees at most, itself included; all before it if left out (Mistral, and Qwen3 with
    /// `use_sliding_window` in every layer).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sliding_window: Option<usize>,
    /// Attention scores become `c tanh(score / c)` with this `c` (Gemma 2's key). No model of transformers computes it
    /// in this architecture, so that it refuses the exported `config.json` instead of computing something else.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub attn_logit_softcapping: Option<f64>,
    /// Whether the output product uses the embedding's weights.
    #[serde(default)]
    pub tie_word_embeddings: bool,
    /// Token that begins a text.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bos_token_id: Option<u32>,
    /// Token that ends a text.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub eos_token_id: Option<u32>,
    /// Whether new weights that write into the residual stream are divided by `sqrt(2 L)` (GPT-2, section 2.3).
    /// Not a property of a finished model, so not part of `config.json`.
    #[serde(default = "default_true")]
    pub residual_init_scale: bool,
}

/// Kinds of `rope_scaling`; others are refused by name.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "rope_type", rename_all = "lowercase", deny_unknown_fields)]
pub enum RopeScaling {
    /// All frequencies divided by `factor`.
    Linear {
        /// Divisor, at least 1.
        factor: f64,
    },
    /// Low frequencies divided by `factor`, high ones kept, a smooth step between (Llama 3.1).
    Llama3 {
        /// Divisor of low frequencies.
        factor: f64,
        /// Wavelengths above `original / low_freq_factor` are divided.
        low_freq_factor: f64,
        /// Wavelengths below `original / high_freq_factor` are kept.
        high_freq_factor: f64,
        /// Positions the model was first trained with.
        original_max_position_embeddings: usize,
    },
}

fn default_positions() -> usize {
    2048
}
fn default_range() -> f64 {
    0.02
}
fn default_eps() -> f64 {
    1e-6
}
fn default_theta() -> f64 {
    10_000.0
}
fn default_true() -> bool {
    true
}

impl LlamaConfig {
    /// A config of these sizes with the default of every other key.
    pub fn new(
        vocab_size: usize,
        hidden_size: usize,
        intermediate_size: usize,
        num_hidden_layers: usize,
        num_attention_heads: usize,
    ) -> LlamaConfig {
        LlamaConfig {
            vocab_size,
            hidden_size,
            intermediate_size,
            num_hidden_layers,
            num_attention_heads,
            num_key_value_heads: None,
            head_dim: None,
            max_position_embeddings: default_positions(),
            initializer_range: default_range(),
            rms_norm_eps: default_eps(),
            rope_theta: default_theta(),
            rope_scaling: None,
            attention_bias: false,
            use_qk_norm: false,
            sliding_window: None,
            attn_logit_softcapping: None,
            tie_word_embeddings: false,
            bos_token_id: None,
            eos_token_id: None,
            residual_init_scale: true,
        }
    }

    /// Key and value heads `G`.
    pub fn kv_heads(&self) -> usize {
        self.num_key_value_heads.unwrap_or(self.num_attention_heads)
    }

    /// Head width `D`.
    pub fn head_dim(&self) -> usize {
        self.head_dim.unwrap_or(self.hidden_size / self.num_attention_heads.max(1))
    }

    /// Rows of the stored embedding: the vocabulary padded to a multiple of 64, so that rows of logits stay
    /// aligned (an unaligned 32004 halves the speed of the head on a GPU). Padding is never exported.
    pub fn padded_vocab_size(&self) -> usize {
        self.vocab_size.next_multiple_of(64)
    }

    /// Checks the shape, with `vocab_size` set.
    ///
    /// # Errors
    /// [`NnError::Config`]: the first broken rule, with key, value and remedy.
    pub fn validate(&self) -> Result<()> {
        if self.vocab_size == 0 || self.vocab_size > i32::MAX as usize {
            return Err(wrong("vocab_size", self.vocab_size, "1 to 2147483647"));
        }
        for (key, id) in [("bos_token_id", self.bos_token_id), ("eos_token_id", self.eos_token_id)] {
            if let Some(id) = id.filter(|id| *id as usize >= self.vocab_size) {
                return Err(wrong(key, id, &format!("below vocab_size {}, or left out", self.vocab_size)));
            }
        }
        self.validate_shape()
    }

    /// As [`LlamaConfig::validate`], before the tokenizer has given `vocab_size`.
    pub fn validate_shape(&self) -> Result<()> {
        for (key, value) in [
            ("hidden_size", self.hidden_size),
            ("intermediate_size", self.intermediate_size),
            ("num_hidden_layers", self.num_hidden_layers),
            ("num_attention_heads", self.num_attention_heads),
            ("num_key_value_heads", self.kv_heads()),
            ("max_position_embeddings", self.max_position_embeddings),
        ] {
            if value == 0 || value > i32::MAX as usize {
                return Err(wrong(key, value, "1 to 2147483647"));
            }
        }
        // Parameters are listed before memory is asked for, and a damaged file must not make that list endless.
        if self.num_hidden_layers > MOST_LAYERS {
            return Err(wrong("num_hidden_layers", self.num_hidden_layers, &format!("1 to {MOST_LAYERS}")));
        }
        let heads = self.num_attention_heads;
        if !self.hidden_size.is_multiple_of(heads) && (self.head_dim.is_none() || !self.use_qk_norm) {
            // With a head_dim it could be computed, but transformers refuses such a Llama (not such a Qwen3).
            let rule = format!("a multiple of num_attention_heads {heads}");
            return Err(wrong("hidden_size", self.hidden_size, &rule));
        }
        if self.head_dim() == 0 || !self.head_dim().is_multiple_of(2) {
            return Err(wrong("head_dim", self.head_dim(), "an even number: rotary positions turn pairs"));
        }
        if !heads.is_multiple_of(self.kv_heads()) {
            let rule = format!("a divisor of num_attention_heads {heads}");
            return Err(wrong("num_key_value_heads", self.kv_heads(), &rule));
        }
        for (key, value) in [
            ("initializer_range", self.initializer_range),
            ("rms_norm_eps", self.rms_norm_eps),
            ("rope_theta", self.rope_theta),
        ] {
            if !(value.is_finite() && value > 0.0) {
                return Err(wrong(key, value, "a finite number above 0"));
            }
        }
        if let Some(window) = self.sliding_window {
            if window == 0 || window > i32::MAX as usize {
                return Err(wrong("sliding_window", window, "1 to 2147483647, or left out"));
            }
            if self.attention_bias && !self.use_qk_norm {
                let rule =
                    "left out: transformers has no such model with attention_bias, which needs use_qk_norm";
                return Err(wrong("sliding_window", window, rule));
            }
        }
        if let Some(cap) = self.attn_logit_softcapping.filter(|cap| !(cap.is_finite() && *cap > 0.0)) {
            return Err(wrong("attn_logit_softcapping", cap, "a finite number above 0, or left out"));
        }
        match &self.rope_scaling {
            Some(RopeScaling::Linear { factor } | RopeScaling::Llama3 { factor, .. })
                if !(factor.is_finite() && *factor >= 1.0) =>
            {
                Err(wrong("rope_scaling.factor", factor, "a finite number of at least 1"))
            }
            Some(RopeScaling::Llama3 { original_max_position_embeddings: 0, .. }) => {
                Err(wrong("rope_scaling.original_max_position_embeddings", 0, "at least 1"))
            }
            Some(RopeScaling::Llama3 { low_freq_factor, high_freq_factor, .. })
                if !(0.0 < *low_freq_factor
                    && low_freq_factor < high_freq_factor
                    && high_freq_factor.is_finite()) =>
            {
                Err(wrong(
                    "rope_scaling.low_freq_factor",
                    low_freq_factor,
                    "above 0 and below high_freq_factor",
                ))
            }
            _ => Ok(()),
        }
    }
}

pub(crate) fn wrong(key: &'static str, value: impl ToString, expected: &str) -> NnError {
    NnError::Config { key, value: value.to_string(), expected: expected.to_string() }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn tiny(vocab_size: usize, heads: usize, kv_heads: usize) -> LlamaConfig {
        LlamaConfig {
            vocab_size,
            hidden_size: 4 * heads,
            intermediate_size: 10,
            num_hidden_layers: 2,
            num_attention_heads: heads,
            num_key_value_heads: Some(kv_heads),
            head_dim: None,
            max_position_embeddings: 64,
            initializer_range: 0.2,
            rms_norm_eps: 1e-6,
            rope_theta: 1e4,
            rope_scaling: None,
            attention_bias: false,
            use_qk_norm: false,
            sliding_window: None,
            attn_logit_softcapping: None,
            tie_word_embeddings: true,
            bos_token_id: None,
            eos_token_id: None,
            residual_init_scale: true,
        }
    }

    #[test]
    fn rules_name_key_value_and_remedy() {
        let message = |change: fn(&mut LlamaConfig)| {
            let mut config = tiny(10, 4, 2);
            change(&mut config);
            config.validate().unwrap_err().to_string()
        };
        tiny(10, 4, 2).validate().unwrap();
        assert_eq!(
            message(|c| c.num_key_value_heads = Some(3)),
            "model config: num_key_value_heads is 3, expected a divisor of num_attention_heads 4"
        );
        assert!(message(|c| c.hidden_size = 18).contains("a multiple of num_attention_heads 4"));
        assert!(message(|c| c.head_dim = Some(5)).contains("an even number"));
        assert!(message(|c| c.vocab_size = 0).contains("vocab_size is 0"));
        assert!(message(|c| c.rope_theta = f64::NAN).contains("rope_theta is NaN"));
        assert!(message(|c| c.num_key_value_heads = Some(8)).contains("num_key_value_heads is 8"));
        assert!(message(|c| c.num_key_value_heads = Some(0)).contains("num_key_value_heads is 0"));
        assert!(message(|c| c.num_hidden_layers = 0).contains("num_hidden_layers is 0"));
        assert!(message(|c| c.vocab_size = 1 << 40).contains("vocab_size is 1099511627776"));
        assert!(
            message(|c| c.eos_token_id = Some(10))
                .contains("eos_token_id is 10, expected below vocab_size 10")
        );
        assert!(message(|c| c.sliding_window = Some(0)).contains("sliding_window is 0"));
        let biased = message(|c| (c.sliding_window, c.attention_bias) = (Some(8), true));
        assert!(biased.contains("sliding_window is 8, expected left out: transformers has no such model"));
        assert!(message(|c| c.attn_logit_softcapping = Some(-1.0)).contains("attn_logit_softcapping is -1"));
        let factor = |factor| Some(RopeScaling::Linear { factor });
        assert!(
            message(|c| c.rope_scaling = Some(RopeScaling::Linear { factor: f64::NAN })).contains("is NaN")
        );
        let mut config = LlamaConfig { rope_scaling: factor(0.5), ..tiny(10, 4, 2) };
        assert!(config.validate().unwrap_err().to_string().contains("rope_scaling.factor is 0.5"));
        config.rope_scaling = factor(1.0);
        config.validate().unwrap();
    }

    #[test]
    fn qwen3_chooses_its_head_size_freely() {
        let mut config =
            LlamaConfig { num_attention_heads: 7, head_dim: Some(8), ..LlamaConfig::new(9, 64, 8, 1, 7) };
        assert!(config.validate().is_err());
        config.use_qk_norm = true;
        config.validate().unwrap();
    }

    #[test]
    fn unknown_keys_and_kinds_are_named() {
        let read = |change: serde_json::Value| {
            let mut json = serde_json::to_value(tiny(10, 4, 2)).unwrap();
            json.as_object_mut().unwrap().extend(change.as_object().unwrap().clone());
            serde_json::from_value::<LlamaConfig>(json).map_err(|e| e.to_string())
        };
        let message = |change| read(change).unwrap_err();
        assert!(message(serde_json::json!({"hiden_size": 1})).contains("unknown field `hiden_size`"));
        let yarn = serde_json::json!({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}});
        assert!(message(yarn).contains("unknown variant `yarn`"));
        let typo = serde_json::json!({"rope_scaling": {"rope_type": "linear", "factor": 2.0, "factr": 1}});
        assert!(message(typo).contains("unknown field `factr`"));
        let linear = serde_json::json!({"rope_scaling": {"rope_type": "linear", "factor": 2}});
        assert_eq!(read(linear).unwrap().rope_scaling, Some(RopeScaling::Linear { factor: 2.0 }));
        assert_eq!(read(serde_json::json!({})).unwrap(), tiny(10, 4, 2));
    }

    #[test]
    fn padding_is_inside() {
        assert_eq!(tiny(257, 4, 2).padded_vocab_size(), 320);
        assert_eq!(tiny(64, 4, 2).padded_vocab_size(), 64);
    }
}
