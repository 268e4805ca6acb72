//! Every algorithm that cuBLASLt can be set to for a product, beside those that it proposes itself.
//!
//! The proposals for one product are often fewer than ten. Here each algorithm of the library is set to each of its
//! tiles, stages, cluster shapes, splits of the sum and block orders, and kept where the library says that it can do
//! the product so.

use std::ffi::{c_int, c_void};

use cudarc::cublaslt::sys::{
    cublasComputeType_t, cublasLtClusterShape_t as Cluster, cublasLtMatmulAlgoCapAttributes_t as Cap,
    cublasLtMatmulAlgoConfigAttributes_t as Config, cudaDataType,
};

use crate::cublaslt::{Algorithm, Alignment, Heuristic, Problem};
use crate::matmul::{MatmulKey, MatrixType};

/// Most algorithms that are asked about.
const MOST_IDS: usize = 256;

/// Most tiles or stages of one algorithm.
const MOST_VALUES: usize = 1024;

/// Settings of one algorithm that the library is asked about, spread evenly over all.
const MOST_EXAMINED: usize = 2048;

/// Parts that a sum may be split into.
const SPLITS: [u32; 4] = [2, 3, 4, 8];

/// Shapes of thread block clusters that are tried where an algorithm has them.
const CLUSTERS: [u32; 4] = [
    Cluster::CUBLASLT_CLUSTER_SHAPE_AUTO as u32,
    Cluster::CUBLASLT_CLUSTER_SHAPE_1x1x1 as u32,
    Cluster::CUBLASLT_CLUSTER_SHAPE_2x1x1 as u32,
    Cluster::CUBLASLT_CLUSTER_SHAPE_1x2x1 as u32,
];

impl Problem<'_> {
    /// At most `most` settings, spread evenly over all that the library accepts for this product, that repeat their
    /// bits and suit the alignment.
    pub(crate) fn settings(&self, key: &MatmulKey, alignment: Alignment, most: usize) -> Vec<Heuristic> {
        let mut found = Vec::new();
        for algorithm in self.algorithms(key) {
            // The operands swap: the first of cuBLASLt is our B.
            let needs = [
                (Cap::CUBLASLT_ALGO_CAP_MIN_ALIGNMENT_A_BYTES, alignment.b),
                (Cap::CUBLASLT_ALGO_CAP_MIN_ALIGNMENT_B_BYTES, alignment.a),
                (Cap::CUBLASLT_ALGO_CAP_MIN_ALIGNMENT_C_BYTES, alignment.c),
                (Cap::CUBLASLT_ALGO_CAP_MIN_ALIGNMENT_D_BYTES, alignment.c),
            ];
            if needs
                .iter()
                .any(|&(cap, has)| self.capability(&algorithm, cap).first().is_some_and(|&n| n > has))
            {
                continue;
            }
            let settings = self.combinations(&algorithm);
            found.extend(spread(&settings, MOST_EXAMINED).filter_map(|setting| self.examine(setting)));
        }
        let mut chosen: Vec<Heuristic> = spread(&found, most).copied().collect();
        // In no order, so that a search that ends early has seen some of everything.
        chosen.sort_by_key(|h| {
            h.algorithm.iter().fold(0u64, |hash, &w| (hash ^ w).wrapping_mul(0x9e37_79b9_7f4a_7c15))
        });
        chosen
    }

    fn algorithms(&self, key: &MatmulKey) -> Vec<Algorithm> {
        let api = self.api();
        let compute = cublasComputeType_t::CUBLAS_COMPUTE_32F as c_int;
        let scale = cudaDataType::CUDA_R_32F as c_int;
        let kind = |of: MatrixType| match of {
            MatrixType::F32 => cudaDataType::CUDA_R_32F as c_int,
            MatrixType::Bf16 => cudaDataType::CUDA_R_16BF as c_int,
        };
        let (ab, c) = (kind(key.ab), kind(key.c));
        let mut ids = [0 as c_int; MOST_IDS];
        let mut count: c_int = 0;
        let most = MOST_IDS as c_int;
        // SAFETY: the list holds as many numbers as are asked for; both results live through the call.
        let status = unsafe {
            (api.cublasLtMatmulAlgoGetIds)(
                self.handle(),
                compute,
                scale,
                ab,
                ab,
                c,
                c,
                most,
                ids.as_mut_ptr(),
                &mut count,
            )
        };
        if status != 0 {
            return Vec::new();
        }
        let mut algorithms = Vec::new();
        for &id in &ids[..usize::try_from(count).unwrap_or(0).min(MOST_IDS)] {
            let mut algorithm: Algorithm = [0; 8];
            // SAFETY: the result is as many bytes as the library's type and lives through the call.
            let status = unsafe {
                (api.cublasLtMatmulAlgoInit)(self.handle(), compute, scale, ab, ab, c, c, id, &mut algorithm)
            };
            if status == 0 {
                algorithms.push(algorithm);
            }
        }
        algorithms
    }

    /// The algorithm with every combination of its settings, as far as the library can store them.
    fn combinations(&self, algorithm: &Algorithm) -> Vec<Algorithm> {
        let all = |cap| self.capability(algorithm, cap);
        let up_to = |cap, most: u32| (0..=all(cap).first().copied().unwrap_or(0).min(most)).collect();
        let splits = if all(Cap::CUBLASLT_ALGO_CAP_SPLITK_SUPPORT) == [1] { &SPLITS[..] } else { &[] };
        // Ways to add the parts, each a bit of the mask.
        let mask = all(Cap::CUBLASLT_ALGO_CAP_REDUCTION_SCHEME_MASK).first().copied().unwrap_or(0);
        let schemes: Vec<u32> =
            (0..3).map(|bit| 1 << bit).filter(|bit| mask & self.reductions() & bit != 0).collect();

        let mut settings = vec![*algorithm];
        for (setting, values) in [
            (Config::CUBLASLT_ALGO_CONFIG_TILE_ID, all(Cap::CUBLASLT_ALGO_CAP_TILE_IDS)),
            (Config::CUBLASLT_ALGO_CONFIG_STAGES_ID, all(Cap::CUBLASLT_ALGO_CAP_STAGES_IDS)),
            (Config::CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID, CLUSTERS.to_vec()),
            (
                Config::CUBLASLT_ALGO_CONFIG_CTA_SWIZZLING,
                up_to(Cap::CUBLASLT_ALGO_CAP_CTA_SWIZZLING_SUPPORT, 1),
            ),
            (Config::CUBLASLT_ALGO_CONFIG_CUSTOM_OPTION, up_to(Cap::CUBLASLT_ALGO_CAP_CUSTOM_OPTION_MAX, 3)),
        ] {
            let with = |s: &Algorithm| -> Vec<Algorithm> {
                let set: Vec<_> = values.iter().filter_map(|&v| self.set(*s, setting, v)).collect();
                // An algorithm without this setting stays as it is.
                if set.is_empty() { vec![*s] } else { set }
            };
            settings = settings.iter().flat_map(with).collect();
        }
        let split = |s: &Algorithm| -> Vec<Algorithm> {
            let (number, scheme) =
                (Config::CUBLASLT_ALGO_CONFIG_SPLITK_NUM, Config::CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME);
            let pairs = splits.iter().flat_map(|&n| schemes.iter().map(move |&scheme| (n, scheme)));
            let parts = pairs.filter_map(|(n, way)| self.set(self.set(*s, number, n)?, scheme, way));
            std::iter::once(*s).chain(parts).collect()
        };
        settings.iter().flat_map(split).collect()
    }

    /// What the library says of an algorithm; one number but for lists.
    fn capability(&self, algorithm: &Algorithm, capability: Cap) -> Vec<u32> {
        let mut values = vec![0u32; MOST_VALUES];
        let mut written = 0usize;
        let bytes = size_of_val(&values[..]);
        // SAFETY: all arguments live through the call; the library writes at most `bytes`.
        let status = unsafe {
            (self.api().cublasLtMatmulAlgoCapGetAttribute)(
                algorithm,
                capability as c_int,
                values.as_mut_ptr().cast::<c_void>(),
                // A single value is asked for with its own size.
                if matches!(capability, Cap::CUBLASLT_ALGO_CAP_TILE_IDS | Cap::CUBLASLT_ALGO_CAP_STAGES_IDS) {
                    bytes
                } else {
                    size_of::<u32>()
                },
                &mut written,
            )
        };
        values.truncate(if status == 0 { written / size_of::<u32>() } else { 0 });
        values
    }

    /// The algorithm with one setting; nothing where it does not have it.
    fn set(&self, mut algorithm: Algorithm, setting: Config, value: u32) -> Option<Algorithm> {
        let short = matches!(setting, Config::CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID);
        let size = if short { size_of::<u16>() } else { size_of::<u32>() };
        // SAFETY: both arguments live through the call. Of a u16 the lower half is read: little-endian.
        let status = unsafe {
            (self.api().cublasLtMatmulAlgoConfigSetAttribute)(
                &mut algorithm,
                setting as c_int,
                std::ptr::from_ref(&value).cast::<c_void>(),
                size,
            )
        };
        (status == 0).then_some(algorithm)
    }
}

/// At most `most` of these, at even distances.
fn spread<T>(all: &[T], most: usize) -> impl Iterator<Item = &T> {
    let count = all.len().min(most);
    (0..count).map(move |i| &all[i * all.len() / count])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spread_is_even_and_without_repeats() {
        let all: Vec<usize> = (0..10).collect();
        let of = |most| spread(&all, most).copied().collect::<Vec<_>>();
        assert_eq!(of(3), [0, 3, 6]);
        assert_eq!(of(10), all);
        assert_eq!(of(99), all);
        assert_eq!(of(0), [0usize; 0]);
    }
}
