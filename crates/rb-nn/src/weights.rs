//! `model.safetensors` with Hugging Face's names.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use rb_autograd::ParamStore;
use rb_planted::{Defect, active};
use rb_tensor::io::FloatFormat;
use rb_tensor::{DType, Device, Tensor, io};

use crate::{NnError, Result};

/// Writes all named parameters as f32. A tied model has no `lm_head.weight`: the table is stored once.
///
/// # Errors
/// A full or read-only disk.
pub fn save_hf(params: &ParamStore, path: &Path) -> Result<()> {
    let mut tensors = Vec::new();
    for (_, part) in params.layout().parts() {
        let mut values = params.part(&part.name)?.to_device(Device::Cpu)?;
        if active(Defect::MasterWeightsNotStored) {
            values = values.to_dtype(DType::BF16)?;
        }
        tensors.push((part.name.as_str(), values.to_dtype(DType::F32)?));
    }
    Ok(io::write_safetensors(path, tensors.iter().map(|(name, tensor)| (*name, tensor)))?)
}

/// How weights are stored for other programs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SaveOptions {
    /// Element type of every tensor.
    pub format: FloatFormat,
    /// Most bytes of tensors in a file; a larger tensor has a file of its own. `None`: one file.
    pub shard_bytes: Option<usize>,
}

/// Writes all named parameters into folder `dir`, as `model.safetensors` or as shards with an index.
///
/// # Errors
/// A weight that is not finite, or that half precision cannot hold; a full or read-only disk.
pub fn save_hf_as(params: &ParamStore, dir: &Path, options: &SaveOptions) -> Result<()> {
    let mut shards: Vec<Vec<(String, Tensor)>> = vec![Vec::new()];
    let (mut in_shard, mut total) = (0, 0);
    for (_, part) in params.layout().parts() {
        let values = params.part(&part.name)?.to_device(Device::Cpu)?.to_dtype(DType::F32)?;
        check_values(dir, &part.name, values.as_slice()?, options.format)?;
        let bytes = values.numel() * options.format.size_bytes();
        if in_shard > 0 && options.shard_bytes.is_some_and(|most| in_shard + bytes > most) {
            shards.push(Vec::new());
            in_shard = 0;
        }
        in_shard += bytes;
        total += bytes;
        if let Some(shard) = shards.last_mut() {
            shard.push((part.name.clone(), values));
        }
    }
    let write = |path: &Path, shard: &[(String, Tensor)]| {
        io::write_safetensors_as(path, shard.iter().map(|(n, t)| (n.as_str(), t)), options.format)
    };
    if let [all] = &shards[..] {
        return Ok(write(&dir.join("model.safetensors"), all)?);
    }
    let mut map = BTreeMap::new();
    for (number, shard) in shards.iter().enumerate() {
        let name = format!("model-{:05}-of-{:05}.safetensors", number + 1, shards.len());
        write(&dir.join(&name), shard)?;
        map.extend(shard.iter().map(|(tensor, _)| (tensor.clone(), name.clone())));
    }
    let index = dir.join("model.safetensors.index.json");
    let json = serde_json::json!({ "metadata": { "total_size": total }, "weight_map": map });
    std::fs::write(&index, format!("{json:#}\n"))
        .map_err(|e| NnError::File { path: index.clone(), reason: format!("cannot be written: {e}") })
}

/// Refuses values that the file could not hold or no reader could use.
fn check_values(dir: &Path, name: &str, values: &[f32], format: FloatFormat) -> Result<()> {
    /// What rounds to infinity in half precision.
    const F16_OVERFLOW: f32 = 65_520.0;
    let bad = |reason: String| Err(NnError::File { path: dir.into(), reason });
    if let Some(at) = values.iter().position(|x| !x.is_finite()) {
        return bad(format!("{name} holds {} at {at}: the weights are damaged", values[at]));
    }
    if format == FloatFormat::F16
        && let Some(at) = values.iter().position(|x| x.abs() >= F16_OVERFLOW)
    {
        return bad(format!("{name} holds {}, which f16 cannot hold; use bf16 or f32", values[at]));
    }
    Ok(())
}

/// Fills all named parameters from `model.safetensors`, or from the shards that
/// `model.safetensors.index.json` names, in folder `dir`. 16-bit values are widened.
///
/// # Errors
/// [`NnError::Weights`] that lists every missing and unexpected name and every wrong shape; nothing is loaded
/// then.
pub fn load_hf(params: &mut ParamStore, dir: &Path) -> Result<()> {
    let mut tensors = BTreeMap::new();
    for file in files(dir)? {
        tensors.extend(io::read_safetensors(&file)?);
    }
    // Old files hold this buffer, which the config determines.
    tensors.retain(|name, _| !name.ends_with(".rotary_emb.inv_freq"));
    let names: Vec<String> = params.layout().parts().map(|(_, p)| p.name.clone()).collect();
    let tied = !names.iter().any(|n| n == "lm_head.weight");
    if tied
        && let Some(head) = tensors.get("lm_head.weight")
        && same(head, tensors.get("model.embed_tokens.weight"))?
    {
        // Some writers store the tied table twice.
        tensors.remove("lm_head.weight");
    }
    let missing: Vec<String> = names.iter().filter(|n| !tensors.contains_key(*n)).cloned().collect();
    let unexpected: Vec<String> = tensors.keys().filter(|n| !names.contains(n)).cloned().collect();
    let mut shapes = Vec::new();
    for (_, part) in params.layout().parts() {
        if let Some(tensor) = tensors.get(&part.name).filter(|t| t.shape() != &part.shape) {
            shapes.push(format!("{} has {}, expected {}", part.name, tensor.shape(), part.shape));
        }
    }
    if !(missing.is_empty() && unexpected.is_empty() && shapes.is_empty()) {
        return Err(NnError::Weights { path: dir.into(), missing, unexpected, shapes });
    }
    for name in &names {
        params.set_part(name, &tensors[name])?;
    }
    Ok(())
}

fn same(a: &Tensor, b: Option<&Tensor>) -> Result<bool> {
    let Some(b) = b else { return Ok(false) };
    Ok(a.shape() == b.shape() && a.dtype() == b.dtype() && a.as_bytes()? == b.as_bytes()?)
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::CausalLm;
    use crate::config::tests::tiny;
    use rb_autograd::ParamBuilder;
    use rb_tensor::{Device, Rng};

    fn store(tied: bool, seed: u64) -> ParamStore {
        let mut config = tiny(65, 4, 2);
        config.tie_word_embeddings = tied;
        let mut builder = ParamBuilder::default();
        CausalLm::init(&config, &mut builder).unwrap();
        builder.build(&Rng::new(seed), Device::Cpu).unwrap()
    }

    fn values(params: &ParamStore) -> Vec<f32> {
        params.arena().as_slice::<f32>().unwrap().to_vec()
    }

    fn write(path: &Path, tensors: &BTreeMap<String, Tensor>) {
        io::write_safetensors(path, tensors.iter().map(|(n, t)| (n.as_str(), t))).unwrap();
    }

    #[test]
    fn round_trip_without_padding_or_tied_head() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("model.safetensors");
        for tied in [true, false] {
            let (from, mut to) = (store(tied, 1), store(tied, 2));
            save_hf(&from, &path).unwrap();
            let mut file = io::read_safetensors(&path).unwrap();
            assert_eq!(file.contains_key("lm_head.weight"), !tied);
            assert_eq!(file["model.embed_tokens.weight"].shape().dims(), &[65, 16]);
            load_hf(&mut to, dir.path()).unwrap();
            assert_eq!(values(&from), values(&to));

            // A tied table that is stored twice is read; a different head beside it is not.
            if tied {
                file.insert("lm_head.weight".into(), file["model.embed_tokens.weight"].clone());
                write(&path, &file);
                load_hf(&mut to, dir.path()).unwrap();
                let other = Tensor::zeros([65, 16], DType::F32, Device::Cpu).unwrap();
                file.insert("lm_head.weight".into(), other);
                write(&path, &file);
                let message = load_hf(&mut to, dir.path()).unwrap_err().to_string();
                assert!(message.contains("unexpected: lm_head.weight"), "{message}");
            }
        }
    }

    #[test]
    fn formats_and_shards_are_read_back() {
        let mut from = store(false, 1);
        let count = from.layout().parts().count();
        for (format, shard_bytes, files) in [
            (FloatFormat::F32, None, 1),
            (FloatFormat::BF16, Some(1), count),
            (FloatFormat::F16, Some(3000), 0),
        ] {
            let dir = tempfile::tempdir().unwrap();
            save_hf_as(&from, dir.path(), &SaveOptions { format, shard_bytes }).unwrap();
            let written = std::fs::read_dir(dir.path()).unwrap().count();
            assert!(if files == 0 { written > 3 } else { written == files + usize::from(files > 1) });
            let mut to = store(false, 2);
            load_hf(&mut to, dir.path()).unwrap();
            for (a, b) in values(&from).iter().zip(values(&to)) {
                let room = match format {
                    FloatFormat::F32 => 0.0,
                    FloatFormat::BF16 => a.abs() / 256.0,
                    FloatFormat::F16 => a.abs() / 2048.0 + 1e-7,
                };
                assert!((a - b).abs() <= room, "{format:?}: {a} became {b}");
            }
        }
        let dir = tempfile::tempdir().unwrap();
        let mut save = |value: f32, format| {
            let norm = Tensor::from_vec(vec![value; 16], [16]).unwrap();
            from.set_part("model.norm.weight", &norm).unwrap();
            save_hf_as(&from, dir.path(), &SaveOptions { format, shard_bytes: None })
                .map_err(|e| e.to_string())
        };
        assert!(save(1e5, FloatFormat::BF16).is_ok());
        assert!(
            save(1e5, FloatFormat::F16).unwrap_err().contains("model.norm.weight holds 100000, which f16")
        );
        assert!(save(f32::NAN, FloatFormat::F32).unwrap_err().contains("model.norm.weight holds NaN at 0"));
    }

    #[test]
    fn one_error_lists_every_problem_and_nothing_is_loaded() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("model.safetensors");
        let mut to = store(true, 2);
        let before = values(&to);
        save_hf(&store(false, 1), &path).unwrap();
        let mut tensors = io::read_safetensors(&path).unwrap();
        tensors.remove("model.norm.weight");
        let up = "model.layers.0.mlp.up_proj.weight";
        tensors.insert(up.into(), Tensor::from_vec(vec![0f32; 4], [2, 2]).unwrap());
        tensors.insert("model.layers.0.self_attn.rotary_emb.inv_freq".into(), Tensor::scalar(1f32));
        write(&path, &tensors);
        let message = load_hf(&mut to, dir.path()).unwrap_err().to_string();
        assert!(message.starts_with(&dir.path().display().to_string()), "{message}");
        let lists =
            "missing: model.norm.weight; unexpected: lm_head.weight; of another shape: model.layers.0.mlp";
        assert!(message.contains(lists), "{message}");
        assert!(message.ends_with("up_proj.weight has [2, 2], expected [10, 16]"), "{message}");
        assert_eq!(values(&to), before);
    }

    #[test]
    fn shards_are_joined_and_stay_in_the_folder() {
        let dir = tempfile::tempdir().unwrap();
        let from = store(false, 1);
        save_hf(&from, &dir.path().join("all")).unwrap();
        let all = io::read_safetensors(&dir.path().join("all")).unwrap();
        let mut map = BTreeMap::new();
        for which in 0..2 {
            let shard = format!("model-0000{}-of-00002.safetensors", which + 1);
            let half =
                all.iter().enumerate().filter(|(i, _)| i % 2 == which).map(|(_, (n, t))| (n.as_str(), t));
            map.extend(half.clone().map(|(n, _)| (n.to_string(), shard.clone())));
            io::write_safetensors(&dir.path().join(shard), half).unwrap();
        }
        let index = dir.path().join("model.safetensors.index.json");
        let json = serde_json::json!({ "metadata": {}, "weight_map": map });
        std::fs::write(&index, json.to_string()).unwrap();
        let mut to = store(false, 2);
        load_hf(&mut to, dir.path()).unwrap();
        assert_eq!(values(&from), values(&to));

        std::fs::remove_file(dir.path().join("model-00002-of-00002.safetensors")).unwrap();
        let message = load_hf(&mut to, dir.path()).unwrap_err().to_string();
        assert!(message.contains("model-00002-of-00002.safetensors: reading failed"), "{message}");
        let outside = serde_json::json!({ "weight_map": { "a": "../x.safetensors" } });
        std::fs::write(&index, outside.to_string()).unwrap();
        assert!(load_hf(&mut to, dir.path()).unwrap_err().to_string().contains("outside the folder"));
    }
}
