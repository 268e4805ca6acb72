//! The files beside `tokenizer.json` in a Hugging Face model folder.

use std::path::Path;

use serde_json::{Map, Value, json};

use super::Tokenizer;
use crate::error::{DataError, Result};

/// Writes the three tokenizer files.
pub(super) fn save(tokenizer: &Tokenizer, folder: &Path, model_max_length: Option<usize>) -> Result<()> {
    let special = tokenizer.special_tokens();
    let name_of = |id: u32| match special.iter().find(|(known, _)| *known == id) {
        Some((_, name)) => name.clone(),
        None => tokenizer.inner.id_to_token(id).unwrap_or_default(),
    };
    let named = [tokenizer.bos_id(), tokenizer.eos_id()];
    let [bos, eos] = named.map(name_of);
    let entry = |name: &str| json!({"content": name, "lstrip": false, "normalized": false, "rstrip": false, "single_word": false, "special": true});
    let decoder: Map<String, Value> =
        special.iter().map(|(id, name)| (id.to_string(), entry(name))).collect();
    let others: Vec<&str> =
        special.iter().filter(|(id, _)| !named.contains(id)).map(|(_, n)| n.as_str()).collect();

    let mut config = json!({
        "added_tokens_decoder": decoder,
        "bos_token": bos,
        "eos_token": eos,
        "clean_up_tokenization_spaces": false,
        "tokenizer_class": "PreTrainedTokenizerFast",
    });
    let mut map = json!({"bos_token": bos, "eos_token": eos});
    if !others.is_empty() {
        config["additional_special_tokens"] = json!(others);
        map["additional_special_tokens"] = json!(others);
    }
    if let Some(tokens) = model_max_length {
        config["model_max_length"] = json!(tokens);
    }
    tokenizer.save(folder.join("tokenizer.json"))?;
    write_json(&folder.join("tokenizer_config.json"), &config)?;
    write_json(&folder.join("special_tokens_map.json"), &map)
}

fn write_json(path: &Path, value: &Value) -> Result<()> {
    Ok(crate::atomic::write(path, format!("{value:#}\n").as_bytes())?)
}

/// What a `tokenizer_config.json` says.
#[derive(Default)]
pub(super) struct Configured {
    pub(super) eos: Option<String>,
    pub(super) bos: Option<String>,
}

/// The tokens named in the `tokenizer_config.json` beside `tokenizer_json`, if there is such a file.
pub(super) fn configured(tokenizer_json: &Path) -> Result<Configured> {
    let path = tokenizer_json.with_file_name("tokenizer_config.json");
    let bytes = match std::fs::read(&path) {
        Ok(bytes) => bytes,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(Configured::default()),
        Err(e) => return Err(DataError::io("read", &path, e)),
    };
    let refuse = |reason: String| DataError::BadTokenizerFile { path: path.clone(), reason };
    let config: Value = serde_json::from_slice(&bytes)
        .map_err(|e| refuse(format!("not JSON: {e}; correct or remove the file")))?;
    let token = |key: &str| {
        let value = &config[key];
        match (value.as_str().or_else(|| value["content"].as_str()), value.is_null()) {
            (Some(name), _) => Ok(Some(name.to_owned())),
            (None, true) => Ok(None),
            (None, false) => Err(refuse(format!("{key} is neither a string nor an object with \"content\""))),
        }
    };
    Ok(Configured { eos: token("eos_token")?, bos: token("bos_token")? })
}

/// Refuses what the tokenizer library would answer with a panic or an obscure error.
pub(super) fn check_shape(json: &Value) -> std::result::Result<(), String> {
    let Some(object) = json.as_object() else {
        return Err("not a Hugging Face tokenizer (not a JSON object); expected a tokenizer.json file".into());
    };
    if !object.get("model").is_some_and(Value::is_object) {
        return Err("not a Hugging Face tokenizer (no \"model\"); expected a tokenizer.json file".into());
    }
    Ok(())
}
