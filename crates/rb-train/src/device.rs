//! Which device a run uses.

use rb_tensor::Device;

use crate::config::DeviceChoice;
use crate::{Result, TrainError};

/// The device for a choice in a config.
///
/// # Errors
/// `cuda` is asked for and cannot be had: the reason and the remedy.
pub fn select(choice: DeviceChoice) -> Result<Device> {
    match choice {
        DeviceChoice::Auto | DeviceChoice::Cpu => Ok(Device::Cpu),
        DeviceChoice::Cuda => Err(TrainError::Config {
            origin: "run.device".into(),
            reason: format!(
                "cuda is not available in this version, which trains on the CPU only ({}); use run.device=\"cpu\"",
                rb_cuda::probe()
            ),
        }),
    }
}
