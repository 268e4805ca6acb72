//! Weights that a run starts from: those of a model folder in place of random ones.

use std::path::{Path, PathBuf};

use rb_autograd::ParamStore;
use rb_data::Tokenizer;
use rb_nn::{LlamaConfig, weights};

use crate::{Config, Result, TrainError, checkpoint};

/// The model folder that `run.init_from` means: itself, or the newest whole checkpoint of a run.
///
/// # Errors
/// A path that is neither.
pub(crate) fn folder(path: &Path) -> Result<PathBuf> {
    if path.join("config.json").is_file() {
        return Ok(path.to_path_buf());
    }
    let checkpoints = path.join("checkpoints");
    let found = if checkpoints.is_dir() { checkpoint::find_latest(&checkpoints)? } else { None };
    found.map(|found| found.path).ok_or_else(|| {
        let what = "is neither a model folder (config.json) nor a run with checkpoints";
        wrong(format!("{}: {what}", path.display()))
    })
}

/// The model of a folder.
///
/// # Errors
/// A `config.json` that this library cannot compute.
pub(crate) fn model(folder: &Path) -> Result<LlamaConfig> {
    LlamaConfig::from_json(&folder.join("config.json")).map_err(|e| wrong(e.to_string()))
}

/// Checks, before anything is made, that a config can take the weights of `folder`.
///
/// # Errors
/// As [`check_sizes`] and [`check_tokenizer`].
pub(crate) fn check(config: &Config, folder: &Path) -> Result<()> {
    check_sizes(&config.model, folder)?;
    match &config.tokenizer.path {
        Some(path) => check_tokenizer(&Tokenizer::load(path)?, folder),
        None => Ok(()),
    }
}

/// Checks that a model can take the weights of `folder`. Positions, rotary settings and windows may differ: they have no
/// weights, and a run may want others.
///
/// # Errors
/// Every size that differs, with both values.
fn check_sizes(config: &LlamaConfig, folder: &Path) -> Result<()> {
    let stored = model(folder)?;
    let sizes = |c: &LlamaConfig| {
        [
            ("hidden_size", c.hidden_size),
            ("intermediate_size", c.intermediate_size),
            ("num_hidden_layers", c.num_hidden_layers),
            ("num_attention_heads", c.num_attention_heads),
            ("num_key_value_heads", c.kv_heads()),
            ("head_dim", c.head_dim()),
            ("attention_bias", usize::from(c.attention_bias)),
            ("use_qk_norm", usize::from(c.use_qk_norm)),
            ("tie_word_embeddings", usize::from(c.tie_word_embeddings)),
        ]
    };
    let pairs = sizes(config).into_iter().zip(sizes(&stored));
    let differences: Vec<String> = pairs
        .filter(|((_, own), (_, stored))| own != stored)
        .map(|((key, own), (_, stored))| format!("model.{key} is {own}, there {stored}"))
        .collect();
    if !differences.is_empty() {
        let what = "leave the section [model] out to take the folder's";
        return Err(wrong(format!("{}: {}; {what}", folder.display(), differences.join(", "))));
    }
    Ok(())
}

/// Checks that the weights of `folder` know the tokens of a tokenizer.
///
/// # Errors
/// Another tokenizer, in which the same numbers mean other tokens; one with more entries than the model.
pub(crate) fn check_tokenizer(tokenizer: &Tokenizer, folder: &Path) -> Result<()> {
    let stored = model(folder)?;
    let path = folder.join("tokenizer.json");
    if path.is_file() && Tokenizer::load(&path)?.sha256() != tokenizer.sha256() {
        let what = "this run's tokenizer is not the folder's, so that its tokens would mean something else to the weights";
        return Err(wrong(format!(
            "{}: {what}; leave tokenizer.path out to take the folder's",
            folder.display()
        )));
    }
    if tokenizer.vocab_size() > stored.vocab_size {
        return Err(wrong(format!(
            "{}: the tokenizer has {} entries, the model {}; they do not belong together",
            folder.display(),
            tokenizer.vocab_size(),
            stored.vocab_size
        )));
    }
    Ok(())
}

/// Fills `params` with the weights of a folder that [`check`] accepts.
///
/// # Errors
/// Weights that are missing, unexpected or of another shape: all of them are listed.
pub(crate) fn load(params: &mut ParamStore, folder: &Path) -> Result<()> {
    weights::load_hf(params, folder).map_err(|e| wrong(e.to_string()))
}

fn wrong(reason: String) -> TrainError {
    TrainError::Config { origin: "run.init_from".into(), reason }
}
