//! Errors of the CUDA backend: each names what failed, where, and what to do.

/// `Result` of this crate.
pub type Result<T, E = CudaError> = std::result::Result<T, E>;

/// Everything that can go wrong on the way to a GPU and on it.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CudaError {
    /// A library or the driver is not on this machine.
    #[error("{component} was not found (looked for {looked_for} in {places}); {remedy}")]
    Missing {
        /// What is missing.
        component: &'static str,
        /// File names tried.
        looked_for: String,
        /// Folders tried, in order.
        places: String,
        /// What to install or set.
        remedy: String,
    },
    /// There is no GPU of this number, or none at all.
    #[error("no usable GPU: {reason}; {remedy}")]
    NoGpu {
        /// What was found instead.
        reason: String,
        /// What to do.
        remedy: &'static str,
    },
    /// A call of the driver or of a library failed.
    #[error("{call} failed: {status} (last kernel launched: {last_kernel})")]
    Call {
        /// The function called.
        call: &'static str,
        /// Status by name and number.
        status: String,
        /// The kernel launched last, which may be the cause: errors arrive late.
        last_kernel: String,
    },
    /// A kernel does not compile: a defect of the project, or an NVRTC that is too old for the card.
    #[error("kernel {kernel} does not compile for {arch} with {defines}:\n{log}")]
    Compile {
        /// The kernel's name.
        kernel: &'static str,
        /// Its constants.
        defines: String,
        /// Architecture.
        arch: String,
        /// What NVRTC said.
        log: String,
    },
    /// The memory budget or the card's memory is used up.
    #[error(
        "GPU memory: {wanted_mib:.1} MiB more were asked for by {wanted_by}, {in_use_mib:.1} of {limit_mib:.1} MiB are in use \
         (largest: {largest}); {remedy}"
    )]
    OutOfMemory {
        /// MiB asked for.
        wanted_mib: f64,
        /// Who asked.
        wanted_by: &'static str,
        /// MiB in use.
        in_use_mib: f64,
        /// The budget or the card's size, in MiB.
        limit_mib: f64,
        /// The three largest holders with their MiB.
        largest: String,
        /// Settings that would help.
        remedy: String,
    },
    /// The card computed something else than the host.
    #[error("{what} gives a wrong result: {detail}")]
    Wrong {
        /// What was run.
        what: &'static str,
        /// Where it differs.
        detail: String,
    },
    /// A launch or product whose sizes no kernel or library call can take.
    #[error("{what}: {reason}")]
    Unsupported {
        /// Kernel or product.
        what: String,
        /// The limit.
        reason: String,
    },
}
