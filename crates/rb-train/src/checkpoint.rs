//! Checkpoints: Hugging Face folders that are whole or do not exist.
//!
//! `checkpoints/step-N/` holds `config.json`, `generation_config.json`, `model.safetensors` and the tokenizer,
//! which `transformers` loads, and `trainer/` with the optimizer's tensors and the loop's state. A folder is
//! written under a temporary name, its files are synced, `manifest.json` lists their sizes and SHA-256, the
//! folder is renamed, and only then does the link `latest` move to it. Nothing is deleted before that.
//! The link `best` is the one with the lowest held-out loss of those that were evaluated at their step.

mod manifest;
mod store;

use std::path::{Path, PathBuf};

use rb_autograd::ParamStore;
use rb_data::{LoaderState, Tokenizer};
use rb_nn::CausalLm;
use rb_optim::Optimizer;
use rb_planted::{Defect, active};
use serde::{Deserialize, Serialize};

use crate::{Result, TrainError};

pub use manifest::verify;
pub(crate) use store::sweep;
pub use store::{Found, Keep, find_latest, list, point_best, prune, step_dir};

/// Version of `trainer/state.json`.
const STATE_VERSION: u32 = 1;

/// Where the loop stands: with weights and optimizer tensors, all that a resumed run needs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TrainerState {
    /// Version of this file.
    pub format_version: u32,
    /// Steps done, skipped ones included.
    pub step: u64,
    /// Tokens seen.
    pub tokens: u64,
    /// Steps skipped because something was not finite.
    pub skipped_steps: u64,
    /// Updates the optimizer has made.
    pub optimizer_steps: u64,
    /// Place in the data.
    pub loader: LoaderState,
    /// Whether the loop had reached its last step.
    pub finished: bool,
}

impl TrainerState {
    /// A state at the current file version.
    pub fn new(
        step: u64,
        tokens: u64,
        skipped_steps: u64,
        optimizer_steps: u64,
        loader: LoaderState,
    ) -> Self {
        let format_version = STATE_VERSION;
        TrainerState { format_version, step, tokens, skipped_steps, optimizer_steps, loader, finished: false }
    }
}

/// What a checkpoint is made of.
pub struct Contents<'a> {
    /// The model: its config.
    pub model: &'a CausalLm,
    /// Weights.
    pub params: &'a ParamStore,
    /// Optimizer state.
    pub optimizer: &'a dyn Optimizer,
    /// Loop state.
    pub state: &'a TrainerState,
    /// Tokenizer.
    pub tokenizer: &'a Tokenizer,
}

/// Writes `checkpoints/step-N/` and points `latest` at it. An existing folder of that step is replaced.
///
/// # Errors
/// A full or read-only disk: the temporary folder is removed, older checkpoints and `latest` are untouched.
pub fn save(checkpoints: &Path, contents: &Contents<'_>) -> Result<PathBuf> {
    std::fs::create_dir_all(checkpoints).map_err(|e| TrainError::io(checkpoints, "creating", e))?;
    let target = step_dir(checkpoints, contents.state.step);
    let temporary = checkpoints.join(format!(".step-{}.tmp-{}", contents.state.step, std::process::id()));
    let written =
        write_all(&temporary, contents).and_then(|()| store::publish(checkpoints, &temporary, &target));
    if written.is_err() {
        // The error that led here is the one to report.
        let _ = std::fs::remove_dir_all(&temporary);
    }
    written.map(|()| target)
}

fn write_all(dir: &Path, contents: &Contents<'_>) -> Result<()> {
    // Left by a killed process of the same id, if it exists at all.
    let _ = std::fs::remove_dir_all(dir);
    let trainer = dir.join("trainer");
    std::fs::create_dir_all(&trainer).map_err(|e| TrainError::io(&trainer, "creating", e))?;
    let config = contents.model.config();
    let (bos, eos) = (contents.tokenizer.bos_id(), contents.tokenizer.eos_id());
    write_json(&dir.join("config.json"), &config.to_json_value())?;
    write_json(
        &dir.join("generation_config.json"),
        &serde_json::json!({ "bos_token_id": bos, "eos_token_id": eos, "do_sample": true }),
    )?;
    rb_nn::weights::save_hf(contents.params, &dir.join("model.safetensors"))?;
    contents.tokenizer.save_folder(dir, Some(config.max_position_embeddings))?;
    let tensors = contents.optimizer.state()?;
    let named = tensors.iter().map(|(name, tensor)| (name.as_str(), tensor));
    rb_tensor::io::write_safetensors(&trainer.join("optimizer.safetensors"), named)?;
    write_json(&trainer.join("state.json"), contents.state)?;
    manifest::write(dir, contents.state.step)
}

/// Reads and checks `trainer/state.json` of a checkpoint whose manifest was verified.
pub fn read_state(dir: &Path) -> Result<TrainerState> {
    let path = dir.join("trainer/state.json");
    let bytes = std::fs::read(&path).map_err(|e| TrainError::io(&path, "reading", e))?;
    let bad = |reason: String| TrainError::Checkpoint { path: dir.into(), reason };
    let state: TrainerState = serde_json::from_slice(&bytes)
        .map_err(|e| bad(format!("trainer/state.json is not readable: {e}")))?;
    if state.format_version != STATE_VERSION {
        return Err(bad(format!(
            "trainer/state.json has version {}, this program reads {STATE_VERSION}; use the program that wrote it",
            state.format_version
        )));
    }
    Ok(state)
}

/// Puts a verified checkpoint's weights and optimizer tensors in place.
pub fn restore(
    dir: &Path,
    state: &TrainerState,
    params: &mut ParamStore,
    optimizer: &mut dyn Optimizer,
) -> Result<()> {
    rb_nn::weights::load_hf(params, dir)?;
    let tensors = rb_tensor::io::read_safetensors(&dir.join("trainer/optimizer.safetensors"))?;
    let steps = if active(Defect::StepCountNotRestored) { 0 } else { state.optimizer_steps };
    if !active(Defect::MomentsNotRestored) {
        optimizer.load_state(&tensors, steps)?;
    }
    Ok(())
}

fn write_json(path: &Path, value: &impl Serialize) -> Result<()> {
    let mut text = serde_json::to_string_pretty(value)
        .map_err(|e| TrainError::io(path, "encoding as JSON", std::io::Error::other(e)))?;
    text.push('\n');
    std::fs::write(path, text).map_err(|e| TrainError::io(path, "writing", e))
}
