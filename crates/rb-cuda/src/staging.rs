//! Page-locked host memory through which copies to the device go without a wait.

use std::ffi::{c_int, c_void};
use std::sync::Mutex;

use crate::Result;
use crate::driver::{Driver, Handle};
use crate::gpu::lock;
use crate::library::call;

/// Larger copies are rare (weights at the start) and take the driver's way.
const MOST_BYTES: usize = 8 << 20;
const LEAST_BYTES: usize = 64 << 10;
const NOT_READY: c_int = cudarc::driver::sys::CUresult::CUDA_ERROR_NOT_READY as c_int;

/// Blocks that are used in turn, each again when its copy is done.
#[derive(Default)]
pub(crate) struct Staging {
    blocks: Mutex<Vec<Block>>,
}

struct Block {
    host: usize,
    bytes: usize,
    /// Recorded after its last copy.
    event: Handle,
}

impl Staging {
    /// Enqueues a copy of `source` to device memory; false where it is too large. `source` may change as soon as this
    /// returns.
    ///
    /// # Safety
    /// `pointer` is device memory of at least `source.len()` bytes; the context is current and the stream is of it.
    pub(crate) unsafe fn copy(
        &self,
        driver: &Driver,
        pointer: u64,
        source: &[u8],
        stream: Handle,
    ) -> Result<bool> {
        if source.len() > MOST_BYTES {
            return Ok(false);
        }
        let mut blocks = lock(&self.blocks);
        // SAFETY: the events are alive; asking changes nothing.
        let idle = |block: &Block| unsafe { (driver.api.cuEventQuery)(block.event) } != NOT_READY;
        let found = blocks.iter().position(|block| block.bytes >= source.len() && idle(block));
        let at = match found {
            Some(at) => at,
            None => {
                blocks.push(Block::new(driver, source.len().next_power_of_two().max(LEAST_BYTES))?);
                blocks.len() - 1
            }
        };
        let block = &blocks[at];
        let to = block.host as *mut u8;
        // SAFETY: the block holds at least that many bytes and no copy from it is under way; the ranges are of
        // different allocations.
        unsafe { std::ptr::copy_nonoverlapping(source.as_ptr(), to, source.len()) };
        let from: *const c_void = to.cast();
        // SAFETY: the caller's promise for the target; the block is page-locked and not written before its event.
        unsafe { call!(driver, cuMemcpyHtoDAsync_v2(pointer, from, source.len(), stream)) }?;
        // SAFETY: event and stream are alive and of one context.
        unsafe { call!(driver, cuEventRecord(block.event, stream)) }?;
        Ok(true)
    }
}

impl Block {
    fn new(driver: &Driver, bytes: usize) -> Result<Block> {
        let (mut host, mut event) = (std::ptr::null_mut(), Handle::NULL);
        // SAFETY: the argument points to an address that lives through the call; the context is current. The memory is
        // never freed: blocks are reused to the end of the process.
        unsafe { call!(driver, cuMemHostAlloc(&mut host, bytes, 0)) }?;
        // SAFETY: the argument points to a handle that lives through the call; the context is current.
        unsafe { call!(driver, cuEventCreate(&mut event, 0)) }?;
        Ok(Block { host: host as usize, bytes, event })
    }
}
