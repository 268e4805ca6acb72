// attention -- what the attention kernels share. Defines: T element type; D head size; HEADS query heads and
// KV_HEADS key heads; Q_STRIDE and K_STRIDE elements between tokens of queries and of keys and values;
// MASK 0 full, 1 causal (the last query is aligned with the last key), 2 ranges [B,queries,2];
// WINDOW, only where a query sees no more than the last WINDOW of the keys that the mask shows it;
// SOFTCAP, only where scores are SOFTCAP * tanh(q k^T * scale / SOFTCAP).

#define GROUP (HEADS / KV_HEADS)

// Keys lo..hi; none if hi <= lo. hi is -1 for a range that leaves 0..=keys.
struct Span {
    int lo, hi;
};

// A given range.
__device__ __forceinline__ Span checked(int lo, int hi, int keys) {
    const bool inside = min(lo, hi) >= 0 && max(lo, hi) <= keys;
    const Span span = {inside && lo < hi ? lo : 0, !inside ? -1 : lo < hi ? hi : 0};
    return span;
}

// What the window leaves of what a mask shows.
__device__ __forceinline__ Span narrowed(Span span) {
#ifdef WINDOW
    span.lo = max(span.lo, span.hi - WINDOW);
#endif
    return span;
}

// What query t of batch row b sees; nothing behind the last query.
__device__ __forceinline__ Span visible(const int* __restrict__ ranges, int b, int t, int queries, int keys) {
    Span span = {0, 0};
    if (t >= queries) return span;
#if MASK == 0
    span.hi = keys;
#elif MASK == 1
    span.hi = max(0, keys - queries + t + 1);
#else
    const int* pair = ranges + 2 * ((i64)b * queries + t);
    span = checked(pair[0], pair[1], keys);
#endif
    return narrowed(span);
}

// The score of a product that is multiplied by `scale`, and its derivative.
__device__ __forceinline__ float score_of(float product) {
#ifdef SOFTCAP
    return SOFTCAP * tanhf(product / SOFTCAP);
#else
    return product;
#endif
}
__device__ __forceinline__ float slope_of(float score) {
#ifdef SOFTCAP
    return 1.0f - score / SOFTCAP * (score / SOFTCAP);
#else
    return 1.0f;
#endif
}

// Whether a query sees any of keys first..first + count.
__device__ __forceinline__ bool overlaps(Span span, int first, int count) {
    return span.lo < first + count && span.hi > first;
}

// The smallest range that holds what queries first..first + count see; a result that is the same for all
// threads of the block. scratch: 2 ints, free for other use after the next barrier.
__device__ __forceinline__ Span seen_by(const int* __restrict__ ranges, int b, int first, int count, int queries,
                                        int keys, int* scratch) {
    if (threadIdx.x == 0) {
        scratch[0] = keys;
        scratch[1] = 0;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < count; i += blockDim.x) {
        const Span span = visible(ranges, b, first + i, queries, keys);
        if (span.hi > span.lo) {
            // Integers: the result does not depend on the order.
            atomicMin(&scratch[0], span.lo);
            atomicMax(&scratch[1], span.hi);
        }
    }
    __syncthreads();
    const Span all = {scratch[0], scratch[1]};
    return all;
}

// The smallest span that holds those of all lanes of a warp, and the span that all of them share.
__device__ __forceinline__ Span warp_union(Span span) {
#pragma unroll
    for (int x = 16; x > 0; x /= 2) {
        span.lo = min(span.lo, __shfl_xor_sync(FULL_WARP, span.lo, x));
        span.hi = max(span.hi, __shfl_xor_sync(FULL_WARP, span.hi, x));
    }
    return span;
}
__device__ __forceinline__ Span warp_common(Span span) {
#pragma unroll
    for (int x = 16; x > 0; x /= 2) {
        span.lo = max(span.lo, __shfl_xor_sync(FULL_WARP, span.lo, x));
        span.hi = min(span.hi, __shfl_xor_sync(FULL_WARP, span.hi, x));
    }
    return span;
}
