//! Errors of a training run, and the exit code each deserves.

use std::path::PathBuf;

/// `Result` of this crate.
pub type Result<T, E = TrainError> = std::result::Result<T, E>;

/// Everything that can stop a run.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TrainError {
    /// A config file or an override is not acceptable.
    #[error("{origin}: {reason}")]
    Config {
        /// File with line, or the override.
        origin: String,
        /// What is wrong and what to do.
        reason: String,
    },
    /// The run directory cannot be used as asked.
    #[error("{}: {reason}", path.display())]
    RunDir {
        /// The directory.
        path: PathBuf,
        /// What is wrong and what to do.
        reason: String,
    },
    /// A checkpoint is damaged or does not belong to this run.
    #[error("checkpoint {}: {reason}", path.display())]
    Checkpoint {
        /// The checkpoint's folder.
        path: PathBuf,
        /// What is wrong and what to do.
        reason: String,
    },
    /// A file could not be read or written.
    #[error("{}: {action} failed: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What was tried.
        action: &'static str,
        /// The system's answer.
        #[source]
        source: std::io::Error,
    },
    /// A check refused the run: nothing more is trained or reported.
    #[error("{reason}")]
    Gate {
        /// Which check, what it saw, where the last good state is.
        reason: String,
    },
    /// Data or tokenizer.
    #[error(transparent)]
    Data(#[from] rb_data::DataError),
    /// Tape, operations, parameters.
    #[error(transparent)]
    Autograd(#[from] rb_autograd::AutogradError),
    /// Tensors as data.
    #[error(transparent)]
    Tensor(#[from] rb_tensor::TensorError),
    /// Model or its config.
    #[error(transparent)]
    Nn(#[from] rb_nn::NnError),
    /// Optimizer or schedule.
    #[error(transparent)]
    Optim(#[from] rb_optim::OptimError),
    /// Metrics, events, report.
    #[error(transparent)]
    Observe(#[from] crate::observe::ObserveError),
}

impl From<rb_cuda::CudaError> for TrainError {
    fn from(error: rb_cuda::CudaError) -> Self {
        TrainError::Tensor(error.into())
    }
}

impl From<rb_data::atomic::FileError> for TrainError {
    fn from(error: rb_data::atomic::FileError) -> Self {
        TrainError::Observe(error.into())
    }
}

impl TrainError {
    /// 1 failed, 2 bad usage or config, 3 a gate refused.
    pub fn exit_code(&self) -> u8 {
        match self {
            TrainError::Config { .. } | TrainError::RunDir { .. } => 2,
            TrainError::Gate { .. } => 3,
            _ => 1,
        }
    }

    pub(crate) fn io(path: impl Into<PathBuf>, action: &'static str, source: std::io::Error) -> TrainError {
        TrainError::Io { path: path.into(), action, source }
    }
}
