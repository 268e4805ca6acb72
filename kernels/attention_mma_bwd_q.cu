// attention_mma_bwd_q -- gradient of ROWS queries of one head, and delta for attention_mma_bwd_kv, on tensor cores.
// Computes     delta = sum(dy*y) for each row; what attention_bwd_q computes, with ds rounded to bf16 before its
//              product with k
// Inputs       q, k, v, ranges as attention_mma_fwd; y, dy [B,queries,HEADS,D] bf16; lse [B,queries,HEADS] f32
// Outputs      delta [B,queries,HEADS] f32; dq [B,queries,..,D] bf16, tokens Q_STRIDE elements apart
// Requires     D 32, 64, 96 or 128; q, k, v, y, dy, dq aligned to 16 bytes; sm_80 or later; outputs overlap nothing
// Launch       grid (ceil(queries/ROWS)*B*HEADS,1,1), block 32*WARPS,
//              dynamic shared 4*(D+8)*max(2*KEYS, KEYS + ROWS) bytes
// Traffic      read q, y and dy once, k and v ceil(queries/ROWS) times less what no query sees; write dq and delta
// Accumulates  f32
// Determinism  bitwise (no atomics)
// Source       arXiv:2307.08691

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    attention_mma_bwd_q(const bf16* __restrict__ q, const bf16* __restrict__ k, const bf16* __restrict__ v,
                        const int* __restrict__ ranges, const bf16* __restrict__ dy, const float* __restrict__ lse,
                        const bf16* __restrict__ y, float* __restrict__ delta, bf16* __restrict__ dq, int batch,
                        int queries, int keys, float scale) {
    await_earlier_work();
    extern __shared__ uint4 shared[];
    __shared__ int scratch[2];
    // Twice KEYS keys and KEYS values; queries and dy lie in the second half until they are in registers.
    bf16* const tiles_at = (bf16*)shared;
    bf16* const q_tile = tiles_at + 2 * KEYS * PITCH;
    bf16* const dy_tile = q_tile + ROWS * PITCH;
    const int tiles = (queries + ROWS - 1) / ROWS;
    const int head = blockIdx.x % HEADS, b = blockIdx.x / HEADS % batch;
    const int t0 = (tiles - 1 - (int)(blockIdx.x / HEADS / batch)) * ROWS;
    const int lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 * (16 * FRAGS), g = lane / 4, c = lane % 4;
    q += (i64)b * queries * Q_STRIDE + head * D;
    dq += (i64)b * queries * Q_STRIDE + head * D;
    dy += (i64)b * queries * (HEADS * D) + head * D;
    y += (i64)b * queries * (HEADS * D) + head * D;
    k += (i64)b * keys * K_STRIDE + head / GROUP * D;
    v += (i64)b * keys * K_STRIDE + head / GROUP * D;
    load_tile<ROWS>(q_tile, q, Q_STRIDE, t0, queries, threadIdx.x);
    load_tile<ROWS>(dy_tile, dy, HEADS * D, t0, queries, threadIdx.x);
    const Span all = seen_by(ranges, b, t0, ROWS, queries, keys, scratch);
    const int start = all.lo / KEYS * KEYS;
    if (start < all.hi) {
        load_tile<KEYS>(tiles_at, k, K_STRIDE, start, keys, threadIdx.x);
        load_tile<KEYS>(tiles_at + KEYS * PITCH, v, K_STRIDE, start, keys, threadIdx.x);
    }
    // This lane's rows of each fragment: g and g + 8 of its 16.
    Span mine[FRAGS][2];
    // What some, and what every row of this warp sees.
    Span some = {keys, 0}, every = {0, keys};
    float minus_lse[FRAGS][2], minus_delta[FRAGS][2];
#pragma unroll
    for (int m = 0; m < FRAGS; m++) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int t = t0 + warp_row + 16 * m + 8 * h + g;
            mine[m][h] = visible(ranges, b, t, queries, keys);
            if (mine[m][h].hi > mine[m][h].lo) {
                some.lo = min(some.lo, mine[m][h].lo);
                some.hi = max(some.hi, mine[m][h].hi);
            }
            every.lo = max(every.lo, mine[m][h].lo);
            every.hi = min(every.hi, mine[m][h].hi);
            // A row behind the last query, or one that sees nothing, is never whole.
            minus_lse[m][h] = t < queries ? -LOG2_E * lse[((i64)b * queries + t) * HEADS + head] : 0.0f;
        }
    }
    some = warp_union(some);
    every = warp_common(every);
    copies_wait();
    __syncthreads();
    u32 q_frag[FRAGS][D / 16][4], dy_frag[FRAGS][D / 16][4];
#pragma unroll
    for (int m = 0; m < FRAGS; m++) {
        float dot[2] = {0.0f, 0.0f};
        const int t = t0 + warp_row + 16 * m + g;
#pragma unroll
        for (int kk = 0; kk < D / 16; kk++) {
            load_a(q_frag[m][kk], q_tile, PITCH, warp_row + 16 * m, kk * 16);
            load_a(dy_frag[m][kk], dy_tile, PITCH, warp_row + 16 * m, kk * 16);
#pragma unroll
            for (int r = 0; r < 4; r++) {
                const int row = t + r % 2 * 8;
                if (row >= queries) continue;
                const u32 two = *(const u32*)(y + (i64)row * (HEADS * D) + kk * 16 + r / 2 * 8 + c * 2);
                const u32 of_dy = dy_frag[m][kk][r];
                dot[r % 2] += __uint_as_float(two << 16) * __uint_as_float(of_dy << 16);
                dot[r % 2] += __uint_as_float(two & 0xffff0000u) * __uint_as_float(of_dy & 0xffff0000u);
            }
        }
#pragma unroll
        for (int h = 0; h < 2; h++) {
            dot[h] += __shfl_xor_sync(FULL_WARP, dot[h], 1);
            dot[h] += __shfl_xor_sync(FULL_WARP, dot[h], 2);
            minus_delta[m][h] = -dot[h];
            const int row = t + 8 * h;
            if (c == 0 && row < queries) delta[((i64)b * queries + row) * HEADS + head] = dot[h];
        }
    }
    const float unit = UNIT(scale);
    float sum[FRAGS][D / 8][4];
#pragma unroll
    for (int m = 0; m < FRAGS; m++) {
#pragma unroll
        for (int n = 0; n < D / 8; n++) sum[m][n][0] = sum[m][n][1] = sum[m][n][2] = sum[m][n][3] = 0.0f;
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
        // Scores and dy v^T - delta.
        float s[FRAGS][KEYS / 8][4], dp[FRAGS][KEYS / 8][4];
#pragma unroll
        for (int m = 0; m < FRAGS; m++) {
#pragma unroll
            for (int n = 0; n < KEYS / 8; n++) {
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    s[m][n][e] = 0.0f;
                    dp[m][n][e] = minus_delta[m][e / 2];
                }
            }
        }
#pragma unroll
        for (int kk = 0; kk < D / 16; kk++) {
#pragma unroll
            for (int n = 0; n < KEYS / 16; n++) {
                u32 frag[4];
                load_b_of_transpose(frag, k_tile, PITCH, kk * 16, n * 16);
#pragma unroll
                for (int m = 0; m < FRAGS; m++) {
                    mma(s[m][2 * n], q_frag[m][kk], frag[0], frag[1]);
                    mma(s[m][2 * n + 1], q_frag[m][kk], frag[2], frag[3]);
                }
                load_b_of_transpose(frag, v_tile, PITCH, kk * 16, n * 16);
#pragma unroll
                for (int m = 0; m < FRAGS; m++) {
                    mma(dp[m][2 * n], dy_frag[m][kk], frag[0], frag[1]);
                    mma(dp[m][2 * n + 1], dy_frag[m][kk], frag[2], frag[3]);
                }
            }
        }
#ifdef SOFTCAP
#pragma unroll
        for (int m = 0; m < FRAGS; m++) {
#pragma unroll
            for (int n = 0; n < KEYS / 8; n++) {
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    s[m][n][e] = capped(s[m][n][e], scale);
                    dp[m][n][e] *= 1.0f - s[m][n][e] * s[m][n][e];
                }
            }
        }
#endif
        // The scores become ds, without its factor `scale`.
#pragma unroll
        for (int m = 0; m < FRAGS; m++) {
#pragma unroll
            for (int n = 0; n < KEYS / 8; n++) {
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    s[m][n][e] = exp2_fast(s[m][n][e] * unit + minus_lse[m][e / 2]) * dp[m][n][e];
                }
            }
        }
        if (every.lo > s0 || every.hi < s0 + KEYS) {
#pragma unroll
            for (int m = 0; m < FRAGS; m++) {
#pragma unroll
                for (int n = 0; n < KEYS / 8; n++) {
#pragma unroll
                    for (int e = 0; e < 4; e++) {
                        const int key = s0 + n * 8 + c * 2 + e % 2;
                        const Span span = mine[m][e / 2];
                        if (key < span.lo || key >= span.hi) s[m][n][e] = 0.0f;
                    }
                }
            }
        }
#pragma unroll
        for (int kk = 0; kk < KEYS / 16; kk++) {
            u32 ds[FRAGS][4];
#pragma unroll
            for (int m = 0; m < FRAGS; m++) a_of_c(ds[m], s[m][2 * kk], s[m][2 * kk + 1]);
#pragma unroll
            for (int n = 0; n < D / 16; n++) {
                u32 frag[4];
                load_b(frag, k_tile, PITCH, kk * 16, n * 16);
#pragma unroll
                for (int m = 0; m < FRAGS; m++) {
                    mma(sum[m][2 * n], ds[m], frag[0], frag[1]);
                    mma(sum[m][2 * n + 1], ds[m], frag[2], frag[3]);
                }
            }
        }
    }
    // No warp reads a tile any more: each takes rows of its own for its output.
    __syncthreads();
#pragma unroll
    for (int m = 0; m < FRAGS; m++) {
        const int row = warp_row + 16 * m;
        store_rows(dq, Q_STRIDE, t0 + row, queries, tiles_at + row * PITCH, sum[m],
                   mine[m][0].hi < 0 ? NAN_F : scale, mine[m][1].hi < 0 ? NAN_F : scale);
    }
}
