//! A second stream, for work whose result nobody needs soon: it fills what the first leaves idle.

use std::any::Any;
use std::collections::VecDeque;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::gpu::lock;
use crate::{CudaError, Gpu, Result};

/// Pieces of work that may be under way at once; what they use stays in memory until then.
const MOST_UNDER_WAY: usize = 8;
/// Names of finished pieces, more than can be under way.
pub(crate) const SLOTS: usize = MOST_UNDER_WAY + 1;

/// Books of the second stream.
#[derive(Default)]
pub(crate) struct Beside {
    active: AtomicBool,
    off: AtomicBool,
    books: Mutex<Books>,
}

#[derive(Default)]
struct Books {
    under_way: VecDeque<Piece>,
    next_slot: usize,
    /// Blocks that were given back by the piece that is being enqueued.
    deferred: Vec<u64>,
}

struct Piece {
    slot: usize,
    deferred: Vec<u64>,
    _holds: Box<dyn Any + Send>,
}

impl Beside {
    /// Whether what is enqueued now goes to the second stream.
    pub(crate) fn is_active(&self) -> bool {
        self.active.load(Ordering::Relaxed)
    }

    /// Keeps a block that is given back now, if it must wait.
    pub(crate) fn defer(&self, start: u64) -> bool {
        let active = self.is_active();
        if active {
            lock(&self.books).deferred.push(start);
        }
        active
    }

    /// Everything goes to the first stream from now on, or not.
    pub(crate) fn turn_off(&self, off: bool) {
        self.off.store(off, Ordering::Relaxed);
    }
}

impl Gpu {
    /// Enqueues `work` on a second stream, after everything enqueued so far: what is enqueued next on the first does
    /// not wait for it before [`Gpu::join`]. Bits do not change, since each piece of work is the same.
    ///
    /// `holds` keeps what `work` reads; it must be changed by nobody. What `work` writes may be used after
    /// [`Gpu::join`] only, or by other work beside.
    ///
    /// # Errors
    /// Those of `work`; a driver error.
    pub fn beside<E: From<CudaError>>(
        &self,
        holds: impl Send + 'static,
        work: impl FnOnce() -> Result<(), E>,
    ) -> Result<(), E> {
        let beside = &self.0.beside;
        if beside.is_active() || beside.off.load(Ordering::Relaxed) {
            return work();
        }
        self.join_to(MOST_UNDER_WAY - 1)?;
        self.backend().fork()?;
        beside.active.store(true, Ordering::Relaxed);
        let done = work();
        beside.active.store(false, Ordering::Relaxed);
        let slot = {
            let mut books = lock(&beside.books);
            let slot = books.next_slot;
            books.next_slot = (slot + 1) % SLOTS;
            let deferred = std::mem::take(&mut books.deferred);
            books.under_way.push_back(Piece { slot, deferred, _holds: Box::new(holds) });
            slot
        };
        self.backend().unfork(slot)?;
        done
    }

    /// What is enqueued from now on waits for all work beside.
    ///
    /// # Errors
    /// A driver error.
    pub fn join(&self) -> Result<()> {
        self.join_to(0)
    }

    fn join_to(&self, left: usize) -> Result<()> {
        // The second stream is in order by itself.
        if self.0.beside.is_active() {
            return Ok(());
        }
        loop {
            let piece = {
                let mut books = lock(&self.0.beside.books);
                if books.under_way.len() <= left {
                    return Ok(());
                }
                books.under_way.pop_front()
            };
            let Some(Piece { slot, deferred, _holds }) = piece else { return Ok(()) };
            self.backend().join(slot)?;
            deferred.into_iter().for_each(|start| self.give_back(start));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::GpuOptions;

    #[test]
    fn what_work_beside_uses_is_kept_until_it_is_joined() {
        let gpu = Gpu::dry((9, 0), &GpuOptions::default());
        let input = gpu.alloc(1 << 20).unwrap();
        gpu.beside(input, || gpu.alloc(2 << 20).map(drop)).unwrap();
        assert_eq!(gpu.memory().in_use, 3 << 20);
        for _ in 0..2 * MOST_UNDER_WAY {
            gpu.beside(gpu.alloc(1 << 20).unwrap(), || Ok::<_, CudaError>(())).unwrap();
            assert!(gpu.memory().in_use <= (MOST_UNDER_WAY + 2) << 20);
        }
        // Work inside work is part of it.
        gpu.beside((), || gpu.beside((), || gpu.join())).unwrap();
        gpu.join().unwrap();
        assert_eq!(gpu.memory().in_use, 0);
    }

    #[test]
    fn a_failure_leaves_the_first_stream_in_charge() {
        let gpu = Gpu::dry((9, 0), &GpuOptions::default());
        let fail = || Err(CudaError::Unsupported { what: "work".into(), reason: "no".into() });
        assert!(gpu.beside((), fail).is_err());
        assert!(!gpu.0.beside.is_active());
        gpu.join().unwrap();
    }
}
