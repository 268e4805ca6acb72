//! `config.json`: written as transformers reads it, read with a refusal of what this library cannot compute.

use std::path::Path;

use serde_json::{Value, json};

use super::{LlamaConfig, RopeScaling};
use crate::{NnError, Result};

/// What `config.json` names where transformers has no model with the same arithmetic.
const OWN_TYPE: &str = "rusting_brain";
const OWN_ARCHITECTURE: &str = "RustingBrainForCausalLM";

impl LlamaConfig {
    /// The content of `config.json`. QK-norm is Qwen3's architecture, a sliding window without it Mistral's, capped
    /// scores nobody's, everything else Llama's. Rotary settings are written in both forms: `rope_theta` with
    /// `rope_scaling`, and version 5's `rope_parameters`.
    pub fn to_json_value(&self) -> Value {
        let (model_type, architecture) =
            match (self.attn_logit_softcapping, self.use_qk_norm, self.sliding_window) {
                (Some(_), _, _) => (OWN_TYPE, OWN_ARCHITECTURE),
                (None, true, _) => ("qwen3", "Qwen3ForCausalLM"),
                (None, false, Some(_)) => ("mistral", "MistralForCausalLM"),
                (None, false, None) => ("llama", "LlamaForCausalLM"),
            };
        let scaling = self.rope_scaling.as_ref().map(scaling_json);
        let mut rope_parameters = scaling.clone().unwrap_or_else(|| json!({ "rope_type": "default" }));
        rope_parameters["rope_theta"] = json!(self.rope_theta);
        let mut json = json!({
            "architectures": [architecture],
            "model_type": model_type,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_hidden_layers,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.kv_heads(),
            "head_dim": self.head_dim(),
            "hidden_act": "silu",
            "max_position_embeddings": self.max_position_embeddings,
            "initializer_range": self.initializer_range,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            "rope_scaling": scaling,
            "rope_parameters": rope_parameters,
            "attention_bias": self.attention_bias,
            "attention_dropout": 0.0,
            "mlp_bias": false,
            "tie_word_embeddings": self.tie_word_embeddings,
            "use_cache": true,
            "bos_token_id": self.bos_token_id,
            "eos_token_id": self.eos_token_id,
            "pad_token_id": null,
            "torch_dtype": "float32",
            "dtype": "float32",
        });
        if let Some(window) = self.sliding_window {
            json["sliding_window"] = json!(window);
            if self.use_qk_norm {
                json["use_sliding_window"] = json!(true);
                json["max_window_layers"] = json!(0);
                json["layer_types"] = json!(vec!["sliding_attention"; self.num_hidden_layers]);
            }
        }
        if let Some(cap) = self.attn_logit_softcapping {
            json["attn_logit_softcapping"] = json!(cap);
            json["use_qk_norm"] = json!(self.use_qk_norm);
        }
        json
    }

    /// Reads a `config.json` of the Llama family. Unknown keys are ignored; known ones that ask for other
    /// arithmetic are refused by name.
    pub fn from_json(path: &Path) -> Result<LlamaConfig> {
        let bad = |reason: String| NnError::File { path: path.into(), reason };
        let text = std::fs::read_to_string(path).map_err(|e| bad(format!("cannot be read: {e}")))?;
        let json: Value = serde_json::from_str(&text).map_err(|e| bad(format!("is not JSON: {e}")))?;
        LlamaConfig::from_value(&json).map_err(bad)
    }

    fn from_value(json: &Value) -> Result<LlamaConfig, String> {
        let present = |key: &str| json.get(key).filter(|v| !v.is_null());
        let architecture = present("architectures").and_then(|a| a.get(0)).and_then(Value::as_str);
        let model_type = match (present("model_type").and_then(Value::as_str), architecture) {
            (Some("llama") | None, Some("LlamaForCausalLM")) | (Some("llama"), None) => "llama",
            (Some("qwen3") | None, Some("Qwen3ForCausalLM")) | (Some("qwen3"), None) => "qwen3",
            (Some("mistral") | None, Some("MistralForCausalLM")) | (Some("mistral"), None) => "mistral",
            (Some(OWN_TYPE), Some(OWN_ARCHITECTURE)) => OWN_TYPE,
            (model_type, architecture) => {
                let shown = |s: Option<&str>| s.unwrap_or("missing").to_string();
                return Err(format!(
                    "model_type is {} and architectures is {}; supported are llama with \
                     LlamaForCausalLM, mistral with MistralForCausalLM and qwen3 with Qwen3ForCausalLM",
                    shown(model_type),
                    shown(architecture)
                ));
            }
        };
        refuse(present("hidden_act"), "hidden_act", |v| v.as_str() == Some("silu"), "silu")?;
        refuse(present("mlp_bias"), "mlp_bias", |v| v.as_bool() == Some(false), "false")?;
        refuse(present("attention_dropout"), "attention_dropout", |v| v.as_f64() == Some(0.0), "0")?;
        refuse(present("partial_rotary_factor"), "partial_rotary_factor", is_one, "1")?;
        refuse(present("quantization_config"), "quantization_config", |_| false, "unquantised weights")?;
        let size = |key: &str| -> Result<Option<usize>, String> {
            match present(key) {
                None => Ok(None),
                Some(v) => match v.as_u64() {
                    Some(n) => Ok(Some(n as usize)),
                    None => Err(format!("{key} is {v}, expected a whole number")),
                },
            }
        };
        let need = |key: &str| size(key)?.ok_or_else(|| format!("{key} is missing"));
        let sliding_window = read_window(json, model_type, size("sliding_window")?)?;
        if model_type == "qwen3" {
            // transformers' defaults for these are the sizes of one published model.
            need("head_dim")?;
            need("num_key_value_heads")?;
        }
        let number = |key: &str, default: f64| match present(key) {
            None => Ok(default),
            Some(v) => v.as_f64().ok_or_else(|| format!("{key} is {v}, expected a number")),
        };
        let flag = |key: &str| match present(key) {
            None => Ok(false),
            Some(v) => v.as_bool().ok_or_else(|| format!("{key} is {v}, expected true or false")),
        };
        // A list of end tokens is legal; the first one is what generation needs.
        let token = |key: &str| {
            let value = present(key)?;
            let id = value.as_u64().or_else(|| value.as_array()?.first()?.as_u64())?;
            u32::try_from(id).ok()
        };
        let rope = present("rope_parameters").or_else(|| present("rope_scaling"));
        if let (Some(new), Some(old)) = (present("rope_parameters"), present("rope_scaling"))
            && read_scaling(new)? != read_scaling(old)?
        {
            return Err("rope_parameters and rope_scaling disagree; remove one of them".into());
        }
        let theta = match rope.and_then(|r| r.get("rope_theta")) {
            None => number("rope_theta", 1e4)?,
            Some(v) => v.as_f64().ok_or_else(|| format!("rope_theta is {v}, expected a number"))?,
        };
        let config = LlamaConfig {
            vocab_size: need("vocab_size")?,
            hidden_size: need("hidden_size")?,
            intermediate_size: need("intermediate_size")?,
            num_hidden_layers: need("num_hidden_layers")?,
            num_attention_heads: need("num_attention_heads")?,
            num_key_value_heads: size("num_key_value_heads")?,
            head_dim: size("head_dim")?,
            max_position_embeddings: size("max_position_embeddings")?.unwrap_or(2048),
            initializer_range: number("initializer_range", 0.02)?,
            rms_norm_eps: number("rms_norm_eps", 1e-6)?,
            rope_theta: theta,
            rope_scaling: rope.map(read_scaling).transpose()?.flatten(),
            attention_bias: flag("attention_bias")?,
            use_qk_norm: model_type == "qwen3" || (model_type == OWN_TYPE && flag("use_qk_norm")?),
            sliding_window,
            attn_logit_softcapping: match present("attn_logit_softcapping") {
                Some(cap) if model_type != OWN_TYPE => {
                    return Err(format!(
                        "attn_logit_softcapping is {cap}, which a {model_type} does not compute"
                    ));
                }
                Some(_) => Some(number("attn_logit_softcapping", 0.0)?),
                None => None,
            },
            tie_word_embeddings: flag("tie_word_embeddings")?,
            bos_token_id: token("bos_token_id"),
            eos_token_id: token("eos_token_id"),
            residual_init_scale: true,
        };
        config.validate().map_err(|e| e.to_string())?;
        Ok(config)
    }
}

/// The window that every layer has, or none. A window in some layers only is refused.
fn read_window(json: &Value, model_type: &str, window: Option<usize>) -> Result<Option<usize>, String> {
    let present = |key: &str| json.get(key).filter(|v| !v.is_null());
    let layers = |kind: &str| {
        let all = |v: &Value| v.as_array().is_some_and(|t| !t.is_empty() && t.iter().all(|t| t == kind));
        present("layer_types").map(all)
    };
    let (full, sliding) = (layers("full_attention"), layers("sliding_attention"));
    let mixed = |key: &str, expected: &str| {
        let value = present(key).unwrap_or(&Value::Null);
        Err(format!("{key} is {value}; this library computes only {expected}"))
    };
    if full == Some(false) && sliding == Some(false) {
        return mixed("layer_types", "full_attention in all layers, or sliding_attention in all");
    }
    let used = match model_type {
        "llama" if window.is_some() => return mixed("sliding_window", "none in a llama"),
        "qwen3" => present("use_sliding_window").and_then(Value::as_bool).unwrap_or(false),
        _ => window.is_some(),
    };
    if sliding == Some(true) && !(used && window.is_some()) {
        return mixed("layer_types", "sliding_attention with a sliding_window");
    }
    if !used || full == Some(true) {
        return Ok(None);
    }
    // Without a list of layers, Qwen3's layers from max_window_layers on have a window.
    let everywhere = present("max_window_layers").and_then(Value::as_u64).is_some_and(|first| first == 0);
    if model_type == "qwen3" && sliding.is_none() && !everywhere {
        return mixed("max_window_layers", "0 with use_sliding_window");
    }
    Ok(window)
}

fn refuse(value: Option<&Value>, key: &str, fine: impl Fn(&Value) -> bool, only: &str) -> Result<(), String> {
    match value {
        Some(v) if !fine(v) => Err(format!("{key} is {v}; this library computes only {only}")),
        _ => Ok(()),
    }
}

fn is_one(value: &Value) -> bool {
    value.as_f64() == Some(1.0)
}

fn scaling_json(scaling: &RopeScaling) -> Value {
    match scaling {
        RopeScaling::Linear { factor } => {
            json!({ "rope_type": "linear", "type": "linear", "factor": factor })
        }
        RopeScaling::Llama3 {
            factor,
            low_freq_factor,
            high_freq_factor,
            original_max_position_embeddings,
        } => json!({
            "rope_type": "llama3",
            "type": "llama3",
            "factor": factor,
            "low_freq_factor": low_freq_factor,
            "high_freq_factor": high_freq_factor,
            "original_max_position_embeddings": original_max_position_embeddings,
        }),
    }
}

fn read_scaling(value: &Value) -> Result<Option<RopeScaling>, String> {
    let kind =
        value.get("rope_type").or_else(|| value.get("type")).and_then(Value::as_str).unwrap_or("default");
    let number = |key: &str| {
        value
            .get(key)
            .and_then(Value::as_f64)
            .ok_or_else(|| format!("rope_scaling {kind} has no number {key}"))
    };
    refuse(value.get("partial_rotary_factor"), "partial_rotary_factor", is_one, "1")?;
    match kind {
        "default" => Ok(None),
        "linear" => Ok(Some(RopeScaling::Linear { factor: number("factor")? })),
        "llama3" => Ok(Some(RopeScaling::Llama3 {
            factor: number("factor")?,
            low_freq_factor: number("low_freq_factor")?,
            high_freq_factor: number("high_freq_factor")?,
            original_max_position_embeddings: number("original_max_position_embeddings")? as usize,
        })),
        other => Err(format!("rope_scaling kind {other} is not supported; supported are linear and llama3")),
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::tiny;
    use super::*;

    #[test]
    fn round_trip() {
        let mut config = tiny(101, 12, 4);
        config.rope_scaling = Some(RopeScaling::Llama3 {
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_max_position_embeddings: 32,
        });
        config.head_dim = Some(4);
        for qk_norm in [false, true] {
            for (window, cap) in [(None, None), (Some(9), None), (None, Some(30.0)), (Some(9), Some(50.0))] {
                let config = LlamaConfig {
                    use_qk_norm: qk_norm,
                    sliding_window: window,
                    attn_logit_softcapping: cap,
                    ..config.clone()
                };
                assert_eq!(LlamaConfig::from_value(&config.to_json_value()).unwrap(), config);
            }
        }
    }

    #[test]
    fn other_arithmetic_is_refused_by_name() {
        let with = |key: &str, value: Value| {
            let mut json = tiny(101, 4, 2).to_json_value();
            json[key] = value;
            LlamaConfig::from_value(&json).unwrap_err()
        };
        assert_eq!(
            with("hidden_act", json!("gelu")),
            "hidden_act is \"gelu\"; this library computes only silu"
        );
        assert!(with("model_type", json!("gemma")).contains("model_type is gemma"));
        assert!(with("architectures", json!(["GemmaForCausalLM"])).contains("GemmaForCausalLM"));
        assert!(with("architectures", json!(["Qwen3ForCausalLM"])).contains("model_type is llama"));
        assert!(with("layer_types", json!(["sliding_attention"])).contains("sliding_attention"));
        let some = json!(["sliding_attention", "full_attention"]);
        assert!(
            with("layer_types", some).contains("layer_types is [\"sliding_attention\",\"full_attention\"]")
        );
        assert!(with("attn_logit_softcapping", json!(30.0)).contains("which a llama does not compute"));
        assert!(with("attention_dropout", json!(0.1)).contains("attention_dropout is 0.1"));
        assert!(with("quantization_config", json!({})).contains("quantization_config is {}"));
        assert!(with("partial_rotary_factor", json!(0.5)).contains("partial_rotary_factor is 0.5"));
        let linear = json!({ "rope_type": "linear", "factor": 4.0 });
        assert!(with("rope_scaling", linear).contains("disagree"));
        let partial = json!({ "rope_type": "default", "partial_rotary_factor": 0.5 });
        assert!(with("rope_parameters", partial).contains("partial_rotary_factor is 0.5"));
        assert!(with("sliding_window", json!(128)).contains("sliding_window is 128"));
        let yarn = json!({ "rope_type": "yarn", "factor": 4.0 });
        assert!(with("rope_parameters", yarn).contains("rope_scaling kind yarn is not supported"));
        assert!(with("mlp_bias", json!(true)).contains("mlp_bias is true"));
        assert_eq!(with("hidden_size", Value::Null), "hidden_size is missing");
        // A value of another type must never turn into a default.
        assert_eq!(with("rms_norm_eps", json!("1e-5")), "rms_norm_eps is \"1e-5\", expected a number");
        assert!(with("tie_word_embeddings", json!(1)).contains("expected true or false"));
        assert!(with("eos_token_id", json!(101)).contains("eos_token_id is 101"));
    }

    #[test]
    fn both_generations_of_transformers_are_read() {
        let mut v4 = tiny(101, 12, 4).to_json_value();
        v4["rope_theta"] = json!(5e5);
        v4["rope_scaling"] = json!({ "type": "linear", "factor": 4.0 });
        for key in ["rope_parameters", "dtype", "head_dim", "model_type"] {
            v4.as_object_mut().unwrap().remove(key);
        }
        v4["eos_token_id"] = json!([5, 6]);
        v4["pad_token_id"] = json!(-1);
        let config = LlamaConfig::from_value(&v4).unwrap();
        assert_eq!((config.rope_theta, config.head_dim(), config.eos_token_id), (5e5, 4, Some(5)));
        assert_eq!(config.rope_scaling, Some(RopeScaling::Linear { factor: 4.0 }));

        let mut v5 = tiny(101, 12, 4).to_json_value();
        for key in ["rope_theta", "rope_scaling", "torch_dtype", "num_key_value_heads"] {
            v5.as_object_mut().unwrap().remove(key);
        }
        v5["rope_parameters"] = json!({ "rope_type": "default", "rope_theta": 7.0 });
        let config = LlamaConfig::from_value(&v5).unwrap();
        assert_eq!((config.rope_theta, config.rope_scaling.clone(), config.kv_heads()), (7.0, None, 12));
    }

    /// What transformers writes for windows: Mistral's key alone, Qwen3's keys, which may be switched off.
    #[test]
    fn windows_are_read() {
        let read = |qk_norm: bool, changes: Value| {
            let mut json = LlamaConfig { use_qk_norm: qk_norm, ..tiny(101, 12, 4) }.to_json_value();
            if !qk_norm {
                json["model_type"] = json!("mistral");
                json["architectures"] = json!(["MistralForCausalLM"]);
            }
            json["head_dim"] = json!(4);
            json.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
            LlamaConfig::from_value(&json).map(|config| config.sliding_window)
        };
        assert_eq!(read(false, json!({ "sliding_window": 128 })), Ok(Some(128)));
        assert_eq!(read(false, json!({ "sliding_window": null })), Ok(None));
        let off = json!({ "sliding_window": 128, "use_sliding_window": false, "max_window_layers": 1 });
        assert_eq!(read(true, off), Ok(None));
        let late = json!({ "sliding_window": 128, "use_sliding_window": true, "max_window_layers": 1 });
        assert!(read(true, late).unwrap_err().contains("max_window_layers is 1"));
        let all = json!({ "sliding_window": 128, "use_sliding_window": true, "max_window_layers": 0 });
        assert_eq!(read(true, all), Ok(Some(128)));
        let full = json!({ "sliding_window": 128, "layer_types": ["full_attention", "full_attention"] });
        assert_eq!(read(false, full), Ok(None));
    }

    #[test]
    fn a_qwen3_config_states_its_head_sizes() {
        let mut json = LlamaConfig { use_qk_norm: true, ..tiny(101, 12, 4) }.to_json_value();
        assert!(LlamaConfig::from_value(&json).unwrap().use_qk_norm);
        json["head_dim"] = Value::Null;
        assert_eq!(LlamaConfig::from_value(&json).unwrap_err(), "head_dim is missing");
    }
}
