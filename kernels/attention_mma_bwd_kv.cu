// attention_mma_bwd_kv -- gradients of ROWS keys and values of one key head, on tensor cores.
// Computes     what attention_bwd_kv computes, with p and ds rounded to bf16 before their products with dy and q
// Inputs       q, k, v, ranges as attention_mma_fwd; dy [B,queries,HEADS,D] bf16; lse, delta [B,queries,HEADS] f32
// Outputs      dk, dv [B,keys,..,D] bf16, tokens K_STRIDE elements apart
// Requires     D 32, 64, 96 or 128; q, k, v, dy, dk, dv aligned to 16 bytes, ranges to 8; sm_80 or later; outputs
//              overlap nothing
// Launch       grid (ceil(keys/ROWS)*B*KV_HEADS,1,1), block 32*WARPS*TEAMS,
//              dynamic shared the larger of 4*(D+8)*ROWS + TEAMS*QUERIES*(8*(D+8) + 32) and 8*D*ROWS*(TEAMS-1) bytes
// Traffic      read k and v once, q and dy ceil(keys/ROWS) times less what no key meets; write dk and dv
// Accumulates  f32; each of TEAMS teams of warps takes every TEAMS'th block of queries, and the teams' sums are
//              added in order
// Determinism  bitwise (no atomics)
// Source       arXiv:2307.08691

// A block of queries of one head.
struct alignas(16) Queries {
    bf16 q[QUERIES * PITCH], dy[QUERIES * PITCH];
    float lse[QUERIES], delta[QUERIES];
    int range[QUERIES][2];
};

__device__ __forceinline__ void load_queries(Queries* to, const bf16* q, const bf16* dy, const float* lse,
                                             const float* delta, const int* ranges, int b, int head, int first,
                                             int queries, int thread) {
    const i64 token = (i64)b * queries;
    load_tile<QUERIES>(to->q, q + token * Q_STRIDE + head * D, Q_STRIDE, first, queries, thread);
    load_tile<QUERIES>(to->dy, dy + token * (HEADS * D) + head * D, HEADS * D, first, queries, thread);
    if (thread < QUERIES) {
        const int t = first + thread;
        const bool valid = t < queries;
        const i64 row = valid ? token + t : 0;
        copy_async<4>(&to->lse[thread], lse + row * HEADS + head, valid);
        copy_async<4>(&to->delta[thread], delta + row * HEADS + head, valid);
        if (MASK == 2) copy_async<8>(to->range[thread], ranges + 2 * row, valid);
    }
}

// The first and one behind the last query that sees any of keys s0..s0 + ROWS. scratch: 2 ints.
__device__ __forceinline__ Span seeing(const int* __restrict__ ranges, int b, int s0, int queries, int keys,
                                       int* scratch) {
    Span span = {0, queries};
#if MASK == 1
    span.lo = max(0, s0 - (keys - queries));
#ifdef WINDOW
    span.hi = min(queries, s0 + ROWS - 1 + WINDOW - (keys - queries));
#endif
#elif MASK == 2
    if (threadIdx.x == 0) {
        scratch[0] = queries;
        scratch[1] = 0;
    }
    __syncthreads();
    int first = queries, end = 0;
    for (int t = threadIdx.x; t < queries; t += blockDim.x) {
        if (overlaps(visible(ranges, b, t, queries, keys), s0, ROWS)) {
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

// What query `i` of the block, token t, sees.
__device__ __forceinline__ Span span_of(const Queries* at, int i, int t, int queries, int keys) {
#if MASK == 2
    return narrowed(checked(at->range[i][0], at->range[i][1], keys));
#else
    return visible(nullptr, 0, t, queries, keys);
#endif
}

// A barrier of the threads of one team; barrier 0 is that of the block.
__device__ __forceinline__ void team_sync(int team) {
    if (TEAMS == 1) __syncthreads();
    else asm volatile("bar.sync %0, %1;" ::"r"(team + 1), "n"(THREADS) : "memory");
}

extern "C" __global__ void __launch_bounds__(THREADS * TEAMS, BLOCKS)
    attention_mma_bwd_kv(const bf16* __restrict__ q, const bf16* __restrict__ k, const bf16* __restrict__ v,
                         const int* __restrict__ ranges, const bf16* __restrict__ dy, const float* __restrict__ lse,
                         const float* __restrict__ delta, bf16* __restrict__ dk, bf16* __restrict__ dv, int batch,
                         int queries, int keys, float scale) {
    await_earlier_work();
    extern __shared__ uint4 shared[];
    __shared__ int scratch[2];
    bf16* const k_tile = (bf16*)shared;
    bf16* const v_tile = k_tile + ROWS * PITCH;
    const int team = threadIdx.x / THREADS, thread = threadIdx.x % THREADS;
    Queries* const buffers = (Queries*)(v_tile + ROWS * PITCH) + 2 * team;
    const int kv = blockIdx.x % KV_HEADS, b = blockIdx.x / KV_HEADS % batch;
    const int s0 = (int)(blockIdx.x / KV_HEADS / batch) * ROWS;
    const int lane = thread % 32, warp_row = thread / 32 * (16 * FRAGS), g = lane / 4, c = lane % 4;
    const i64 key_offset = (i64)b * keys * K_STRIDE + kv * D;
    if (team == 0) {
        load_tile<ROWS>(k_tile, k + key_offset, K_STRIDE, s0, keys, thread);
        load_tile<ROWS>(v_tile, v + key_offset, K_STRIDE, s0, keys, thread);
    }
    const Span span = seeing(ranges, b, s0, queries, keys, scratch);
    // All blocks of queries that meet these keys, for one head of the group after the other.
    const int first = span.lo / QUERIES * QUERIES;
    const int blocks = max(0, (span.hi - first + QUERIES - 1) / QUERIES), steps = blocks * GROUP;
    // The block of queries that this team takes next: token and head.
    int t0 = first, head = kv * GROUP;
    const auto advance = [&](int by) {
        for (t0 += by * QUERIES; t0 >= span.hi && head < (kv + 1) * GROUP; head++) t0 -= blocks * QUERIES;
    };
    advance(team);
    if (team < steps) load_queries(&buffers[0], q, dy, lse, delta, ranges, b, head, t0, queries, thread);
    const float unit = UNIT(scale);
    float dk_sum[FRAGS][D / 8][4], dv_sum[FRAGS][D / 8][4];
#pragma unroll
    for (int m = 0; m < FRAGS; m++) {
#pragma unroll
        for (int n = 0; n < D / 8; n++) {
#pragma unroll
            for (int e = 0; e < 4; e++) dk_sum[m][n][e] = dv_sum[m][n][e] = 0.0f;
        }
    }
    const int key0 = s0 + warp_row; // of this warp
    // Keys and values are there for all teams.
    copies_wait();
    __syncthreads();
#if KEEP
    u32 k_frag[FRAGS][D / 16][4], v_frag[FRAGS][D / 16][4];
#pragma unroll
    for (int m = 0; m < FRAGS; m++) {
#pragma unroll
        for (int kk = 0; kk < D / 16; kk++) {
            load_a(k_frag[m][kk], k_tile, PITCH, warp_row + 16 * m, kk * 16);
            load_a(v_frag[m][kk], v_tile, PITCH, warp_row + 16 * m, kk * 16);
        }
    }
#endif
    for (int step = team, turn = 0; step < steps; step += TEAMS, turn ^= 1) {
        // This buffer has arrived, and no warp of the team reads the other one any more.
        copies_wait();
        team_sync(team);
        const Queries* const at = &buffers[turn];
        const int here = t0;
        advance(TEAMS);
        if (step + TEAMS < steps) {
            load_queries(&buffers[turn ^ 1], q, dy, lse, delta, ranges, b, head, t0, queries, thread);
        }
        // Whether the block's queries see all of the warp's keys, or none.
        bool whole = true;
#if MASK == 1
        // Rows behind the last query are zeros, which add nothing.
        const int seen = here + 1 + keys - queries; // behind the last key that the first query sees
        if (seen + QUERIES - 1 <= key0) continue;
        whole = seen >= key0 + 16 * FRAGS;
#ifdef WINDOW
        if (seen - WINDOW >= key0 + 16 * FRAGS) continue;
        whole &= seen + QUERIES - 1 - WINDOW <= key0;
#endif
#elif MASK == 2
        bool some = false;
#pragma unroll
        for (int i = lane; i < QUERIES; i += 32) {
            const Span mine = span_of(at, i, here + i, queries, keys);
            whole &= mine.lo <= key0 && mine.hi >= key0 + 16 * FRAGS;
            some |= overlaps(mine, key0, 16 * FRAGS);
        }
        if (!__any_sync(FULL_WARP, some)) continue;
        whole = __all_sync(FULL_WARP, whole);
#elif defined(WINDOW)
        whole = key0 >= keys - WINDOW;
#endif
        // Scores and dy v^T - delta, transposed: the warp's keys by the block's queries.
        float s[FRAGS][QUERIES / 8][4], dp[FRAGS][QUERIES / 8][4];
#pragma unroll
        for (int n = 0; n < QUERIES / 8; n++) {
            const float2 row_delta = *(const float2*)&at->delta[n * 8 + c * 2];
#pragma unroll
            for (int m = 0; m < FRAGS; m++) {
                s[m][n][0] = s[m][n][1] = s[m][n][2] = s[m][n][3] = 0.0f;
                dp[m][n][0] = dp[m][n][2] = -row_delta.x;
                dp[m][n][1] = dp[m][n][3] = -row_delta.y;
            }
        }
#pragma unroll
        for (int kk = 0; kk < D / 16; kk++) {
#if KEEP
            const int of = kk;
#else
            const int of = 0;
            u32 k_frag[FRAGS][1][4], v_frag[FRAGS][1][4];
#pragma unroll
            for (int m = 0; m < FRAGS; m++) {
                load_a(k_frag[m][0], k_tile, PITCH, warp_row + 16 * m, kk * 16);
                load_a(v_frag[m][0], v_tile, PITCH, warp_row + 16 * m, kk * 16);
            }
#endif
#pragma unroll
            for (int n = 0; n < QUERIES / 16; n++) {
                u32 frag[4];
                load_b_of_transpose(frag, at->q, PITCH, kk * 16, n * 16);
#pragma unroll
                for (int m = 0; m < FRAGS; m++) {
                    mma(s[m][2 * n], k_frag[m][of], frag[0], frag[1]);
                    mma(s[m][2 * n + 1], k_frag[m][of], frag[2], frag[3]);
                }
                load_b_of_transpose(frag, at->dy, PITCH, kk * 16, n * 16);
#pragma unroll
                for (int m = 0; m < FRAGS; m++) {
                    mma(dp[m][2 * n], v_frag[m][of], frag[0], frag[1]);
                    mma(dp[m][2 * n + 1], v_frag[m][of], frag[2], frag[3]);
                }
            }
        }
#ifdef SOFTCAP
#pragma unroll
        for (int m = 0; m < FRAGS; m++) {
#pragma unroll
            for (int n = 0; n < QUERIES / 8; n++) {
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    s[m][n][e] = capped(s[m][n][e], scale);
                    dp[m][n][e] *= 1.0f - s[m][n][e] * s[m][n][e];
                }
            }
        }
#endif
        if (!whole) {
#pragma unroll
            for (int n = 0; n < QUERIES / 8; n++) {
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    const int i = n * 8 + c * 2 + e;
                    const Span mine = span_of(at, i, here + i, queries, keys);
#pragma unroll
                    for (int m = 0; m < FRAGS; m++) {
                        const int key = key0 + 16 * m + g;
                        if (key < mine.lo || key >= mine.hi) s[m][n][e] = -INFINITY_F;
                        if (key + 8 < mine.lo || key + 8 >= mine.hi) s[m][n][2 + e] = -INFINITY_F;
                    }
                }
            }
        }
        // s becomes p, dp becomes ds without its factor `scale`.
#pragma unroll
        for (int n = 0; n < QUERIES / 8; n++) {
#pragma unroll
            for (int e = 0; e < 2; e++) {
                // A query that sees nothing gets probabilities of 0.
                const float row_lse = at->lse[n * 8 + c * 2 + e];
                const float minus = row_lse == -INFINITY_F ? -INFINITY_F : -LOG2_E * row_lse;
#pragma unroll
                for (int m = 0; m < FRAGS; m++) {
#pragma unroll
                    for (int h = 0; h < 4; h += 2) {
                        s[m][n][h + e] = exp2_fast(s[m][n][h + e] * unit + minus);
                        dp[m][n][h + e] *= s[m][n][h + e];
                    }
                }
            }
        }
#pragma unroll
        for (int kk = 0; kk < QUERIES / 16; kk++) {
            u32 p[FRAGS][4], ds[FRAGS][4];
#pragma unroll
            for (int m = 0; m < FRAGS; m++) {
                a_of_c(p[m], s[m][2 * kk], s[m][2 * kk + 1]);
                a_of_c(ds[m], dp[m][2 * kk], dp[m][2 * kk + 1]);
            }
#pragma unroll
            for (int n = 0; n < D / 16; n++) {
                u32 frag[4];
                load_b(frag, at->dy, PITCH, kk * 16, n * 16);
#pragma unroll
                for (int m = 0; m < FRAGS; m++) {
                    mma(dv_sum[m][2 * n], p[m], frag[0], frag[1]);
                    mma(dv_sum[m][2 * n + 1], p[m], frag[2], frag[3]);
                }
                load_b(frag, at->q, PITCH, kk * 16, n * 16);
#pragma unroll
                for (int m = 0; m < FRAGS; m++) {
                    mma(dk_sum[m][2 * n], ds[m], frag[0], frag[1]);
                    mma(dk_sum[m][2 * n + 1], ds[m], frag[2], frag[3]);
                }
            }
        }
    }
    // No warp reads a tile any more.
    copies_wait();
    __syncthreads();
    if (TEAMS > 1) {
        // Sums of a thread lie THREADS apart, so that a warp's are neighbours.
        float* const sums = (float*)shared + thread;
        const int count = FRAGS * (D / 8) * 4;
        if (team > 0) {
            float* const to = sums + (team - 1) * (2 * count * THREADS);
#pragma unroll
            for (int i = 0; i < count; i++) {
                to[i * THREADS] = dk_sum[i / (D / 2)][i / 4 % (D / 8)][i % 4];
                to[(count + i) * THREADS] = dv_sum[i / (D / 2)][i / 4 % (D / 8)][i % 4];
            }
        }
        __syncthreads();
        if (team == 0) {
            for (int other = 0; other < TEAMS - 1; other++) {
                const float* const from = sums + other * (2 * count * THREADS);
#pragma unroll
                for (int i = 0; i < count; i++) {
                    dk_sum[i / (D / 2)][i / 4 % (D / 8)][i % 4] += from[i * THREADS];
                    dv_sum[i / (D / 2)][i / 4 % (D / 8)][i % 4] += from[(count + i) * THREADS];
                }
            }
        }
        __syncthreads();
        if (team > 0) return;
    }
    // Each warp takes rows of its own for its output.
#pragma unroll
    for (int m = 0; m < FRAGS; m++) {
        const int row = warp_row + 16 * m;
        store_rows(dk + key_offset, K_STRIDE, s0 + row, keys, k_tile + row * PITCH, dk_sum[m], scale, scale);
        store_rows(dv + key_offset, K_STRIDE, s0 + row, keys, v_tile + row * PITCH, dv_sum[m], 1.0f, 1.0f);
    }
}
