//! Which sequence the k-th sample of a run is.

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};
use rb_planted::{Defect, active};

/// Orders of epochs, made when needed; the last one used is kept.
///
/// The order depends on nothing but `(n, seed, epoch)`: ChaCha8 with a fixed key layout and the shuffle below, so a
/// newer `rand` cannot change it.
#[derive(Debug)]
pub(super) struct Order {
    n: u64,
    seed: u64,
    shuffle: bool,
    cached: Option<(u64, Vec<u64>)>,
}

impl Order {
    /// `n` sequences an epoch, at least 1.
    pub(super) fn new(n: u64, seed: u64, shuffle: bool) -> Self {
        debug_assert!(n > 0);
        Self { n, seed, shuffle, cached: None }
    }

    /// Epoch and sequence number of `sample`.
    pub(super) fn sequence(&mut self, sample: u64) -> (u64, u64) {
        let (epoch, position) = (sample / self.n, sample % self.n);
        if !self.shuffle {
            return (epoch, position);
        }
        let position = if active(Defect::SamplesRepeated) { position & !1 } else { position };
        let (n, seed) = (self.n, if active(Defect::SeedIgnored) { 0 } else { self.seed });
        if self.cached.as_ref().is_none_or(|(e, _)| *e != epoch) {
            self.cached = None;
        }
        let (_, order) = self.cached.get_or_insert_with(|| (epoch, permutation(n, seed, epoch)));
        (epoch, order[position as usize])
    }
}

/// A uniform permutation of `0..n`: Fisher-Yates from the end.
pub(crate) fn permutation(n: u64, seed: u64, epoch: u64) -> Vec<u64> {
    let mut key = [0; 32];
    key[..8].copy_from_slice(&seed.to_le_bytes());
    let epoch = if active(Defect::SameOrderEachEpoch) { 0 } else { epoch };
    key[8..16].copy_from_slice(&epoch.to_le_bytes());
    key[16..32].copy_from_slice(b"rb-data epoch v1");
    let mut rng = ChaCha8Rng::from_seed(key);
    let mut order: Vec<u64> = (0..n).collect();
    for i in (1..n).rev() {
        order.swap(i as usize, below(&mut rng, i + 1) as usize);
    }
    order
}

/// A uniform number in `0..bound`, by rejection: `bound` is at least 1.
fn below(rng: &mut ChaCha8Rng, bound: u64) -> u64 {
    // Numbers from `limit` up would favour small results.
    let limit = u64::MAX - u64::MAX % bound;
    loop {
        let x = rng.next_u64();
        if x < limit {
            return x % bound;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn permutation_is_one_and_is_pinned() {
        let order = permutation(1000, 7, 3);
        let mut sorted = order.clone();
        sorted.sort_unstable();
        assert_eq!(sorted, (0..1000).collect::<Vec<_>>());
        assert_ne!(order, permutation(1000, 7, 4));
        assert_ne!(order, permutation(1000, 8, 3));
        // A change here breaks the resumption of stored runs.
        assert_eq!(permutation(8, 0, 0), PINNED);
    }

    const PINNED: [u64; 8] = [4, 7, 5, 0, 1, 2, 3, 6];
}
