// attention_fwd -- attention of one block of queries of one head, forward: the plain version for any head size.
// Computes     s = q k^T * scale, capped where SOFTCAP is defined; p = softmax(s) over the keys that each query sees;
//              y = p v; lse = log(sum(e^s));
//              a query that sees nothing gets 0 and -inf, one whose range leaves the keys NaN
// Inputs       q [B,queries,..,D] T; k, v [B,keys,..,D] T, tokens Q_STRIDE and K_STRIDE elements apart;
//              ranges [B,queries,2] int if MASK is 2
// Outputs      y [B,queries,HEADS,D] T; lse [B,queries,HEADS] f32
// Requires     D <= 256; outputs overlap nothing
// Launch       grid (ceil(queries/TILE)*B*HEADS,1,1), block 8*TILE, dynamic shared 4*(3*TILE*(D|1) + TILE*(TILE+1)) bytes
// Traffic      read q once, k and v ceil(queries/TILE) times less what no query sees; write y and lse
// Accumulates  f32, rescaled when a row's maximum grows
// Determinism  bitwise
// Source       arXiv:2205.14135

#define PITCH (D | 1)
#define PER_LANE ((D + 7) / 8)

__device__ __forceinline__ void load_rows(float* to, const T* from, i64 stride, int first, int tokens) {
    for (int i = threadIdx.x; i < TILE * D; i += blockDim.x) {
        const int row = i / D, d = i - row * D;
        to[row * PITCH + d] = first + row < tokens ? f(from[(first + row) * stride + d]) : 0.0f;
    }
}

__device__ __forceinline__ float max8(float x) {
#pragma unroll
    for (int o = 4; o > 0; o >>= 1) x = fmaxf(x, __shfl_xor_sync(FULL_WARP, x, o));
    return x;
}
__device__ __forceinline__ float sum8(float x) {
#pragma unroll
    for (int o = 4; o > 0; o >>= 1) x += __shfl_xor_sync(FULL_WARP, x, o);
    return x;
}

// Eight lanes a query: in the scores lane j has keys j, j+8, ..; in the output elements j, j+8, ..
extern "C" __global__ void __launch_bounds__(8 * TILE)
    attention_fwd(const T* __restrict__ q, const T* __restrict__ k, const T* __restrict__ v,
                  const int* __restrict__ ranges, T* __restrict__ y, float* __restrict__ lse, int batch, int queries,
                  int keys, float scale) {
    await_earlier_work();
    extern __shared__ float shared[];
    __shared__ int scratch[2];
    float* const q_tile = shared;
    float* const k_tile = q_tile + TILE * PITCH;
    float* const v_tile = k_tile + TILE * PITCH;
    float* const p_tile = v_tile + TILE * PITCH; // [TILE][TILE + 1]
    // Blocks of late queries, which have most to do under a causal mask, come first.
    const int tiles = (queries + TILE - 1) / TILE;
    const int head = blockIdx.x % HEADS, b = blockIdx.x / HEADS % batch;
    const int t0 = (tiles - 1 - (int)(blockIdx.x / HEADS / batch)) * TILE;
    const int r = threadIdx.x / 8, j = threadIdx.x % 8;
    q += (i64)b * queries * Q_STRIDE + head * D;
    k += (i64)b * keys * K_STRIDE + head / GROUP * D;
    v += (i64)b * keys * K_STRIDE + head / GROUP * D;
    const Span all = seen_by(ranges, b, t0, TILE, queries, keys, scratch);
    const Span mine = visible(ranges, b, t0 + r, queries, keys);
    load_rows(q_tile, q, Q_STRIDE, t0, queries);
    float m = -INFINITY_F, l = 0.0f, o[PER_LANE];
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) o[i] = 0.0f;
    for (int s0 = all.lo / TILE * TILE; s0 < all.hi; s0 += TILE) {
        __syncthreads();
        load_rows(k_tile, k, K_STRIDE, s0, keys);
        load_rows(v_tile, v, K_STRIDE, s0, keys);
        __syncthreads();
        float score[TILE / 8], top = m;
#pragma unroll
        for (int i = 0; i < TILE / 8; i++) {
            const int key = j + 8 * i;
            float dot = 0.0f;
#pragma unroll 8
            for (int d = 0; d < D; d++) dot += q_tile[r * PITCH + d] * k_tile[key * PITCH + d];
            const bool seen = s0 + key >= mine.lo && s0 + key < mine.hi;
            score[i] = seen ? score_of(dot * scale) : -INFINITY_F;
            top = fmaxf(top, score[i]);
        }
        top = max8(top);
        const float base = top == -INFINITY_F ? 0.0f : top;
        const float shrink = expf(m - base);
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < TILE / 8; i++) {
            const float p = expf(score[i] - base);
            sum += p;
            p_tile[r * (TILE + 1) + j + 8 * i] = p;
        }
        l = l * shrink + sum8(sum);
        m = top;
        // The row's probabilities come from lanes of this warp.
        __syncwarp();
#pragma unroll
        for (int i = 0; i < PER_LANE; i++) o[i] *= shrink;
        for (int key = 0; key < TILE; key++) {
            const float p = p_tile[r * (TILE + 1) + key];
#pragma unroll
            for (int i = 0; i < PER_LANE; i++) {
                if (j + 8 * i < D) o[i] += p * v_tile[key * PITCH + j + 8 * i];
            }
        }
    }
    if (t0 + r >= queries) return;
    const i64 row = ((i64)b * queries + t0 + r) * HEADS + head;
    // A sum of 0 is a query that sees nothing.
    const float scale_out = mine.hi < 0 ? NAN_F : l == 0.0f ? 0.0f : 1.0f / l;
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) {
        if (j + 8 * i < D) put(&y[row * D + j + 8 * i], o[i] * scale_out);
    }
    if (j == 0) lse[row] = mine.hi < 0 ? NAN_F : l == 0.0f ? -INFINITY_F : m + logf(l);
}
