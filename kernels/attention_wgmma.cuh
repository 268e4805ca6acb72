// attention_wgmma -- what the sm_90a kernels of attention share. A unit is 64 queries of one head; the units of a
// key head are numbered by query first, then by head of the group, and neighbours of them share a block, which
// holds one warpgroup that copies and WORKERS that compute. Defines beside those of attention: WORKERS, KEYS (keys
// of a step), STAGES (steps in flight), SPARE and SHARE (registers of a copying and of a computing thread).

#define LOG2_E 1.4426950408889634f
// Tiles of 64 columns in a row of a head.
#define SLICES (D / 64)
#define UNIT_BYTES (64 * D * 2)
#define STEP_BYTES (KEYS * D * 2)

// What 64 queries see: keys lo..hi some of them, keys inner_lo..inner_hi all of them.
struct Reach {
    int lo, hi, inner_lo, inner_hi;
};

__device__ __forceinline__ int warp_min(int x) {
    int y;
    asm volatile("redux.sync.min.s32 %0, %1, 0xffffffff;" : "=r"(y) : "r"(x));
    return y;
}
__device__ __forceinline__ int warp_max(int x) {
    int y;
    asm volatile("redux.sync.max.s32 %0, %1, 0xffffffff;" : "=r"(y) : "r"(x));
    return y;
}

// What queries first..first + 64 see; for a whole warp, and the same for all its lanes.
__device__ __forceinline__ Reach reach(const int* __restrict__ ranges, int b, int first, int queries, int keys) {
#if MASK == 2
    Reach r = {keys, 0, 0, keys};
#pragma unroll
    for (int i = 0; i < 64; i += 32) {
        const int t = first + i + threadIdx.x % 32;
        if (t < queries) {
            const Span span = visible(ranges, b, t, queries, keys);
            if (span.hi > span.lo) {
                r.lo = min(r.lo, span.lo);
                r.hi = max(r.hi, span.hi);
            }
            r.inner_lo = max(r.inner_lo, span.lo);
            r.inner_hi = min(r.inner_hi, span.hi);
        }
    }
    r.lo = warp_min(r.lo);
    r.hi = warp_max(r.hi);
    r.inner_lo = warp_max(r.inner_lo);
    r.inner_hi = warp_min(r.inner_hi);
#elif MASK == 1
    const int past = keys - queries + 1;
    const Reach r = {0, max(0, past + min(first + 63, queries - 1)), 0, max(0, past + first)};
#else
    const Reach r = {0, keys, 0, keys};
#endif
    return r;
}

// One of the `blocks` pieces of the work on a key head.
struct Work {
    int b, kv, block;
};

// The work of an item: all blocks numbered 0 before those numbered 1, of `section` key heads at a time, as many
// as the level-two cache holds what they read of.
__device__ __forceinline__ Work work_of(int item, int batch, int blocks, int section) {
    const int pairs = batch * KV_HEADS, part = item / (section * blocks), in_part = item - part * section * blocks;
    const int size = min(section, pairs - part * section), pair = part * section + in_part % size;
    const Work work = {pair / KV_HEADS, pair % KV_HEADS, in_part / size};
    return work;
}

// The item of a persistent block in a round: forward and backward in turns, so that all get equal work.
__device__ __forceinline__ int item_of(int round) {
    return round * gridDim.x + (round % 2 == 0 ? blockIdx.x : gridDim.x - 1 - blockIdx.x);
}

// Copies rows first..first + ROWS of a head.
template <int ROWS>
__device__ __forceinline__ void copy_rows(u32 to, const TensorMap& map, u32 barrier, int head, int first, int b) {
#pragma unroll
    for (int slice = 0; slice < SLICES; slice++) {
#pragma unroll
        for (int row = 0; row < ROWS; row += 64) {
            copy_box(to + (slice * ROWS + row) * 128, map, barrier, slice * 64, head, first + row, b);
        }
    }
}

// A tile of ROWS rows as operand: 16 columns from 16*k on, of rows from `row` on.
template <int ROWS>
__device__ __forceinline__ u64 columns(u32 tile, int k, int row = 0) {
    return operand(tile + (k / 4 * ROWS + row) * 128 + k % 4 * 32);
}
// All columns of the 16 rows from 16*k on, as a transposed operand.
template <int ROWS>
__device__ __forceinline__ u64 rows_of(u32 tile, int k) {
    return operand(tile + k * 2048, ROWS * 128);
}

#if TURN
// Turns the warp's 16 rows of fragments, of tokens first.. of a sequence, back by the angles [tokens,D/2] (cosine, sine)
// of the sequence.
__device__ __forceinline__ void turn_back(float (&c)[D / 8][4], const float* __restrict__ angles, int first,
                                          int tokens) {
    constexpr int PAIR = D / 16;
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int e = 0; e < 4; e += 2) {
        const float* row = angles + (i64)min(first + lane / 4 + e * 4, tokens - 1) * D;
#pragma unroll
        for (int n = 0; n < PAIR; n++) {
            const float4 a = *(const float4*)(row + 16 * n + lane % 4 * 4);
            const float x0 = c[n][e], x1 = c[n][e + 1], y0 = c[n + PAIR][e], y1 = c[n + PAIR][e + 1];
            c[n][e] = x0 * a.x + y0 * a.y;
            c[n][e + 1] = x1 * a.z + y1 * a.w;
            c[n + PAIR][e] = y0 * a.x - x0 * a.y;
            c[n + PAIR][e + 1] = y1 * a.z - x1 * a.w;
        }
    }
}
#endif

// Fragments of a thread in shared memory, one every 2048 bytes: those of its warp lie side by side.
__device__ __forceinline__ void put_sums(u32 to, const float (&c)[D / 8][4]) {
#pragma unroll
    for (int n = 0; n < D / 8; n++) {
        asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to + n * 2048), "f"(c[n][0]), "f"(c[n][1]),
                     "f"(c[n][2]), "f"(c[n][3])
                     : "memory");
    }
}
__device__ __forceinline__ void add_sums(float (&c)[D / 8][4], u32 from) {
#pragma unroll
    for (int n = 0; n < D / 8; n++) {
        float x[4];
        asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                     : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3])
                     : "r"(from + n * 2048)
                     : "memory");
#pragma unroll
        for (int e = 0; e < 4; e++) c[n][e] += x[e];
    }
}

// Writes the warp's 16 rows of fragments, times `low` (rows g) and `high` (rows g + 8), to rows first..first + 16
// of a head, by way of its own 16 rows, from `row` on, of a tile of ROWS rows.
template <int ROWS>
__device__ __forceinline__ void store_rows(bf16* head, i64 stride, int first, int tokens, u32 tile, int row,
                                           const float (&c)[D / 8][4], float low, float high) {
    const int lane = threadIdx.x % 32, g = lane / 4;
#pragma unroll
    for (int n = 0; n < D / 8; n++) {
        const u32 at = tile + (n / 8 * ROWS + row + g) * 128 + ((n % 8 ^ g) * 16 + lane % 4 * 4);
        asm volatile("st.shared.b32 [%0], %1;" ::"r"(at), "r"(pack_bf16(c[n][0] * low, c[n][1] * low)) : "memory");
        asm volatile("st.shared.b32 [%0], %1;" ::"r"(at + 8 * 128), "r"(pack_bf16(c[n][2] * high, c[n][3] * high))
                     : "memory");
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < D / 16; i++) {
        const int chunk = lane % 8, slice = i / 4, r = i % 4 * 4 + lane / 8;
        uint4 x;
        asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                     : "r"(tile + (slice * ROWS + row + r) * 128 + (chunk ^ r % 8) * 16)
                     : "memory");
        if (first + r < tokens) *(uint4*)(head + (first + r) * stride + slice * 64 + chunk * 8) = x;
    }
}
