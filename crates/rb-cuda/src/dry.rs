//! A device without a card: it counts addresses and computes nothing.

use std::sync::Mutex;

use crate::Result;
use crate::driver::Handle;
use crate::gpu::{Backend, PrepareStats, Ticket, lock};
use crate::graph::Exec;
use crate::kernel::{Launch, Unit};
use crate::matmul::Matmul;
use crate::memory::Segments;

/// Counts addresses and computes nothing.
#[derive(Default)]
pub(crate) struct Dry {
    next: Mutex<u64>,
}

impl Segments for Dry {
    fn allocate(&self, bytes: usize) -> Option<u64> {
        let mut next = lock(&self.next);
        *next += 2 << 20;
        let start = *next;
        *next += bytes.next_multiple_of(2 << 20) as u64;
        Some(start)
    }
}

impl Backend for Dry {
    fn memset(&self, _: u64, _: u8, _: usize) -> Result<()> {
        Ok(())
    }
    fn fill(&self, _: u64, _: u32, _: usize) -> Result<()> {
        Ok(())
    }
    fn upload(&self, _: u64, _: &[u8]) -> Result<()> {
        Ok(())
    }
    fn download(&self, _: u64, target: &mut [u8]) -> Result<()> {
        target.fill(0);
        Ok(())
    }
    fn start_read(&self, _: u64, bytes: usize) -> Result<Ticket> {
        Ok(Ticket { host: 0, event: Handle::NULL, bytes })
    }
    fn finish_read(&self, ticket: Ticket) -> Result<Vec<u8>> {
        Ok(vec![0; ticket.bytes])
    }
    fn copy(&self, _: u64, _: u64, _: usize) -> Result<()> {
        Ok(())
    }
    fn launch(&self, _: &Launch<'_>) -> Result<()> {
        Ok(())
    }
    fn matmul(&self, _: &Matmul, _: [u64; 3], _: u64) -> Result<()> {
        Ok(())
    }
    fn memory_info(&self) -> Result<(usize, usize)> {
        Ok((0, 0))
    }
    fn prepare(&self, _: &[Unit]) -> Result<PrepareStats> {
        Ok(PrepareStats::default())
    }
    fn synchronize(&self) -> Result<()> {
        Ok(())
    }
    fn start_capture(&self) -> Result<()> {
        Ok(())
    }
    fn end_capture(&self) -> Result<Exec> {
        Ok(Exec { handle: Handle::NULL, nodes: 0 })
    }
    fn launch_graph(&self, _: Exec) -> Result<()> {
        Ok(())
    }
    fn destroy_graph(&self, _: Exec) {}
    fn fork(&self) -> Result<()> {
        Ok(())
    }
    fn unfork(&self, _: usize) -> Result<()> {
        Ok(())
    }
    fn join(&self, _: usize) -> Result<()> {
        Ok(())
    }
    fn is_dry(&self) -> bool {
        true
    }
}
