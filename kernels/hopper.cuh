// hopper -- what sm_90a adds: barriers in shared memory that count bytes, tiles that the tensor memory engine
// copies, and matrix products of a warpgroup (128 threads). Shared memory is named by its 32-bit address. After mma.
// Tiles    rows of 64 bf16 (128 bytes), at a multiple of 1024 bytes; the 16-byte chunk c of row r lies at chunk
//          c ^ (r % 8), as the engine's 128-byte swizzle puts it and wgmma reads it
// Products wgmma.m64nNk16: c [64,N] f32 += A [64,16] B [16,N]; warp w of the group holds rows 16w..16w+16 of c
//          and of A, in the fragments of mma.m16n8k16; c[n] is the fragment of columns 8n..8n+8

// What cuTensorMapEncodeTiled fills.
struct alignas(64) TensorMap {
    u64 words[16];
};

// Barriers: 8 bytes each. A phase ends after `count` arrivals and all bytes expected in it; waiting names the
// phase's parity, and a fresh barrier counts as past a phase of parity 1.
__device__ __forceinline__ void barrier_init(u32 barrier, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}
// Shows fresh barriers to the copy engine.
__device__ __forceinline__ void barriers_ready() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void barrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void barrier_arrive_and_expect(u32 barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
    u32 done;
#ifdef SPIN_LIMIT
    int spins = 0;
#endif
    do {
        asm volatile(
            "{\n.reg .pred done;\nmbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;\n"
            "selp.u32 %0, 1, 0, done;\n}"
            : "=r"(done)
            : "r"(barrier), "r"(parity)
            : "memory");
#ifdef SPIN_LIMIT
        if (++spins > SPIN_LIMIT) asm volatile("trap;");
#endif
    } while (!done);
}

// Starts copying a box at these coordinates, innermost first, to shared memory; elements outside the tensor
// become zeros. The barrier counts the box's bytes.
__device__ __forceinline__ void copy_box(u32 to, const TensorMap& map, u32 barrier, int x, int y, int z, int w) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], "
        "[%2];" ::"r"(to),
        "l"(&map), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(w)
        : "memory");
}
// Starts copying bytes (a multiple of 16, as both addresses).
__device__ __forceinline__ void copy_bulk(u32 to, const void* from, int bytes, u32 barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
        "l"(from), "r"(bytes), "r"(barrier)
        : "memory");
}
// Orders this thread's accesses to shared memory before those of the copy engine and of wgmma.
__device__ __forceinline__ void async_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Threads `count` of the block meet at barrier `id`, 1 to 15.
__device__ __forceinline__ void meet(int id, int count) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(count) : "memory");
}
// Arrives at such a barrier without waiting.
__device__ __forceinline__ void meet_later(int id, int count) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(count) : "memory");
}
// Threads of the blocks of a cluster meet: each arrives, then waits for all that have not ended; what they wrote to
// shared memory before is visible then.
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.release;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }
template <int REGISTERS>
__device__ __forceinline__ void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
template <int REGISTERS>
__device__ __forceinline__ void give_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

// A tile as wgmma reads it, from `address` on: 8-row groups follow each other; `across` bytes to the next 64
// columns, where a transposed operand has more.
__device__ __forceinline__ u64 operand(u32 address, u32 across = 16) {
    return (u64)(address >> 4 & 0x3fff) | (u64)(across >> 4) << 16 | (u64)64 << 32 | (u64)1 << 62;
}

// Orders register accesses before the products that follow.
__device__ __forceinline__ void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
// Closes a group of products.
__device__ __forceinline__ void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most PENDING groups are unfinished.
template <int PENDING>
__device__ __forceinline__ void products_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
// Keeps the compiler from moving uses of fragments over this point.
template <int COUNT>
__device__ __forceinline__ void hold(float (&c)[COUNT][4]) {
#pragma unroll
    for (int n = 0; n < COUNT; n++) {
        asm volatile("" : "+f"(c[n][0]), "+f"(c[n][1]), "+f"(c[n][2]), "+f"(c[n][3])::"memory");
    }
}
template <int COUNT>
__device__ __forceinline__ void hold(u32 (&a)[COUNT][4]) {
#pragma unroll
    for (int n = 0; n < COUNT; n++) {
        asm volatile("" : "+r"(a[n][0]), "+r"(a[n][1]), "+r"(a[n][2]), "+r"(a[n][3])::"memory");
    }
}

#define FRAGMENT(c, n) "+f"((c)[n][0]), "+f"((c)[n][1]), "+f"((c)[n][2]), "+f"((c)[n][3])
#define FRAGMENTS_8(c, n)                                                                                    \
    FRAGMENT(c, n), FRAGMENT(c, n + 1), FRAGMENT(c, n + 2), FRAGMENT(c, n + 3), FRAGMENT(c, n + 4),           \
        FRAGMENT(c, n + 5), FRAGMENT(c, n + 6), FRAGMENT(c, n + 7)
#define PLACES_32                                                                                            \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, "    \
    "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define PLACES_64                                                                                            \
    PLACES_32                                                                                                \
    ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, "  \
    "%52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"

// c += A B, or c = A B where !add; A in shared memory, its 16 columns contiguous; B in shared memory as the rows
// of its transpose.
template <int N>
__device__ __forceinline__ void wgmma(float (*c)[4], u64 a, u64 b, int add) {
    if constexpr (N == 64) {
        asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %34, 0;\n"
                     "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" PLACES_32
                     "}, %32, %33, add, 1, 1, 0, 0;\n}"
                     : FRAGMENTS_8(c, 0)
                     : "l"(a), "l"(b), "r"(add));
    } else {
        asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %66, 0;\n"
                     "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" PLACES_64
                     "}, %64, %65, add, 1, 1, 0, 0;\n}"
                     : FRAGMENTS_8(c, 0), FRAGMENTS_8(c, 8)
                     : "l"(a), "l"(b), "r"(add));
    }
}
// The same with A in registers; B in shared memory as it is (TRANSPOSED) or as the rows of its transpose.
template <int N, int TRANSPOSED>
__device__ __forceinline__ void wgmma(float (*c)[4], const u32 (&a)[4], u64 b, int add) {
    if constexpr (N == 64) {
        asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %37, 0;\n"
                     "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" PLACES_32
                     "}, {%32, %33, %34, %35}, %36, add, 1, 1, %38;\n}"
                     : FRAGMENTS_8(c, 0)
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "n"(TRANSPOSED));
    } else {
        asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %69, 0;\n"
                     "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" PLACES_64
                     "}, {%64, %65, %66, %67}, %68, add, 1, 1, %70;\n}"
                     : FRAGMENTS_8(c, 0), FRAGMENTS_8(c, 8)
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "n"(TRANSPOSED));
    }
}
