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
        self.live.insert(start, Live { bytes, holder });
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
        let Some(Live { bytes, holder }) = self.live.remove(&start) else {
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
