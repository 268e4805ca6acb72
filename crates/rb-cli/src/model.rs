//! Models from folders, for the commands that read one.

use std::path::{Path, PathBuf};

use rb_autograd::{ParamBuilder, ParamStore};
use rb_nn::{CausalLm, LlamaConfig, weights};
use rb_tensor::{Device, Rng};

use crate::Failure;

/// The folder of a model: the one given, or the newest whole checkpoint of the run given.
pub(crate) fn folder(path: &Path) -> Result<PathBuf, Failure> {
    if path.join("config.json").is_file() {
        return Ok(path.to_path_buf());
    }
    let checkpoints = path.join("checkpoints");
    let found = if checkpoints.is_dir() { rb_train::checkpoint::find_latest(&checkpoints)? } else { None };
    match found {
        Some(found) => Ok(found.path),
        None => Err(Failure::new(
            2,
            format!("{}: is neither a model folder (config.json) nor a run with checkpoints", path.display()),
        )),
    }
}

/// The model of a folder with its weights.
pub(crate) fn load(folder: &Path) -> Result<(CausalLm, ParamStore), Failure> {
    let config = LlamaConfig::from_json(&folder.join("config.json")).map_err(Failure::failed)?;
    let mut builder = ParamBuilder::default();
    let model = CausalLm::init(&config, &mut builder).map_err(Failure::failed)?;
    let mut params = builder.build(&Rng::new(0), Device::Cpu).map_err(Failure::failed)?;
    weights::load_hf(&mut params, folder).map_err(Failure::failed)?;
    Ok((model, params))
}
