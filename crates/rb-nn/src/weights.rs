//! `model.safetensors` with Hugging Face's names.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use rb_autograd::ParamStore;
use rb_tensor::{DType, Tensor, io};

use crate::{NnError, Result};

/// Writes all named parameters as f32. A tied model has no `lm_head.weight`: the table is stored once.
///
/// # Errors
/// A full or read-only disk.
pub fn save_hf(params: &ParamStore, path: &Path) -> Result<()> {
    let mut tensors = Vec::new();
    for (_, part) in params.layout().parts() {
        tensors.push((part.name.as_str(), params.part(&part.name)?.to_dtype(DType::F32)));
    }
    Ok(io::write_safetensors(path, tensors.iter().map(|(name, tensor)| (*name, tensor)))?)
}

/// Fills all named parameters from `model.safetensors`, or from the shards that
/// `model.safetensors.index.json` names, in folder `dir`. 16-bit values are widened.
///
/// # Errors
/// One error that lists every missing and every unexpected name, or the first wrong shape.
pub fn load_hf(params: &mut ParamStore, dir: &Path) -> Result<()> {
    let mut tensors = BTreeMap::new();
    for file in files(dir)? {
        tensors.extend(io::read_safetensors(&file)?);
    }
    let names: Vec<String> = params.layout().parts().map(|(_, p)| p.name.clone()).collect();
    let tied = !names.iter().any(|n| n == "lm_head.weight");
    if tied
        && tensors
            .get("lm_head.weight")
            .is_some_and(|head| same(head, tensors.get("model.embed_tokens.weight")))
    {
        // Some writers store the tied table twice.
        tensors.remove("lm_head.weight");
    }
    let missing: Vec<&str> = names.iter().filter(|n| !tensors.contains_key(*n)).map(String::as_str).collect();
    let unexpected: Vec<&str> = tensors.keys().filter(|n| !names.contains(n)).map(String::as_str).collect();
    if !missing.is_empty() || !unexpected.is_empty() {
        let list = |names: &[&str]| if names.is_empty() { "none".to_string() } else { names.join(", ") };
        let reason = format!(
            "the weights do not fit the config: missing {}; unexpected {}",
            list(&missing),
            list(&unexpected)
        );
        return Err(NnError::File { path: dir.into(), reason });
    }
    for name in &names {
        params.set_part(name, &tensors[name])?;
    }
    Ok(())
}

fn same(a: &Tensor, b: Option<&Tensor>) -> bool {
    b.is_some_and(|b| a.shape() == b.shape() && a.dtype() == b.dtype() && a.as_bytes() == b.as_bytes())
}

fn files(dir: &Path) -> Result<Vec<PathBuf>> {
    let single = dir.join("model.safetensors");
    let index = dir.join("model.safetensors.index.json");
    if single.exists() || !index.exists() {
        return Ok(vec![single]);
    }
    let bad = |reason: String| NnError::File { path: index.clone(), reason };
    let text = std::fs::read_to_string(&index).map_err(|e| bad(format!("cannot be read: {e}")))?;
    let json: serde_json::Value =
        serde_json::from_str(&text).map_err(|e| bad(format!("is not JSON: {e}")))?;
    let map = json.get("weight_map").and_then(|m| m.as_object());
    let map = map.ok_or_else(|| bad("has no weight_map".into()))?;
    let mut names: Vec<&str> = map.values().filter_map(|v| v.as_str()).collect();
    names.sort_unstable();
    names.dedup();
    // A shard is a file of this folder: an index must not reach elsewhere.
    match names.iter().find(|n| n.contains('/') || n.contains('\\') || n.contains("..")) {
        Some(name) => Err(bad(format!("names the file {name}, which is outside the folder"))),
        None => Ok(names.into_iter().map(|n| dir.join(n)).collect()),
    }
}
