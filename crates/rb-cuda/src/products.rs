//! Products on a card: descriptors kept by shape, and the search for the fastest algorithm.
//!
//! Without a search a product takes the library's first guess. What a search found is kept in a file by card,
//! driver and library version, and each choice is checked by the library before it is used.

use std::collections::{BTreeMap, HashMap};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use crate::compile::hex;
use crate::cublaslt::{Algorithm, Alignment, CublasLt, Heuristic, Problem, WORKSPACE_BYTES};
use crate::discover::cache_folder;
use crate::driver::Handle;
use crate::gpu::lock;
use crate::library::LibraryInfo;
use crate::matmul::{Matmul, MatmulKey, MatrixType};
use crate::{Buffer, CudaError, Gpu, Result};

/// Algorithms asked for in one search.
const CANDIDATES: usize = 64;

/// What the search for one product found.
#[derive(Clone, Debug, PartialEq)]
pub struct Tuning {
    /// The product.
    pub spec: Matmul,
    /// Algorithms that ran; 0 if the choice was known before or nothing could be tried.
    pub candidates: usize,
    /// Microseconds of the library's first guess.
    pub default_us: f64,
    /// Microseconds of the fastest.
    pub best_us: f64,
}

/// A shape with the alignment of its pointers.
type Case = (MatmulKey, Alignment);

struct Plan {
    problem: Problem<'static>,
    algorithm: Algorithm,
}

/// A choice that a search made.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Choice {
    algorithm: Algorithm,
    candidates: usize,
    default_us: f64,
    best_us: f64,
}

/// Everything that products need beside their pointers.
pub(crate) struct Products {
    lt: &'static CublasLt,
    plans: Mutex<HashMap<Case, Arc<Plan>>>,
    chosen: Mutex<BTreeMap<String, Choice>>,
    store: Store,
}

impl Products {
    pub(crate) fn new(lt: CublasLt, gpu_name: &str, driver_version: &str) -> Products {
        let identity = json!({ "gpu": gpu_name, "driver": driver_version, "cublaslt": lt.version });
        let store = Store::new(cache_folder().map(|f| f.join("products")), identity);
        // The card stays open to the end of the process, and its library with it.
        let lt: &'static CublasLt = Box::leak(Box::new(lt));
        Products { lt, plans: Mutex::default(), chosen: Mutex::new(store.read()), store }
    }

    pub(crate) fn library(&self) -> LibraryInfo {
        self.lt.library()
    }

    /// Enqueues `C = alpha A B + beta C`.
    ///
    /// # Safety
    /// The pointers are device memory that holds the matrices of `spec`; the workspace is [`WORKSPACE_BYTES`]
    /// of device memory that no other stream uses; the context is current.
    pub(crate) unsafe fn enqueue(
        &self,
        spec: &Matmul,
        pointers: [u64; 3],
        workspace: u64,
        stream: Handle,
    ) -> Result<()> {
        let [a, b, c] = pointers;
        let plan = self.plan((spec.key(), Alignment::of(a, b, c)))?;
        // SAFETY: the caller's promise; the algorithm was found for this alignment.
        unsafe { plan.problem.enqueue(&plan.algorithm, (spec.alpha, spec.beta), pointers, workspace, stream) }
    }

    fn plan(&self, case: Case) -> Result<Arc<Plan>> {
        let mut plans = lock(&self.plans);
        if let Some(plan) = plans.get(&case) {
            return Ok(plan.clone());
        }
        let problem = self.lt.problem(&case.0)?;
        let algorithm = match self.known(&problem, case) {
            Some(choice) => choice.algorithm,
            None => first_guess(&problem, case)?.algorithm,
        };
        let plan = Arc::new(Plan { problem, algorithm });
        plans.insert(case, plan.clone());
        Ok(plan)
    }

    /// The choice of an earlier search, if the library still takes it.
    fn known(&self, problem: &Problem<'_>, case: Case) -> Option<Choice> {
        let choice = *lock(&self.chosen).get(&name_of(case))?;
        problem.examine(&choice.algorithm).map(|_| choice)
    }

    /// Searches for each product that has no choice yet, and keeps what it finds.
    pub(crate) fn tune(&self, gpu: &Gpu, specs: &[Matmul], stream: Handle) -> Result<Vec<Tuning>> {
        let workspace = gpu.workspace()?;
        let mut results = Vec::new();
        let mut found = 0;
        for spec in specs {
            if spec.m == 0 || spec.n == 0 || spec.k == 0 || spec.batch == 0 {
                continue;
            }
            for case in self.cases(spec) {
                let problem = self.lt.problem(&case.0)?;
                let choice = match self.known(&problem, case) {
                    Some(choice) => Choice { candidates: 0, ..choice },
                    None => match search(gpu, spec, &problem, case, workspace, stream) {
                        Ok(choice) => {
                            found += 1;
                            lock(&self.chosen).insert(name_of(case), choice);
                            lock(&self.plans).remove(&case);
                            choice
                        }
                        Err(error @ (CudaError::OutOfMemory { .. } | CudaError::Unsupported { .. })) => {
                            tracing::warn!("product {spec} is not tuned: {error}");
                            continue;
                        }
                        Err(error) => return Err(error),
                    },
                };
                let Choice { candidates, default_us, best_us, .. } = choice;
                results.push(Tuning { spec: *spec, candidates, default_us, best_us });
            }
        }
        if found > 0
            && let Err(error) = self.store.write(&lock(&self.chosen))
        {
            tracing::warn!(
                "the choices of algorithms are not kept: {error}; set RUSTINGBRAIN_CACHE to a folder that can be \
                 written"
            );
        }
        Ok(results)
    }

    /// The alignments that a product was seen with; the allocator's own if it was not seen.
    fn cases(&self, spec: &Matmul) -> Vec<Case> {
        let key = spec.key();
        let plans = lock(&self.plans);
        let mut cases: Vec<Case> = plans.keys().filter(|case| case.0 == key).copied().collect();
        if cases.is_empty() {
            cases.push((key, Alignment::FULL));
        }
        cases.sort();
        cases
    }
}

/// A name of a case that is the same in every version of this program that gives it the same meaning.
fn name_of((key, alignment): Case) -> String {
    let Alignment { a, b, c } = alignment;
    format!("{key}, aligned to {a}, {b}, {c}")
}

fn first_guess(problem: &Problem<'_>, case: Case) -> Result<Heuristic> {
    // A few, since the first may be one that does not repeat its bits.
    let found = problem.candidates(case.1, WORKSPACE_BYTES, 8)?;
    found.first().copied().ok_or_else(|| CudaError::Unsupported {
        what: format!("product {}", name_of(case)),
        reason: "cuBLASLt has no algorithm for it".into(),
    })
}

/// Times all candidates on random data in buffers of its own.
fn search(
    gpu: &Gpu,
    spec: &Matmul,
    problem: &Problem<'_>,
    case: Case,
    workspace: u64,
    stream: Handle,
) -> Result<Choice> {
    let default = first_guess(problem, case)?;
    let mut candidates = vec![default];
    // The second search, without scratch memory, finds algorithms that the first has crowded out.
    for workspace_bytes in [WORKSPACE_BYTES, 0] {
        for found in problem.candidates(case.1, workspace_bytes, CANDIDATES)? {
            if candidates.iter().all(|c| c.algorithm != found.algorithm) {
                candidates.push(found);
            }
        }
    }
    let [a_bytes, b_bytes, c_bytes] = spec.spans().ok_or_else(|| CudaError::Unsupported {
        what: format!("product {spec}"),
        reason: "sizes overflow".into(),
    })?;
    let alignment = case.1;
    let a = Operand::random(gpu, spec.ab, a_bytes, alignment.a, 1)?;
    let b = Operand::random(gpu, spec.ab, b_bytes, alignment.b, 2)?;
    let c = Operand::random(gpu, spec.c, c_bytes, alignment.c, 3)?;
    let pointers = [a.pointer(), b.pointer(), c.pointer()];
    let run = |algorithm: &Algorithm, times: usize| -> Result<f64> {
        let milliseconds = gpu.elapsed_ms(|| {
            for _ in 0..times {
                let factors = (spec.alpha, spec.beta);
                // SAFETY: the operands hold the matrices of the product with the alignment that the candidates
                // were found for; the workspace is used by this stream alone; `elapsed_ms` made the context
                // current.
                unsafe { problem.enqueue(algorithm, factors, pointers, workspace, stream) }?;
            }
            Ok(())
        })?;
        Ok(milliseconds * 1e3 / times as f64)
    };
    let mut best: Option<(f64, Algorithm)> = None;
    let (mut ran, mut default_us) = (0, f64::INFINITY);
    for (at, candidate) in candidates.iter().enumerate() {
        // The library may refuse a candidate that it offered itself; what fails on the card is seen here too.
        if run(&candidate.algorithm, 2).is_err() {
            gpu.synchronize()?;
            continue;
        }
        ran += 1;
        let rough = run(&candidate.algorithm, 1)?;
        let hopeless = best.is_some_and(|(us, _)| rough > 2.0 * us + 20.0);
        let us = if hopeless {
            rough
        } else {
            let times = (200.0 / rough.max(1.0)).clamp(1.0, 50.0) as usize;
            let mut samples = [0.0; 5];
            for sample in &mut samples {
                *sample = run(&candidate.algorithm, times)?;
            }
            samples.sort_by(f64::total_cmp);
            samples[2]
        };
        if at == 0 {
            default_us = us;
        }
        if best.is_none_or(|(least, _)| us < least) {
            best = Some((us, candidate.algorithm));
        }
    }
    let (best_us, algorithm) = best.ok_or_else(|| CudaError::Unsupported {
        what: format!("product {spec}"),
        reason: format!("none of {} algorithms runs", candidates.len()),
    })?;
    tracing::debug!("{spec}: {best_us:.1} us, first guess {default_us:.1} us, of {ran} algorithms");
    Ok(Choice { algorithm, candidates: ran, default_us, best_us })
}

/// A matrix of random values, at an address with exactly the alignment asked for.
struct Operand {
    buffer: Buffer,
    offset: usize,
}

impl Operand {
    fn random(gpu: &Gpu, of: MatrixType, bytes: usize, alignment: u32, seed: u64) -> Result<Operand> {
        // Blocks start at multiples of 512 bytes.
        let offset = if alignment >= 256 { 0 } else { alignment as usize };
        let buffer = gpu.alloc_for(offset + bytes, "search for algorithms")?;
        let start = random_bytes(of, bytes.min(4 << 20), seed);
        gpu.upload(&buffer, offset, &start)?;
        // What is there is copied behind itself until the matrix is full.
        let mut filled = start.len();
        while filled < bytes {
            let more = filled.min(bytes - filled);
            gpu.copy(&buffer, offset + filled, &buffer, offset, more)?;
            filled += more;
        }
        Ok(Operand { buffer, offset })
    }

    fn pointer(&self) -> u64 {
        self.buffer.pointer(self.offset)
    }
}

/// Values evenly spread over [-1, 1): speed depends on the bits that flip, so zeros would mislead.
fn random_bytes(of: MatrixType, bytes: usize, seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    let mut out = Vec::with_capacity(bytes);
    while out.len() < bytes {
        let word = next().to_bits().to_le_bytes();
        match of {
            MatrixType::F32 => out.extend_from_slice(&word),
            // bf16 is the upper half of an f32.
            MatrixType::Bf16 => out.extend_from_slice(&word[2..]),
        }
    }
    out
}

/// The file of choices: a line that says for what machine, then a line for each product.
struct Store {
    file: Option<PathBuf>,
    identity: Value,
}

impl Store {
    fn new(folder: Option<PathBuf>, identity: Value) -> Store {
        let digest = hex(&Sha256::digest(identity.to_string()));
        Store { file: folder.map(|f| f.join(format!("{}.jsonl", &digest[..16]))), identity }
    }

    /// All choices that read well; damaged lines are left out and searched for again.
    fn read(&self) -> BTreeMap<String, Choice> {
        let text = self.file.as_ref().and_then(|f| std::fs::read_to_string(f).ok()).unwrap_or_default();
        let mut lines = text.lines().map(|line| serde_json::from_str::<Value>(line).ok());
        if lines.next().flatten().as_ref() != Some(&self.identity) {
            return BTreeMap::new();
        }
        lines.flatten().filter_map(|line| choice_of(&line)).collect()
    }

    /// Adds these choices to those on disk, in a whole new file.
    fn write(&self, chosen: &BTreeMap<String, Choice>) -> std::io::Result<()> {
        let Some(file) = &self.file else { return Ok(()) };
        let mut all = self.read();
        all.extend(chosen.iter().map(|(name, choice)| (name.clone(), *choice)));
        let folder = file.parent().unwrap_or(Path::new("."));
        std::fs::create_dir_all(folder)?;
        let mut part = tempfile::NamedTempFile::new_in(folder)?;
        writeln!(part, "{}", self.identity)?;
        for (name, choice) in &all {
            writeln!(part, "{}", line_of(name, choice))?;
        }
        part.persist(file).map_err(|e| e.error)?;
        Ok(())
    }
}

fn line_of(name: &str, choice: &Choice) -> Value {
    let words: Vec<String> = choice.algorithm.iter().map(|word| format!("{word:016x}")).collect();
    let check = &hex(&Sha256::digest(format!("{name}{}", words.concat())))[..16];
    json!({
        "product": name,
        "algorithm": words,
        "candidates": choice.candidates,
        "default_us": choice.default_us,
        "best_us": choice.best_us,
        "check": check,
    })
}

fn choice_of(line: &Value) -> Option<(String, Choice)> {
    let name = line.get("product")?.as_str()?;
    let words = line.get("algorithm")?.as_array()?;
    let mut algorithm: Algorithm = [0; 8];
    if words.len() != algorithm.len() {
        return None;
    }
    for (to, word) in algorithm.iter_mut().zip(words) {
        *to = u64::from_str_radix(word.as_str()?, 16).ok()?;
    }
    let choice = Choice {
        algorithm,
        candidates: usize::try_from(line.get("candidates")?.as_u64()?).ok()?,
        default_us: line.get("default_us")?.as_f64()?,
        best_us: line.get("best_us")?.as_f64()?,
    };
    (line_of(name, &choice).get("check") == line.get("check")).then(|| (name.to_string(), choice))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn choice(word: u64) -> Choice {
        Choice {
            algorithm: [word, 0, u64::MAX, 3, 4, 5, 6, 7],
            candidates: 64,
            default_us: 12.5,
            best_us: 10.25,
        }
    }

    #[test]
    fn choices_are_kept_by_machine_and_damaged_lines_are_left_out() {
        let dir = tempfile::tempdir().unwrap();
        let store =
            |gpu: &str| Store::new(Some(dir.path().join("deep")), json!({ "gpu": gpu, "cublaslt": 130_000 }));
        let first = BTreeMap::from([("a".to_string(), choice(1))]);
        let second = BTreeMap::from([("b".to_string(), choice(2))]);
        assert!(store("H200").read().is_empty());
        store("H200").write(&first).unwrap();
        store("H200").write(&second).unwrap();
        let both: BTreeMap<_, _> = first.clone().into_iter().chain(second).collect();
        assert_eq!(store("H200").read(), both, "a second process adds");
        assert!(store("H100").read().is_empty());

        let path = store("H200").file.unwrap();
        let text = std::fs::read_to_string(&path).unwrap();
        let line_b = text.lines().nth(2).unwrap();
        for damage in [&line_b[..40], &line_b.replace("0000000000000002", "0000000000000003"), "{}", ""] {
            std::fs::write(&path, text.replace(line_b, damage)).unwrap();
            assert_eq!(store("H200").read(), first, "{damage}");
        }
        std::fs::write(&path, text.replace("H200", "H300")).unwrap();
        assert!(store("H200").read().is_empty(), "a file of another machine under this name");
    }

    #[test]
    fn without_a_folder_nothing_is_kept() {
        let store = Store::new(None, json!({}));
        store.write(&BTreeMap::from([("a".to_string(), choice(1))])).unwrap();
        assert!(store.read().is_empty());
    }

    #[test]
    fn random_values_fill_the_range() {
        let values: Vec<f32> = random_bytes(MatrixType::F32, 4000, 1)
            .chunks_exact(4)
            .map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]))
            .collect();
        assert_eq!(values.len(), 1000);
        assert!(values.iter().all(|x| (-1.0..1.0).contains(x)));
        assert!(values.iter().any(|x| *x > 0.9) && values.iter().any(|x| *x < -0.9));
        assert_eq!(random_bytes(MatrixType::Bf16, 10, 1).len(), 10);
    }
}
