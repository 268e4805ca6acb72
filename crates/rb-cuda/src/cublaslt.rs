//! cuBLASLt: its functions, and one product described to it.
//!
//! cuBLASLt reads matrices by columns. A row-major matrix read by columns is its transpose, so the row-major
//! `C = A B` is asked for as `C^T = B^T A^T`: the operands swap and nothing is copied.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::path::PathBuf;

use cudarc::cublaslt::sys::{
    cublasComputeType_t, cublasLtMatmulAlgoConfigAttributes_t as AlgoConfig,
    cublasLtMatmulDescAttributes_t as DescAttribute, cublasLtMatmulPreferenceAttributes_t as Preference,
    cublasLtMatrixLayoutAttribute_t as LayoutAttribute, cublasLtReductionScheme_t as Reduction, cudaDataType,
};

use crate::discover::{CUBLASLT, Search};
use crate::driver::{Driver, Handle};
use crate::library::{self, LibraryInfo, api, call};
use crate::matmul::{MatmulKey, MatrixType};
use crate::{CudaError, Result};

/// Bytes of scratch memory that an algorithm may use.
pub(crate) const WORKSPACE_BYTES: usize = 32 << 20;

/// An algorithm with its settings: opaque, but fixed in size and free of pointers.
pub(crate) type Algorithm = [u64; 8];

/// What a search or a check says of an algorithm.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct Heuristic {
    pub(crate) algorithm: Algorithm,
    pub(crate) workspace_bytes: usize,
    pub(crate) status: c_int,
    waves: f32,
    reserved: [c_int; 4],
}

impl Heuristic {
    const EMPTY: Heuristic =
        Heuristic { algorithm: [0; 8], workspace_bytes: 0, status: -1, waves: 0.0, reserved: [0; 4] };
}

api! {
    /// Functions that cuBLASLt 12 and 13 have alike.
    CublasLtApi {
        fn cublasLtCreate(*mut Handle);
        fn cublasLtGetVersion() -> usize;
        fn cublasLtGetStatusName(c_int) -> *const c_char;
        fn cublasLtMatmulDescCreate(*mut Handle, c_int, c_int);
        fn cublasLtMatmulDescSetAttribute(Handle, c_int, *const c_void, usize);
        fn cublasLtMatmulDescDestroy(Handle);
        fn cublasLtMatrixLayoutCreate(*mut Handle, c_int, u64, u64, i64);
        fn cublasLtMatrixLayoutSetAttribute(Handle, c_int, *const c_void, usize);
        fn cublasLtMatrixLayoutDestroy(Handle);
        fn cublasLtMatmulPreferenceCreate(*mut Handle);
        fn cublasLtMatmulPreferenceSetAttribute(Handle, c_int, *const c_void, usize);
        fn cublasLtMatmulPreferenceDestroy(Handle);
        fn cublasLtMatmulAlgoGetHeuristic(
            Handle, Handle, Handle, Handle, Handle, Handle, Handle, c_int, *mut Heuristic, *mut c_int
        );
        fn cublasLtMatmulAlgoCheck(
            Handle, Handle, Handle, Handle, Handle, Handle, *const Algorithm, *mut Heuristic
        );
        fn cublasLtMatmulAlgoConfigGetAttribute(*const Algorithm, c_int, *mut c_void, usize, *mut usize);
        fn cublasLtMatmulAlgoConfigSetAttribute(*mut Algorithm, c_int, *const c_void, usize);
        fn cublasLtMatmulAlgoCapGetAttribute(*const Algorithm, c_int, *mut c_void, usize, *mut usize);
        fn cublasLtMatmulAlgoGetIds(
            Handle, c_int, c_int, c_int, c_int, c_int, c_int, c_int, *mut c_int, *mut c_int
        );
        fn cublasLtMatmulAlgoInit(
            Handle, c_int, c_int, c_int, c_int, c_int, c_int, c_int, *mut Algorithm
        );
        fn cublasLtMatmul(
            Handle, Handle, *const c_void, u64, Handle, u64, Handle, *const c_void, u64, Handle, u64, Handle,
            *const Algorithm, u64, usize, Handle
        );
    }
}

/// The library with its handle for the context that was current.
pub(crate) struct CublasLt {
    api: CublasLtApi,
    handle: Handle,
    /// `major * 10000 + minor * 100 + patch`.
    pub(crate) version: usize,
    path: PathBuf,
}

/// How the pointers of one product are aligned, in bytes: 256, 16, or a smaller power of two.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Alignment {
    pub(crate) a: u32,
    pub(crate) b: u32,
    pub(crate) c: u32,
}

impl Alignment {
    pub(crate) const FULL: Alignment = Alignment { a: 256, b: 256, c: 256 };

    pub(crate) fn of(a: u64, b: u64, c: u64) -> Alignment {
        let class = |pointer: u64| match pointer.trailing_zeros() {
            8.. => 256,
            4..8 => 16,
            zeros => 1 << zeros,
        };
        Alignment { a: class(a), b: class(b), c: class(c) }
    }
}

/// Ways to add the parts of a split sum that are allowed: in a fixed order, and in fp32. The in-place way adds
/// with atomics in any order; partial sums in the type of the output are fp32 only where the output is.
fn reductions(c: MatrixType) -> u32 {
    let compute = Reduction::CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE as u32;
    match c {
        MatrixType::F32 => compute | Reduction::CUBLASLT_REDUCTION_SCHEME_OUTPUT_TYPE as u32,
        MatrixType::Bf16 => compute,
    }
}

impl CublasLt {
    /// Loads the cuBLASLt that the driver serves; the context must be current.
    pub(crate) fn open(search: &Search, driver: &Driver) -> Result<CublasLt> {
        let path = search.find(&CUBLASLT, Some(driver.version.0))?;
        let api = library::open::<CublasLtApi>(&CUBLASLT, &path)?;
        let mut lt = CublasLt { api, handle: Handle::NULL, version: 0, path };
        // SAFETY: no preconditions.
        lt.version = unsafe { (lt.api.cublasLtGetVersion)() };
        let mut handle = Handle::NULL;
        // SAFETY: the argument points to a handle that lives through the call; a context is current.
        unsafe { call!(lt, cublasLtCreate(&mut handle)) }?;
        lt.handle = handle;
        Ok(lt)
    }

    pub(crate) fn library(&self) -> LibraryInfo {
        let (major, minor, patch) = (self.version / 10_000, self.version / 100 % 100, self.version % 100);
        let version = format!("{major}.{minor}.{patch}");
        LibraryInfo { name: CUBLASLT.name, path: self.path.clone(), version }
    }

    /// Turns a status into an error. The last kernel is named by the caller, who knows it.
    fn check(&self, call: &'static str, status: c_int) -> Result<()> {
        if status == 0 {
            return Ok(());
        }
        // SAFETY: any number is answered, with a constant zero-terminated string.
        let text = unsafe { (self.api.cublasLtGetStatusName)(status) };
        let name = if text.is_null() {
            "an unknown status".into()
        } else {
            // SAFETY: a constant, zero-terminated string of the library, checked not to be null.
            unsafe { CStr::from_ptr(text) }.to_string_lossy()
        };
        Err(CudaError::Call { call, status: format!("{name} ({status})"), last_kernel: String::new() })
    }

    /// Describes a product.
    pub(crate) fn problem(&self, key: &MatmulKey) -> Result<Problem<'_>> {
        let mut problem = Problem {
            lt: self,
            desc: Handle::NULL,
            first: Handle::NULL,
            second: Handle::NULL,
            out: Handle::NULL,
            reductions: reductions(key.c),
        };
        let compute = cublasComputeType_t::CUBLAS_COMPUTE_32F as c_int;
        let scale = cudaDataType::CUDA_R_32F as c_int;
        // SAFETY: the argument points to a handle that lives through the call.
        unsafe { call!(self, cublasLtMatmulDescCreate(&mut problem.desc, compute, scale)) }?;
        // The operands swap: the first of cuBLASLt is our B.
        for (attribute, transposed) in [
            (DescAttribute::CUBLASLT_MATMUL_DESC_TRANSA, key.trans_b),
            (DescAttribute::CUBLASLT_MATMUL_DESC_TRANSB, key.trans_a),
        ] {
            // CUBLAS_OP_N and CUBLAS_OP_T.
            let operation = c_int::from(transposed);
            let (pointer, size) = bytes_of(&operation);
            let attribute = attribute as c_int;
            // SAFETY: the descriptor is alive; the value is an int, as these attributes are.
            unsafe { call!(self, cublasLtMatmulDescSetAttribute(problem.desc, attribute, pointer, size)) }?;
        }
        let stored = |rows: usize, cols: usize, transposed: bool| {
            // Row-major [rows, cols] is cols x rows by columns.
            if transposed { (rows, cols) } else { (cols, rows) }
        };
        let batch = (key.batch, [key.stride_b, key.stride_a, key.stride_c]);
        problem.first = self.layout(key.ab, stored(key.k, key.n, key.trans_b), batch.0, batch.1[0])?;
        problem.second = self.layout(key.ab, stored(key.m, key.k, key.trans_a), batch.0, batch.1[1])?;
        problem.out = self.layout(key.c, (key.n, key.m), batch.0, batch.1[2])?;
        Ok(problem)
    }

    fn layout(
        &self,
        of: MatrixType,
        (rows, cols): (usize, usize),
        batch: usize,
        stride: usize,
    ) -> Result<Handle> {
        let kind = match of {
            MatrixType::F32 => cudaDataType::CUDA_R_32F,
            MatrixType::Bf16 => cudaDataType::CUDA_R_16BF,
        } as c_int;
        let mut layout = Handle::NULL;
        // SAFETY: the argument points to a handle that lives through the call.
        unsafe {
            call!(self, cublasLtMatrixLayoutCreate(&mut layout, kind, rows as u64, cols as u64, rows as i64))
        }?;
        if batch > 1 {
            let unsupported = |reason: String| CudaError::Unsupported { what: "product".into(), reason };
            let set = || {
                let batch = c_int::try_from(batch).map_err(|_| unsupported(format!("a batch of {batch}")))?;
                let (pointer, size) = bytes_of(&batch);
                let attribute = LayoutAttribute::CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT as c_int;
                // SAFETY: the layout is alive; the value is an int, as this attribute is.
                unsafe { call!(self, cublasLtMatrixLayoutSetAttribute(layout, attribute, pointer, size)) }?;
                let stride = stride as i64;
                let (pointer, size) = bytes_of(&stride);
                let attribute = LayoutAttribute::CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET as c_int;
                // SAFETY: the layout is alive; the value is an int64, as this attribute is.
                unsafe { call!(self, cublasLtMatrixLayoutSetAttribute(layout, attribute, pointer, size)) }
            };
            if let Err(error) = set() {
                // SAFETY: the layout was created above and is used by nothing.
                unsafe { (self.api.cublasLtMatrixLayoutDestroy)(layout) };
                return Err(error);
            }
        }
        Ok(layout)
    }
}

/// A value as attributes take it.
fn bytes_of<T>(value: &T) -> (*const c_void, usize) {
    (std::ptr::from_ref(value).cast(), size_of::<T>())
}

/// Descriptors of one product, destroyed with it.
pub(crate) struct Problem<'a> {
    lt: &'a CublasLt,
    desc: Handle,
    first: Handle,
    second: Handle,
    out: Handle,
    /// Allowed [`reductions`].
    reductions: u32,
}

impl Problem<'_> {
    pub(crate) fn api(&self) -> &CublasLtApi {
        &self.lt.api
    }

    pub(crate) fn handle(&self) -> Handle {
        self.lt.handle
    }

    /// Allowed [`reductions`].
    pub(crate) fn reductions(&self) -> u32 {
        self.reductions
    }

    /// Algorithms by the library's own guess of their speed, best first: those that need no more than
    /// `workspace_bytes`, suit the alignment, and sum in fp32 and in a fixed order.
    pub(crate) fn candidates(
        &self,
        alignment: Alignment,
        workspace_bytes: usize,
        most: usize,
    ) -> Result<Vec<Heuristic>> {
        let lt = self.lt;
        let mut preference = Handle::NULL;
        // SAFETY: the argument points to a handle that lives through the call.
        unsafe { call!(lt, cublasLtMatmulPreferenceCreate(&mut preference)) }?;
        let result = self.candidates_with(preference, alignment, workspace_bytes, most);
        // SAFETY: created above, used by nothing after this.
        unsafe { (lt.api.cublasLtMatmulPreferenceDestroy)(preference) };
        result
    }

    fn candidates_with(
        &self,
        preference: Handle,
        alignment: Alignment,
        workspace_bytes: usize,
        most: usize,
    ) -> Result<Vec<Heuristic>> {
        let lt = self.lt;
        let workspace_bytes = workspace_bytes as u64;
        let (pointer, size) = bytes_of(&workspace_bytes);
        let attribute = Preference::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES as c_int;
        // SAFETY: the preference is alive; the value is a uint64, as this attribute is.
        unsafe { call!(lt, cublasLtMatmulPreferenceSetAttribute(preference, attribute, pointer, size)) }?;
        for (attribute, value) in [
            (Preference::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, self.reductions),
            (Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, alignment.b),
            (Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, alignment.a),
            (Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, alignment.c),
            (Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, alignment.c),
        ] {
            let (pointer, size) = bytes_of(&value);
            let attribute = attribute as c_int;
            // SAFETY: the preference is alive; the value is a uint32, as these attributes are.
            unsafe { call!(lt, cublasLtMatmulPreferenceSetAttribute(preference, attribute, pointer, size)) }?;
        }
        let mut found = vec![Heuristic::EMPTY; most];
        let mut count: c_int = 0;
        // SAFETY: all handles are alive; the list holds as many results as are asked for.
        let status = unsafe {
            (lt.api.cublasLtMatmulAlgoGetHeuristic)(
                lt.handle,
                self.desc,
                self.first,
                self.second,
                self.out,
                self.out,
                preference,
                most as c_int,
                found.as_mut_ptr(),
                &mut count,
            )
        };
        // Without any algorithm the status is "not supported", which an empty list says as well.
        if count == 0 && status == cudarc::cublaslt::sys::cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED as c_int
        {
            return Ok(Vec::new());
        }
        lt.check("cublasLtMatmulAlgoGetHeuristic", status)?;
        found.truncate(usize::try_from(count).unwrap_or(0));
        found.retain(|h| h.status == 0 && self.repeatable(&h.algorithm));
        Ok(found)
    }

    /// Whether an algorithm adds the parts of a sum in an allowed way.
    fn repeatable(&self, algorithm: &Algorithm) -> bool {
        let mut scheme: u32 = 0;
        let mut written = 0usize;
        let attribute = AlgoConfig::CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME as c_int;
        let value: *mut c_void = std::ptr::from_mut(&mut scheme).cast();
        let get = self.lt.api.cublasLtMatmulAlgoConfigGetAttribute;
        // SAFETY: the algorithm and both results live through the call; the attribute is a uint32.
        let status = unsafe { get(algorithm, attribute, value, size_of::<u32>(), &mut written) };
        // An algorithm that has no such setting splits no sums.
        status != 0 || scheme & !self.reductions == 0
    }

    /// What the library says of a stored algorithm for this product; nothing if it does not fit.
    pub(crate) fn examine(&self, algorithm: &Algorithm) -> Option<Heuristic> {
        let mut found = Heuristic::EMPTY;
        // SAFETY: all handles are alive; the algorithm is as many bytes as the library's, which checks it.
        let status = unsafe {
            (self.lt.api.cublasLtMatmulAlgoCheck)(
                self.lt.handle,
                self.desc,
                self.first,
                self.second,
                self.out,
                self.out,
                algorithm,
                &mut found,
            )
        };
        found.algorithm = *algorithm;
        let good = status == 0 && found.workspace_bytes <= WORKSPACE_BYTES && self.repeatable(algorithm);
        good.then_some(found)
    }

    /// Enqueues the product.
    ///
    /// # Safety
    /// The pointers are device memory that holds the matrices of the description, with the alignment that
    /// `algorithm` was found for; the workspace is [`WORKSPACE_BYTES`] of device memory that no other stream
    /// uses; the context is current.
    pub(crate) unsafe fn enqueue(
        &self,
        algorithm: &Algorithm,
        (alpha, beta): (f32, f32),
        [a, b, c]: [u64; 3],
        workspace: u64,
        stream: Handle,
    ) -> Result<()> {
        // SAFETY: the caller vouches for the pointers; handles and factors live through the call.
        unsafe {
            call!(
                self.lt,
                cublasLtMatmul(
                    self.lt.handle,
                    self.desc,
                    bytes_of(&alpha).0,
                    b,
                    self.first,
                    a,
                    self.second,
                    bytes_of(&beta).0,
                    c,
                    self.out,
                    c,
                    self.out,
                    algorithm,
                    workspace,
                    WORKSPACE_BYTES,
                    stream
                )
            )
        }
    }
}

impl Drop for Problem<'_> {
    fn drop(&mut self) {
        let api = &self.lt.api;
        for layout in [self.first, self.second, self.out] {
            if layout != Handle::NULL {
                // SAFETY: created by this problem, destroyed once.
                unsafe { (api.cublasLtMatrixLayoutDestroy)(layout) };
            }
        }
        if self.desc != Handle::NULL {
            // SAFETY: created by this problem, destroyed once.
            unsafe { (api.cublasLtMatmulDescDestroy)(self.desc) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn alignment_is_what_the_pointers_have() {
        let of = |a, b, c| Alignment::of(a, b, c);
        assert_eq!(of(0x1000, 0x1100, 0x200), Alignment::FULL);
        assert_eq!(of(0x1080, 0x1010, 0x1002), Alignment { a: 16, b: 16, c: 2 });
        assert_eq!(of(8, 4, 1), Alignment { a: 8, b: 4, c: 1 });
    }

    #[test]
    fn results_have_the_size_of_the_library() {
        use cudarc::cublaslt::sys::{cublasLtMatmulAlgo_t, cublasLtMatmulHeuristicResult_t};
        assert_eq!(size_of::<Heuristic>(), size_of::<cublasLtMatmulHeuristicResult_t>());
        assert_eq!(size_of::<Algorithm>(), size_of::<cublasLtMatmulAlgo_t>());
    }
}
