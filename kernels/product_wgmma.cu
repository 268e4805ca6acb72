// product_wgmma -- matrix product on Hopper whose launch overlaps the kernel before it.
// Computes     c[i,j] = sum_l a[i,l] * b[j,l], or of b[l,j] where TRANS_B is 0
// Inputs       a [m,k] and b [n,k] or [k,n] bf16 as tensor maps, innermost first, with the 128-byte swizzle: a of boxes
//              64, 1, ROWS, 1; b of boxes 64, 1, COLS/DOWN, 1, or 64, 1, 64/DOWN, 1 where TRANS_B is 0
// Outputs      c [m,n] bf16
// Requires     m, n, k above 0, n and k multiples of 8; all aligned to 16 bytes; sm_90a; c overlaps nothing; boxes of
//              multiples of 8 rows
// Launch       a block for each tile of ROWS = 64*HEIGHT*WORKERS rows and COLS columns, in clusters of DOWN tiles below
//              each other, which share what they read of b: grid (ceil(m/(ROWS*DOWN))*ceil(n/COLS)*DOWN,1,1), block
//              128*WORKERS+COPIERS; dynamic shared 1024 + the larger of STAGES*128*(ROWS + COLS, that up to the next
//              multiple of 64 where TRANS_B is 0) and ROWS*(2*COLS+16) bytes; SHARE and SPARE, registers of a computing
//              and of a copying thread, need 128 COPIERS, SHARE 0 leaves them as they are; with LETS_NEXT the next
//              launch may begin when the products are done, else when the block ends
// Traffic      read a once for each column of tiles, b once for DOWN rows of tiles; write c
// Accumulates  f32, over all of k in order
// Determinism  bitwise
// Source       none

#define ROWS (64 * HEIGHT * WORKERS)
#define A_BYTES (ROWS * 128)
#if TRANS_B
#define B_BYTES (COLS * 128)
#else
#define B_BOXES ((COLS + 63) / 64)
#define B_BYTES (B_BOXES * 8192)
#endif
#define STEP_BYTES (A_BYTES + B_BYTES)
// Fragments of 8 columns of a thread.
#define PARTS (COLS / 8)
// Bytes from row to row of a rounded tile: 16 more than its columns take, so that a warp's stores meet no bank twice.
#define PITCH (COLS * 2 + 16)

#define FRAGMENTS_2(c, n) FRAGMENT(c, n), FRAGMENT(c, n + 1)
#define FRAGMENTS_4(c, n) FRAGMENTS_2(c, n), FRAGMENTS_2(c, n + 2)
#define PLACES_24                                                                                            \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, "    \
    "%22, %23"
#define PLACES_40 PLACES_32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define PLACES_80 PLACES_64 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define PLACES_88 PLACES_80 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define PLACES_96 PLACES_88 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define PRODUCT(columns, places, a, b, add)                                                                  \
    "{\n.reg .pred add;\nsetp.ne.b32 add, " add ", 0;\nwgmma.mma_async.sync.aligned.m64n" columns            \
    "k16.f32.bf16.bf16 {" places "}, " a ", " b ", add, 1, 1, 0, %" PLACE_OF_TRANSPOSED ";\n}"

// c += A B for 16 of the summed elements, or c = A B where !add.
__device__ __forceinline__ void multiply(float (&c)[PARTS][4], u64 a, u64 b, int add) {
#if COLS == 48
#define PLACE_OF_TRANSPOSED "27"
    asm volatile(PRODUCT("48", PLACES_24, "%24", "%25", "%26")
                 : FRAGMENTS_4(c, 0), FRAGMENTS_2(c, 4)
                 : "l"(a), "l"(b), "r"(add), "n"(!TRANS_B));
#elif COLS == 64
#define PLACE_OF_TRANSPOSED "35"
    asm volatile(PRODUCT("64", PLACES_32, "%32", "%33", "%34")
                 : FRAGMENTS_8(c, 0)
                 : "l"(a), "l"(b), "r"(add), "n"(!TRANS_B));
#elif COLS == 80
#define PLACE_OF_TRANSPOSED "43"
    asm volatile(PRODUCT("80", PLACES_40, "%40", "%41", "%42")
                 : FRAGMENTS_8(c, 0), FRAGMENTS_2(c, 8)
                 : "l"(a), "l"(b), "r"(add), "n"(!TRANS_B));
#elif COLS == 88
#define PLACE_OF_TRANSPOSED "47"
    asm volatile(PRODUCT("88", PLACES_40 ", %40, %41, %42, %43", "%44", "%45", "%46")
                 : FRAGMENTS_8(c, 0), FRAGMENTS_2(c, 8), FRAGMENT(c, 10)
                 : "l"(a), "l"(b), "r"(add), "n"(!TRANS_B));
#elif COLS == 96
#define PLACE_OF_TRANSPOSED "51"
    asm volatile(PRODUCT("96", PLACES_40 ", %40, %41, %42, %43, %44, %45, %46, %47", "%48", "%49", "%50")
                 : FRAGMENTS_8(c, 0), FRAGMENTS_4(c, 8)
                 : "l"(a), "l"(b), "r"(add), "n"(!TRANS_B));
#elif COLS == 128
#define PLACE_OF_TRANSPOSED "67"
    asm volatile(PRODUCT("128", PLACES_64, "%64", "%65", "%66")
                 : FRAGMENTS_8(c, 0), FRAGMENTS_8(c, 8)
                 : "l"(a), "l"(b), "r"(add), "n"(!TRANS_B));
#elif COLS == 160
#define PLACE_OF_TRANSPOSED "83"
    asm volatile(PRODUCT("160", PLACES_80, "%80", "%81", "%82")
                 : FRAGMENTS_8(c, 0), FRAGMENTS_8(c, 8), FRAGMENTS_4(c, 16)
                 : "l"(a), "l"(b), "r"(add), "n"(!TRANS_B));
#elif COLS == 176
#define PLACE_OF_TRANSPOSED "91"
    asm volatile(PRODUCT("176", PLACES_88, "%88", "%89", "%90")
                 : FRAGMENTS_8(c, 0), FRAGMENTS_8(c, 8), FRAGMENTS_4(c, 16), FRAGMENTS_2(c, 20)
                 : "l"(a), "l"(b), "r"(add), "n"(!TRANS_B));
#elif COLS == 192
#define PLACE_OF_TRANSPOSED "99"
    asm volatile(PRODUCT("192", PLACES_96, "%96", "%97", "%98")
                 : FRAGMENTS_8(c, 0), FRAGMENTS_8(c, 8), FRAGMENTS_8(c, 16)
                 : "l"(a), "l"(b), "r"(add), "n"(!TRANS_B));
#else
#error "COLS is none of those that multiply knows"
#endif
}

// As copy_box, to the same place in each block of the cluster that `blocks` names; the barrier of each counts.
__device__ __forceinline__ void copy_box_to(u32 to, const TensorMap& map, u32 barrier, int x, int y, u16 blocks) {
#if DOWN > 1
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
        "[%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(to),
        "l"(&map), "r"(barrier), "r"(x), "r"(0), "r"(y), "r"(0), "h"(blocks)
        : "memory");
#else
    copy_box(to, map, barrier, x, 0, y, 0);
#endif
}

// Starts to copy this block's part of b to all blocks of the cluster.
__device__ __forceinline__ void copy_b(u32 to, const TensorMap& map, u32 barrier, int k, int column, int down) {
    constexpr u16 ALL = (1 << DOWN) - 1;
#if TRANS_B
    const int line = down * (COLS / DOWN);
    copy_box_to(to + line * 128, map, barrier, k, column + line, ALL);
#else
    const int line = down * (64 / DOWN);
#pragma unroll
    for (int i = 0; i < B_BOXES; i++) {
        copy_box_to(to + i * 8192 + line * 128, map, barrier, column + i * 64, k + line, ALL);
    }
#endif
}

// Brings a tensor map to where the copy engine looks for it.
__device__ __forceinline__ void prefetch_map(const TensorMap& map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// Arrives at the barrier of another block of the cluster. It orders nothing outside the block: what it says is that
// products, which are done, have read a tile; ordering more costs a microsecond.
__device__ __forceinline__ void barrier_arrive_at(u32 barrier, int block) {
    asm volatile("{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\n"
                 "mbarrier.arrive.shared::cluster.b64 _, [there];\n}" ::"r"(barrier),
                 "r"(block)
                 : "memory");
}

__device__ __forceinline__ void hold_all(float (&c)[HEIGHT][PARTS][4]) {
#pragma unroll
    for (int h = 0; h < HEIGHT; h++) hold(c[h]);
}

// Writes 16 rows of the rounded tile at `from`, which begins at `row` and `column` of c; for a warp.
__device__ __forceinline__ void store_tile(u32 from, bf16* __restrict__ c, int row, int column, int m, int n) {
#pragma unroll 4
    for (int i = threadIdx.x % 32; i < 16 * PARTS; i += 32) {
        const int r = i / PARTS, at = i % PARTS, j = column + at * 8;
        if (row + r >= m) break;
        uint4 x;
        asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                     : "r"(from + r * PITCH + at * 16)
                     : "memory");
        if (j < n) *(uint4*)(c + (i64)(row + r) * n + j) = x;
    }
}

extern "C" __global__ void
#if DOWN > 1
__cluster_dims__(DOWN, 1, 1)
#endif
__launch_bounds__(128 * WORKERS + COPIERS, 1)
    product_wgmma(const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap b_map,
                  bf16* __restrict__ c, int m, int n, int k) {
    extern __shared__ uint4 shared[];
    __shared__ u64 barriers[2 * STAGES];
    const u32 ring = (shared_address(shared) + 1023) / 1024 * 1024;
    const u32 full = shared_address(barriers), empty = full + 8 * STAGES;
    // The block's place in its cluster, and the cluster's among all.
    const int down = blockIdx.x % DOWN, cluster = blockIdx.x / DOWN, tiles_across = (n + COLS - 1) / COLS;
    const int row = (cluster / tiles_across * DOWN + down) * ROWS, column = cluster % tiles_across * COLS;
    const int steps = (k + 63) / 64;
    const bool copies = threadIdx.x == 128 * WORKERS;
    if (copies) {
        prefetch_map(a_map);
        prefetch_map(b_map);
        for (int i = 0; i < STAGES; i++) {
            barrier_init(full + 8 * i, 1);
            // All blocks of the cluster, which get something from this one, say when they have read it.
            barrier_init(empty + 8 * i, 4 * WORKERS * DOWN);
        }
        barriers_ready();
    }
#if DOWN > 1
    // The barriers of all blocks of the cluster are there.
    asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
    cluster_wait();
#endif
    __syncthreads();
    end_of_earlier_work();
    const int lane = threadIdx.x % 32, warp = __shfl_sync(FULL_WARP, (int)threadIdx.x / 32, 0);
    // The last warps copy.
    if (warp >= 4 * WORKERS) {
#if SHARE
        give_registers<SPARE>();
#endif
        if (copies) {
            for (int step = 0; step < steps; step++) {
                const u32 stage = step % STAGES, to = ring + stage * STEP_BYTES, barrier = full + 8 * stage;
                if (step >= STAGES) barrier_wait(empty + 8 * stage, (step / STAGES & 1) ^ 1);
                barrier_arrive_and_expect(barrier, STEP_BYTES);
                copy_b(to + A_BYTES, b_map, barrier, step * 64, column, down);
                copy_box(to, a_map, barrier, step * 64, 0, row, 0);
            }
        }
        return;
    }
#if SHARE
    take_registers<SHARE>();
#endif
    const int g = lane / 4, q = lane % 4;
    // Those of rows row_of(h) + g, the first two, and row_of(h) + g + 8.
    float sums[HEIGHT][PARTS][4];
    auto row_of = [&](int h) { return (warp / 4 * HEIGHT + h) * 64 + warp % 4 * 16; };
    for (int step = 0; step < steps; step++) {
        const u32 stage = step % STAGES, a_tile = ring + stage * STEP_BYTES + warp / 4 * HEIGHT * 8192;
        const u32 b_tile = ring + stage * STEP_BYTES + A_BYTES;
        barrier_wait(full + 8 * stage, step / STAGES & 1);
        hold_all(sums);
        products_begin();
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const u64 b = TRANS_B ? operand(b_tile + i * 32) : operand(b_tile + i * 2048, 8192);
#pragma unroll
            for (int h = 0; h < HEIGHT; h++) multiply(sums[h], operand(a_tile + h * 8192 + i * 32), b, step + i);
        }
        products_commit();
        products_wait<1>();
        hold_all(sums);
        // The step before has been read: whoever copied a part of it may copy there anew, if anything is left.
        const int read = step - 1;
        if (read >= 0 && read + STAGES < steps) {
            const u32 barrier = empty + 8 * (read % STAGES);
#if DOWN > 1
            if (lane < DOWN) barrier_arrive_at(barrier, lane);
#else
            if (lane == 0) barrier_arrive(barrier);
#endif
        }
    }
    products_wait<0>();
    hold_all(sums);
#if LETS_NEXT
    let_next_begin();
#endif
    // The tiles' memory is used anew from here on.
    meet(1, 128 * WORKERS);
#pragma unroll
    for (int h = 0; h < HEIGHT; h++) {
#pragma unroll
        for (int i = 0; i < PARTS; i++) {
            const u32 at = ring + (row_of(h) + g) * PITCH + i * 16 + q * 4;
            asm volatile("st.shared.b32 [%0], %1;" ::"r"(at), "r"(pack_bf16(sums[h][i][0], sums[h][i][1])) : "memory");
            asm volatile("st.shared.b32 [%0], %1;" ::"r"(at + 8 * PITCH), "r"(pack_bf16(sums[h][i][2], sums[h][i][3]))
                         : "memory");
        }
    }
    __syncwarp();
#pragma unroll 1
    for (int h = 0; h < HEIGHT; h++) store_tile(ring + row_of(h) * PITCH, c, row + row_of(h), column, m, n);
}
