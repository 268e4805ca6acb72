// attention_mma_fwd -- attention of ROWS queries of one head, forward, on tensor cores.
// Computes     what attention_fwd computes, with probabilities rounded to bf16 before their product with v
// Inputs       q [B,queries,..,D] bf16; k, v [B,keys,..,D] bf16, tokens Q_STRIDE and K_STRIDE elements apart;
//              ranges [B,queries,2] int if MASK is 2
// Outputs      y [B,queries,HEADS,D] bf16; lse [B,queries,HEADS] f32
// Requires     D 32, 64, 96 or 128; scale > 0; q, k, v, y aligned to 16 bytes; sm_80 or later; outputs overlap nothing
// Launch       grid (ceil(queries/ROWS)*B*HEADS,1,1), block 32*WARPS,
//              dynamic shared 2*(D+8)*max(4*KEYS, 2*KEYS + ROWS) bytes
// Traffic      read q once, k and v ceil(queries/ROWS) times less what no query sees; write y and lse
// Accumulates  f32, rescaled when a row's maximum grows by more than a factor 2^8
// Determinism  bitwise
// Source       arXiv:2307.08691

// Powers of two by which a score may exceed the number that exponents are relative to: it is raised seldom, and
// sums stay far from the end of f32.
#define HEADROOM 8.0f
#define LOWEST_F (-3.402823466e38f)

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    attention_mma_fwd(const bf16* __restrict__ q, const bf16* __restrict__ k, const bf16* __restrict__ v,
                      const int* __restrict__ ranges, bf16* __restrict__ y, float* __restrict__ lse, int batch,
                      int queries, int keys, float scale) {
    await_earlier_work();
    extern __shared__ uint4 shared[];
    __shared__ int scratch[2];
    // Twice KEYS keys and KEYS values; the queries lie in the second half until they are in registers.
    bf16* const tiles_at = (bf16*)shared;
    bf16* const q_tile = tiles_at + (Q_SHARED ? 4 : 2) * KEYS * PITCH;
    // Blocks of late queries, which have most to do under a causal mask, come first.
    const int tiles = (queries + ROWS - 1) / ROWS;
    const int head = blockIdx.x % HEADS, b = blockIdx.x / HEADS % batch;
    const int t0 = (tiles - 1 - (int)(blockIdx.x / HEADS / batch)) * ROWS;
    const int lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 * (16 * FRAGS), g = lane / 4, c = lane % 4;
    q += (i64)b * queries * Q_STRIDE + head * D;
    k += (i64)b * keys * K_STRIDE + head / GROUP * D;
    v += (i64)b * keys * K_STRIDE + head / GROUP * D;
    load_tile<ROWS>(q_tile, q, Q_STRIDE, t0, queries, threadIdx.x);
    const Span all = seen_by(ranges, b, t0, ROWS, queries, keys, scratch);
    const int start = all.lo / KEYS * KEYS;
    if (start < all.hi) {
        load_tile<KEYS>(tiles_at, k, K_STRIDE, start, keys, threadIdx.x);
        load_tile<KEYS>(tiles_at + KEYS * PITCH, v, K_STRIDE, start, keys, threadIdx.x);
    }
    // What row g + 8 h of a fragment sees; read again where it is needed, for want of registers.
    const auto mine = [&](int m, int h) {
        return visible(ranges, b, t0 + warp_row + 16 * m + 8 * h + g, queries, keys);
    };
    // What some, and what every row of this warp sees.
    Span some = {keys, 0}, every = {0, keys};
#pragma unroll
    for (int m = 0; m < FRAGS; m++) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const Span span = mine(m, h);
            if (span.hi > span.lo) {
                some.lo = min(some.lo, span.lo);
                some.hi = max(some.hi, span.hi);
            }
            every.lo = max(every.lo, span.lo);
            every.hi = min(every.hi, span.hi);
        }
    }
    some = warp_union(some);
    every = warp_common(every);
    copies_wait();
    __syncthreads();
    u32 q_frag[FRAGS][Q_SHARED ? 1 : D / 16][4];
#pragma unroll
    for (int m = 0; m < FRAGS && !Q_SHARED; m++) {
#pragma unroll
        for (int kk = 0; kk < D / 16; kk++) load_a(q_frag[m][kk], q_tile, PITCH, warp_row + 16 * m, kk * 16);
    }

    // Exponents, in units of log 2, are relative to base; sum holds this lane's part of the row's sum.
    const float unit = UNIT(scale);
    float o[FRAGS][D / 8][4], base[FRAGS][2], sum[FRAGS][2];
#pragma unroll
    for (int m = 0; m < FRAGS; m++) {
        base[m][0] = base[m][1] = LOWEST_F;
        sum[m][0] = sum[m][1] = 0.0f;
#pragma unroll
        for (int n = 0; n < D / 8; n++) o[m][n][0] = o[m][n][1] = o[m][n][2] = o[m][n][3] = 0.0f;
    }
    int half = 0;
    for (int s0 = start; s0 < all.hi; s0 += KEYS, half ^= 1) {
        // This half has arrived, and no warp reads the other one any more.
        copies_wait();
        __syncthreads();
        const bf16* const k_tile = tiles_at + half * (2 * KEYS * PITCH);
        const bf16* const v_tile = k_tile + KEYS * PITCH;
        if (s0 + KEYS < all.hi) {
            bf16* const next = tiles_at + (half ^ 1) * (2 * KEYS * PITCH);
            load_tile<KEYS>(next, k, K_STRIDE, s0 + KEYS, keys, threadIdx.x);
            load_tile<KEYS>(next + KEYS * PITCH, v, K_STRIDE, s0 + KEYS, keys, threadIdx.x);
        }
        if (!overlaps(some, s0, KEYS)) continue;
        float s[FRAGS][KEYS / 8][4];
#pragma unroll
        for (int m = 0; m < FRAGS; m++) {
#pragma unroll
            for (int n = 0; n < KEYS / 8; n++) s[m][n][0] = s[m][n][1] = s[m][n][2] = s[m][n][3] = 0.0f;
        }
#pragma unroll
        for (int kk = 0; kk < D / 16; kk++) {
            const int at = Q_SHARED ? 0 : kk;
#pragma unroll
            for (int m = 0; m < FRAGS && Q_SHARED; m++) load_a(q_frag[m][0], q_tile, PITCH, warp_row + 16 * m, kk * 16);
#pragma unroll
            for (int n = 0; n < KEYS / 16; n++) {
                u32 frag[4];
                load_b_of_transpose(frag, k_tile, PITCH, kk * 16, n * 16);
#pragma unroll
                for (int m = 0; m < FRAGS; m++) {
                    mma(s[m][2 * n], q_frag[m][at], frag[0], frag[1]);
                    mma(s[m][2 * n + 1], q_frag[m][at], frag[2], frag[3]);
                }
            }
        }
#ifdef SOFTCAP
#pragma unroll
        for (int m = 0; m < FRAGS; m++) {
#pragma unroll
            for (int n = 0; n < KEYS / 8; n++) {
#pragma unroll
                for (int e = 0; e < 4; e++) s[m][n][e] = capped(s[m][n][e], scale);
            }
        }
#endif
        if (every.lo > s0 || every.hi < s0 + KEYS) {
#pragma unroll
            for (int m = 0; m < FRAGS; m++) {
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    const Span span = mine(m, h);
#pragma unroll
                    for (int n = 0; n < KEYS / 8; n++) {
#pragma unroll
                        for (int e = 0; e < 2; e++) {
                            const int key = s0 + n * 8 + c * 2 + e;
                            if (key < span.lo || key >= span.hi) s[m][n][2 * h + e] = -INFINITY_F;
                        }
                    }
                }
            }
        }
        float top[FRAGS][2];
        bool grows = false;
#pragma unroll
        for (int m = 0; m < FRAGS; m++) {
#pragma unroll
            for (int h = 0; h < 2; h++) {
                top[m][h] = -INFINITY_F;
#pragma unroll
                for (int n = 0; n < KEYS / 8; n++) {
                    top[m][h] = fmaxf(top[m][h], fmaxf(s[m][n][2 * h], s[m][n][2 * h + 1]));
                }
                grows |= top[m][h] * unit > base[m][h] + HEADROOM;
            }
        }
        if (__any_sync(FULL_WARP, grows)) {
#pragma unroll
            for (int m = 0; m < FRAGS; m++) {
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    // The four lanes of a row.
                    top[m][h] = fmaxf(top[m][h], __shfl_xor_sync(FULL_WARP, top[m][h], 1));
                    top[m][h] = fmaxf(top[m][h], __shfl_xor_sync(FULL_WARP, top[m][h], 2)) * unit;
                    const float raised = top[m][h] > base[m][h] + HEADROOM ? top[m][h] : base[m][h];
                    const float shrink = exp2_fast(base[m][h] - raised);
                    base[m][h] = raised;
                    sum[m][h] *= shrink;
#pragma unroll
                    for (int n = 0; n < D / 8; n++) {
                        o[m][n][2 * h] *= shrink;
                        o[m][n][2 * h + 1] *= shrink;
                    }
                }
            }
        }
#pragma unroll
        for (int m = 0; m < FRAGS; m++) {
#pragma unroll
            for (int n = 0; n < KEYS / 8; n++) {
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    s[m][n][e] = exp2_fast(s[m][n][e] * unit - base[m][e / 2]);
                    sum[m][e / 2] += s[m][n][e];
                }
            }
        }
#pragma unroll
        for (int kk = 0; kk < KEYS / 16; kk++) {
            u32 p[FRAGS][4];
#pragma unroll
            for (int m = 0; m < FRAGS; m++) a_of_c(p[m], s[m][2 * kk], s[m][2 * kk + 1]);
#pragma unroll
            for (int n = 0; n < D / 16; n++) {
                u32 frag[4];
                load_b(frag, v_tile, PITCH, kk * 16, n * 16);
#pragma unroll
                for (int m = 0; m < FRAGS; m++) {
                    mma(o[m][2 * n], p[m], frag[0], frag[1]);
                    mma(o[m][2 * n + 1], p[m], frag[2], frag[3]);
                }
            }
        }
    }
    // No warp reads a tile any more: each takes rows of its own for its output.
    __syncthreads();
    y += (i64)b * queries * (HEADS * D) + head * D;
    lse += (i64)b * queries * HEADS + head;
#pragma unroll
    for (int m = 0; m < FRAGS; m++) {
        float out[2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            sum[m][h] += __shfl_xor_sync(FULL_WARP, sum[m][h], 1);
            sum[m][h] += __shfl_xor_sync(FULL_WARP, sum[m][h], 2);
            // A sum of 0 is a query that sees nothing.
            const bool outside = mine(m, h).hi < 0, nothing = sum[m][h] == 0.0f;
            out[h] = outside ? NAN_F : nothing ? 0.0f : 1.0f / sum[m][h];
            const int t = t0 + warp_row + 16 * m + 8 * h + g;
            if (c == 0 && t < queries) {
                const float value = nothing ? -INFINITY_F : base[m][h] * LN_2 + logf(sum[m][h]);
                lse[(i64)t * HEADS] = outside ? NAN_F : value;
            }
        }
        const int row = warp_row + 16 * m;
        store_rows(y, HEADS * D, t0 + row, queries, tiles_at + row * PITCH, o[m], out[0], out[1]);
    }
}
