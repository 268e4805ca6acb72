//! Products on a card: descriptors kept by shape, and the search for the fastest algorithm.
//!
//! Without a search a product takes the library's first guess. What a search found is kept in a file by card,
//! driver and library version, and each choice is checked by the library before it is used. For some cards and library
//! versions choices come with this program.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

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

/// Algorithms that the library is asked to propose.
const PROPOSED: usize = 64;
/// Settings of the library's algorithms that are tried beside those it proposes.
const SETTINGS: usize = 128;
/// Candidates that every search tries, however long they take.
const LEAST: usize = 32;
/// Time of a search after which it ends with what it has.
const ENOUGH: Duration = Duration::from_millis(300);

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
        let mut chosen = shipped(gpu_name, lt.version);
        let store = Store::new(cache_folder().map(|f| f.join("products")), identity);
        chosen.extend(store.read());
        // The card stays open to the end of the process, and its library with it.
        let lt: &'static CublasLt = Box::leak(Box::new(lt));
        Products { lt, plans: Mutex::default(), chosen: Mutex::new(chosen), store }
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
        let mut found = BTreeMap::new();
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
                            found.insert(name_of(case), choice);
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
        if !found.is_empty()
            && let Err(error) = self.store.write(&found)
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
        candidates.extend(problem.candidates(case.1, workspace_bytes, PROPOSED)?);
    }
    candidates.extend(problem.settings(&case.0, case.1, SETTINGS));
    let mut seen = BTreeSet::new();
    candidates.retain(|c| seen.insert(c.algorithm));
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
    let mut timed: Vec<(f64, Algorithm)> = Vec::new();
    let (mut least, mut default_us) = (f64::INFINITY, f64::INFINITY);
    let began = Instant::now();
    for (at, candidate) in candidates.iter().enumerate() {
        if timed.len() >= LEAST && began.elapsed() > ENOUGH {
            break;
        }
        // The library may refuse a candidate that it offered itself; what fails on the card is seen here too.
        if run(&candidate.algorithm, 2).is_err() {
            gpu.synchronize()?;
            continue;
        }
        let rough = run(&candidate.algorithm, 1)?;
        let us = if rough > 1.5 * least + 10.0 {
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
        least = least.min(us);
        timed.push((us, candidate.algorithm));
    }
    let (ran, judge) = (timed.len(), timed.first().map(|(_, algorithm)| *algorithm));
    timed.sort_by(|a, b| a.0.total_cmp(&b.0));
    let result = |algorithm: &Algorithm| -> Result<Vec<u8>> {
        c.fill(gpu, spec.c)?;
        run(algorithm, 1)?;
        c.sample(gpu)
    };
    // A wrong or changing result, however fast, is none. The judge is the library's first proposal that ran.
    let expected = match judge {
        Some(judge) => result(&judge)?,
        None => Vec::new(),
    };
    for (best_us, algorithm) in timed {
        let got = result(&algorithm)?;
        if agree(spec.c, &expected, &got) && result(&algorithm)? == got {
            tracing::debug!("{spec}: {best_us:.1} us, first guess {default_us:.1} us, of {ran} algorithms");
            return Ok(Choice { algorithm, candidates: ran, default_us, best_us });
        }
        tracing::warn!("product {spec}: an algorithm of {best_us:.1} us gives other values; it is not used");
    }
    Err(CudaError::Unsupported {
        what: format!("product {spec}"),
        reason: format!("none of {} algorithms runs", candidates.len()),
    })
}

/// Whether two results of a product are the same but for rounding.
fn agree(of: MatrixType, expected: &[u8], got: &[u8]) -> bool {
    let values = |bytes: &[u8]| -> Vec<f32> {
        match of {
            MatrixType::F32 => {
                bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
            }
            MatrixType::Bf16 => {
                bytes.chunks_exact(2).map(|b| f32::from_le_bytes([0, 0, b[0], b[1]])).collect()
            }
        }
    };
    let (expected, got) = (values(expected), values(got));
    let square: f32 = expected.iter().map(|x| x * x).sum();
    let unit = (square / expected.len().max(1) as f32).sqrt();
    // Two roundings of a bf16 result; sums in fp32 in another order are far closer than a hundredth.
    let far = |x: f32, y: f32| (x - y).abs() > 0.01 * (unit + x.abs());
    !expected.iter().zip(&got).any(|(&x, &y)| far(x, y) || y.is_nan()) && unit.is_finite()
}

/// A matrix of random values, at an address with exactly the alignment asked for.
struct Operand {
    buffer: Buffer,
    offset: usize,
    bytes: usize,
    seed: u64,
}

/// Bytes that [`Operand::sample`] reads at each of three places.
const SAMPLE: usize = 1 << 20;

impl Operand {
    fn random(gpu: &Gpu, of: MatrixType, bytes: usize, alignment: u32, seed: u64) -> Result<Operand> {
        // Blocks start at multiples of 512 bytes.
        let offset = if alignment >= 256 { 0 } else { alignment as usize };
        let buffer = gpu.alloc_for(offset + bytes, "search for algorithms")?;
        let operand = Operand { buffer, offset, bytes, seed };
        operand.fill(gpu, of)?;
        Ok(operand)
    }

    fn fill(&self, gpu: &Gpu, of: MatrixType) -> Result<()> {
        let start = random_bytes(of, self.bytes.min(4 << 20), self.seed);
        gpu.upload(&self.buffer, self.offset, &start)?;
        // What is there is copied behind itself until the matrix is full.
        let mut filled = start.len();
        while filled < self.bytes {
            let more = filled.min(self.bytes - filled);
            gpu.copy(&self.buffer, self.offset + filled, &self.buffer, self.offset, more)?;
            filled += more;
        }
        Ok(())
    }

    /// What stands at the beginning, in the middle and at the end.
    fn sample(&self, gpu: &Gpu) -> Result<Vec<u8>> {
        let length = SAMPLE.min(self.bytes);
        let mut all = Vec::new();
        for at in [0, (self.bytes - length) / 2 / 4 * 4, self.bytes - length] {
            let mut part = vec![0; length];
            gpu.download(&self.buffer, self.offset + at, &mut part)?;
            all.extend(part);
        }
        Ok(all)
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

/// Choices that come with this program, for the shapes of common models. To make one anew, take its line out of
/// [`SHIPPED`], train with `run.tune_products` on the card, and copy the file that the search wrote without the
/// driver of its first line.
const SHIPPED: &[&str] = &[include_str!("../choices/nvidia_h200_130100.jsonl")];

fn shipped(gpu_name: &str, version: usize) -> BTreeMap<String, Choice> {
    let wanted = json!({ "gpu": gpu_name, "cublaslt": version });
    let mut chosen = BTreeMap::new();
    for text in SHIPPED {
        let mut lines = text.lines().map(|line| serde_json::from_str::<Value>(line).ok());
        if lines.next().flatten().as_ref() == Some(&wanted) {
            chosen.extend(choices_of(lines));
        }
    }
    chosen
}

/// All lines that read well.
fn choices_of(lines: impl Iterator<Item = Option<Value>>) -> BTreeMap<String, Choice> {
    lines.flatten().filter_map(|line| choice_of(&line)).collect()
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
        choices_of(lines)
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
    fn shipped_choices_read_well() {
        for text in SHIPPED {
            let identity: Value = serde_json::from_str(text.lines().next().unwrap()).unwrap();
            let (gpu, version) = (&identity["gpu"], &identity["cublaslt"]);
            let found = shipped(gpu.as_str().unwrap(), version.as_u64().unwrap() as usize);
            assert_eq!(found.len(), text.lines().count() - 1, "{identity}: damaged or repeated lines");
            assert!(found.values().all(|c| c.candidates >= LEAST && c.best_us <= c.default_us));
        }
        assert!(shipped("another card", 130_100).is_empty());
    }

    #[test]
    fn without_a_folder_nothing_is_kept() {
        let store = Store::new(None, json!({}));
        store.write(&BTreeMap::from([("a".to_string(), choice(1))])).unwrap();
        assert!(store.read().is_empty());
    }

    #[test]
    fn wrong_results_do_not_agree() {
        for of in [MatrixType::F32, MatrixType::Bf16] {
            let expected = random_bytes(of, 4000, 1);
            assert!(agree(of, &expected, &expected));
            let size = of.size_bytes();
            for value in [f32::NAN, f32::INFINITY, 0.5] {
                let mut got = expected.clone();
                got[400..][..size].copy_from_slice(&value.to_le_bytes()[4 - size..]);
                assert!(!agree(of, &expected, &got), "{value}");
            }
            // The last bit of a value is rounding.
            let mut got = expected.clone();
            got[400] ^= 1;
            assert!(agree(of, &expected, &got));
        }
        let nan = f32::NAN.to_le_bytes();
        assert!(!agree(MatrixType::F32, &nan, &nan));
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
