// prelude -- what every kernel may use; no CUDA header is included anywhere.
// Types       bf16 (storage only), i64, u64, u32; T, TX, TY, TW are element types given as defines
// Arithmetic  always float: load with f(x), store with put(&y[i], value); bf16 rounds to nearest even
// Order       await_earlier_work() at the start of every kernel, or end_of_earlier_work() and let_next_begin() apart
// Access      packed<Count>(p) and put_packed(p, values): neighbours with one instruction
// Reductions  warp_sum, warp_max, block_sum, block_max: fixed order, so results repeat bit for bit

typedef long long i64;
typedef unsigned long long u64;
typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;

struct __align__(2) bf16 {
    u16 bits;
};

// Lets the next launch begin, as soon as every block of this one has said so or has ended.
__device__ __forceinline__ void let_next_begin() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
// A launch may begin before the ones before it end: this waits until all that they write is there.
__device__ __forceinline__ void end_of_earlier_work() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// Both, before the first access to device memory. Cards before Hopper know no such launches.
__device__ __forceinline__ void await_earlier_work() {
    let_next_begin();
    end_of_earlier_work();
}

#define INFINITY_F __int_as_float(0x7f800000)
#define NAN_F __int_as_float(0x7fffffff)

__device__ __forceinline__ float f(float x) { return x; }
__device__ __forceinline__ float f(bf16 x) { return __uint_as_float((u32)x.bits << 16); }
__device__ __forceinline__ void put(float* p, float x) { *p = x; }
__device__ __forceinline__ void put(bf16* p, float x) {
    u16 bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    p->bits = bits;
}
// Four neighbours at once; p is aligned to four elements.
__device__ __forceinline__ void load4(const float* p, float (&v)[4]) {
    const float4 q = *reinterpret_cast<const float4*>(p);
    v[0] = q.x, v[1] = q.y, v[2] = q.z, v[3] = q.w;
}
__device__ __forceinline__ void load4(const bf16* p, float (&v)[4]) {
    const uint2 q = *reinterpret_cast<const uint2*>(p);
    v[0] = __uint_as_float(q.x << 16), v[1] = __uint_as_float(q.x & 0xffff0000u);
    v[2] = __uint_as_float(q.y << 16), v[3] = __uint_as_float(q.y & 0xffff0000u);
}
__device__ __forceinline__ void store4(float* p, const float (&v)[4]) {
    *reinterpret_cast<float4*>(p) = make_float4(v[0], v[1], v[2], v[3]);
}
__device__ __forceinline__ void store4(bf16* p, const float (&v)[4]) {
    uint2 q;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(q.x) : "f"(v[1]), "f"(v[0]));
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(q.y) : "f"(v[3]), "f"(v[2]));
    *reinterpret_cast<uint2*>(p) = q;
}
// V neighbours, V being 1 or 4.
template <int V, typename E>
__device__ __forceinline__ void load_n(const E* p, float (&v)[V]) {
    if constexpr (V == 4) load4(p, v);
    else v[0] = f(*p);
}
template <int V, typename E>
__device__ __forceinline__ void store_n(E* p, const float (&v)[V]) {
    if constexpr (V == 4) store4(p, v);
    else put(p, v[0]);
}
// x as an element of type E would hold it.
template <typename E>
__device__ __forceinline__ float rounded(float x) {
    E e;
    put(&e, x);
    return f(e);
}

// Neighbouring elements, read or written at once; their address is a multiple of their size, at most 16 bytes.
// Template parameters here are named as no define of a kernel is.
template <typename Elem, int Count>
struct alignas(Count * sizeof(Elem)) Packed {
    Elem v[Count];
};
template <int Count, typename Elem>
__device__ __forceinline__ Packed<Elem, Count> packed(const Elem* p) {
    return *(const Packed<Elem, Count>*)p;
}
template <int Count, typename Elem>
__device__ __forceinline__ void put_packed(Elem* p, const Packed<Elem, Count>& values) {
    *(Packed<Elem, Count>*)p = values;
}

// Starts to bring the line of 128 bytes at p to the level-two cache.
__device__ __forceinline__ void prefetch(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }

#define FULL_WARP 0xffffffffu

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int o = 16; o > 0; o >>= 1) x += __shfl_xor_sync(FULL_WARP, x, o);
    return x;
}
__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
    for (int o = 16; o > 0; o >>= 1) x = fmaxf(x, __shfl_xor_sync(FULL_WARP, x, o));
    return x;
}

// Sum over a block of whole warps (x dimension only); every thread gets the result. scratch: 32 floats.
__device__ __forceinline__ float block_sum(float x, float* scratch) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = (blockDim.x + 31) >> 5;
    x = warp_sum(x);
    __syncthreads();
    if (lane == 0) scratch[warp] = x;
    __syncthreads();
    return warp_sum(lane < warps ? scratch[lane] : 0.0f);
}
__device__ __forceinline__ float block_max(float x, float* scratch) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = (blockDim.x + 31) >> 5;
    x = warp_max(x);
    __syncthreads();
    if (lane == 0) scratch[warp] = x;
    __syncthreads();
    return warp_max(lane < warps ? scratch[lane] : -INFINITY_F);
}

// Sum and maximum over the threads that share a line: one, a warp, or the whole block (scratch: 32 floats).
template <int Sharing>
__device__ __forceinline__ float lanes_sum(float x, float* scratch) {
    if constexpr (Sharing == 1) return x;
    else if constexpr (Sharing == 32) return warp_sum(x);
    else return block_sum(x, scratch);
}
template <int Sharing>
__device__ __forceinline__ float lanes_max(float x, float* scratch) {
    if constexpr (Sharing == 1) return x;
    else if constexpr (Sharing == 32) return warp_max(x);
    else return block_max(x, scratch);
}

// A stride loop over lines of which each is shared by LANES (a define) threads of a block.
#define LINE_STRIDE(line, lines)                                                                            \
    for (i64 line = ((i64)blockIdx.x * blockDim.x + threadIdx.x) / LANES; line < (i64)(lines);               \
         line += (i64)gridDim.x * blockDim.x / LANES)

// Thread's place in a grid-stride loop over one dimension.
#define GRID_STRIDE(i, n) \
    for (i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; i < (i64)(n); i += (i64)gridDim.x * blockDim.x)

// N neighbouring elements, loaded and stored at once: their place is aligned to their size.
template <typename Element, int COUNT>
struct alignas(COUNT * sizeof(Element)) Pack {
    Element x[COUNT];
};
