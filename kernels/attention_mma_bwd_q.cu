// attention_mma_bwd_q -- gradient of 64 queries of one head, on tensor cores.
// Computes     what attention_bwd_q computes, with ds rounded to bf16 before its product with k
// Inputs       q, k, v, ranges as attention_mma_fwd; dy [B,queries,HEADS,D] bf16; lse, delta [B,queries,HEADS] f32
// Outputs      dq [B,queries,..,D] bf16, tokens Q_STRIDE elements apart
// Requires     D 32, 64, 96 or 128; q, k, v, dy, dq aligned to 16 bytes; sm_80 or later; dq overlaps nothing
// Launch       grid (ceil(queries/64)*B*HEADS,1,1), block 128, dynamic shared 2*64*(D+8)*2 bytes
// Traffic      read q and dy once, k and v ceil(queries/64) times less what no query sees; write dq
// Accumulates  f32
// Determinism  bitwise (no atomics)
// Source       arXiv:2307.08691

extern "C" __global__ void __launch_bounds__(128, D <= 64 ? 3 : 2)
    attention_mma_bwd_q(const bf16* __restrict__ q, const bf16* __restrict__ k, const bf16* __restrict__ v,
                        const int* __restrict__ ranges, const bf16* __restrict__ dy, const float* __restrict__ lse,
                        const float* __restrict__ delta, bf16* __restrict__ dq, int batch, int queries, int keys,
                        float scale) {
    extern __shared__ uint4 shared[];
    __shared__ int scratch[2];
    // First 64 queries and 64 rows of dy; then, twice, 32 keys and 32 values.
    bf16* const tiles_at = (bf16*)shared;
    const int tiles = (queries + 63) / 64;
    const int head = blockIdx.x % HEADS, b = blockIdx.x / HEADS % batch;
    const int t0 = (tiles - 1 - (int)(blockIdx.x / HEADS / batch)) * 64;
    const int lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 * 16, g = lane / 4, c = lane % 4;
    q += (i64)b * queries * Q_STRIDE + head * D;
    dq += (i64)b * queries * Q_STRIDE + head * D;
    dy += (i64)b * queries * (HEADS * D) + head * D;
    k += (i64)b * keys * K_STRIDE + head / GROUP * D;
    v += (i64)b * keys * K_STRIDE + head / GROUP * D;
    load_tile<64>(tiles_at, q, Q_STRIDE, t0, queries);
    load_tile<64>(tiles_at + 64 * PITCH, dy, HEADS * D, t0, queries);
    const Span all = seen_by(ranges, b, t0, 64, queries, keys, scratch);
    const int start = all.lo / 32 * 32;
    const int t_low = t0 + warp_row + g, t_high = t_low + 8;
    const Span low = visible(ranges, b, t_low, queries, keys), high = visible(ranges, b, t_high, queries, keys);
    const i64 row = ((i64)b * queries + t_low) * HEADS + head;
    const float lse_low = t_low < queries ? lse[row] * LOG2_E : 0.0f;
    const float lse_high = t_high < queries ? lse[row + 8 * HEADS] * LOG2_E : 0.0f;
    const float delta_low = t_low < queries ? delta[row] : 0.0f;
    const float delta_high = t_high < queries ? delta[row + 8 * HEADS] : 0.0f;
    copies_wait();
    __syncthreads();
    u32 q_frag[D / 16][4], dy_frag[D / 16][4];
#pragma unroll
    for (int kk = 0; kk < D / 16; kk++) {
        load_a(q_frag[kk], tiles_at, PITCH, warp_row, kk * 16);
        load_a(dy_frag[kk], tiles_at + 64 * PITCH, PITCH, warp_row, kk * 16);
    }
    // Every warp has its queries before keys take their place.
    __syncthreads();
    if (start < all.hi) {
        load_tile<32>(tiles_at, k, K_STRIDE, start, keys);
        load_tile<32>(tiles_at + 32 * PITCH, v, K_STRIDE, start, keys);
    }
    const float unit = scale * LOG2_E;
    float sum[D / 8][4];
#pragma unroll
    for (int n = 0; n < D / 8; n++) sum[n][0] = sum[n][1] = sum[n][2] = sum[n][3] = 0.0f;
    int half = 0;
    for (int s0 = start; s0 < all.hi; s0 += 32, half ^= 1) {
        // This half has arrived, and no warp reads the other one any more.
        copies_wait();
        __syncthreads();
        const bf16* const k_tile = tiles_at + half * 64 * PITCH;
        const bf16* const v_tile = k_tile + 32 * PITCH;
        if (s0 + 32 < all.hi) {
            bf16* const next = tiles_at + (half ^ 1) * 64 * PITCH;
            load_tile<32>(next, k, K_STRIDE, s0 + 32, keys);
            load_tile<32>(next + 32 * PITCH, v, K_STRIDE, s0 + 32, keys);
        }
        float s[4][4], dp[4][4];
#pragma unroll
        for (int n = 0; n < 4; n++) {
#pragma unroll
            for (int e = 0; e < 4; e++) s[n][e] = dp[n][e] = 0.0f;
        }
#pragma unroll
        for (int kk = 0; kk < D / 16; kk++) {
#pragma unroll
            for (int n = 0; n < 2; n++) {
                u32 frag[4];
                load_b_of_transpose(frag, k_tile, PITCH, kk * 16, n * 16);
                mma(s[2 * n], q_frag[kk], frag[0], frag[1]);
                mma(s[2 * n + 1], q_frag[kk], frag[2], frag[3]);
                load_b_of_transpose(frag, v_tile, PITCH, kk * 16, n * 16);
                mma(dp[2 * n], dy_frag[kk], frag[0], frag[1]);
                mma(dp[2 * n + 1], dy_frag[kk], frag[2], frag[3]);
            }
        }
        // The scores become ds, without its factor `scale`.
        const bool whole = max(low.lo, high.lo) <= s0 && min(low.hi, high.hi) >= s0 + 32;
#pragma unroll
        for (int n = 0; n < 4; n++) {
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const int key = s0 + n * 8 + c * 2 + e;
                const bool seen_low = whole || (key >= low.lo && key < low.hi);
                const bool seen_high = whole || (key >= high.lo && key < high.hi);
                const float p_low = exp2_fast(s[n][e] * unit - lse_low);
                const float p_high = exp2_fast(s[n][2 + e] * unit - lse_high);
                s[n][e] = seen_low ? p_low * (dp[n][e] - delta_low) : 0.0f;
                s[n][2 + e] = seen_high ? p_high * (dp[n][2 + e] - delta_high) : 0.0f;
            }
        }
#pragma unroll
        for (int kk = 0; kk < 2; kk++) {
            u32 ds[4];
            a_of_c(ds, s[2 * kk], s[2 * kk + 1]);
#pragma unroll
            for (int n = 0; n < D / 16; n++) {
                u32 frag[4];
                load_b(frag, k_tile, PITCH, kk * 16, n * 16);
                mma(sum[2 * n], ds, frag[0], frag[1]);
                mma(sum[2 * n + 1], ds, frag[2], frag[3]);
            }
        }
    }
    // No warp reads keys any more.
    __syncthreads();
    store_rows(dq, Q_STRIDE, t0 + warp_row, queries, tiles_at + warp_row * PITCH, sum,
               low.hi < 0 ? NAN_F : scale, high.hi < 0 ? NAN_F : scale);
}
