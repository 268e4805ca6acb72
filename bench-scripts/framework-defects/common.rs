//! What these programs measure with: bytes by an allocator that counts, resident memory, and one printed line
//! for each defect.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

static LIVE: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);
static WATCHED_SIZE: AtomicUsize = AtomicUsize::new(usize::MAX);
static WATCHED_COUNT: AtomicUsize = AtomicUsize::new(0);

struct Counting;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn took(bytes: usize) {
    let live = LIVE.fetch_add(bytes, Relaxed) + bytes;
    PEAK.fetch_max(live, Relaxed);
    if bytes == WATCHED_SIZE.load(Relaxed) {
        WATCHED_COUNT.fetch_add(1, Relaxed);
    }
}

// SAFETY: every call goes to the system's allocator with the caller's own arguments; the counters touch no memory that
// is handed out.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        took(layout.size());
        // SAFETY: the caller's promises about `layout` are those that the system's allocator asks for.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        took(layout.size());
        // SAFETY: as above.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size(), Relaxed);
        // SAFETY: `at` came from one of the two functions above with this layout.
        unsafe { System.dealloc(at, layout) }
    }
}

/// Bytes that are allocated now.
pub fn live() -> usize {
    LIVE.load(Relaxed)
}

/// The most bytes that were allocated at once while `work` ran, above those before it, and what it gave.
pub fn peak_above<T>(work: impl FnOnce() -> T) -> (usize, T) {
    let before = live();
    PEAK.store(before, Relaxed);
    let value = work();
    (PEAK.load(Relaxed) - before, value)
}

/// Allocations of exactly `bytes` while `work` runs, and what it gave.
pub fn allocations_of<T>(bytes: usize, work: impl FnOnce() -> T) -> (usize, T) {
    WATCHED_SIZE.store(bytes, Relaxed);
    WATCHED_COUNT.store(0, Relaxed);
    let value = work();
    WATCHED_SIZE.store(usize::MAX, Relaxed);
    (WATCHED_COUNT.load(Relaxed), value)
}

/// Resident memory of this process in MiB, from `/proc/self/status`; NaN where there is none.
pub fn resident_mib() -> f64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kib = line.and_then(|line| line.trim().trim_end_matches("kB").trim().parse::<f64>().ok());
    kib.map_or(f64::NAN, |kib| kib / 1024.0)
}

/// MiB of bytes.
pub fn mib(bytes: usize) -> f64 {
    bytes as f64 / (1024.0 * 1024.0)
}

/// Numbers that look random and are the same in every run, in -1 to 1.
pub struct Numbers(pub u64);

impl Numbers {
    pub fn next(&mut self) -> f32 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        ((self.0 >> 40) as f32) / ((1u64 << 23) as f32) - 1.0
    }

    pub fn many(&mut self, count: usize) -> Vec<f32> {
        (0..count).map(|_| self.next()).collect()
    }
}

/// What a run showed.
pub enum Verdict {
    /// The defect was seen in this release.
    Exists,
    /// The case ran and did what it should.
    NotSeen,
    /// It cannot be shown on a CPU.
    NotOnCpu,
}

/// Prints one line: name, what was tried, what was seen, verdict.
pub fn report(name: &str, tried: &str, seen: &str, verdict: Verdict) {
    let verdict = match verdict {
        Verdict::Exists => "EXISTS",
        Verdict::NotSeen => "NOT SEEN",
        Verdict::NotOnCpu => "NOT ON A CPU",
    };
    println!("{verdict} | {name} | {tried} | {seen}");
}

/// [`Verdict::Exists`] if `defect`.
pub fn exists(defect: bool) -> Verdict {
    if defect { Verdict::Exists } else { Verdict::NotSeen }
}
