//! Where the time of enqueued work goes, piece by piece.

use crate::{Gpu, Result};

/// One piece of work on the device.
#[derive(Clone, Debug, PartialEq)]
pub struct Timing {
    /// Kernel name; `matmul`, `copy` or `fill`.
    pub name: &'static str,
    /// The product, or nothing.
    pub detail: String,
    /// Microseconds from the end of the piece before to its own end: with the gap between the two.
    pub microseconds: f64,
    /// Floating-point operations of matrix products, where known.
    pub flops: f64,
    /// Bytes that must be read and written at least, where known.
    pub bytes: f64,
}

impl Gpu {
    /// Times every kernel, product, copy and fill that `work` enqueues, by events between them. The device is held back
    /// until the host is ahead, so that no launch is waited for; nothing runs on the second stream meanwhile. Empty on a
    /// dry run.
    ///
    /// # Errors
    /// Those of `work`, a driver error.
    pub fn profile<E: From<crate::CudaError>>(
        &self,
        work: impl FnOnce() -> Result<(), E>,
    ) -> Result<Vec<Timing>, E> {
        self.join()?;
        self.0.beside.turn_off(true);
        let mut work = Some(work);
        let mut failed = None;
        let timings = self.backend().profile(&mut || {
            if let Some(Err(error)) = work.take().map(|work| work()) {
                failed = Some(error);
            }
            Ok(())
        });
        self.0.beside.turn_off(false);
        match failed {
            Some(error) => Err(error),
            None => Ok(timings?),
        }
    }
}
