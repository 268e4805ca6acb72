// prelude -- what every kernel may use; no CUDA header is included anywhere.
// Types       bf16 (storage only), i64, u64, u32; T, TX, TY, TW are element types given as defines
// Arithmetic  always float: load with f(x), store with put(&y[i], value); bf16 rounds to nearest even
// Reductions  warp_sum, warp_max, block_sum, block_max: fixed order, so results repeat bit for bit

typedef long long i64;
typedef unsigned long long u64;
typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;

struct __align__(2) bf16 {
    u16 bits;
};

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
// x as an element of type E would hold it.
template <typename E>
__device__ __forceinline__ float rounded(float x) {
    E e;
    put(&e, x);
    return f(e);
}

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

// Thread's place in a grid-stride loop over one dimension.
#define GRID_STRIDE(i, n) \
    for (i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; i < (i64)(n); i += (i64)gridDim.x * blockDim.x)

// N neighbouring elements, loaded and stored at once: their place is aligned to their size.
template <typename Element, int COUNT>
struct alignas(COUNT * sizeof(Element)) Pack {
    Element x[COUNT];
};
