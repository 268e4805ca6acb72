//! Models from folders, for the commands that read one.

use std::path::{Path, PathBuf};

use rb_autograd::{ParamBuilder, ParamStore, Precision};
use rb_cuda::{CudaError, Gpu, GpuOptions};
use rb_data::Tokenizer;
use rb_nn::{CausalLm, LlamaConfig, weights};
use rb_tensor::{DType, Device};

use crate::Failure;
use crate::cli::{DeviceArg, PlaceArgs, PrecisionArg};

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

/// The model of a folder with its weights, in fp32 on the CPU.
pub(crate) fn load(folder: &Path) -> Result<(CausalLm, ParamStore), Failure> {
    let config = LlamaConfig::from_json(&folder.join("config.json")).map_err(Failure::failed)?;
    let mut builder = ParamBuilder::default();
    let model = CausalLm::init(&config, &mut builder).map_err(Failure::failed)?;
    let mut params = builder.build_zeros(DType::F32, Device::Cpu).map_err(Failure::failed)?;
    weights::load_hf(&mut params, folder).map_err(Failure::failed)?;
    Ok((model, params))
}

/// The same where, and in the element types that, the user asked for. A device that cannot be had is refused before
/// weights are read.
pub(crate) fn load_on(folder: &Path, place: &PlaceArgs) -> Result<(CausalLm, ParamStore), Failure> {
    let device = device(place.device)?;
    let precision = match (place.precision, device) {
        (PrecisionArg::Bf16, Device::Cpu) => {
            let message = "--precision bf16 needs a GPU; the CPU computes in fp32: leave it out";
            return Err(Failure::new(2, message));
        }
        (PrecisionArg::Fp32, _) | (PrecisionArg::Auto, Device::Cpu) => Precision::Full,
        (PrecisionArg::Bf16 | PrecisionArg::Auto, _) => Precision::MIXED,
    };
    let (model, params) = load(folder)?;
    if device == Device::Cpu {
        return Ok((model, params));
    }
    let mut params = params.to_device(device).map_err(Failure::failed)?;
    params.set_precision(precision).map_err(Failure::failed)?;
    Ok((model, params))
}

fn device(choice: DeviceArg) -> Result<Device, Failure> {
    let open = || Gpu::open(0, &GpuOptions::default());
    match choice {
        DeviceArg::Cpu => Ok(Device::Cpu),
        DeviceArg::Cuda => match open() {
            Ok(gpu) => Ok(Device::Cuda(gpu)),
            Err(error) => Err(Failure::new(2, format!("--device cuda: {error}; or use --device cpu"))),
        },
        DeviceArg::Auto => match open() {
            Ok(gpu) => Ok(Device::Cuda(gpu)),
            // No GPU or no driver: a machine for the CPU, nothing to tell.
            Err(CudaError::NoGpu { .. } | CudaError::Missing { component: "driver", .. }) => Ok(Device::Cpu),
            Err(error) => {
                eprintln!("a GPU is here but cannot be used, computing on the CPU: {error}");
                Ok(Device::Cpu)
            }
        },
    }
}

/// The tokenizer of a folder, which must not know more tokens than its model.
pub(crate) fn tokenizer(folder: &Path, config: &LlamaConfig) -> Result<Tokenizer, Failure> {
    let tokenizer = Tokenizer::load(folder.join("tokenizer.json")).map_err(Failure::failed)?;
    if tokenizer.vocab_size() > config.vocab_size {
        return Err(Failure::new(
            1,
            format!(
                "{}: the tokenizer has {} entries, the model {}; they do not belong together",
                folder.display(),
                tokenizer.vocab_size(),
                config.vocab_size
            ),
        ));
    }
    Ok(tokenizer)
}
