//! A real card: one context, one stream in whose order all work is, and a second beside it.

mod marks;

use std::collections::BTreeMap;
use std::ffi::{CString, c_int, c_uint, c_void};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use cudarc::driver::sys::{
    CUdevice_attribute, CUevent_flags, CUfunction_attribute, CUlaunchAttribute, CUlaunchAttributeID,
    CUlaunchAttributeValue, CUlaunchConfig, CUstream_flags, CUstreamCaptureMode, CUtensorMapDataType,
    CUtensorMapFloatOOBfill, CUtensorMapInterleave, CUtensorMapL2promotion, CUtensorMapSwizzle,
};

use crate::beside::SLOTS;
use crate::compile::{Compiler, in_parallel};
use crate::cublaslt::CublasLt;
use crate::discover::Search;
use crate::driver::{Driver, Handle, TensorMap};
use crate::gpu::{Backend, PrepareStats, READ_BYTES, Ticket, lock};
use crate::graph::Exec;
use crate::kernel::{Arg, Launch, Tiles, Unit};
use crate::library::{LibraryInfo, call};
use crate::matmul::Matmul;
use crate::memory::Segments;
use crate::products::{Products, Tuning};
use crate::profile::Timing;
use crate::staging::Staging;
use crate::{CudaError, Gpu, GpuOptions, Result};

pub(crate) use marks::HOLD_BACK;
use marks::Mark;

/// Dynamic shared memory that a kernel may have without asking.
const PLAIN_SHARED_BYTES: u32 = 48 << 10;
const OUT_OF_MEMORY: c_int = cudarc::driver::sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY as c_int;

impl Gpu {
    /// Opens a card by its number among those that the driver shows, with NVRTC and cuBLASLt.
    ///
    /// # Errors
    /// [`CudaError::Missing`] without the driver or a library, [`CudaError::NoGpu`] where the driver shows no
    /// such card or one older than compute capability 8.0, [`CudaError::Call`] where opening fails.
    pub fn open(ordinal: usize, options: &GpuOptions) -> Result<Gpu> {
        let search = Search::of_this_machine();
        let driver = Driver::open(&search)?;
        let device = driver.device(ordinal)?;
        let info = driver.info(ordinal, device)?;
        if info.capability < (8, 0) {
            return Err(CudaError::NoGpu {
                reason: format!(
                    "{} has compute capability {}.{}",
                    info.name, info.capability.0, info.capability.1
                ),
                remedy: "cards from compute capability 8.0 (Ampere, RTX 30) on are supported",
            });
        }
        let compiler = Compiler::open(&search, Some(driver.version.0))?;
        let mut context = Handle::NULL;
        // SAFETY: the argument points to a handle that lives through the call; the device exists.
        unsafe { call!(driver, cuDevicePrimaryCtxRetain(&mut context, device)) }?;
        // SAFETY: the context was just retained and is never released.
        unsafe { call!(driver, cuCtxSetCurrent(context)) }?;
        let new_stream = || {
            let mut stream = Handle::NULL;
            let flags = CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
            // SAFETY: the argument points to a handle that lives through the call; a context is current.
            unsafe { call!(driver, cuStreamCreate(&mut stream, flags)) }.map(|()| stream)
        };
        let streams = [new_stream()?, new_stream()?];
        let new_event = || {
            let mut event = Handle::NULL;
            let flags = CUevent_flags::CU_EVENT_DISABLE_TIMING as u32;
            // SAFETY: the argument points to a handle that lives through the call; a context is current.
            unsafe { call!(driver, cuEventCreate(&mut event, flags)) }.map(|()| event)
        };
        let forked = new_event()?;
        let mut finished = [Handle::NULL; SLOTS];
        for event in &mut finished {
            *event = new_event()?;
        }
        let lt = CublasLt::open(&search, &driver)?;
        let uses_host_pages = driver.attribute(
            device,
            CUdevice_attribute::CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES,
        )? != 0;
        let products = Products::new(lt, &info.name, &driver.library().version);
        let arch = info.arch();
        let shared_limit = info.shared_bytes_per_block;
        let live = Live {
            driver,
            context,
            streams,
            on_second: AtomicBool::new(false),
            forked,
            finished,
            compiler,
            products,
            arch,
            shared_limit,
            early_launches: info.capability >= (9, 0),
            uses_host_pages,
            loaded: Mutex::default(),
            idle_slots: Mutex::default(),
            staging: Staging::default(),
            marks: Mutex::default(),
        };
        let (free, _) = live.memory_info()?;
        let budget_bytes = Some(options.budget_bytes.unwrap_or(free));
        Ok(Gpu::with_backend(info, Box::new(live), &GpuOptions { budget_bytes, ..options.clone() }))
    }

    /// How many cards the driver shows.
    ///
    /// # Errors
    /// As [`Gpu::open`] without a driver or a card.
    pub fn count_devices() -> Result<usize> {
        Driver::open(&Search::of_this_machine())?.device_count()
    }
}

/// A kernel in the card's memory.
#[derive(Clone, Copy)]
struct Loaded {
    function: Handle,
    /// Dynamic shared memory that it may have so far.
    shared_bytes: u32,
    /// Whether its launches may begin before the work before them ends.
    early: bool,
}

struct Live {
    driver: Driver,
    context: Handle,
    streams: [Handle; 2],
    /// Whether what is enqueued now goes to the second stream.
    on_second: AtomicBool,
    /// Recorded on the first stream where work beside begins.
    forked: Handle,
    /// Recorded on the second stream where work beside ends.
    finished: [Handle; SLOTS],
    compiler: Compiler,
    products: Products,
    arch: String,
    shared_limit: usize,
    /// Whether the card lets a launch begin before the one before it ends: Hopper and newer.
    early_launches: bool,
    /// Whether copies from pageable memory may read it after the call returns.
    uses_host_pages: bool,
    loaded: Mutex<BTreeMap<Unit, Loaded>>,
    /// Page-locked host memory and events that no reading uses now.
    idle_slots: Mutex<Vec<Slot>>,
    staging: Staging,
    /// What was enqueued since a profile began; nothing where none is made.
    marks: Mutex<Option<Vec<Mark>>>,
}

/// Page-locked host memory with the event that says when it holds what was read.
struct Slot {
    host: usize,
    event: Handle,
}

impl Live {
    /// Makes the context current on this thread: every call of the driver needs it.
    fn enter(&self) -> Result<()> {
        // SAFETY: the context was retained when the card was opened and is never released.
        unsafe { call!(self.driver, cuCtxSetCurrent(self.context)) }
    }

    /// The stream of what is enqueued now.
    fn stream(&self) -> Handle {
        self.streams[usize::from(self.on_second.load(Ordering::Relaxed))]
    }

    fn load(&self, unit: &Unit, code: &[u8]) -> Result<Loaded> {
        let (mut module, mut function) = (Handle::NULL, Handle::NULL);
        // SAFETY: the image is a whole CUBIN, or PTX with its zero byte, checked by the cache's checksum or
        // fresh from NVRTC; the driver copies it. The module is never unloaded, so its function stays.
        unsafe { call!(self.driver, cuModuleLoadData(&mut module, code.as_ptr().cast())) }?;
        let name = CString::new(unit.name).map_err(|_| CudaError::Unsupported {
            what: format!("kernel {}", unit.name),
            reason: "its name holds a zero byte".into(),
        })?;
        // SAFETY: the module is loaded and the name is zero-terminated.
        unsafe { call!(self.driver, cuModuleGetFunction(&mut function, module, name.as_ptr())) }?;
        let early = self.early_launches && unit.awaits_earlier_work();
        Ok(Loaded { function, shared_bytes: PLAIN_SHARED_BYTES, early })
    }

    fn new_slot(&self) -> Result<Slot> {
        let (mut host, mut event) = (std::ptr::null_mut(), Handle::NULL);
        // SAFETY: the argument points to an address that lives through the call; the context is current. The
        // memory is never freed: slots are reused to the end of the process.
        unsafe { call!(self.driver, cuMemHostAlloc(&mut host, READ_BYTES, 0)) }?;
        // SAFETY: the argument points to a handle that lives through the call; the context is current.
        unsafe { call!(self.driver, cuEventCreate(&mut event, 0)) }?;
        Ok(Slot { host: host as usize, event })
    }

    /// The kernel of a launch, allowed its shared memory.
    fn kernel(&self, launch: &Launch<'_>) -> Result<Loaded> {
        let mut loaded = lock(&self.loaded);
        let entry = match loaded.get_mut(&launch.unit) {
            Some(entry) => entry,
            None => {
                let compiled = self.compiler.compile(&launch.unit, &self.arch)?;
                let fresh = self.load(&launch.unit, &compiled.code)?;
                loaded.entry(launch.unit.clone()).or_insert(fresh)
            }
        };
        if launch.shared_bytes > entry.shared_bytes {
            let attribute = CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES as c_int;
            let bytes = launch.shared_bytes as c_int;
            // SAFETY: the function is loaded and the context is current; the driver checks the size.
            let status = unsafe { call!(self.driver, cuFuncSetAttribute(entry.function, attribute, bytes)) };
            status.map_err(|_| CudaError::Unsupported {
                what: format!("kernel {}", launch.unit.name),
                reason: format!(
                    "{bytes} bytes of dynamic shared memory beside what it declares, the card has {}",
                    self.shared_limit
                ),
            })?;
            entry.shared_bytes = launch.shared_bytes;
        }
        Ok(*entry)
    }

    /// What the copy engine needs to know of a tensor.
    fn tensor_map(&self, tiles: &Tiles<'_>) -> Result<TensorMap> {
        let mut map = TensorMap::of(0);
        let [batch, tokens, heads, size] = tiles.shape.map(|n| n as u64);
        let stride = 2 * tiles.token_stride as u64;
        let sizes = [size, heads, tokens, batch];
        let strides = [2 * size, stride, stride * tokens];
        let (boxes, steps) = ([64u32, 1, tiles.box_tokens as u32, 1], [1u32; 4]);
        let start = tiles.buffer.pointer(tiles.offset_bytes) as usize as *mut c_void;
        // SAFETY: the arrays have the lengths that four dimensions ask for and live through the call, which writes
        // the map alone; the address is not read.
        unsafe {
            call!(
                self.driver,
                cuTensorMapEncodeTiled(
                    &mut map,
                    CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 as c_uint,
                    4,
                    start,
                    sizes.as_ptr(),
                    strides.as_ptr(),
                    boxes.as_ptr(),
                    steps.as_ptr(),
                    CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE as c_uint,
                    CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B as c_uint,
                    CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B as c_uint,
                    CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE as c_uint
                )
            )
        }?;
        Ok(map)
    }

    /// Names the last kernel in an error of a library.
    fn name_kernel(&self, error: CudaError) -> CudaError {
        match error {
            CudaError::Call { call, status, .. } => self.driver.error(call, status),
            other => other,
        }
    }
}

impl Segments for Live {
    fn allocate(&self, bytes: usize) -> Option<u64> {
        let mut pointer = 0u64;
        if let Err(error) = self.enter() {
            tracing::error!("{error}");
            return None;
        }
        // SAFETY: the argument points to an address that lives through the call; the context is current.
        let status = unsafe { (self.driver.api.cuMemAlloc_v2)(&mut pointer, bytes) };
        if status != 0 && status != OUT_OF_MEMORY {
            // Memory is not what is short: say what is, before the error about memory that follows.
            if let Err(error) = self.driver.check("cuMemAlloc_v2", status) {
                tracing::error!("{error}");
            }
        }
        (status == 0).then_some(pointer)
    }
}

impl Backend for Live {
    fn memset(&self, pointer: u64, byte: u8, bytes: usize) -> Result<()> {
        self.enter()?;
        // SAFETY: the range lies in a live block of this device: `Gpu` checks it.
        unsafe { call!(self.driver, cuMemsetD8Async(pointer, byte, bytes, self.stream())) }?;
        self.mark("fill", String::new, 0.0, bytes as f64)
    }

    fn fill(&self, pointer: u64, word: u32, words: usize) -> Result<()> {
        self.enter()?;
        // SAFETY: the range lies in a live block of this device: `Gpu` checks it; the address is a multiple of 4.
        unsafe { call!(self.driver, cuMemsetD32Async(pointer, word, words, self.stream())) }?;
        self.mark("fill", String::new, 0.0, 4.0 * words as f64)
    }

    fn upload(&self, pointer: u64, source: &[u8]) -> Result<()> {
        self.enter()?;
        // SAFETY: the range lies in a live block of this device: `Gpu` checks it; the context is current.
        if unsafe { self.staging.copy(&self.driver, pointer, source, self.stream()) }? {
            return self.mark("copy", String::new, 0.0, source.len() as f64);
        }
        let from: *const c_void = source.as_ptr().cast();
        // SAFETY: the range lies in a live block of this device: `Gpu` checks it. The source is pageable host
        // memory, which the driver copies to a buffer of its own before it returns, so the source may change;
        // the card that reads host pages itself is waited for below.
        unsafe { call!(self.driver, cuMemcpyHtoDAsync_v2(pointer, from, source.len(), self.stream())) }?;
        if self.uses_host_pages { self.synchronize() } else { Ok(()) }
    }

    fn download(&self, pointer: u64, target: &mut [u8]) -> Result<()> {
        self.enter()?;
        let to: *mut c_void = target.as_mut_ptr().cast();
        // SAFETY: the range lies in a live block of this device: `Gpu` checks it. The target is borrowed until
        // the copy is done, which is waited for below.
        let copied =
            unsafe { call!(self.driver, cuMemcpyDtoHAsync_v2(to, pointer, target.len(), self.stream())) };
        // Even after an error nothing may write to the target once it is given back.
        let waited = self.synchronize();
        copied.and(waited)
    }

    fn start_read(&self, pointer: u64, bytes: usize) -> Result<Ticket> {
        self.enter()?;
        let idle = lock(&self.idle_slots).pop();
        let slot = match idle {
            Some(slot) => slot,
            None => self.new_slot()?,
        };
        let to = slot.host as *mut c_void;
        // SAFETY: the range lies in a live block of this device and is no longer than a slot: `Gpu` checks both.
        // The slot is page-locked memory that nothing else uses until the ticket is redeemed.
        unsafe { call!(self.driver, cuMemcpyDtoHAsync_v2(to, pointer, bytes, self.stream())) }?;
        // SAFETY: event and stream are alive and of one context.
        unsafe { call!(self.driver, cuEventRecord(slot.event, self.stream())) }?;
        Ok(Ticket { host: slot.host, event: slot.event, bytes })
    }

    fn finish_read(&self, ticket: Ticket) -> Result<Vec<u8>> {
        self.enter()?;
        // SAFETY: the event is alive and was recorded after the copy.
        unsafe { call!(self.driver, cuEventSynchronize(ticket.event)) }?;
        // SAFETY: the slot holds at least that many bytes, all written by the copy that is now done.
        let bytes = unsafe { std::slice::from_raw_parts(ticket.host as *const u8, ticket.bytes) }.to_vec();
        lock(&self.idle_slots).push(Slot { host: ticket.host, event: ticket.event });
        Ok(bytes)
    }

    fn copy(&self, target: u64, source: u64, bytes: usize) -> Result<()> {
        self.enter()?;
        // SAFETY: both ranges lie in live blocks of this device: `Gpu` checks them.
        unsafe { call!(self.driver, cuMemcpyDtoDAsync_v2(target, source, bytes, self.stream())) }?;
        self.mark("copy", String::new, 0.0, 2.0 * bytes as f64)
    }

    fn launch(&self, launch: &Launch<'_>) -> Result<()> {
        self.enter()?;
        let Loaded { function, early, .. } = self.kernel(launch)?;
        // Every argument in a slot of its own, as wide as the widest; a narrower one in the first bytes of it
        // (little-endian).
        let word = |x: u64| Ok(TensorMap::of(x));
        let slots = launch.args.iter().map(|arg| match *arg {
            Arg::Buffer(buffer, offset) => word(buffer.pointer(offset)),
            Arg::Null => word(0),
            Arg::F32(x) => word(u64::from(x.to_bits())),
            Arg::I32(x) => word(u64::from(x.cast_unsigned())),
            Arg::U32(x) => word(u64::from(x)),
            Arg::I64(x) => word(x.cast_unsigned()),
            Arg::U64(x) => word(x),
            Arg::Words(words) => Ok(TensorMap(words)),
            Arg::Tiles(tiles) => self.tensor_map(&tiles),
        });
        let mut slots = slots.collect::<Result<Vec<TensorMap>>>()?;
        let mut pointers: Vec<*mut c_void> =
            slots.iter_mut().map(|slot| std::ptr::from_mut(slot).cast()).collect();
        let id = CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
        let value = CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 };
        let mut attribute = CUlaunchAttribute { id, pad: [0; 4], value };
        let config = CUlaunchConfig {
            gridDimX: launch.grid[0],
            gridDimY: launch.grid[1],
            gridDimZ: launch.grid[2],
            blockDimX: launch.block[0],
            blockDimY: launch.block[1],
            blockDimZ: launch.block[2],
            sharedMemBytes: launch.shared_bytes,
            hStream: self.stream().0.cast(),
            attrs: &mut attribute,
            numAttrs: u32::from(early),
        };
        self.driver.note_kernel(launch.unit.name);
        // SAFETY: the function is loaded in the current context. The arguments are as many and of the types
        // that the kernel's Rust file states, which the comparisons with the host path check; each slot is at
        // least as wide as its argument and lives through the call, which copies it, as do the attribute and what
        // points at it. Buffers stay alive or are reused only by later work on this stream, which waits for this
        // kernel; where it may begin early it waits for what is before it.
        unsafe {
            call!(
                self.driver,
                cuLaunchKernelEx(&config, function, pointers.as_mut_ptr(), std::ptr::null_mut())
            )
        }?;
        self.mark(launch.unit.name, || launch.about.clone(), launch.flops, launch.moved_bytes)
    }

    fn matmul(&self, spec: &Matmul, pointers: [u64; 3], workspace: u64) -> Result<()> {
        self.enter()?;
        // SAFETY: the context is current; `Gpu` checks that the matrices lie in live blocks of this device, and
        // the workspace is used by this stream alone.
        unsafe { self.products.enqueue(spec, pointers, workspace, self.stream()) }
            .map_err(|error| self.name_kernel(error))?;
        self.mark("matmul", || spec.to_string(), spec.flops(), spec.moved_bytes())
    }

    fn synchronize(&self) -> Result<()> {
        self.enter()?;
        // SAFETY: the stream is alive.
        unsafe { call!(self.driver, cuStreamSynchronize(self.stream())) }
    }

    fn elapsed_ms(&self, work: &mut dyn FnMut() -> Result<()>) -> Result<f64> {
        self.enter()?;
        let (start, end) = (Event::new(&self.driver)?, Event::new(&self.driver)?);
        start.record(self.stream())?;
        work()?;
        self.enter()?;
        end.record(self.stream())?;
        let mut milliseconds = 0f32;
        // SAFETY: the event is alive and was recorded.
        unsafe { call!(self.driver, cuEventSynchronize(end.event)) }?;
        // SAFETY: both events are done; the argument points to a float that lives through the call.
        unsafe { call!(self.driver, cuEventElapsedTime(&mut milliseconds, start.event, end.event)) }?;
        Ok(f64::from(milliseconds))
    }

    fn memory_info(&self) -> Result<(usize, usize)> {
        self.enter()?;
        let (mut free, mut total) = (0usize, 0usize);
        // SAFETY: both arguments point to sizes that live through the call; the context is current.
        unsafe { call!(self.driver, cuMemGetInfo_v2(&mut free, &mut total)) }?;
        Ok((free, total))
    }

    fn prepare(&self, units: &[Unit]) -> Result<PrepareStats> {
        let start = Instant::now();
        let mut wanted: Vec<Unit> = units.to_vec();
        wanted.sort();
        wanted.dedup();
        let distinct = wanted.len();
        {
            let loaded = lock(&self.loaded);
            wanted.retain(|unit| !loaded.contains_key(unit));
        }
        let compiled = in_parallel(&wanted, |unit| self.compiler.compile(unit, &self.arch))?;
        self.enter()?;
        let mut loaded = lock(&self.loaded);
        let mut stats = PrepareStats { loaded: distinct - wanted.len(), ..PrepareStats::default() };
        for (unit, compiled) in wanted.into_iter().zip(compiled) {
            if compiled.cached {
                stats.cached += 1;
            } else {
                stats.compiled += 1;
            }
            let fresh = self.load(&unit, &compiled.code)?;
            loaded.entry(unit).or_insert(fresh);
        }
        stats.milliseconds = start.elapsed().as_secs_f64() * 1e3;
        Ok(stats)
    }

    fn libraries(&self) -> Vec<LibraryInfo> {
        vec![self.driver.library(), self.compiler.library(), self.products.library()]
    }

    fn start_capture(&self) -> Result<()> {
        self.enter()?;
        // Other threads may allocate meanwhile, and so may the work itself: nothing of that is captured.
        let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED as c_int;
        // SAFETY: the stream is alive and captures nothing: `Gpu` sees to that.
        unsafe { call!(self.driver, cuStreamBeginCapture_v2(self.streams[0], mode)) }
    }

    fn end_capture(&self) -> Result<Exec> {
        self.enter()?;
        let (mut graph, mut exec) = (Handle::NULL, Handle::NULL);
        // SAFETY: the argument points to a handle that lives through the call; the stream is alive.
        unsafe { call!(self.driver, cuStreamEndCapture(self.streams[0], &mut graph)) }?;
        let mut nodes = 0usize;
        // SAFETY: the graph was just made; without a list the call only counts.
        let counted = unsafe { call!(self.driver, cuGraphGetNodes(graph, std::ptr::null_mut(), &mut nodes)) };
        let made = counted.and_then(|()| {
            // SAFETY: the argument points to a handle that lives through the call; the graph was just made.
            unsafe { call!(self.driver, cuGraphInstantiateWithFlags(&mut exec, graph, 0)) }
        });
        // SAFETY: the executable graph is a copy of this one, which nobody else knows.
        unsafe { (self.driver.api.cuGraphDestroy)(graph) };
        made?;
        // SAFETY: graph and stream are alive.
        unsafe { call!(self.driver, cuGraphUpload(exec, self.streams[0])) }?;
        Ok(Exec { handle: exec, nodes })
    }

    fn launch_graph(&self, exec: Exec) -> Result<()> {
        self.enter()?;
        self.driver.note_kernel("a captured step");
        // SAFETY: graph and stream are alive; `Graph` has checked that the addresses in it are still of the blocks that
        // they were of.
        unsafe { call!(self.driver, cuGraphLaunch(exec.handle, self.streams[0])) }?;
        self.mark("graph", String::new, 0.0, 0.0)
    }

    fn destroy_graph(&self, exec: Exec) {
        // SAFETY: made by `end_capture` and destroyed once; the driver waits for launches that are under way.
        unsafe { (self.driver.api.cuGraphExecDestroy)(exec.handle) };
    }

    fn fork(&self) -> Result<()> {
        self.enter()?;
        let [first, second] = self.streams;
        // SAFETY: event and stream are alive and of one context.
        unsafe { call!(self.driver, cuEventRecord(self.forked, first)) }?;
        // SAFETY: event and stream are alive and of one context.
        unsafe { call!(self.driver, cuStreamWaitEvent(second, self.forked, 0)) }?;
        self.on_second.store(true, Ordering::Relaxed);
        Ok(())
    }

    fn unfork(&self, slot: usize) -> Result<()> {
        self.enter()?;
        self.on_second.store(false, Ordering::Relaxed);
        // SAFETY: event and stream are alive and of one context.
        unsafe { call!(self.driver, cuEventRecord(self.finished[slot], self.streams[1])) }
    }

    fn join(&self, slot: usize) -> Result<()> {
        self.enter()?;
        // SAFETY: event and stream are alive and of one context.
        unsafe { call!(self.driver, cuStreamWaitEvent(self.streams[0], self.finished[slot], 0)) }
    }

    fn profile(&self, work: &mut dyn FnMut() -> Result<()>) -> Result<Vec<Timing>> {
        self.time_pieces(work)
    }

    fn tune(&self, gpu: &Gpu, specs: &[Matmul]) -> Result<Vec<Tuning>> {
        self.enter()?;
        self.products.tune(gpu, specs, self.stream()).map_err(|error| self.name_kernel(error))
    }
}

/// A mark in the stream, destroyed with its owner.
struct Event<'a> {
    driver: &'a Driver,
    event: Handle,
}

impl Event<'_> {
    fn new(driver: &Driver) -> Result<Event<'_>> {
        let mut event = Handle::NULL;
        // SAFETY: the argument points to a handle that lives through the call; the context is current.
        unsafe { call!(driver, cuEventCreate(&mut event, 0)) }?;
        Ok(Event { driver, event })
    }

    fn record(&self, stream: Handle) -> Result<()> {
        // SAFETY: event and stream are alive and of one context.
        unsafe { call!(self.driver, cuEventRecord(self.event, stream)) }
    }
}

impl Drop for Event<'_> {
    fn drop(&mut self) {
        // SAFETY: created by this event, destroyed once; pending records do not need it.
        unsafe { (self.driver.api.cuEventDestroy_v2)(self.event) };
    }
}
