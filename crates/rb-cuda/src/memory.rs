//! The caching allocator: best fit with splitting and joining inside large segments, under a hard budget.
//!
//! The same code serves a GPU and a dry run, so the plan that a dry run gives is what a real run takes.
//! Blocks are reused as soon as they are dropped: all work is in the order of one stream.

use std::collections::{BTreeMap, BTreeSet};

use crate::{CudaError, Result};

/// Every block starts at a multiple of this many bytes: rows stay aligned for 16-byte and TMA access.
const ALIGN: usize = 512;
/// Smallest segment asked of the driver, whose own granularity is 2 MiB.
const SEGMENT: usize = 32 << 20;

/// Memory in use and held, in bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MemoryStats {
    /// In blocks that are alive.
    pub in_use: usize,
    /// The most that was ever alive at once.
    pub peak: usize,
    /// Held from the driver.
    pub reserved: usize,
    /// Alive at the moment of the peak, by holder, largest first.
    pub peak_holders: Vec<(&'static str, usize)>,
    /// Alive now, by holder, largest first.
    pub holders: Vec<(&'static str, usize)>,
}

/// What a block is taken from.
pub(crate) trait Segments {
    fn allocate(&self, bytes: usize) -> Option<u64>;
}

#[derive(Debug, Clone, Copy)]
struct Live {
    bytes: usize,
    holder: &'static str,
    /// No two blocks have the same, however their places are reused.
    serial: u64,
}

/// What a recorded piece of work needs of memory when it is run again: see [`Pool::still_holds`].
#[derive(Debug, Default)]
pub(crate) struct Footprint {
    /// Where the blocks were that the work took, as sorted ranges that do not touch.
    scratch: Vec<(u64, u64)>,
    /// Blocks that the work took and that were alive at its end, by serial.
    kept: BTreeSet<u64>,
    /// Blocks that the work used and did not take: start and serial.
    used: Vec<(u64, u64)>,
}

#[derive(Debug)]
struct Recording {
    first_serial: u64,
    taken: Vec<(u64, u64)>,
    used: BTreeSet<u64>,
}

/// The allocator's book.
#[derive(Debug)]
pub(crate) struct Pool {
    budget: usize,
    /// Segments: start to size.
    segments: BTreeMap<u64, usize>,
    /// Free blocks by start.
    free: BTreeMap<u64, usize>,
    /// Free blocks by (size, start), for the best fit.
    by_size: BTreeSet<(usize, u64)>,
    live: BTreeMap<u64, Live>,
    in_use: usize,
    reserved: usize,
    peak: usize,
    by_holder: BTreeMap<&'static str, usize>,
    peak_holders: BTreeMap<&'static str, usize>,
    next_serial: u64,
    recording: Option<Recording>,
}

impl Pool {
    pub(crate) fn new(budget: usize) -> Pool {
        Pool {
            budget,
            segments: BTreeMap::new(),
            free: BTreeMap::new(),
            by_size: BTreeSet::new(),
            live: BTreeMap::new(),
            in_use: 0,
            reserved: 0,
            peak: 0,
            by_holder: BTreeMap::new(),
            peak_holders: BTreeMap::new(),
            next_serial: 0,
            recording: None,
        }
    }

    pub(crate) fn budget(&self) -> usize {
        self.budget
    }

    /// A block of at least `bytes` bytes.
    pub(crate) fn take(&mut self, bytes: usize, holder: &'static str, from: &dyn Segments) -> Result<u64> {
        let bytes = bytes.max(1).next_multiple_of(ALIGN);
        let found = self.by_size.range((bytes, 0)..).next().copied();
        let (size, start) = match found {
            Some(block) => block,
            None => self.grow(bytes, holder, from)?,
        };
        self.by_size.remove(&(size, start));
        self.free.remove(&start);
        if size > bytes {
            self.insert_free(start + bytes as u64, size - bytes);
        }
        let serial = self.next_serial;
        self.next_serial += 1;
        self.live.insert(start, Live { bytes, holder, serial });
        if let Some(recording) = &mut self.recording {
            recording.taken.push((start, start + bytes as u64));
        }
        self.in_use += bytes;
        *self.by_holder.entry(holder).or_default() += bytes;
        if self.in_use > self.peak {
            self.peak = self.in_use;
            self.peak_holders.clone_from(&self.by_holder);
        }
        Ok(start)
    }

    fn grow(&mut self, bytes: usize, holder: &'static str, from: &dyn Segments) -> Result<(usize, u64)> {
        let room = self.budget.saturating_sub(self.reserved);
        // A generous segment where there is room, an exact one where the budget is nearly used up.
        for size in [bytes.max(SEGMENT).next_multiple_of(2 << 20), bytes] {
            if size <= room
                && let Some(start) = from.allocate(size)
            {
                self.segments.insert(start, size);
                self.reserved += size;
                self.insert_free(start, size);
                return Ok((size, start));
            }
        }
        Err(self.out_of_memory(bytes, holder))
    }

    /// Holds `bytes` in one segment, so that later blocks need no driver call. Ignored where it does not fit.
    pub(crate) fn reserve(&mut self, bytes: usize, from: &dyn Segments) {
        let bytes = bytes.next_multiple_of(2 << 20);
        if bytes > self.reserved
            && bytes <= self.budget.saturating_sub(self.reserved)
            && let Some(start) = from.allocate(bytes)
        {
            self.segments.insert(start, bytes);
            self.reserved += bytes;
            self.insert_free(start, bytes);
        }
    }

    fn insert_free(&mut self, start: u64, bytes: usize) {
        self.free.insert(start, bytes);
        self.by_size.insert((bytes, start));
    }

    /// Gives a block back and joins it with free neighbours of its segment.
    pub(crate) fn give_back(&mut self, start: u64) {
        let Some(Live { bytes, holder, .. }) = self.live.remove(&start) else {
            debug_assert!(false, "a block is given back twice");
            return;
        };
        self.in_use -= bytes;
        if let Some(held) = self.by_holder.get_mut(holder) {
            *held -= bytes;
        }
        let segment = self.segments.range(..=start).next_back().map_or(start, |(s, _)| *s);
        let segment_end = segment + self.segments.get(&segment).copied().unwrap_or(bytes) as u64;
        let (mut first, mut size) = (start, bytes);
        let after = start + bytes as u64;
        if after < segment_end
            && let Some(next) = self.free.remove(&after)
        {
            self.by_size.remove(&(next, after));
            size += next;
        }
        let before = self.free.range(segment..start).next_back().map(|(s, b)| (*s, *b));
        if let Some((s, b)) = before
            && s + b as u64 == start
        {
            self.free.remove(&s);
            self.by_size.remove(&(b, s));
            (first, size) = (s, size + b);
        }
        self.insert_free(first, size);
    }

    /// Notes from now on which blocks are taken and used.
    pub(crate) fn start_recording(&mut self) {
        let first_serial = self.next_serial;
        self.recording = Some(Recording { first_serial, taken: Vec::new(), used: BTreeSet::new() });
    }

    /// Notes that the block at `start` is used by the work that is recorded.
    pub(crate) fn note_use(&mut self, start: u64) {
        if let Some(recording) = &mut self.recording {
            recording.used.insert(start);
        }
    }

    /// Ends the recording. A block that was there before and was given back meanwhile makes a footprint that does not
    /// hold.
    pub(crate) fn end_recording(&mut self) -> Footprint {
        let Some(Recording { first_serial, mut taken, used }) = self.recording.take() else {
            return Footprint::default();
        };
        taken.sort_unstable();
        let mut scratch: Vec<(u64, u64)> = Vec::new();
        for (start, end) in taken {
            match scratch.last_mut() {
                Some((_, last)) if start <= *last => *last = end.max(*last),
                _ => scratch.push((start, end)),
            }
        }
        let fresh = |live: &&Live| live.serial >= first_serial;
        let kept = self.live.values().filter(fresh).map(|live| live.serial).collect();
        let inside = |at: u64| scratch.iter().any(|&(start, end)| (start..end).contains(&at));
        let used = used
            .into_iter()
            .filter_map(|start| match self.live.get(&start) {
                Some(live) if live.serial >= first_serial => None,
                Some(live) => Some((start, live.serial)),
                // Taken and given back by the work itself, or gone: then the serial is of no block.
                None if inside(start) => None,
                None => Some((start, u64::MAX)),
            })
            .collect();
        Footprint { scratch, kept, used }
    }

    /// Whether the recorded work may run again: every block that it used is still the same block, and nobody else
    /// has a block where it writes.
    pub(crate) fn still_holds(&self, footprint: &Footprint) -> bool {
        let same = |&(start, serial): &(u64, u64)| self.live.get(&start).is_some_and(|l| l.serial == serial);
        let apart = |(&start, live): (&u64, &Live)| {
            let end = start + live.bytes as u64;
            let next = footprint.scratch.partition_point(|&(_, scratch_end)| scratch_end <= start);
            footprint.kept.contains(&live.serial)
                || footprint.scratch.get(next).is_none_or(|&(scratch_start, _)| scratch_start >= end)
        };
        footprint.used.iter().all(same) && self.live.iter().all(apart)
    }

    pub(crate) fn reset_peak(&mut self) {
        self.peak = self.in_use;
        self.peak_holders.clone_from(&self.by_holder);
    }

    pub(crate) fn stats(&self) -> MemoryStats {
        MemoryStats {
            in_use: self.in_use,
            peak: self.peak,
            reserved: self.reserved,
            peak_holders: sorted(&self.peak_holders),
            holders: sorted(&self.by_holder),
        }
    }

    fn out_of_memory(&self, bytes: usize, holder: &'static str) -> CudaError {
        let mib = |b: usize| b as f64 / (1 << 20) as f64;
        let largest: Vec<String> =
            sorted(&self.by_holder).iter().take(3).map(|(n, b)| format!("{n} {:.1} MiB", mib(*b))).collect();
        CudaError::OutOfMemory {
            wanted_mib: mib(bytes),
            wanted_by: holder,
            in_use_mib: mib(self.in_use),
            limit_mib: mib(self.budget),
            largest: largest.join(", "),
            remedy:
                "lower train.per_device_train_batch_size or train.seq_len, set train.recompute to \"mlp\" or \
                     \"block\", or raise --gpu-memory-budget-mib; `rb plan CONFIG` prints what a run needs"
                    .into(),
        }
    }
}

fn sorted(holders: &BTreeMap<&'static str, usize>) -> Vec<(&'static str, usize)> {
    let mut list: Vec<(&'static str, usize)> =
        holders.iter().filter(|(_, b)| **b > 0).map(|(n, b)| (*n, *b)).collect();
    list.sort_by_key(|(name, bytes)| (std::cmp::Reverse(*bytes), *name));
    list
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::cell::Cell;

    struct Fake(Cell<u64>);
    impl Segments for Fake {
        fn allocate(&self, bytes: usize) -> Option<u64> {
            let start = self.0.get();
            self.0.set(start + bytes as u64 + (4 << 20));
            Some(start)
        }
    }

    fn fake() -> Fake {
        Fake(Cell::new(1 << 30))
    }

    #[test]
    fn blocks_are_reused_split_and_joined() {
        let (mut pool, from) = (Pool::new(usize::MAX), fake());
        let a = pool.take(10 << 20, "a", &from).unwrap();
        let b = pool.take(10 << 20, "b", &from).unwrap();
        assert_eq!(b, a + (10 << 20));
        pool.give_back(a);
        pool.give_back(b);
        assert_eq!(pool.take(32 << 20, "c", &from).unwrap(), a, "neighbours were joined");
        assert_eq!(pool.stats().reserved, 32 << 20);
        assert_eq!(pool.stats().peak_holders, [("c", 32 << 20)]);
    }

    #[test]
    fn the_budget_is_hard_and_the_error_names_holders() {
        let (mut pool, from) = (Pool::new(100 << 20), fake());
        pool.take(60 << 20, "weights", &from).unwrap();
        pool.take(30 << 20, "gradients", &from).unwrap();
        let message = pool.take(20 << 20, "attention", &from).unwrap_err().to_string();
        for part in ["20.0 MiB more", "attention", "90.0 of 100.0", "weights 60.0 MiB, gradients 30.0 MiB"] {
            assert!(message.contains(part), "{message}");
        }
        assert!(pool.stats().reserved <= 100 << 20);
    }

    #[test]
    fn recorded_work_runs_again_only_where_its_memory_is_its_own() {
        let (mut pool, from) = (Pool::new(usize::MAX), fake());
        let weights = pool.take(1 << 20, "weights", &from).unwrap();
        let other = pool.take(1 << 20, "other", &from).unwrap();
        pool.start_recording();
        let scratch = pool.take(2 << 20, "scratch", &from).unwrap();
        let loss = pool.take(4, "loss", &from).unwrap();
        for start in [weights, scratch, loss] {
            pool.note_use(start);
        }
        pool.give_back(scratch);
        let footprint = pool.end_recording();
        assert!(pool.still_holds(&footprint));
        // Free memory may be used between two runs, and blocks elsewhere may come and go.
        let between = pool.take(2 << 20, "evaluation", &from).unwrap();
        assert_eq!(between, scratch);
        assert!(!pool.still_holds(&footprint), "a block where the work writes");
        pool.give_back(between);
        pool.give_back(other);
        assert!(pool.still_holds(&footprint));
        // The same place, but another block.
        pool.give_back(loss);
        let taken = pool.take(4, "loss", &from).unwrap();
        assert!(taken != loss || !pool.still_holds(&footprint));
        pool.give_back(weights);
        assert!(!pool.still_holds(&footprint), "weights are gone");
    }

    proptest! {
        #[test]
        fn live_blocks_never_overlap_and_books_balance(sizes in prop::collection::vec((1usize..(3 << 20), any::<bool>()), 1..200)) {
            let (mut pool, from) = (Pool::new(usize::MAX), fake());
            let mut live: Vec<(u64, usize)> = Vec::new();
            for (bytes, free_one) in sizes {
                if free_one && !live.is_empty() {
                    let (start, _) = live.swap_remove(bytes % live.len());
                    pool.give_back(start);
                } else {
                    let start = pool.take(bytes, "x", &from).unwrap();
                    prop_assert!(start % ALIGN as u64 == 0);
                    for &(s, b) in &live {
                        prop_assert!(start + bytes as u64 <= s || s + b as u64 <= start);
                    }
                    live.push((start, bytes));
                }
            }
            for (start, _) in live {
                pool.give_back(start);
            }
            prop_assert_eq!(pool.in_use, 0);
            prop_assert_eq!(pool.free.values().sum::<usize>(), pool.reserved);
            prop_assert_eq!(pool.free.len(), pool.segments.len(), "all joined again");
        }
    }
}
