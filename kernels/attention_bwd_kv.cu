// attention_bwd_kv -- gradients of one block of keys and values of one key head: the plain version for any head size.
// Computes     p = e^(s - lse) where the query sees the key, s as attention_fwd; ds = p*(dy v^T - delta)*ds/d(q k^T);
//              dk = ds^T q, dv = p^T dy, summed over the query heads of the group, head after head
// Inputs       q, k, v, ranges as attention_fwd; dy [B,queries,HEADS,D] T; lse, delta [B,queries,HEADS] f32
// Outputs      dk, dv [B,keys,..,D] T, tokens K_STRIDE elements apart
// Requires     D <= 256; outputs overlap nothing
// Launch       grid (ceil(keys/TILE)*B*KV_HEADS,1,1), block 8*TILE,
//              dynamic shared 4*(4*TILE*(D|1) + 2*TILE*(TILE+1)) bytes
// Traffic      read k and v once, q and dy ceil(keys/TILE) times less what no key meets; write dk and dv
// Accumulates  f32
// Determinism  bitwise (no atomics)
// Source       arXiv:2205.14135

#define PITCH (D | 1)
#define PER_LANE ((D + 7) / 8)

__device__ __forceinline__ void load_rows(float* to, const T* from, i64 stride, int first, int tokens) {
    for (int i = threadIdx.x; i < TILE * D; i += blockDim.x) {
        const int row = i / D, d = i - row * D;
        to[row * PITCH + d] = first + row < tokens ? f(from[(first + row) * stride + d]) : 0.0f;
    }
}

// Eight lanes a row: queries in the scores, keys in the gradients.
extern "C" __global__ void __launch_bounds__(8 * TILE, 1)
    attention_bwd_kv(const T* __restrict__ q, const T* __restrict__ k, const T* __restrict__ v,
                     const int* __restrict__ ranges, const T* __restrict__ dy, const float* __restrict__ lse,
                     const float* __restrict__ delta, T* __restrict__ dk, T* __restrict__ dv, int batch, int queries,
                     int keys, float scale) {
    await_earlier_work();
    extern __shared__ float shared[];
    float* const k_tile = shared;
    float* const v_tile = k_tile + TILE * PITCH;
    float* const q_tile = v_tile + TILE * PITCH;
    float* const dy_tile = q_tile + TILE * PITCH;
    float* const p_tile = dy_tile + TILE * PITCH; // [TILE][TILE + 1], query by key
    float* const ds_tile = p_tile + TILE * (TILE + 1);
    const int kv = blockIdx.x % KV_HEADS, b = blockIdx.x / KV_HEADS % batch;
    const int s0 = (int)(blockIdx.x / KV_HEADS / batch) * TILE;
    const int r = threadIdx.x / 8, j = threadIdx.x % 8;
    const i64 key_offset = (i64)b * keys * K_STRIDE + kv * D;
    load_rows(k_tile, k + key_offset, K_STRIDE, s0, keys);
    load_rows(v_tile, v + key_offset, K_STRIDE, s0, keys);
    float dk_sum[PER_LANE], dv_sum[PER_LANE];
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) dk_sum[i] = dv_sum[i] = 0.0f;
    for (int head = kv * GROUP; head < (kv + 1) * GROUP; head++) {
        const T* const q_head = q + (i64)b * queries * Q_STRIDE + head * D;
        const T* const dy_head = dy + (i64)b * queries * (HEADS * D) + head * D;
        for (int t0 = 0; t0 < queries; t0 += TILE) {
            const Span mine = visible(ranges, b, t0 + r, queries, keys);
            // Also keeps the tiles until every thread has read the last ones.
            if (!__syncthreads_or(overlaps(mine, s0, TILE))) continue;
            load_rows(q_tile, q_head, Q_STRIDE, t0, queries);
            load_rows(dy_tile, dy_head, HEADS * D, t0, queries);
            const i64 row = ((i64)b * queries + t0 + r) * HEADS + head;
            const float lse_row = t0 + r < queries ? lse[row] : 0.0f;
            const float delta_row = t0 + r < queries ? delta[row] : 0.0f;
            __syncthreads();
#pragma unroll
            for (int i = 0; i < TILE / 8; i++) {
                const int key = j + 8 * i;
                float dot = 0.0f, dp = 0.0f;
#pragma unroll 8
                for (int d = 0; d < D; d++) {
                    dot += q_tile[r * PITCH + d] * k_tile[key * PITCH + d];
                    dp += dy_tile[r * PITCH + d] * v_tile[key * PITCH + d];
                }
                const bool seen = s0 + key >= mine.lo && s0 + key < mine.hi;
                const float score = score_of(dot * scale), p = seen ? expf(score - lse_row) : 0.0f;
                p_tile[r * (TILE + 1) + key] = p;
                ds_tile[r * (TILE + 1) + key] = seen ? p * (dp - delta_row) * (slope_of(score) * scale) : 0.0f;
            }
            __syncthreads();
            for (int t = 0; t < TILE; t++) {
                const float p = p_tile[t * (TILE + 1) + r], ds = ds_tile[t * (TILE + 1) + r];
#pragma unroll
                for (int i = 0; i < PER_LANE; i++) {
                    if (j + 8 * i < D) {
                        dv_sum[i] += p * dy_tile[t * PITCH + j + 8 * i];
                        dk_sum[i] += ds * q_tile[t * PITCH + j + 8 * i];
                    }
                }
            }
        }
    }
    if (s0 + r >= keys) return;
    const i64 at = key_offset + (i64)(s0 + r) * K_STRIDE + j;
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) {
        if (j + 8 * i < D) {
            put(&dk[at + 8 * i], dk_sum[i]);
            put(&dv[at + 8 * i], dv_sum[i]);
        }
    }
}
