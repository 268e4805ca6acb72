//! Random numbers from an explicit seed: Philox4x32-10.
//!
//! A counter-based generator gives the same bits on a host and on a GPU, and any element of a stream
//! without the ones before it.
//!
//! **Source** Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.

/// The whole state of a generator: what a checkpoint stores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RngState {
    /// User seed.
    pub seed: u64,
    /// Stream number, from [`Rng::fork`].
    pub stream: u64,
    /// Position: counts blocks of four 32-bit words.
    pub counter: u64,
}

/// A generator: a seed (key), a stream and a counter.
#[derive(Clone, Debug)]
pub struct Rng {
    state: RngState,
    block: [u32; 4],
    used: usize,
}

impl Rng {
    /// A generator at the start of stream 0 of `seed`.
    pub fn new(seed: u64) -> Rng {
        Rng::from_state(RngState { seed, stream: 0, counter: 0 })
    }

    /// A generator at a stored state (at a block boundary).
    pub fn from_state(state: RngState) -> Rng {
        Rng { state, block: [0; 4], used: 4 }
    }

    /// The state after the words taken so far, rounded up to a whole block.
    pub fn state(&self) -> RngState {
        self.state
    }

    /// An independent generator named by `label`; depends on this one's seed and stream, not its position.
    pub fn fork(&self, label: &str) -> Rng {
        // FNV-1a over the parent stream and the label.
        let mut hash = 0xcbf2_9ce4_8422_2325u64;
        for byte in self.state.stream.to_le_bytes().iter().chain(label.as_bytes()) {
            hash = (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3);
        }
        Rng::from_state(RngState { seed: self.state.seed, stream: hash, counter: 0 })
    }

    /// The next 32 random bits.
    pub fn next_u32(&mut self) -> u32 {
        if self.used == 4 {
            self.block = philox4x32(self.state.seed, self.state.stream, self.state.counter);
            self.state.counter = self.state.counter.wrapping_add(1);
            self.used = 0;
        }
        self.used += 1;
        self.block[self.used - 1]
    }

    /// Uniform in [0, 1) with 53 random bits.
    pub fn uniform(&mut self) -> f64 {
        let bits = (u64::from(self.next_u32()) << 32) | u64::from(self.next_u32());
        (bits >> 11) as f64 * (1.0 / (1u64 << 53) as f64)
    }

    /// Standard normal (Box-Muller, one value a pair of uniforms).
    pub fn normal(&mut self) -> f64 {
        let u = 1.0 - self.uniform(); // (0, 1]: the logarithm is finite
        let v = self.uniform();
        (-2.0 * u.ln()).sqrt() * (std::f64::consts::TAU * v).cos()
    }

    /// Uniform integer in `0..bound` without modulo bias; `bound` is at least 1.
    pub fn below(&mut self, bound: u64) -> u64 {
        debug_assert!(bound > 0, "empty range");
        let bound = bound.max(1);
        let zone = u64::MAX - (u64::MAX - bound + 1) % bound;
        loop {
            let x = (u64::from(self.next_u32()) << 32) | u64::from(self.next_u32());
            if x <= zone {
                return x % bound;
            }
        }
    }
}

/// One block of four random words for (key, stream, counter).
pub fn philox4x32(key: u64, stream: u64, counter: u64) -> [u32; 4] {
    const M0: u64 = 0xD251_1F53;
    const M1: u64 = 0xCD9E_8D57;
    let mut c = [counter as u32, (counter >> 32) as u32, stream as u32, (stream >> 32) as u32];
    let (mut k0, mut k1) = (key as u32, (key >> 32) as u32);
    for _ in 0..10 {
        let p0 = M0 * u64::from(c[0]);
        let p1 = M1 * u64::from(c[2]);
        c = [(p1 >> 32) as u32 ^ c[1] ^ k0, p1 as u32, (p0 >> 32) as u32 ^ c[3] ^ k1, p0 as u32];
        k0 = k0.wrapping_add(0x9E37_79B9);
        k1 = k1.wrapping_add(0xBB67_AE85);
    }
    c
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Known answers published with the Random123 library (kat_vectors, philox 4x32 10).
    #[test]
    fn known_answers() {
        assert_eq!(philox4x32(0, 0, 0), [0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8]);
        assert_eq!(
            philox4x32(u64::MAX, u64::MAX, u64::MAX),
            [0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd]
        );
        assert_eq!(
            philox4x32(0x299f31d0_a4093822, 0x03707344_13198a2e, 0x85a308d3_243f6a88),
            [0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1]
        );
    }

    #[test]
    fn streams_differ_and_repeat() {
        let draw = |mut r: Rng| (0..8).map(|_| r.next_u32()).collect::<Vec<_>>();
        let root = Rng::new(7);
        assert_eq!(draw(root.fork("a")), draw(Rng::new(7).fork("a")));
        assert_ne!(draw(root.fork("a")), draw(root.fork("b")));
        assert_ne!(draw(root.fork("a")), draw(Rng::new(8).fork("a")));
    }

    #[test]
    fn moments() {
        let mut rng = Rng::new(1);
        let n = 40_000;
        let xs: Vec<f64> = (0..n).map(|_| rng.normal()).collect();
        let mean = xs.iter().sum::<f64>() / n as f64;
        let var = xs.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / n as f64;
        // Five standard errors of each estimate.
        assert!(mean.abs() < 5.0 / (n as f64).sqrt(), "{mean}");
        assert!((var - 1.0).abs() < 5.0 * (2.0 / n as f64).sqrt(), "{var}");
        assert!((0..1000).all(|_| rng.below(3) < 3));
    }
}
