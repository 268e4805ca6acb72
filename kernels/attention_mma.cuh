// attention_mma -- what the tensor core kernels of attention share: tiles of bf16 rows of one head, 128 threads.

// Elements between rows of a tile: 16 bytes more than a row, so that the 8 rows of an ldmatrix fall on 8
// different groups of banks.
#define PITCH (D + 8)
#define LOG2_E 1.4426950408889634f
#define LN_2 0.6931471805599453f

// Starts copying rows first..first + ROWS of a head; rows behind the last token become zeros.
template <int ROWS>
__device__ __forceinline__ void load_tile(bf16* tile, const bf16* head, i64 stride, int first, int tokens) {
    const int chunks = D / 8;
#pragma unroll
    for (int k = 0; k < ROWS * chunks / 128; k++) {
        const int i = threadIdx.x + 128 * k, row = i / chunks, at = i % chunks * 8;
        const bool valid = first + row < tokens;
        copy_async<16>(tile + row * PITCH + at, head + (valid ? (first + row) * stride + at : 0), valid);
    }
}

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
