//! Which device and element types a run uses.

use rb_autograd::Precision;
use rb_cuda::{CudaError, Gpu, GpuOptions};
use rb_tensor::Device;

use crate::config::{DeviceChoice, Precision as PrecisionChoice, RunSection};
use crate::{Result, TrainError};

/// The device for the choice in a config, and a line for the user where `auto` passes a GPU over.
///
/// # Errors
/// `cuda` is asked for and cannot be had: the reason and the remedy.
pub fn select(run: &RunSection) -> Result<(Device, Option<String>)> {
    let budget_bytes = run.gpu_memory_budget_mib.map(budget_bytes);
    let open = || Gpu::open(0, &GpuOptions { budget_bytes, ..GpuOptions::default() });
    match run.device {
        DeviceChoice::Cpu => Ok((Device::Cpu, None)),
        DeviceChoice::Cuda => match open() {
            Ok(gpu) => Ok((Device::Cuda(gpu), None)),
            Err(error) => Err(TrainError::Config {
                origin: "run.device".into(),
                reason: format!("cuda cannot be used: {error}; or train on the CPU with run.device=\"cpu\""),
            }),
        },
        DeviceChoice::Auto => match open() {
            Ok(gpu) => Ok((Device::Cuda(gpu), None)),
            // No GPU or no driver: a machine for the CPU, nothing to tell.
            Err(CudaError::NoGpu { .. } | CudaError::Missing { component: "driver", .. }) => {
                Ok((Device::Cpu, None))
            }
            Err(error) => Ok((
                Device::Cpu,
                Some(format!("a GPU is here but cannot be used, training on the CPU: {error}")),
            )),
        },
    }
}

/// In which element types a run computes on `device`.
///
/// # Errors
/// bf16 on the CPU.
pub fn precision(run: &RunSection, device: Device) -> Result<Precision> {
    match (run.precision, device) {
        (PrecisionChoice::Fp32, _) | (PrecisionChoice::Auto, Device::Cpu) => Ok(Precision::Full),
        (PrecisionChoice::Bf16, Device::Cpu) => Err(TrainError::Config {
            origin: "run.precision".into(),
            reason: "bf16 needs a GPU; the CPU trains in fp32: set run.precision=\"auto\" or \"fp32\"".into(),
        }),
        (PrecisionChoice::Bf16 | PrecisionChoice::Auto, _) => Ok(mixed(run)),
    }
}

/// bf16 mixed precision with the run's residual stream, gradients and weights.
pub(crate) fn mixed(run: &RunSection) -> Precision {
    Precision::Bf16 {
        residual: run.residual_dtype.into(),
        gradients: run.gradient_dtype.into(),
        master: run.master_weights.into(),
    }
}

/// A budget in MiB as bytes.
pub(crate) fn budget_bytes(mib: u64) -> usize {
    usize::try_from(mib).unwrap_or(usize::MAX).saturating_mul(1 << 20)
}
