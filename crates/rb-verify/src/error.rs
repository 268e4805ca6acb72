//! Errors of checks that could not run; a check that ran and failed is a [`crate::Check`].

/// `Result` of this crate.
pub type Result<T, E = VerifyError> = std::result::Result<T, E>;

/// Why a check could not run.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum VerifyError {
    /// Operations and parameters.
    #[error(transparent)]
    Autograd(#[from] rb_autograd::AutogradError),
    /// Tensors.
    #[error(transparent)]
    Tensor(#[from] rb_tensor::TensorError),
    /// Models.
    #[error(transparent)]
    Nn(#[from] rb_nn::NnError),
    /// Optimizers.
    #[error(transparent)]
    Optim(#[from] rb_optim::OptimError),
}

impl From<rb_cuda::CudaError> for VerifyError {
    fn from(error: rb_cuda::CudaError) -> Self {
        VerifyError::Tensor(error.into())
    }
}
