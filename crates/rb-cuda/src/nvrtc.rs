//! NVRTC: CUDA C to machine code or PTX, in memory.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::{Path, PathBuf};

use crate::discover::{NVRTC, Search};
use crate::library::{self, LibraryInfo, api, call};
use crate::{CudaError, Result};

/// A program handle: an opaque pointer that one thread uses at a time.
type Program = *mut c_void;

api! {
    /// Functions that NVRTC 12 and 13 have alike.
    NvrtcApi {
        fn nvrtcVersion(*mut c_int, *mut c_int);
        fn nvrtcGetErrorString(c_int) -> *const c_char;
        fn nvrtcGetNumSupportedArchs(*mut c_int);
        fn nvrtcGetSupportedArchs(*mut c_int);
        fn nvrtcCreateProgram(
            *mut Program, *const c_char, *const c_char, c_int, *const *const c_char, *const *const c_char
        );
        fn nvrtcCompileProgram(Program, c_int, *const *const c_char);
        fn nvrtcDestroyProgram(*mut Program);
        fn nvrtcGetProgramLogSize(Program, *mut usize);
        fn nvrtcGetProgramLog(Program, *mut c_char);
        fn nvrtcGetCUBINSize(Program, *mut usize);
        fn nvrtcGetCUBIN(Program, *mut c_char);
        fn nvrtcGetPTXSize(Program, *mut usize);
        fn nvrtcGetPTX(Program, *mut c_char);
    }
}

/// The library, loaded. Any number of threads may compile at once.
pub(crate) struct Nvrtc {
    api: NvrtcApi,
    pub(crate) version: (u32, u32),
    /// Compute capabilities it knows, as `major * 10 + minor`, ascending.
    pub(crate) capabilities: Vec<u32>,
    path: PathBuf,
}

/// What a program gave.
pub(crate) struct Output {
    /// Machine code, or PTX with a zero byte at its end.
    pub(crate) code: Vec<u8>,
    /// Warnings, and what options asked the compiler to say.
    pub(crate) log: String,
}

/// Why a program gave no code.
pub(crate) enum Refusal {
    /// The source does not compile: the log.
    Log(String),
    /// NVRTC itself failed.
    Call(CudaError),
}

impl From<CudaError> for Refusal {
    fn from(error: CudaError) -> Self {
        Refusal::Call(error)
    }
}

impl Nvrtc {
    /// Loads the NVRTC that a driver of this CUDA version serves, with the builtins beside it.
    pub(crate) fn open(search: &Search, driver_major: Option<u32>) -> Result<Nvrtc> {
        let path = search.find(&NVRTC, driver_major)?;
        for builtins in builtins_beside(&path) {
            library::preload(&builtins);
        }
        let api = library::open::<NvrtcApi>(&NVRTC, &path)?;
        let mut nvrtc = Nvrtc { api, version: (0, 0), capabilities: Vec::new(), path };
        let (mut major, mut minor): (c_int, c_int) = (0, 0);
        // SAFETY: both arguments point to ints that live through the call.
        unsafe { call!(nvrtc, nvrtcVersion(&mut major, &mut minor)) }?;
        nvrtc.version = (u32::try_from(major).unwrap_or(0), u32::try_from(minor).unwrap_or(0));
        let mut count: c_int = 0;
        // SAFETY: the argument points to an int that lives through the call.
        unsafe { call!(nvrtc, nvrtcGetNumSupportedArchs(&mut count)) }?;
        let mut list: Vec<c_int> = vec![0; usize::try_from(count).unwrap_or(0)];
        // SAFETY: the list has as many elements as the call before announced.
        unsafe { call!(nvrtc, nvrtcGetSupportedArchs(list.as_mut_ptr())) }?;
        nvrtc.capabilities = list.into_iter().filter_map(|n| u32::try_from(n).ok()).collect();
        nvrtc.capabilities.sort_unstable();
        Ok(nvrtc)
    }

    pub(crate) fn library(&self) -> LibraryInfo {
        let version = format!("{}.{}", self.version.0, self.version.1);
        LibraryInfo { name: NVRTC.name, path: self.path.clone(), version }
    }

    fn check(&self, call: &'static str, status: c_int) -> Result<()> {
        if status == 0 {
            return Ok(());
        }
        // SAFETY: any number is answered, with a constant zero-terminated string.
        let text = unsafe { (self.api.nvrtcGetErrorString)(status) };
        let name = if text.is_null() {
            "an unknown error".into()
        } else {
            // SAFETY: a constant, zero-terminated string of the library, checked not to be null.
            unsafe { CStr::from_ptr(text) }.to_string_lossy()
        };
        // Compiling runs nothing on the card, so no kernel can be the cause.
        Err(CudaError::Call { call, status: format!("{name} ({status})"), last_kernel: "none".into() })
    }

    /// Machine code of `text`, or PTX.
    pub(crate) fn compile(
        &self,
        name: &str,
        text: &str,
        options: &[String],
        ptx: bool,
    ) -> Result<Output, Refusal> {
        let c_string = |text: &str| {
            CString::new(text).map_err(|_| Refusal::Log("the source or an option holds a zero byte".into()))
        };
        let source = c_string(text)?;
        let file = c_string(&format!("{name}.cu"))?;
        let options = options.iter().map(|o| c_string(o)).collect::<Result<Vec<_>, _>>()?;
        let pointers: Vec<*const c_char> = options.iter().map(|o| o.as_ptr()).collect();
        let mut program = OwnedProgram { nvrtc: self, program: std::ptr::null_mut() };
        // SAFETY: source and name are zero-terminated and live to the end of this function, as the program does;
        // no headers are given, so their lists may be null.
        unsafe {
            call!(
                self,
                nvrtcCreateProgram(
                    &mut program.program,
                    source.as_ptr(),
                    file.as_ptr(),
                    0,
                    std::ptr::null(),
                    std::ptr::null()
                )
            )
        }?;
        // A list of a few options fits an int.
        let count = pointers.len() as c_int;
        // SAFETY: the program is alive and the options are `count` zero-terminated strings.
        let status = unsafe { (self.api.nvrtcCompileProgram)(program.program, count, pointers.as_ptr()) };
        let compilation_failed = cudarc::nvrtc::sys::nvrtcResult::NVRTC_ERROR_COMPILATION as c_int;
        if status != compilation_failed {
            self.check("nvrtcCompileProgram", status)?;
        }
        let log = self.fetch(
            &program,
            ("nvrtcGetProgramLogSize", self.api.nvrtcGetProgramLogSize),
            ("nvrtcGetProgramLog", self.api.nvrtcGetProgramLog),
        )?;
        let log = String::from_utf8_lossy(&log).trim_end_matches(['\0', '\n']).to_string();
        if status == compilation_failed {
            return Err(Refusal::Log(log));
        }
        let code = if ptx {
            self.fetch(
                &program,
                ("nvrtcGetPTXSize", self.api.nvrtcGetPTXSize),
                ("nvrtcGetPTX", self.api.nvrtcGetPTX),
            )?
        } else {
            self.fetch(
                &program,
                ("nvrtcGetCUBINSize", self.api.nvrtcGetCUBINSize),
                ("nvrtcGetCUBIN", self.api.nvrtcGetCUBIN),
            )?
        };
        if code.is_empty() {
            return Err(Refusal::Log("NVRTC gave no code for this architecture".into()));
        }
        Ok(Output { code, log })
    }

    /// Something of a program, by the two calls that give its size and its bytes.
    fn fetch(
        &self,
        program: &OwnedProgram<'_>,
        size_call: (&'static str, unsafe extern "C" fn(Program, *mut usize) -> c_int),
        bytes_call: (&'static str, unsafe extern "C" fn(Program, *mut c_char) -> c_int),
    ) -> Result<Vec<u8>> {
        let mut size = 0usize;
        // SAFETY: the program is alive and the size lives through the call.
        self.check(size_call.0, unsafe { (size_call.1)(program.program, &mut size) })?;
        let mut bytes = vec![0u8; size];
        // SAFETY: the program is alive and the buffer has the size that it announced.
        self.check(bytes_call.0, unsafe { (bytes_call.1)(program.program, bytes.as_mut_ptr().cast()) })?;
        Ok(bytes)
    }
}

/// A program that is destroyed with its owner.
struct OwnedProgram<'a> {
    nvrtc: &'a Nvrtc,
    program: Program,
}

impl Drop for OwnedProgram<'_> {
    fn drop(&mut self) {
        if !self.program.is_null() {
            // SAFETY: the program was created and is destroyed once. A failure leaves a leak, nothing else.
            unsafe { (self.nvrtc.api.nvrtcDestroyProgram)(&mut self.program) };
        }
    }
}

/// `libnvrtc-builtins.so.*` in the folder of the library: NVRTC asks for it by name alone.
fn builtins_beside(path: &Path) -> Vec<PathBuf> {
    let real = path.canonicalize().unwrap_or_else(|_| path.to_path_buf());
    let mut found: Vec<PathBuf> = real
        .parent()
        .and_then(|folder| std::fs::read_dir(folder).ok())
        .into_iter()
        .flatten()
        .flatten()
        .map(|e| e.path())
        .filter(|p| p.file_name().is_some_and(|n| n.to_string_lossy().starts_with("libnvrtc-builtins.so.")))
        .collect();
    found.sort();
    found
}
