// attention_mma_bwd_kv -- gradients of 64 keys and values of one key head, on tensor cores.
// Computes     what attention_bwd_kv computes, with p and ds rounded to bf16 before their products with dy and q
// Inputs       q, k, v, ranges as attention_mma_fwd; dy [B,queries,HEADS,D] bf16; lse, delta [B,queries,HEADS] f32
// Outputs      dk, dv [B,keys,..,D] bf16, tokens K_STRIDE elements apart
// Requires     D 32, 64, 96 or 128; q, k, v, dy, dk, dv aligned to 16 bytes, ranges to 8; sm_80 or later; outputs
//              overlap nothing
// Launch       grid (ceil(keys/64)*B*KV_HEADS,1,1), block 128, dynamic shared 4*64*(D+8)*2 + 1024 bytes
// Traffic      read k and v once, q and dy ceil(keys/64) times less what no key meets; write dk and dv
// Accumulates  f32
// Determinism  bitwise (no atomics)
// Source       arXiv:2307.08691

// 32 queries of one head.
struct alignas(16) Queries {
    bf16 q[32 * PITCH], dy[32 * PITCH];
    float lse[32], delta[32];
    int range[32][2];
};

__device__ __forceinline__ void load_queries(Queries* to, const bf16* q, const bf16* dy, const float* lse,
                                             const float* delta, const int* ranges, int b, int head, int first,
                                             int queries) {
    const i64 token = (i64)b * queries;
    load_tile<32>(to->q, q + token * Q_STRIDE + head * D, Q_STRIDE, first, queries);
    load_tile<32>(to->dy, dy + token * (HEADS * D) + head * D, HEADS * D, first, queries);
    const int i = threadIdx.x % 32, t = first + i;
    const bool valid = t < queries;
    const i64 row = valid ? token + t : 0;
    if (threadIdx.x < 32) {
        copy_async<4>(&to->lse[i], lse + row * HEADS + head, valid);
    } else if (threadIdx.x < 64) {
        copy_async<4>(&to->delta[i], delta + row * HEADS + head, valid);
    } else if (MASK == 2 && threadIdx.x < 96) {
        copy_async<8>(to->range[i], ranges + 2 * row, valid);
    }
}

// The first and one behind the last query that sees any of keys s0..s0 + 64. scratch: 2 ints.
__device__ __forceinline__ Span seeing(const int* __restrict__ ranges, int b, int s0, int queries, int keys,
                                       int* scratch) {
    Span span = {0, queries};
#if MASK == 1
    span.lo = max(0, s0 - (keys - queries));
#elif MASK == 2
    if (threadIdx.x == 0) {
        scratch[0] = queries;
        scratch[1] = 0;
    }
    __syncthreads();
    int first = queries, end = 0;
    for (int t = threadIdx.x; t < queries; t += blockDim.x) {
        if (overlaps(visible(ranges, b, t, queries, keys), s0, 64)) {
            first = min(first, t);
            end = t + 1;
        }
    }
    // Integers: the result does not depend on the order.
    atomicMin(&scratch[0], first);
    atomicMax(&scratch[1], end);
    __syncthreads();
    span.lo = scratch[0];
    span.hi = scratch[1];
#endif
    return span;
}

extern "C" __global__ void __launch_bounds__(128, D <= 64 ? 3 : 2)
    attention_mma_bwd_kv(const bf16* __restrict__ q, const bf16* __restrict__ k, const bf16* __restrict__ v,
                         const int* __restrict__ ranges, const bf16* __restrict__ dy, const float* __restrict__ lse,
                         const float* __restrict__ delta, bf16* __restrict__ dk, bf16* __restrict__ dv, int batch,
                         int queries, int keys, float scale) {
    extern __shared__ uint4 shared[];
    __shared__ int scratch[2];
    bf16* const k_tile = (bf16*)shared;
    bf16* const v_tile = k_tile + 64 * PITCH;
    Queries* const buffers = (Queries*)(v_tile + 64 * PITCH); // two
    const int kv = blockIdx.x % KV_HEADS, b = blockIdx.x / KV_HEADS % batch;
    const int s0 = (int)(blockIdx.x / KV_HEADS / batch) * 64;
    const int lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 * 16, g = lane / 4, c = lane % 4;
    const i64 key_offset = (i64)b * keys * K_STRIDE + kv * D;
    load_tile<64>(k_tile, k + key_offset, K_STRIDE, s0, keys);
    load_tile<64>(v_tile, v + key_offset, K_STRIDE, s0, keys);
    const Span span = seeing(ranges, b, s0, queries, keys, scratch);
    // All blocks of 32 queries that meet these keys, for one head of the group after the other.
    const int first = span.lo / 32, blocks = max(0, (span.hi + 31) / 32 - first), steps = blocks * GROUP;
    if (steps > 0) load_queries(&buffers[0], q, dy, lse, delta, ranges, b, kv * GROUP, first * 32, queries);
    const float unit = scale * LOG2_E;
    float dk_sum[D / 8][4], dv_sum[D / 8][4];
#pragma unroll
    for (int n = 0; n < D / 8; n++) {
#pragma unroll
        for (int e = 0; e < 4; e++) dk_sum[n][e] = dv_sum[n][e] = 0.0f;
    }
    for (int step = 0; step < steps; step++) {
        // This buffer has arrived, and no warp reads the other one any more.
        copies_wait();
        __syncthreads();
        const Queries* const at = &buffers[step % 2];
        if (step + 1 < steps) {
            const int head = kv * GROUP + (step + 1) / blocks, next = (first + (step + 1) % blocks) * 32;
            load_queries(&buffers[(step + 1) % 2], q, dy, lse, delta, ranges, b, head, next, queries);
        }
        // Scores and dy v^T, transposed: keys g and g + 8 of the warp's 16 by 32 queries.
        float s[4][4], dp[4][4];
#pragma unroll
        for (int n = 0; n < 4; n++) {
#pragma unroll
            for (int e = 0; e < 4; e++) s[n][e] = dp[n][e] = 0.0f;
        }
#pragma unroll
        for (int kk = 0; kk < D / 16; kk++) {
            u32 k_frag[4], v_frag[4];
            load_a(k_frag, k_tile, PITCH, warp_row, kk * 16);
            load_a(v_frag, v_tile, PITCH, warp_row, kk * 16);
#pragma unroll
            for (int n = 0; n < 2; n++) {
                u32 frag[4];
                load_b_of_transpose(frag, at->q, PITCH, kk * 16, n * 16);
                mma(s[2 * n], k_frag, frag[0], frag[1]);
                mma(s[2 * n + 1], k_frag, frag[2], frag[3]);
                load_b_of_transpose(frag, at->dy, PITCH, kk * 16, n * 16);
                mma(dp[2 * n], v_frag, frag[0], frag[1]);
                mma(dp[2 * n + 1], v_frag, frag[2], frag[3]);
            }
        }
        // s becomes p, dp becomes ds without its factor `scale`.
        const int key_low = s0 + warp_row + g, key_high = key_low + 8;
#pragma unroll
        for (int n = 0; n < 4; n++) {
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const int i = n * 8 + c * 2 + e;
#if MASK == 2
                const Span mine = checked(at->range[i][0], at->range[i][1], keys);
#else
                const Span mine = visible(ranges, b, (first + step % blocks) * 32 + i, queries, keys);
#endif
                const float lse_i = at->lse[i] * LOG2_E, delta_i = at->delta[i];
                const bool seen_low = key_low >= mine.lo && key_low < mine.hi;
                const bool seen_high = key_high >= mine.lo && key_high < mine.hi;
                s[n][e] = seen_low ? exp2_fast(s[n][e] * unit - lse_i) : 0.0f;
                s[n][2 + e] = seen_high ? exp2_fast(s[n][2 + e] * unit - lse_i) : 0.0f;
                dp[n][e] = seen_low ? s[n][e] * (dp[n][e] - delta_i) : 0.0f;
                dp[n][2 + e] = seen_high ? s[n][2 + e] * (dp[n][2 + e] - delta_i) : 0.0f;
            }
        }
#pragma unroll
        for (int kk = 0; kk < 2; kk++) {
            u32 p[4], ds[4];
            a_of_c(p, s[2 * kk], s[2 * kk + 1]);
            a_of_c(ds, dp[2 * kk], dp[2 * kk + 1]);
#pragma unroll
            for (int n = 0; n < D / 16; n++) {
                u32 frag[4];
                load_b(frag, at->dy, PITCH, kk * 16, n * 16);
                mma(dv_sum[2 * n], p, frag[0], frag[1]);
                mma(dv_sum[2 * n + 1], p, frag[2], frag[3]);
                load_b(frag, at->q, PITCH, kk * 16, n * 16);
                mma(dk_sum[2 * n], ds, frag[0], frag[1]);
                mma(dk_sum[2 * n + 1], ds, frag[2], frag[3]);
            }
        }
    }
    // The copies of a block that met no query; only this warp reads its rows of keys and values.
    copies_wait();
    __syncthreads();
    store_rows(dk + key_offset, K_STRIDE, s0 + warp_row, keys, k_tile + warp_row * PITCH, dk_sum, scale, scale);
    store_rows(dv + key_offset, K_STRIDE, s0 + warp_row, keys, v_tile + warp_row * PITCH, dv_sum, 1.0f, 1.0f);
}
