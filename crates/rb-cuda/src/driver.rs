//! The driver: its functions, and the calls that need no context.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use cudarc::driver::sys::{CUdevice_attribute, CUlaunchConfig};

use crate::discover::{DRIVER, Search};
use crate::gpu::{GpuInfo, lock};
use crate::library::{self, LibraryInfo, api, call};
use crate::{CudaError, Result};

/// An object of the driver or a library. All of them may be used from any thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(transparent)]
pub(crate) struct Handle(pub(crate) *mut c_void);

// SAFETY: contexts, streams, functions, events and cuBLASLt's handles and descriptors are documented as usable
// from any thread; they are opaque numbers to this program, which never reads through them.
unsafe impl Send for Handle {}
// SAFETY: as for Send; the functions that take them lock by themselves.
unsafe impl Sync for Handle {}

impl Handle {
    pub(crate) const NULL: Handle = Handle(std::ptr::null_mut());
}

/// What the driver makes of a tensor for the copy engine: `CUtensorMap`.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(crate) struct TensorMap(pub(crate) [u64; 16]);

impl TensorMap {
    /// A map that holds a number in its first bytes.
    pub(crate) fn of(first: u64) -> TensorMap {
        let mut words = [0; 16];
        words[0] = first;
        TensorMap(words)
    }
}

api! {
    /// Functions that drivers of CUDA 12 and 13 have alike.
    DriverApi {
        fn cuInit(c_uint);
        fn cuDriverGetVersion(*mut c_int);
        fn cuGetErrorName(c_int, *mut *const c_char);
        fn cuGetErrorString(c_int, *mut *const c_char);
        fn cuDeviceGetCount(*mut c_int);
        fn cuDeviceGet(*mut c_int, c_int);
        fn cuDeviceGetName(*mut c_char, c_int, c_int);
        fn cuDeviceGetAttribute(*mut c_int, c_int, c_int);
        fn cuDeviceTotalMem_v2(*mut usize, c_int);
        fn cuDevicePrimaryCtxRetain(*mut Handle, c_int);
        fn cuCtxSetCurrent(Handle);
        fn cuStreamCreate(*mut Handle, c_uint);
        fn cuStreamSynchronize(Handle);
        fn cuMemGetInfo_v2(*mut usize, *mut usize);
        fn cuMemAlloc_v2(*mut u64, usize);
        fn cuMemHostAlloc(*mut *mut c_void, usize, c_uint);
        fn cuMemsetD8Async(u64, u8, usize, Handle);
        fn cuMemcpyHtoDAsync_v2(u64, *const c_void, usize, Handle);
        fn cuMemcpyDtoHAsync_v2(*mut c_void, u64, usize, Handle);
        fn cuMemcpyDtoDAsync_v2(u64, u64, usize, Handle);
        fn cuModuleLoadData(*mut Handle, *const c_void);
        fn cuModuleGetFunction(*mut Handle, Handle, *const c_char);
        fn cuFuncSetAttribute(Handle, c_int, c_int);
        fn cuLaunchKernelEx(*const CUlaunchConfig, Handle, *mut *mut c_void, *mut *mut c_void);
        fn cuTensorMapEncodeTiled(
            *mut TensorMap, c_uint, c_uint, *mut c_void, *const u64, *const u64, *const u32, *const u32, c_uint, c_uint,
            c_uint, c_uint
        );
        fn cuStreamWaitEvent(Handle, Handle, c_uint);
        fn cuStreamBeginCapture_v2(Handle, c_int);
        fn cuStreamEndCapture(Handle, *mut Handle);
        fn cuGraphGetNodes(Handle, *mut Handle, *mut usize);
        fn cuGraphInstantiateWithFlags(*mut Handle, Handle, u64);
        fn cuGraphUpload(Handle, Handle);
        fn cuGraphLaunch(Handle, Handle);
        fn cuGraphExecDestroy(Handle);
        fn cuGraphDestroy(Handle);
        fn cuMemsetD32Async(u64, c_uint, usize, Handle);
        fn cuEventCreate(*mut Handle, c_uint);
        fn cuEventQuery(Handle);
        fn cuEventRecord(Handle, Handle);
        fn cuEventSynchronize(Handle);
        fn cuEventElapsedTime(*mut f32, Handle, Handle);
        fn cuEventDestroy_v2(Handle);
    }
}

/// The driver, loaded and initialised.
pub(crate) struct Driver {
    pub(crate) api: DriverApi,
    /// CUDA version that it serves, major and minor.
    pub(crate) version: (u32, u32),
    path: PathBuf,
    /// Errors of kernels arrive with later calls, so each names the last one.
    last_kernel: Mutex<&'static str>,
}

impl Driver {
    /// Loads the driver by the system's rules, or from where the search finds it.
    pub(crate) fn open(search: &Search) -> Result<Driver> {
        let named = Path::new("libcuda.so.1");
        let (api, path) = match library::open::<DriverApi>(&DRIVER, named) {
            Ok(api) => (api, named.to_path_buf()),
            Err(_) => {
                let path = search.find(&DRIVER, None)?;
                (library::open::<DriverApi>(&DRIVER, &path)?, path)
            }
        };
        let mut driver =
            Driver { api, version: (0, 0), path: loaded_file(&path), last_kernel: Mutex::new("none") };
        // SAFETY: cuInit has no preconditions and may be called again.
        let status = unsafe { (driver.api.cuInit)(0) };
        if status != 0 {
            return Err(CudaError::NoGpu {
                reason: format!("the driver {} says {}", driver.path.display(), driver.describe(status)),
                remedy: "`nvidia-smi` shows what the driver sees; in a container, start it with the GPUs",
            });
        }
        let mut version: c_int = 0;
        // SAFETY: the argument points to an int that lives through the call.
        unsafe { call!(driver, cuDriverGetVersion(&mut version)) }?;
        let version = u32::try_from(version).unwrap_or(0);
        driver.version = (version / 1000, version % 1000 / 10);
        if driver.version.0 < 12 {
            return Err(CudaError::NoGpu {
                reason: format!("the driver serves CUDA {}.{}", driver.version.0, driver.version.1),
                remedy: "install a driver for CUDA 12 or newer (525 or newer)",
            });
        }
        Ok(driver)
    }

    /// Turns the status of `call` into an error that names it and the last kernel.
    pub(crate) fn check(&self, call: &'static str, status: c_int) -> Result<()> {
        if status == 0 {
            return Ok(());
        }
        Err(self.error(call, self.describe(status)))
    }

    /// The error of a call whose status has this text.
    pub(crate) fn error(&self, call: &'static str, status: String) -> CudaError {
        CudaError::Call { call, status, last_kernel: lock(&self.last_kernel).to_string() }
    }

    pub(crate) fn note_kernel(&self, name: &'static str) {
        *lock(&self.last_kernel) = name;
    }

    fn describe(&self, status: c_int) -> String {
        let text = |function: unsafe extern "C" fn(c_int, *mut *const c_char) -> c_int| {
            let mut text = std::ptr::null();
            // SAFETY: the pointer to write to lives through the call; the driver answers with a constant string
            // or leaves null.
            let found = unsafe { function(status, &mut text) } == 0 && !text.is_null();
            // SAFETY: a constant, zero-terminated string of the driver, checked not to be null.
            found.then(|| unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned())
        };
        let name = text(self.api.cuGetErrorName).unwrap_or_else(|| "an unknown error".into());
        match text(self.api.cuGetErrorString) {
            Some(meaning) => format!("{name} ({status}): {meaning}"),
            None => format!("{name} ({status})"),
        }
    }

    pub(crate) fn device_count(&self) -> Result<usize> {
        let mut count: c_int = 0;
        // SAFETY: the argument points to an int that lives through the call.
        unsafe { call!(self, cuDeviceGetCount(&mut count)) }?;
        Ok(usize::try_from(count).unwrap_or(0))
    }

    /// The number by which the driver knows the card.
    pub(crate) fn device(&self, ordinal: usize) -> Result<c_int> {
        let count = self.device_count()?;
        let wanted = c_int::try_from(ordinal).ok().filter(|_| ordinal < count);
        let Some(wanted) = wanted else {
            return Err(CudaError::NoGpu {
                reason: format!("cuda:{ordinal} was asked for, the driver shows {count}"),
                remedy: "GPUs are numbered from 0; CUDA_VISIBLE_DEVICES may hide some",
            });
        };
        let mut device: c_int = 0;
        // SAFETY: the argument points to an int that lives through the call.
        unsafe { call!(self, cuDeviceGet(&mut device, wanted)) }?;
        Ok(device)
    }

    pub(crate) fn attribute(&self, device: c_int, attribute: CUdevice_attribute) -> Result<u32> {
        let mut value: c_int = 0;
        // SAFETY: the argument points to an int that lives through the call; the device exists.
        unsafe { call!(self, cuDeviceGetAttribute(&mut value, attribute as c_int, device)) }?;
        Ok(u32::try_from(value).unwrap_or(0))
    }

    pub(crate) fn info(&self, ordinal: usize, device: c_int) -> Result<GpuInfo> {
        let mut name: [c_char; 256] = [0; 256];
        // SAFETY: the buffer has the length given, less one that stays zero.
        unsafe { call!(self, cuDeviceGetName(name.as_mut_ptr(), 255, device)) }?;
        // SAFETY: the last byte was never written, so the text ends inside the buffer.
        let name = unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy().into_owned();
        let mut memory_bytes = 0usize;
        // SAFETY: the argument points to a size that lives through the call.
        unsafe { call!(self, cuDeviceTotalMem_v2(&mut memory_bytes, device)) }?;
        use CUdevice_attribute as A;
        let get = |attribute| self.attribute(device, attribute);
        Ok(GpuInfo {
            ordinal,
            name,
            capability: (
                get(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
                get(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
            ),
            multiprocessors: get(A::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
            shared_bytes_per_block: get(A::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)? as usize,
            memory_bytes,
        })
    }

    pub(crate) fn library(&self) -> LibraryInfo {
        let (major, minor) = self.version;
        let kernel = crate::discover::kernel_driver_version().unwrap_or_else(|| "of unknown version".into());
        LibraryInfo {
            name: DRIVER.name,
            path: self.path.clone(),
            version: format!("{kernel}, serves CUDA {major}.{minor}"),
        }
    }
}

/// The file behind a name that the system's loader resolved, from the list of mapped files.
fn loaded_file(name: &Path) -> PathBuf {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    let stem = name.file_name().unwrap_or_default().to_string_lossy();
    let prefix = stem.split(".so").next().unwrap_or(&stem).to_string() + ".so";
    maps.lines()
        .filter_map(|line| line.find('/').map(|at| Path::new(&line[at..])))
        .find(|path| path.file_name().is_some_and(|n| n.to_string_lossy().starts_with(&prefix)))
        .map_or_else(|| name.to_path_buf(), Path::to_path_buf)
}
