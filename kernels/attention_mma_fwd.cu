// attention_mma_fwd -- attention of 64 queries of one head, forward, on tensor cores.
// Computes     what attention_fwd computes, with probabilities rounded to bf16 before their product with v
// Inputs       q [B,queries,..,D] bf16; k, v [B,keys,..,D] bf16, tokens Q_STRIDE and K_STRIDE elements apart;
//              ranges [B,queries,2] int if MASK is 2
// Outputs      y [B,queries,HEADS,D] bf16; lse [B,queries,HEADS] f32
// Requires     D 32, 64, 96 or 128; q, k, v, y aligned to 16 bytes; sm_80 or later; outputs overlap nothing
// Launch       grid (ceil(queries/64)*B*HEADS,1,1), block 128, dynamic shared 3*64*(D+8)*2 bytes
// Traffic      read q once, k and v ceil(queries/64) times less what no query sees; write y and lse
// Accumulates  f32, rescaled when a row's maximum grows
// Determinism  bitwise
// Source       arXiv:2307.08691

extern "C" __global__ void __launch_bounds__(128, D <= 64 ? 3 : 2)
    attention_mma_fwd(const bf16* __restrict__ q, const bf16* __restrict__ k, const bf16* __restrict__ v,
                      const int* __restrict__ ranges, bf16* __restrict__ y, float* __restrict__ lse, int batch,
                      int queries, int keys, float scale) {
    extern __shared__ uint4 shared[];
    __shared__ int scratch[2];
    bf16* const q_tile = (bf16*)shared;
    bf16* const k_tile = q_tile + 64 * PITCH;
    bf16* const v_tile = k_tile + 64 * PITCH;
    // Blocks of late queries, which have most to do under a causal mask, come first.
    const int tiles = (queries + 63) / 64;
    const int head = blockIdx.x % HEADS, b = blockIdx.x / HEADS % batch;
    const int t0 = (tiles - 1 - (int)(blockIdx.x / HEADS / batch)) * 64;
    const int lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 * 16, g = lane / 4, c = lane % 4;
    q += (i64)b * queries * Q_STRIDE + head * D;
    k += (i64)b * keys * K_STRIDE + head / GROUP * D;
    v += (i64)b * keys * K_STRIDE + head / GROUP * D;
    load_tile<64>(q_tile, q, Q_STRIDE, t0, queries);
    const Span all = seen_by(ranges, b, t0, 64, queries, keys, scratch);
    const int start = all.lo / 64 * 64;
    if (start < all.hi) load_tile<64>(k_tile, k, K_STRIDE, start, keys);
    // This lane's rows of the fragments: g and g + 8 of the warp's 16.
    const int t_low = t0 + warp_row + g, t_high = t_low + 8;
    const Span low = visible(ranges, b, t_low, queries, keys), high = visible(ranges, b, t_high, queries, keys);
    copies_wait();
    __syncthreads();
    u32 q_frag[D / 16][4];
#pragma unroll
    for (int kk = 0; kk < D / 16; kk++) load_a(q_frag[kk], q_tile, PITCH, warp_row, kk * 16);

    // Scores in units of log 2; l holds this lane's part of the row's sum.
    const float unit = scale * LOG2_E;
    float o[D / 8][4], m_low = -INFINITY_F, m_high = -INFINITY_F, l_low = 0.0f, l_high = 0.0f;
#pragma unroll
    for (int n = 0; n < D / 8; n++) o[n][0] = o[n][1] = o[n][2] = o[n][3] = 0.0f;
    for (int s0 = start; s0 < all.hi; s0 += 64) {
        // Keys have arrived, and no warp reads the last values any more.
        copies_wait();
        __syncthreads();
        load_tile<64>(v_tile, v, K_STRIDE, s0, keys);
        float s[8][4];
#pragma unroll
        for (int n = 0; n < 8; n++) s[n][0] = s[n][1] = s[n][2] = s[n][3] = 0.0f;
#pragma unroll
        for (int kk = 0; kk < D / 16; kk++) {
#pragma unroll
            for (int n = 0; n < 4; n++) {
                u32 frag[4];
                load_b_of_transpose(frag, k_tile, PITCH, kk * 16, n * 16);
                mma(s[2 * n], q_frag[kk], frag[0], frag[1]);
                mma(s[2 * n + 1], q_frag[kk], frag[2], frag[3]);
            }
        }
        const bool whole = max(low.lo, high.lo) <= s0 && min(low.hi, high.hi) >= s0 + 64;
        float top_low = m_low, top_high = m_high;
#pragma unroll
        for (int n = 0; n < 8; n++) {
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const int key = s0 + n * 8 + c * 2 + e;
                s[n][e] = whole || (key >= low.lo && key < low.hi) ? s[n][e] * unit : -INFINITY_F;
                s[n][2 + e] = whole || (key >= high.lo && key < high.hi) ? s[n][2 + e] * unit : -INFINITY_F;
                top_low = fmaxf(top_low, s[n][e]);
                top_high = fmaxf(top_high, s[n][2 + e]);
            }
        }
        // The four lanes of a row.
#pragma unroll
        for (int x = 1; x < 4; x *= 2) {
            top_low = fmaxf(top_low, __shfl_xor_sync(FULL_WARP, top_low, x));
            top_high = fmaxf(top_high, __shfl_xor_sync(FULL_WARP, top_high, x));
        }
        const float base_low = top_low == -INFINITY_F ? 0.0f : top_low;
        const float base_high = top_high == -INFINITY_F ? 0.0f : top_high;
        const float shrink_low = exp2_fast(m_low - base_low), shrink_high = exp2_fast(m_high - base_high);
        m_low = top_low;
        m_high = top_high;
        l_low *= shrink_low;
        l_high *= shrink_high;
#pragma unroll
        for (int n = 0; n < 8; n++) {
#pragma unroll
            for (int e = 0; e < 2; e++) {
                s[n][e] = exp2_fast(s[n][e] - base_low);
                s[n][2 + e] = exp2_fast(s[n][2 + e] - base_high);
                l_low += s[n][e];
                l_high += s[n][2 + e];
            }
        }
#pragma unroll
        for (int n = 0; n < D / 8; n++) {
            o[n][0] *= shrink_low;
            o[n][1] *= shrink_low;
            o[n][2] *= shrink_high;
            o[n][3] *= shrink_high;
        }
        // Values have arrived, and no warp reads these keys any more.
        copies_wait();
        __syncthreads();
        if (s0 + 64 < all.hi) load_tile<64>(k_tile, k, K_STRIDE, s0 + 64, keys);
#pragma unroll
        for (int kk = 0; kk < 4; kk++) {
            u32 p[4];
            a_of_c(p, s[2 * kk], s[2 * kk + 1]);
#pragma unroll
            for (int n = 0; n < D / 16; n++) {
                u32 frag[4];
                load_b(frag, v_tile, PITCH, kk * 16, n * 16);
                mma(o[2 * n], p, frag[0], frag[1]);
                mma(o[2 * n + 1], p, frag[2], frag[3]);
            }
        }
    }
#pragma unroll
    for (int x = 1; x < 4; x *= 2) {
        l_low += __shfl_xor_sync(FULL_WARP, l_low, x);
        l_high += __shfl_xor_sync(FULL_WARP, l_high, x);
    }
    // A sum of 0 is a query that sees nothing.
    const float out_low = low.hi < 0 ? NAN_F : l_low == 0.0f ? 0.0f : 1.0f / l_low;
    const float out_high = high.hi < 0 ? NAN_F : l_high == 0.0f ? 0.0f : 1.0f / l_high;
    // Only this warp has read these rows of the queries, all of them before the loop.
    y += (i64)b * queries * (HEADS * D) + head * D;
    store_rows(y, HEADS * D, t0 + warp_row, queries, q_tile + warp_row * PITCH, o, out_low, out_high);
    lse += (i64)b * queries * HEADS + head;
    if (c == 0 && t_low < queries) {
        lse[(i64)t_low * HEADS] =
            low.hi < 0 ? NAN_F : l_low == 0.0f ? -INFINITY_F : m_low * LN_2 + logf(l_low);
    }
    if (c == 0 && t_high < queries) {
        lse[(i64)t_high * HEADS] =
            high.hi < 0 ? NAN_F : l_high == 0.0f ? -INFINITY_F : m_high * LN_2 + logf(l_high);
    }
}
