// attention_mma -- what the tensor core kernels of attention share: tiles of bf16 rows of one head.
// Defines: WARPS of a block; FRAGS fragments of 16 rows that each warp owns; BLOCKS that a multiprocessor should hold;
// SOFTCAP, only where scores are capped.

#define THREADS (32 * WARPS)
#define ROWS (16 * FRAGS * WARPS)

// Elements between rows of a tile: 16 bytes more than a row, so that the 8 rows of an ldmatrix fall on 8
// different groups of banks.
#define PITCH (D + 8)
#define LOG2_E 1.4426950408889634f
#define LN_2 0.6931471805599453f

// Starts copying rows first..first + Count of a head with THREADS threads; rows behind the last token become zeros.
template <int Count>
__device__ __forceinline__ void load_tile(bf16* tile, const bf16* head, i64 stride, int first, int tokens,
                                          int thread) {
    const int chunks = D / 8;
#pragma unroll
    for (int k = 0; k < (Count * chunks + THREADS - 1) / THREADS; k++) {
        const int i = thread + THREADS * k, row = i / chunks, at = i % chunks * 8;
        if (Count * chunks % THREADS != 0 && i >= Count * chunks) break;
        const bool valid = first + row < tokens;
        copy_async<16>(tile + row * PITCH + at, head + (valid ? (first + row) * stride + at : 0), valid);
    }
}

#ifdef SOFTCAP
// The factor of what `capped` returns that gives scores in units of log 2.
#define UNIT(scale) (SOFTCAP * LOG2_E)
// tanh(x * scale / SOFTCAP), by way of e^(2 x): within about 1e-7.
__device__ __forceinline__ float capped(float x, float scale) {
    float r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(1.0f + exp2_fast(x * (2.0f * LOG2_E * scale / SOFTCAP))));
    return 1.0f - 2.0f * r;
}
#else
#define UNIT(scale) ((scale) * LOG2_E)
#endif

// Writes a warp's 16 rows, times `low` (rows g) and `high` (rows g + 8), to rows first..first + 16 of a head
// by way of the warp's own 16 rows of shared memory.
__device__ __forceinline__ void store_rows(bf16* head, i64 stride, int first, int tokens, bf16* rows,
                                           const float (&c)[D / 8][4], float low, float high) {
    const int lane = threadIdx.x % 32, chunks = D / 8;
    __syncwarp();
#pragma unroll
    for (int n = 0; n < D / 8; n++) {
        bf16* const at = rows + lane / 4 * PITCH + n * 8 + lane % 4 * 2;
        *(u32*)at = pack_bf16(c[n][0] * low, c[n][1] * low);
        *(u32*)(at + 8 * PITCH) = pack_bf16(c[n][2] * high, c[n][3] * high);
    }
    __syncwarp();
#pragma unroll
    for (int i = lane; i < 16 * chunks; i += 32) {
        const int row = i / chunks, at = i % chunks * 8;
        if (first + row < tokens) {
            *(uint4*)(head + (first + row) * stride + at) = *(const uint4*)(rows + row * PITCH + at);
        }
    }
}
