// attention_bwd_q -- gradient of one block of queries of one head: the plain version for any head size.
// Computes     p = e^(s - lse) where the query sees the key, s as attention_fwd; ds = p*(dy v^T - delta)*ds/d(q k^T); dq = ds k;
//              0 for a query that sees nothing, NaN for one whose range leaves the keys
// Inputs       q, k, v, ranges as attention_fwd; dy [B,queries,HEADS,D] T; lse, delta [B,queries,HEADS] f32
// Outputs      dq [B,queries,..,D] T, tokens Q_STRIDE elements apart
// Requires     D <= 256; dq overlaps nothing
// Launch       grid (ceil(queries/TILE)*B*HEADS,1,1), block 8*TILE,
//              dynamic shared 4*(4*TILE*(D|1) + TILE*(TILE+1)) bytes
// Traffic      read q and dy once, k and v ceil(queries/TILE) times less what no query sees; write dq
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

// Eight lanes a query.
extern "C" __global__ void __launch_bounds__(8 * TILE)
    attention_bwd_q(const T* __restrict__ q, const T* __restrict__ k, const T* __restrict__ v,
                    const int* __restrict__ ranges, const T* __restrict__ dy, const float* __restrict__ lse,
                    const float* __restrict__ delta, T* __restrict__ dq, int batch, int queries, int keys,
                    float scale) {
    await_earlier_work();
    extern __shared__ float shared[];
    __shared__ int scratch[2];
    float* const q_tile = shared;
    float* const dy_tile = q_tile + TILE * PITCH;
    float* const k_tile = dy_tile + TILE * PITCH;
    float* const v_tile = k_tile + TILE * PITCH;
    float* const ds_tile = v_tile + TILE * PITCH; // [TILE][TILE + 1]
    const int tiles = (queries + TILE - 1) / TILE;
    const int head = blockIdx.x % HEADS, b = blockIdx.x / HEADS % batch;
    const int t0 = (tiles - 1 - (int)(blockIdx.x / HEADS / batch)) * TILE;
    const int r = threadIdx.x / 8, j = threadIdx.x % 8;
    const i64 query_offset = (i64)b * queries * Q_STRIDE + head * D;
    k += (i64)b * keys * K_STRIDE + head / GROUP * D;
    v += (i64)b * keys * K_STRIDE + head / GROUP * D;
    const Span all = seen_by(ranges, b, t0, TILE, queries, keys, scratch);
    const Span mine = visible(ranges, b, t0 + r, queries, keys);
    load_rows(q_tile, q + query_offset, Q_STRIDE, t0, queries);
    load_rows(dy_tile, dy + (i64)b * queries * (HEADS * D) + head * D, HEADS * D, t0, queries);
    const i64 row = ((i64)b * queries + t0 + r) * HEADS + head;
    const float lse_row = t0 + r < queries ? lse[row] : 0.0f;
    const float delta_row = t0 + r < queries ? delta[row] : 0.0f;
    float sum[PER_LANE];
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) sum[i] = 0.0f;
    for (int s0 = all.lo / TILE * TILE; s0 < all.hi; s0 += TILE) {
        __syncthreads();
        load_rows(k_tile, k, K_STRIDE, s0, keys);
        load_rows(v_tile, v, K_STRIDE, s0, keys);
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
            ds_tile[r * (TILE + 1) + key] = seen ? p * (dp - delta_row) * (slope_of(score) * scale) : 0.0f;
        }
        // The row's values come from lanes of this warp.
        __syncwarp();
        for (int key = 0; key < TILE; key++) {
            const float ds = ds_tile[r * (TILE + 1) + key];
#pragma unroll
            for (int i = 0; i < PER_LANE; i++) {
                if (j + 8 * i < D) sum[i] += ds * k_tile[key * PITCH + j + 8 * i];
            }
        }
    }
    if (t0 + r >= queries) return;
    const i64 at = query_offset + (i64)(t0 + r) * Q_STRIDE + j;
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) {
        if (j + 8 * i < D) put(&dq[at + 8 * i], mine.hi < 0 ? NAN_F : sum[i]);
    }
}
