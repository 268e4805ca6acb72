//! [`Gpu`]: one card, or a dry run of one.

mod capture;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::beside::Beside;
use crate::cublaslt::WORKSPACE_BYTES;
use crate::dry::Dry;
use crate::graph::Exec;
use crate::kernel::{Arg, Launch, Unit};
use crate::library::LibraryInfo;
use crate::matmul::{Matmul, MatmulKey};
use crate::memory::{MemoryStats, Pool, Segments};
use crate::products::Tuning;
use crate::profile::Timing;
use crate::{CudaError, Result};

/// What is known of a card.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GpuInfo {
    /// Its number; 0 for a dry run.
    pub ordinal: usize,
    /// Product name.
    pub name: String,
    /// Compute capability, major and minor.
    pub capability: (u32, u32),
    /// Streaming multiprocessors.
    pub multiprocessors: u32,
    /// Shared memory a block may have, in bytes.
    pub shared_bytes_per_block: usize,
    /// Memory of the card, in bytes.
    pub memory_bytes: usize,
}

impl GpuInfo {
    /// The architecture that kernels are compiled for: `sm_90a` on Hopper, whose own instructions need the
    /// `a`, the plain name elsewhere.
    pub fn arch(&self) -> String {
        let (major, minor) = self.capability;
        let suffix = if major == 9 { "a" } else { "" };
        format!("sm_{major}{minor}{suffix}")
    }
}

/// Choices made when a GPU is opened.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GpuOptions {
    /// Most bytes that tensors may take; the card's free memory without a value.
    pub budget_bytes: Option<usize>,
    /// Fill every new block with NaN patterns, so that what a kernel leaves unwritten is seen.
    pub poison: bool,
}

/// What a device does; the rest of the crate is the same for a card and a dry run.
pub(crate) trait Backend: Segments + Send + Sync {
    fn memset(&self, pointer: u64, byte: u8, bytes: usize) -> Result<()>;
    /// Sets `words` 32-bit words.
    fn fill(&self, pointer: u64, word: u32, words: usize) -> Result<()>;
    fn upload(&self, pointer: u64, source: &[u8]) -> Result<()>;
    fn download(&self, pointer: u64, target: &mut [u8]) -> Result<()>;
    /// Starts to copy at most [`READ_BYTES`] bytes to the host.
    fn start_read(&self, pointer: u64, bytes: usize) -> Result<Ticket>;
    /// Waits for such a copy alone, not for work enqueued after it.
    fn finish_read(&self, ticket: Ticket) -> Result<Vec<u8>>;
    fn copy(&self, target: u64, source: u64, bytes: usize) -> Result<()>;
    fn launch(&self, launch: &Launch<'_>) -> Result<()>;
    /// `C`, the last of the pointers, from `A` and `B`; the workspace has [`WORKSPACE_BYTES`].
    fn matmul(&self, spec: &Matmul, pointers: [u64; 3], workspace: u64) -> Result<()>;
    fn synchronize(&self) -> Result<()>;
    /// Milliseconds of device time of what `work` enqueues.
    fn elapsed_ms(&self, work: &mut dyn FnMut() -> Result<()>) -> Result<f64> {
        work()?;
        Ok(0.0)
    }
    /// Free and total bytes of the card.
    fn memory_info(&self) -> Result<(usize, usize)>;
    fn prepare(&self, units: &[Unit]) -> Result<PrepareStats>;
    fn libraries(&self) -> Vec<LibraryInfo> {
        Vec::new()
    }
    /// Finds the fastest algorithm of each product.
    fn tune(&self, gpu: &Gpu, specs: &[Matmul]) -> Result<Vec<Tuning>> {
        let _ = (gpu, specs);
        Ok(Vec::new())
    }
    /// What follows is captured, not executed.
    fn start_capture(&self) -> Result<()>;
    fn end_capture(&self) -> Result<Exec>;
    fn launch_graph(&self, exec: Exec) -> Result<()>;
    fn destroy_graph(&self, exec: Exec);
    /// What follows goes to the second stream, after what the first has so far.
    fn fork(&self) -> Result<()>;
    /// What follows goes to the first stream; what the second has so far is known as `slot`.
    fn unfork(&self, slot: usize) -> Result<()>;
    /// The first stream goes on when what is known as `slot` is done.
    fn join(&self, slot: usize) -> Result<()>;
    /// Times each piece of work that `work` enqueues.
    fn profile(&self, work: &mut dyn FnMut() -> Result<()>) -> Result<Vec<Timing>> {
        work()?;
        Ok(Vec::new())
    }
    fn is_dry(&self) -> bool {
        false
    }
}

/// What [`Gpu::prepare`] did.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct PrepareStats {
    /// Kernels compiled by NVRTC.
    pub compiled: usize,
    /// Kernels taken from the cache on disk.
    pub cached: usize,
    /// Kernels that were loaded before.
    pub loaded: usize,
    /// Time of all of it, in milliseconds.
    pub milliseconds: f64,
}

pub(crate) struct Inner {
    info: GpuInfo,
    poison: bool,
    backend: Box<dyn Backend>,
    pool: Mutex<Pool>,
    /// Copies from the host.
    uploads: AtomicU64,
    /// Launches by kernel name: the proof that a kernel ran.
    launches: Mutex<BTreeMap<&'static str, u64>>,
    /// Distinct kernels with constants that were launched, and distinct products.
    units: Mutex<BTreeSet<Unit>>,
    matmuls: Mutex<BTreeMap<MatmulKey, Matmul>>,
    /// Scratch memory of products on each stream, taken with the first.
    workspaces: Mutex<[Option<Buffer>; 2]>,
    /// Whether work is captured now.
    capturing: AtomicBool,
    /// Whether all products go to the library.
    pub(crate) library_products: AtomicBool,
    pub(crate) beside: Beside,
    /// Who is said to hold what is allocated now.
    holder: Mutex<&'static str>,
}

/// A handle to one card and its stream, or to a dry run that counts and computes nothing.
///
/// Handles are copied freely; the card stays open to the end of the process, as CUDA's primary context does.
#[derive(Clone, Copy)]
pub struct Gpu(pub(crate) &'static Inner);

impl PartialEq for Gpu {
    fn eq(&self, other: &Gpu) -> bool {
        std::ptr::eq(self.0, other.0)
    }
}
impl Eq for Gpu {}

impl fmt::Debug for Gpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Gpu({self})")
    }
}

impl fmt::Display for Gpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_dry() { f.write_str("cuda (dry run)") } else { write!(f, "cuda:{}", self.0.info.ordinal) }
    }
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // The books hold no invariant that a panicking holder could break half-way.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Gpu {
    pub(crate) fn with_backend(info: GpuInfo, backend: Box<dyn Backend>, options: &GpuOptions) -> Gpu {
        let budget = options.budget_bytes.unwrap_or(info.memory_bytes);
        Gpu(Box::leak(Box::new(Inner {
            info,
            poison: options.poison,
            backend,
            pool: Mutex::new(Pool::new(budget)),
            uploads: AtomicU64::new(0),
            launches: Mutex::default(),
            units: Mutex::default(),
            matmuls: Mutex::default(),
            workspaces: Mutex::default(),
            capturing: AtomicBool::new(false),
            library_products: AtomicBool::new(false),
            beside: Beside::default(),
            holder: Mutex::new("activations"),
        })))
    }

    /// A device that allocates, launches and multiplies nothing but counts everything: what a step needs of
    /// memory and kernels, found without a GPU. Values read from it are zeros.
    pub fn dry(capability: (u32, u32), options: &GpuOptions) -> Gpu {
        let shared_bytes_per_block = match capability {
            (8, 0) => 163 << 10,
            (8, _) | (12, _) => 99 << 10,
            _ => 227 << 10,
        };
        let info = GpuInfo {
            ordinal: 0,
            name: "dry run".into(),
            capability,
            multiprocessors: 132,
            shared_bytes_per_block,
            memory_bytes: 1 << 46,
        };
        Gpu::with_backend(info, Box::new(Dry::default()), options)
    }

    /// What is known of the card.
    pub fn info(&self) -> &'static GpuInfo {
        &self.0.info
    }

    /// Whether this is a dry run: nothing is computed and values read are zeros.
    pub fn is_dry(&self) -> bool {
        self.0.backend.is_dry()
    }

    pub(crate) fn backend(&self) -> &'static dyn Backend {
        self.0.backend.as_ref()
    }

    /// A block of device memory, its content undefined.
    pub fn alloc(&self, bytes: usize) -> Result<Buffer> {
        self.alloc_for(bytes, *lock(&self.0.holder))
    }

    /// A block in the name of `holder`, for the memory plan and for errors.
    pub fn alloc_for(&self, bytes: usize, holder: &'static str) -> Result<Buffer> {
        let start = lock(&self.0.pool).take(bytes, holder, &SegmentsOf(self.0.backend.as_ref()))?;
        let buffer = Buffer { gpu: *self, start, bytes };
        if self.0.poison {
            self.memset(&buffer, 0, bytes, 0xff)?;
        }
        Ok(buffer)
    }

    /// Names the holder of what is allocated until the guard is dropped.
    pub fn holding(&self, holder: &'static str) -> Holding {
        let old = std::mem::replace(&mut *lock(&self.0.holder), holder);
        Holding { gpu: *self, old }
    }

    /// Holds `bytes` from the driver at once, where the budget allows.
    pub fn reserve(&self, bytes: usize) {
        lock(&self.0.pool).reserve(bytes, &SegmentsOf(self.0.backend.as_ref()));
    }

    /// Sets bytes.
    pub fn memset(&self, buffer: &Buffer, offset: usize, bytes: usize, byte: u8) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        buffer.check(offset, bytes)?;
        self.note_use(&[buffer]);
        self.0.backend.memset(buffer.pointer(offset), byte, bytes)
    }

    /// Sets `words` 32-bit words from `offset` bytes on, a multiple of 4.
    pub fn fill(&self, buffer: &Buffer, offset: usize, words: usize, word: u32) -> Result<()> {
        if words == 0 {
            return Ok(());
        }
        buffer.check(offset, words.saturating_mul(4))?;
        self.note_use(&[buffer]);
        self.0.backend.fill(buffer.pointer(offset), word, words)
    }

    /// Copies host bytes to the device, in stream order; `source` may be changed as soon as this returns.
    pub fn upload(&self, buffer: &Buffer, offset: usize, source: &[u8]) -> Result<()> {
        if source.is_empty() {
            return Ok(());
        }
        buffer.check(offset, source.len())?;
        self.refuse_in_capture("a copy from the host")?;
        self.0.uploads.fetch_add(1, Ordering::Relaxed);
        self.0.backend.upload(buffer.pointer(offset), source)
    }

    /// Copies device bytes to the host; waits for all work before.
    pub fn download(&self, buffer: &Buffer, offset: usize, target: &mut [u8]) -> Result<()> {
        if target.is_empty() {
            return Ok(());
        }
        buffer.check(offset, target.len())?;
        self.refuse_in_capture("a copy to the host")?;
        self.0.backend.download(buffer.pointer(offset), target)
    }

    /// Starts to copy a few bytes (at most 4096) to the host. Unlike [`Gpu::download`], neither this nor the wait
    /// later holds up work that is enqueued in between.
    pub fn read_later(&self, buffer: &Buffer, offset: usize, bytes: usize) -> Result<Reading> {
        buffer.check(offset, bytes)?;
        self.refuse_in_capture("a copy to the host")?;
        if bytes > READ_BYTES {
            return Err(CudaError::Unsupported {
                what: "read_later".into(),
                reason: format!("{bytes} bytes, at most {READ_BYTES} can be read a step late"),
            });
        }
        Ok(Reading { gpu: *self, ticket: self.0.backend.start_read(buffer.pointer(offset), bytes)? })
    }

    /// Copies bytes between two buffers of this device.
    pub fn copy(
        &self,
        target: &Buffer,
        target_offset: usize,
        source: &Buffer,
        source_offset: usize,
        bytes: usize,
    ) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        target.check(target_offset, bytes)?;
        source.check(source_offset, bytes)?;
        self.note_use(&[target, source]);
        self.0.backend.copy(target.pointer(target_offset), source.pointer(source_offset), bytes)
    }

    /// Enqueues a kernel. Compiles it, or takes it from the cache, if this is its first launch.
    ///
    /// # Errors
    /// A grid or block that the hardware cannot take, a kernel that does not compile, a driver error.
    pub fn launch(&self, launch: Launch<'_>) -> Result<()> {
        let threads: u64 = launch.block.iter().map(|&n| u64::from(n)).product();
        let [x, y, z] = launch.grid;
        let in_range = |n: u32, most: u32| (1..=most).contains(&n);
        let grid = in_range(x, i32::MAX as u32) && in_range(y, 65535) && in_range(z, 65535);
        let shared = launch.shared_bytes as usize <= self.0.info.shared_bytes_per_block;
        if !(1..=1024).contains(&threads) || !grid || !shared {
            return Err(CudaError::Unsupported {
                what: format!("kernel {}", launch.unit.name),
                reason: format!(
                    "a grid of {:?} blocks of {:?} threads with {} bytes of shared memory",
                    launch.grid, launch.block, launch.shared_bytes
                ),
            });
        }
        for arg in &launch.args {
            let (buffer, offset, bytes) = match arg {
                Arg::Buffer(buffer, offset) => (buffer, *offset, 0),
                Arg::Tiles(tiles) => (&tiles.buffer, tiles.offset_bytes, tiles.bytes()),
                _ => continue,
            };
            buffer.check(offset, bytes)?;
            debug_assert!(buffer.gpu == *self, "{}: buffer of another device", launch.unit.name);
            self.note_use(&[buffer]);
        }
        self.count(launch.unit.name);
        {
            // Known after its first launch: the constants are text, not to be copied at every later one.
            let mut units = lock(&self.0.units);
            if !units.contains(&launch.unit) {
                units.insert(launch.unit.clone());
            }
        }
        self.0.backend.launch(&launch)
    }

    /// Compiles all kernels that are not loaded yet, in parallel, and loads them: the start of a run takes as
    /// long as its slowest kernel. Without this each is compiled by its first launch.
    ///
    /// # Errors
    /// A kernel that does not compile, a driver error.
    pub fn prepare(&self, units: &[Unit]) -> Result<PrepareStats> {
        self.0.backend.prepare(units)
    }

    /// Times the algorithms of each product on random data and uses the fastest from then on, in later
    /// processes too: the choice is kept on disk by card, driver and library. Products that were tuned before
    /// cost nothing. An untuned product takes the library's own first guess.
    ///
    /// Only algorithms that sum in fp32 and in a fixed order take part. Nothing happens on a dry run.
    ///
    /// # Errors
    /// A driver error. A product whose matrices do not fit in memory is left untuned.
    pub fn tune(&self, specs: &[Matmul]) -> Result<Vec<Tuning>> {
        self.refuse_in_capture("a search for algorithms")?;
        self.0.backend.tune(self, specs)
    }

    /// Milliseconds of device time that the work enqueued by `work` takes; 0 on a dry run. Waits for its end.
    ///
    /// # Errors
    /// Those of `work`, a driver error.
    pub fn elapsed_ms(&self, work: impl FnOnce() -> Result<()>) -> Result<f64> {
        self.refuse_in_capture("a measurement")?;
        let mut work = Some(work);
        self.0.backend.elapsed_ms(&mut || work.take().map_or(Ok(()), |work| work()))
    }

    /// Free and total bytes of the card, as the driver counts them: other processes take part.
    pub fn memory_info(&self) -> Result<(usize, usize)> {
        self.0.backend.memory_info()
    }

    /// The libraries in use; none on a dry run.
    pub fn libraries(&self) -> Vec<LibraryInfo> {
        self.0.backend.libraries()
    }

    /// Waits until all work is done; reports errors of kernels that ran before.
    pub fn synchronize(&self) -> Result<()> {
        self.refuse_in_capture("a wait")?;
        self.0.backend.synchronize()
    }

    /// Most bytes that buffers may take.
    pub fn budget_bytes(&self) -> usize {
        lock(&self.0.pool).budget()
    }

    /// Memory in use and its peak.
    pub fn memory(&self) -> MemoryStats {
        lock(&self.0.pool).stats()
    }

    /// Starts a new measurement of the peak.
    pub fn reset_peak(&self) {
        lock(&self.0.pool).reset_peak();
    }

    pub(crate) fn count(&self, name: &'static str) {
        *lock(&self.0.launches).entry(name).or_default() += 1;
    }

    pub(crate) fn set_launches(&self, launches: BTreeMap<&'static str, u64>) {
        *lock(&self.0.launches) = launches;
    }

    pub(crate) fn add_launches(&self, more: &BTreeMap<&'static str, u64>) {
        let mut launches = lock(&self.0.launches);
        more.iter().for_each(|(name, count)| *launches.entry(name).or_default() += count);
    }

    /// How often each kernel was launched; products count as `matmul`.
    pub fn launches(&self) -> BTreeMap<&'static str, u64> {
        lock(&self.0.launches).clone()
    }

    /// Copies from the host so far.
    pub fn uploads(&self) -> u64 {
        self.0.uploads.load(Ordering::Relaxed)
    }

    pub(crate) fn note_matmul(&self, spec: &Matmul) {
        lock(&self.0.matmuls).entry(spec.key()).or_insert(*spec);
    }

    /// Every product asked for so far. Products that differ only in their factors are one, except that `beta`
    /// of 0 is apart.
    pub fn matmuls(&self) -> Vec<Matmul> {
        lock(&self.0.matmuls).values().copied().collect()
    }

    /// Scratch memory of products, [`WORKSPACE_BYTES`] of it.
    pub(crate) fn workspace(&self) -> Result<u64> {
        let mut workspaces = lock(&self.0.workspaces);
        let workspace = &mut workspaces[usize::from(self.0.beside.is_active())];
        if let Some(buffer) = workspace.as_ref() {
            return Ok(buffer.start);
        }
        let buffer = self.alloc_for(WORKSPACE_BYTES, "workspace")?;
        Ok(workspace.insert(buffer).start)
    }

    /// Every kernel launched so far, with its constants.
    pub fn units(&self) -> Vec<Unit> {
        lock(&self.0.units).iter().cloned().collect()
    }
}

/// Most bytes of one [`Gpu::read_later`].
pub(crate) const READ_BYTES: usize = 4096;

/// Where a copy to the host is on its way to.
pub(crate) struct Ticket {
    pub(crate) host: usize,
    pub(crate) event: crate::driver::Handle,
    pub(crate) bytes: usize,
}

/// Bytes on their way to the host.
#[must_use]
pub struct Reading {
    gpu: Gpu,
    ticket: Ticket,
}

impl Reading {
    /// Waits for the bytes, and for nothing enqueued after them.
    pub fn wait(self) -> Result<Vec<u8>> {
        self.gpu.0.backend.finish_read(self.ticket)
    }
}

/// Restores the former holder when dropped.
#[must_use]
pub struct Holding {
    gpu: Gpu,
    old: &'static str,
}

impl Drop for Holding {
    fn drop(&mut self) {
        *lock(&self.gpu.0.holder) = self.old;
    }
}

/// A block of device memory; goes back to the allocator when dropped.
pub struct Buffer {
    gpu: Gpu,
    start: u64,
    bytes: usize,
}

impl Buffer {
    /// The device it is on.
    pub fn gpu(&self) -> Gpu {
        self.gpu
    }

    /// Its size in bytes.
    pub fn size_bytes(&self) -> usize {
        self.bytes
    }

    pub(crate) fn pointer(&self, offset: usize) -> u64 {
        self.start + offset as u64
    }

    pub(crate) fn check(&self, offset: usize, bytes: usize) -> Result<()> {
        if offset.checked_add(bytes).is_some_and(|end| end <= self.bytes) {
            return Ok(());
        }
        Err(CudaError::Unsupported {
            what: "device buffer".into(),
            reason: format!("bytes {offset} to {offset}+{bytes} of {}", self.bytes),
        })
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // What work on the second stream used is free when the first waits for it.
        if !self.gpu.0.beside.defer(self.start) {
            self.gpu.give_back(self.start);
        }
    }
}

impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Buffer({} bytes on {})", self.bytes, self.gpu)
    }
}

struct SegmentsOf<'a>(&'a dyn Backend);
impl Segments for SegmentsOf<'_> {
    fn allocate(&self, bytes: usize) -> Option<u64> {
        self.0.allocate(bytes)
    }
}
