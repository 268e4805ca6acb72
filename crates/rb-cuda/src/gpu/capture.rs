//! What a [`Gpu`] notes while work is captured.

use std::sync::atomic::Ordering;

use super::lock;
use crate::graph::{Exec, refuse_in_capture};
use crate::memory::Footprint;
use crate::{Buffer, Gpu, Result};

impl Gpu {
    pub(super) fn refuse_in_capture(&self, what: &str) -> Result<()> {
        refuse_in_capture(self.0.capturing.load(Ordering::Relaxed), what)
    }

    /// Tells a recording that these blocks are used.
    pub(crate) fn note_use(&self, buffers: &[&Buffer]) {
        if self.0.capturing.load(Ordering::Relaxed) {
            let mut pool = lock(&self.0.pool);
            buffers.iter().for_each(|buffer| pool.note_use(buffer.start));
        }
    }

    pub(crate) fn start_capture(&self) -> Result<()> {
        self.refuse_in_capture("a second capture")?;
        self.join()?;
        self.0.backend.start_capture()?;
        lock(&self.0.pool).start_recording();
        self.0.capturing.store(true, Ordering::Relaxed);
        Ok(())
    }

    pub(crate) fn end_capture(&self) -> (Result<Exec>, Footprint) {
        let joined = self.join();
        let exec = self.0.backend.end_capture();
        self.0.capturing.store(false, Ordering::Relaxed);
        let footprint = lock(&self.0.pool).end_recording();
        (joined.and(exec), footprint)
    }

    pub(crate) fn still_holds(&self, footprint: &Footprint) -> bool {
        lock(&self.0.pool).still_holds(footprint)
    }

    /// Gives the block at `start` back to the allocator.
    pub(crate) fn give_back(&self, start: u64) {
        lock(&self.0.pool).give_back(start);
    }
}
