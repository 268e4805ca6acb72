//! Kernels to machine code, through a cache on disk.
//!
//! A file of the cache is named by everything that decides its content: text, options, architecture and NVRTC
//! version. It holds a mark, its length and a checksum, so that a damaged file is seen and built anew.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use sha2::{Digest, Sha256};

use crate::discover::{Search, cache_folder};
use crate::inspect::Resources;
use crate::kernel::Unit;
use crate::library::LibraryInfo;
use crate::nvrtc::{Nvrtc, Output, Refusal};
use crate::{CudaError, Result};

/// Options of every compilation. No fast mathematics: a kernel asks for an approximation by name.
const OPTIONS: [&str; 2] = ["--std=c++17", "--fmad=true"];

/// NVRTC with the cache; needs no GPU.
pub struct Compiler {
    nvrtc: Nvrtc,
    cache: Option<PathBuf>,
    warned: AtomicBool,
}

/// A compiled kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Compiled {
    /// A CUBIN, or PTX with a zero byte at its end.
    pub code: Vec<u8>,
    /// Whether it came from the cache.
    pub cached: bool,
}

impl Compiler {
    /// Finds and loads NVRTC. Kernels are kept in the folder of `$RUSTINGBRAIN_CACHE`, else in the user's
    /// cache folder.
    ///
    /// # Errors
    /// NVRTC is absent or too old.
    pub fn find() -> Result<Compiler> {
        Compiler::open(&Search::of_this_machine(), None)
    }

    pub(crate) fn open(search: &Search, driver_major: Option<u32>) -> Result<Compiler> {
        let nvrtc = Nvrtc::open(search, driver_major)?;
        Ok(Compiler {
            nvrtc,
            cache: cache_folder().map(|folder| folder.join("kernels")),
            warned: AtomicBool::new(false),
        })
    }

    /// Keeps kernels in `folder`, or nowhere.
    pub fn with_cache(mut self, folder: Option<PathBuf>) -> Compiler {
        self.cache = folder;
        self
    }

    /// The library in use.
    pub fn library(&self) -> LibraryInfo {
        self.nvrtc.library()
    }

    /// Code of `unit` for an architecture such as `sm_90a`: machine code, or PTX for the newest architecture
    /// that NVRTC knows where the card is newer than NVRTC.
    ///
    /// # Errors
    /// [`CudaError::Compile`] with the compiler's log.
    pub fn compile(&self, unit: &Unit, arch: &str) -> Result<Compiled> {
        let (target, ptx) = self.target(unit, arch)?;
        self.build(unit, &target, ptx)
    }

    /// The architecture to compile for, and whether it is PTX.
    fn target(&self, unit: &Unit, arch: &str) -> Result<(String, bool)> {
        let digits: String = arch.chars().filter(char::is_ascii_digit).collect();
        let wanted: u32 = digits.parse().unwrap_or(0);
        let known = &self.nvrtc.capabilities;
        if known.contains(&wanted) {
            return Ok((arch.to_string(), false));
        }
        let newest = known.iter().rev().find(|&&capability| capability < wanted && capability >= 80);
        match newest {
            Some(capability) if wanted > 0 => Ok((format!("compute_{capability}"), true)),
            _ => Err(CudaError::Compile {
                kernel: unit.name,
                defines: one_line(&unit.defines),
                arch: arch.into(),
                log: format!(
                    "NVRTC {}.{} knows no architecture that would run there",
                    self.nvrtc.version.0, self.nvrtc.version.1
                ),
            }),
        }
    }

    fn build(&self, unit: &Unit, target: &str, ptx: bool) -> Result<Compiled> {
        let options = options(target);
        let text = unit.text();
        let key = self.key(&text, &options);
        let file = self.cache.as_ref().map(|f| f.join(format!("{}-{}.bin", unit.name, &hex(&key)[..32])));
        if let Some(code) = file.as_ref().and_then(|file| read(file, &key)) {
            return Ok(Compiled { code, cached: true });
        }
        let code = self.run(unit, &text, target, &options, ptx)?.code;
        if let Some(file) = file
            && let Err(error) = write(&file, &key, &code)
            && !self.warned.swap(true, Ordering::Relaxed)
        {
            tracing::warn!(
                "compiled kernels are not kept, so the next start compiles again: {}: {error}; \
                 set RUSTINGBRAIN_CACHE to a folder that can be written",
                file.display()
            );
        }
        Ok(Compiled { code, cached: false })
    }

    fn run(&self, unit: &Unit, text: &str, target: &str, options: &[String], ptx: bool) -> Result<Output> {
        self.nvrtc.compile(unit.name, text, options, ptx).map_err(|refusal| match refusal {
            Refusal::Call(error) => error,
            Refusal::Log(log) => CudaError::Compile {
                kernel: unit.name,
                defines: one_line(&unit.defines),
                arch: target.into(),
                log,
            },
        })
    }

    /// Compiles `unit` for an architecture such as `sm_90a` and says what it takes; the cache takes no part.
    ///
    /// # Errors
    /// [`CudaError::Compile`] with the compiler's log, also where NVRTC does not know the architecture.
    pub fn inspect(&self, unit: &Unit, arch: &str) -> Result<Resources> {
        let mut options = options(arch);
        options.push("--ptxas-options=-v".into());
        let log = self.run(unit, &unit.text(), arch, &options, false)?.log;
        Resources::parse(&log).ok_or_else(|| CudaError::Compile {
            kernel: unit.name,
            defines: one_line(&unit.defines),
            arch: arch.into(),
            log: format!("NVRTC does not say what the kernel takes: {log}"),
        })
    }

    fn key(&self, text: &str, options: &[String]) -> [u8; 32] {
        let mut hash = Sha256::new();
        for part in [text, &options.join("\n")] {
            hash.update((part.len() as u64).to_le_bytes());
            hash.update(part);
        }
        hash.update(self.nvrtc.version.0.to_le_bytes());
        hash.update(self.nvrtc.version.1.to_le_bytes());
        hash.finalize().into()
    }
}

fn options(target: &str) -> Vec<String> {
    let mut options = vec![format!("--gpu-architecture={target}")];
    options.extend(OPTIONS.map(String::from));
    options
}

/// Calls `work` for every item on all cores, in no fixed order; the first error by item wins.
pub(crate) fn in_parallel<T: Sync, R: Send>(
    items: &[T],
    work: impl Fn(&T) -> Result<R> + Sync,
) -> Result<Vec<R>> {
    let threads = std::thread::available_parallelism().map_or(1, |n| n.get()).min(items.len());
    let next = AtomicUsize::new(0);
    let mut results: Vec<(usize, Result<R>)> = Vec::with_capacity(items.len());
    std::thread::scope(|scope| {
        let worker = || {
            let mut done = Vec::new();
            loop {
                let at = next.fetch_add(1, Ordering::Relaxed);
                let Some(item) = items.get(at) else { return done };
                done.push((at, work(item)));
            }
        };
        let workers: Vec<_> = (0..threads).map(|_| scope.spawn(worker)).collect();
        for worker in workers {
            match worker.join() {
                Ok(done) => results.extend(done),
                Err(panic) => std::panic::resume_unwind(panic),
            }
        }
    });
    results.sort_by_key(|(at, _)| *at);
    results.into_iter().map(|(_, result)| result).collect()
}

/// Constants for a message.
fn one_line(defines: &str) -> String {
    let list: Vec<&str> = defines.lines().map(|l| l.trim_start_matches("#define ")).collect();
    if list.is_empty() { "no constants".into() } else { list.join(", ") }
}

/// Opens every file of the cache; the digits count its layout.
const MARK: &[u8; 8] = b"RBKERN01";

/// The code in a whole file; nothing if it is absent, damaged or of another key.
fn read(file: &Path, key: &[u8; 32]) -> Option<Vec<u8>> {
    let bytes = std::fs::read(file).ok()?;
    let rest = bytes.strip_prefix(MARK)?;
    let (length, rest) = rest.split_first_chunk::<8>()?;
    let (checksum, code) = rest.split_first_chunk::<32>()?;
    let whole = u64::from_le_bytes(*length) == code.len() as u64 && *checksum == checksum_of(key, code);
    if !whole {
        tracing::debug!("{}: damaged, built anew", file.display());
    }
    whole.then(|| code.to_vec())
}

/// Writes a whole file or none: readers never see a part.
fn write(file: &Path, key: &[u8; 32], code: &[u8]) -> std::io::Result<()> {
    let folder = file.parent().unwrap_or(Path::new("."));
    std::fs::create_dir_all(folder)?;
    let mut part = tempfile::NamedTempFile::new_in(folder)?;
    part.write_all(MARK)?;
    part.write_all(&(code.len() as u64).to_le_bytes())?;
    part.write_all(&checksum_of(key, code))?;
    part.write_all(code)?;
    part.persist(file).map_err(|e| e.error)?;
    Ok(())
}

fn checksum_of(key: &[u8; 32], code: &[u8]) -> [u8; 32] {
    Sha256::new().chain_update(key).chain_update(code).finalize().into()
}

pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::{Kernel, Launch};

    const ADD: Kernel = Kernel {
        name: "add_n",
        source: "extern \"C\" __global__ void add_n(float* y) { GRID_STRIDE(i, N) y[i] += f(Y(1)); }\n",
    };

    fn unit(kernel: &Kernel, n: usize) -> Unit {
        Launch::new(kernel, [1; 3], [32, 1, 1]).define("N", n).define("Y", "float").unit().clone()
    }

    /// NVRTC with a cache of its own, or the reason why there is none.
    fn compiler(folder: &Path) -> Option<Compiler> {
        match Compiler::find() {
            Ok(compiler) => Some(compiler.with_cache(Some(folder.to_path_buf()))),
            Err(error) => {
                println!("skipped: {error}");
                None
            }
        }
    }

    fn files(folder: &Path) -> Vec<PathBuf> {
        std::fs::read_dir(folder).unwrap().map(|e| e.unwrap().path()).collect()
    }

    #[test]
    fn a_file_is_whole_or_not_read() {
        let dir = tempfile::tempdir().unwrap();
        let (file, key) = (dir.path().join("deep/k.bin"), [7; 32]);
        write(&file, &key, b"code").unwrap();
        assert_eq!(read(&file, &key).as_deref(), Some(&b"code"[..]));
        assert_eq!(read(&file, &[8; 32]), None, "of another key");
        let whole = std::fs::read(&file).unwrap();
        for cut in 0..whole.len() {
            std::fs::write(&file, &whole[..cut]).unwrap();
            assert_eq!(read(&file, &key), None, "cut to {cut}");
            let mut flipped = whole.clone();
            flipped[cut] ^= 1;
            std::fs::write(&file, flipped).unwrap();
            assert_eq!(read(&file, &key), None, "byte {cut} changed");
        }
        write(&file, &key, b"code").unwrap();
        assert_eq!(files(dir.path().join("deep").as_path()).len(), 1, "no temporary file is left");
    }

    #[test]
    fn compiles_for_every_architecture_and_keeps_the_result() {
        let dir = tempfile::tempdir().unwrap();
        let Some(compiler) = compiler(dir.path()) else { return };
        for arch in ["sm_80", "sm_86", "sm_89", "sm_90a", "sm_120"] {
            let first = compiler.compile(&unit(&ADD, 10), arch).unwrap();
            assert!(!first.cached && first.code.starts_with(b"\x7fELF"), "{arch}");
            let again = compiler.compile(&unit(&ADD, 10), arch).unwrap();
            assert!(again.cached && again.code == first.code, "{arch}");
        }
        assert!(!compiler.compile(&unit(&ADD, 11), "sm_80").unwrap().cached, "another constant");
        let newer = compiler.compile(&unit(&ADD, 10), "sm_999").unwrap();
        assert!(String::from_utf8_lossy(&newer.code).contains(".entry add_n"), "PTX for an unknown card");
    }

    #[test]
    fn a_damaged_cache_is_rebuilt_and_a_closed_one_is_no_error() {
        let dir = tempfile::tempdir().unwrap();
        let Some(compiler) = compiler(dir.path()) else { return };
        let good = compiler.compile(&unit(&ADD, 10), "sm_80").unwrap();
        let [file] = &files(dir.path())[..] else { panic!("one file") };
        std::fs::write(file, b"RBKERN01 and rubbish").unwrap();
        let again = compiler.compile(&unit(&ADD, 10), "sm_80").unwrap();
        assert!(!again.cached && again.code == good.code);
        assert!(compiler.compile(&unit(&ADD, 10), "sm_80").unwrap().cached);
        // A file where the folder should be: nothing can be written.
        let closed = compiler.with_cache(Some(file.join("kernels")));
        assert!(!closed.compile(&unit(&ADD, 10), "sm_80").unwrap().cached);
    }

    #[test]
    fn an_error_shows_constants_and_the_log() {
        let dir = tempfile::tempdir().unwrap();
        let Some(compiler) = compiler(dir.path()) else { return };
        let broken =
            Kernel { name: "broken", source: "extern \"C\" __global__ void broken() { nothing; }\n" };
        let message = compiler.compile(&unit(&broken, 3), "sm_80").unwrap_err().to_string();
        for part in ["kernel broken", "sm_80", "N 3, Y float", "broken.cu(1)", "\"nothing\" is undefined"] {
            assert!(message.contains(part), "{part}: {message}");
        }
        let message = compiler.compile(&unit(&ADD, 3), "sm_10").unwrap_err().to_string();
        assert!(message.contains("knows no architecture"), "{message}");
    }

    #[test]
    fn parallel_work_keeps_the_order() {
        let items: Vec<usize> = (0..100).collect();
        assert_eq!(in_parallel(&items, |&i| Ok(i * 2)).unwrap()[..3], [0, 2, 4]);
        assert!(in_parallel(&[] as &[usize], |&i| Ok(i)).unwrap().is_empty());
    }
}
