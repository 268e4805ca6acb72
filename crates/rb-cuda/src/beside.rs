//! A second stream, for work whose result nobody needs soon: it fills what the first leaves idle.

use std::any::Any;
use std::collections::VecDeque;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::gpu::lock;
use crate::{CudaError, Gpu, Result};

/// Pieces of work that may be under way at once.
const MOST_UNDER_WAY: usize = 256;
/// Bytes that they may hold.
const MOST_BYTES: usize = 512 << 20;
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
    bytes: usize,
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

    /// Pieces under way and the bytes that they hold.
    fn under_way(&self) -> (usize, usize) {
        let books = lock(&self.books);
        (books.under_way.len(), books.under_way.iter().map(|piece| piece.bytes).sum())
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
    /// The first stream waits meanwhile where too much memory is held, and then for half of all that is under way: each
    /// wait costs it a microsecond or two, in a captured step too.
    ///
    /// `holds` keeps what `work` reads, `bytes` of memory; it must be changed by nobody. What `work` writes may be used after
    /// [`Gpu::join`] only, or by other work beside.
    ///
    /// # Errors
    /// Those of `work`; a driver error.
    pub fn beside<E: From<CudaError>>(
        &self,
        bytes: usize,
        holds: impl Send + 'static,
        work: impl FnOnce() -> Result<(), E>,
    ) -> Result<(), E> {
        let beside = &self.0.beside;
        if beside.is_active() || beside.off.load(Ordering::Relaxed) {
            return work();
        }
        let (pieces, held) = beside.under_way();
        if pieces == MOST_UNDER_WAY || pieces > 0 && held + bytes > MOST_BYTES {
            self.join_to(pieces / 2)?;
        }
        self.backend().fork()?;
        beside.active.store(true, Ordering::Relaxed);
        let done = work();
        beside.active.store(false, Ordering::Relaxed);
        let slot = {
            let mut books = lock(&beside.books);
            let slot = books.next_slot;
            books.next_slot = (slot + 1) % SLOTS;
            let deferred = std::mem::take(&mut books.deferred);
            books.under_way.push_back(Piece { slot, bytes, deferred, _holds: Box::new(holds) });
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
        let finished: Vec<Piece> = {
            let mut books = lock(&self.0.beside.books);
            let count = books.under_way.len().saturating_sub(left);
            books.under_way.drain(..count).collect()
        };
        // The second stream is in order: whoever waits for the last of them waits for all.
        let Some(last) = finished.last() else { return Ok(()) };
        self.backend().join(last.slot)?;
        finished.iter().flat_map(|piece| &piece.deferred).for_each(|&start| self.give_back(start));
        Ok(())
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
        gpu.beside(1 << 20, input, || gpu.alloc(2 << 20).map(drop)).unwrap();
        assert_eq!(gpu.memory().in_use, 3 << 20);
        for _ in 0..2 * MOST_UNDER_WAY {
            gpu.beside(1 << 20, gpu.alloc(1 << 20).unwrap(), || Ok::<_, CudaError>(())).unwrap();
            assert!(gpu.memory().in_use <= (MOST_UNDER_WAY + 2) << 20);
        }
        // Few large pieces: half of them are waited for.
        gpu.join().unwrap();
        let large = MOST_BYTES / 4;
        let used: Vec<usize> = (0..7)
            .map(|_| {
                gpu.beside(large, gpu.alloc(large).unwrap(), || Ok::<_, CudaError>(())).unwrap();
                gpu.memory().in_use / large
            })
            .collect();
        assert_eq!(used, [1, 2, 3, 4, 3, 4, 3]);
        // Work inside work is part of it.
        gpu.beside(0, (), || gpu.beside(0, (), || gpu.join())).unwrap();
        gpu.join().unwrap();
        assert_eq!(gpu.memory().in_use, 0);
    }

    #[test]
    fn a_failure_leaves_the_first_stream_in_charge() {
        let gpu = Gpu::dry((9, 0), &GpuOptions::default());
        let fail = || Err(CudaError::Unsupported { what: "work".into(), reason: "no".into() });
        assert!(gpu.beside(0, (), fail).is_err());
        assert!(!gpu.0.beside.is_active());
        gpu.join().unwrap();
    }
}
