//! Models for other programs: Hugging Face folders and GGUF files.
//!
//! What is written appears whole or not at all; an older good folder or file is replaced only by a whole new one.

mod gguf;
mod gguf_tokenizer;
mod q8_0;

use std::fs::File;
use std::path::{Path, PathBuf};

use rb_autograd::ParamStore;
use rb_data::Tokenizer;
use rb_nn::weights::{SaveOptions, save_hf_as};
use rb_nn::{LlamaConfig, NnError};
use serde_json::{Value, json};

pub use gguf::{GgufFormat, save_gguf};

/// Errors of export.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ExportError {
    /// The place cannot be written as asked.
    #[error("{}: {reason}", path.display())]
    Target {
        /// File or folder.
        path: PathBuf,
        /// What is wrong and what to do.
        reason: String,
    },
    /// The format cannot say what the model computes.
    #[error("{what} cannot be exported to GGUF: {reason}")]
    Unsupported {
        /// Part of the model or tokenizer.
        what: &'static str,
        /// Why, and what can be done.
        reason: String,
    },
    /// The operating system refused.
    #[error("{}: {action} failed: {source}", path.display())]
    Io {
        /// File or folder.
        path: PathBuf,
        /// What was tried.
        action: &'static str,
        /// The system's answer.
        #[source]
        source: std::io::Error,
    },
    /// Files that replace others.
    #[error(transparent)]
    File(#[from] rb_data::atomic::FileError),
    /// Model.
    #[error(transparent)]
    Nn(#[from] NnError),
    /// Parameters.
    #[error(transparent)]
    Autograd(#[from] rb_autograd::AutogradError),
    /// Tensors.
    #[error(transparent)]
    Tensor(#[from] rb_tensor::TensorError),
    /// Tokenizer.
    #[error(transparent)]
    Data(#[from] rb_data::DataError),
}

/// Writes the folder that `transformers` loads: config, weights, tokenizer. With `overwrite` an existing folder with a
/// `config.json` is replaced once the new one is on disk.
///
/// # Errors
/// A folder that holds something else, or a model without `overwrite`; weights that are not finite or do not fit the
/// format; a full or read-only disk. The place is then as it was.
pub fn save_folder(
    config: &LlamaConfig,
    params: &ParamStore,
    tokenizer: &Tokenizer,
    target: &Path,
    options: &SaveOptions,
    overwrite: bool,
) -> Result<(), ExportError> {
    check_target(target, overwrite)?;
    let temporary = beside(target, "tmp");
    let _ = std::fs::remove_dir_all(&temporary);
    let written =
        fill(config, params, tokenizer, &temporary, options).and_then(|()| publish(&temporary, target));
    if written.is_err() {
        // The error that led here is the one to report.
        let _ = std::fs::remove_dir_all(&temporary);
    }
    written
}

/// A hidden name in the same folder.
fn beside(target: &Path, what: &str) -> PathBuf {
    let name = target.file_name().unwrap_or_default().to_string_lossy().into_owned();
    target.with_file_name(format!(".{name}.{what}-{}", std::process::id()))
}

fn io_error(path: &Path, action: &'static str) -> impl FnOnce(std::io::Error) -> ExportError {
    let path = path.to_path_buf();
    move |source| ExportError::Io { path, action, source }
}

fn check_target(target: &Path, overwrite: bool) -> Result<(), ExportError> {
    let bad = |reason: &str| Err(ExportError::Target { path: target.into(), reason: reason.into() });
    if target.file_name().is_none() {
        return bad("names no folder to create");
    }
    let is_empty = match std::fs::read_dir(target) {
        Ok(mut entries) => entries.next().is_none(),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => true,
        Err(e) => return Err(io_error(target, "looking into the folder")(e)),
    };
    if is_empty {
        return Ok(());
    }
    match (target.join("config.json").is_file(), target.join("trainer").is_dir(), overwrite) {
        (true, true, _) => {
            bad("is a checkpoint of a run, which only `rb train` writes; choose another place")
        }
        (true, false, true) => Ok(()),
        (true, false, false) => bad("holds a model already; choose another place or pass --overwrite"),
        (false, ..) => bad("is not empty and holds no model; choose another place"),
    }
}

fn fill(
    config: &LlamaConfig,
    params: &ParamStore,
    tokenizer: &Tokenizer,
    dir: &Path,
    options: &SaveOptions,
) -> Result<(), ExportError> {
    std::fs::create_dir_all(dir).map_err(io_error(dir, "creating"))?;
    let mut json = config.to_json_value();
    for key in ["torch_dtype", "dtype"] {
        json[key] = json!(options.format.torch_name());
    }
    let eos = config.eos_token_id.unwrap_or(tokenizer.eos_id());
    let bos = config.bos_token_id.unwrap_or(eos);
    json["eos_token_id"] = json!(eos);
    json["bos_token_id"] = json!(bos);
    write_json(&dir.join("config.json"), &json)?;
    let generation = json!({ "bos_token_id": bos, "eos_token_id": eos, "do_sample": true });
    write_json(&dir.join("generation_config.json"), &generation)?;
    tokenizer.save_folder(dir, Some(config.max_position_embeddings))?;
    save_hf_as(params, dir, options)?;
    for entry in std::fs::read_dir(dir).map_err(io_error(dir, "listing"))? {
        let path = entry.map_err(io_error(dir, "listing"))?.path();
        File::open(&path).and_then(|file| file.sync_all()).map_err(io_error(&path, "syncing"))?;
    }
    Ok(())
}

fn write_json(path: &Path, value: &Value) -> Result<(), ExportError> {
    std::fs::write(path, format!("{value:#}\n")).map_err(io_error(path, "writing"))
}

/// Moves the finished folder to its name; an old one is moved aside first and removed last.
fn publish(temporary: &Path, target: &Path) -> Result<(), ExportError> {
    let aside = beside(target, "old");
    let _ = std::fs::remove_dir_all(&aside);
    let replaces = target.exists();
    if replaces {
        std::fs::rename(target, &aside).map_err(io_error(target, "moving the old folder aside"))?;
    }
    if let Err(e) = std::fs::rename(temporary, target) {
        if replaces {
            let _ = std::fs::rename(&aside, target);
        }
        return Err(io_error(target, "renaming the finished folder to")(e));
    }
    let _ = std::fs::remove_dir_all(&aside);
    Ok(())
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use rb_autograd::ParamBuilder;
    use rb_data::TokenizerConfig;
    use rb_nn::CausalLm;
    use rb_tensor::io::FloatFormat;
    use rb_tensor::{Device, Rng};

    pub(crate) fn tokenizer() -> Tokenizer {
        let text = "the boat on the river and the house by the river ".repeat(8);
        let config = TokenizerConfig { vocab_size: 280, ..TokenizerConfig::default() };
        Tokenizer::train(std::iter::once(Ok(text)), &config).unwrap().0
    }

    pub(crate) fn config() -> LlamaConfig {
        LlamaConfig {
            num_key_value_heads: Some(2),
            max_position_embeddings: 32,
            ..LlamaConfig::new(tokenizer().vocab_size(), 32, 48, 2, 4)
        }
    }

    pub(crate) fn params(config: &LlamaConfig) -> ParamStore {
        let mut builder = ParamBuilder::default();
        CausalLm::init(config, &mut builder).unwrap();
        builder.build(&Rng::new(1), Device::Cpu).unwrap()
    }

    const F32: SaveOptions = SaveOptions { format: FloatFormat::F32, shard_bytes: None };

    fn names(dir: &Path) -> Vec<String> {
        let mut names: Vec<String> =
            std::fs::read_dir(dir).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    #[test]
    fn a_folder_is_read_back() {
        let dir = tempfile::tempdir().unwrap();
        let target = dir.path().join("model");
        let (config, tokenizer) = (config(), tokenizer());
        let from = params(&config);
        let options = SaveOptions { format: FloatFormat::BF16, shard_bytes: Some(20_000) };
        save_folder(&config, &from, &tokenizer, &target, &options, false).unwrap();
        let read = LlamaConfig::from_json(&target.join("config.json")).unwrap();
        let eos = Some(tokenizer.eos_id());
        assert_eq!(
            read,
            LlamaConfig { bos_token_id: eos, eos_token_id: eos, head_dim: Some(8), ..config.clone() }
        );
        let json: Value =
            serde_json::from_slice(&std::fs::read(target.join("config.json")).unwrap()).unwrap();
        assert_eq!(json["torch_dtype"], "bfloat16");
        let mut to = params(&config);
        rb_nn::weights::load_hf(&mut to, &target).unwrap();
        assert_eq!(Tokenizer::load(target.join("tokenizer.json")).unwrap().sha256(), tokenizer.sha256());
        assert!(target.join("model.safetensors.index.json").is_file());
        assert_eq!(names(dir.path()), ["model"], "nothing is left beside");
    }

    #[test]
    fn nothing_good_is_lost() {
        let dir = tempfile::tempdir().unwrap();
        let target = dir.path().join("model");
        let (config, tokenizer) = (config(), tokenizer());
        let mut from = params(&config);
        let save = |from: &ParamStore, overwrite| {
            save_folder(&config, from, &tokenizer, &target, &F32, overwrite).map_err(|e| e.to_string())
        };
        save(&from, false).unwrap();
        let good = std::fs::read(target.join("model.safetensors")).unwrap();
        assert!(save(&from, false).unwrap_err().contains("pass --overwrite"));
        let norm = rb_tensor::Tensor::from_vec(vec![f32::INFINITY; 32], [32]).unwrap();
        from.set_part("model.norm.weight", &norm).unwrap();
        assert!(save(&from, true).unwrap_err().contains("model.norm.weight holds inf"));
        assert_eq!(std::fs::read(target.join("model.safetensors")).unwrap(), good);
        save(&params(&config), true).unwrap();
        assert_eq!(names(dir.path()), ["model"]);

        std::fs::create_dir(target.join("trainer")).unwrap();
        assert!(save(&params(&config), true).unwrap_err().contains("is a checkpoint of a run"));
        let other = dir.path().join("other");
        std::fs::create_dir(&other).unwrap();
        std::fs::write(other.join("thesis.txt"), "x").unwrap();
        let refused = save_folder(&config, &params(&config), &tokenizer, &other, &F32, true).unwrap_err();
        assert!(refused.to_string().contains("is not empty and holds no model"));
        assert_eq!(names(&other), ["thesis.txt"]);
    }
}
