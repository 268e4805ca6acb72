//! A thread that makes the next batches while a step is computed.

use std::sync::mpsc::{Receiver, sync_channel};

use super::order::Order;
use super::row::Rows;
use super::{Batch, LoaderConfig, batch_at};

/// Batches made ahead, each with the number of its first sample. The thread ends when this is dropped.
#[derive(Debug)]
pub(super) struct Ahead(Receiver<(u64, Batch)>);

impl Ahead {
    /// Starts with the batch whose first sample is `first`.
    pub(super) fn start(rows: Rows, mut order: Order, config: LoaderConfig, mut first: u64) -> Self {
        let (sender, receiver) = sync_channel(config.prefetch);
        let step = config.batch_size as u64 * config.world_size as u64;
        let work = move || {
            while sender.send((first, batch_at(&rows, &mut order, &config, first))).is_ok() {
                first += step;
            }
        };
        // Without a thread the channel is closed, and the loader makes its batches itself.
        let _ = std::thread::Builder::new().name("rb-data ahead".into()).spawn(work);
        Self(receiver)
    }

    /// The batch whose first sample is `first`; `None` if there is no thread to make it.
    pub(super) fn next(&mut self, first: u64) -> Option<Batch> {
        let (made, batch) = self.0.recv().ok()?;
        debug_assert_eq!(made, first, "the thread follows the loader");
        Some(batch)
    }
}
