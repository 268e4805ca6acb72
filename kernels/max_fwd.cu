// max_fwd -- maximum over an axis and the place of the first one.
// Computes     y[o,i] = max over k of x[o,k,i]; index[o,i] = the least such k; NaN is larger than all
// Inputs       x [outer,n,inner] T
// Outputs      y [lines] T; index [lines] int
// Requires     lines = outer*inner; 1 <= n < 2^31; LANES is 1, 32 or the size of the block
// Launch       LANES threads a line, grid-stride, block 256
// Traffic      read lines*n*sizeof(T), write lines*(sizeof(T) + 4) bytes
// Accumulates  f32
// Determinism  bitwise
// Source       none

struct Best {
    float value;
    int index;
};

__device__ __forceinline__ bool better(Best a, Best b) {
    const bool a_nan = a.value != a.value, b_nan = b.value != b.value;
    if (a_nan != b_nan) return a_nan;
    if (!a_nan && a.value != b.value) return a.value > b.value;
    return a.index < b.index;
}

__device__ __forceinline__ Best warp_best(Best mine) {
#pragma unroll
    for (int o = 16; o > 0; o >>= 1) {
        Best other;
        other.value = __shfl_xor_sync(FULL_WARP, mine.value, o);
        other.index = __shfl_xor_sync(FULL_WARP, mine.index, o);
        if (better(other, mine)) mine = other;
    }
    return mine;
}

extern "C" __global__ void max_fwd(const T* __restrict__ x, T* __restrict__ y, int* __restrict__ index, i64 lines,
                                   i64 n, i64 inner) {
    await_earlier_work();
    __shared__ float values[32];
    __shared__ int indices[32];
    const int lane = threadIdx.x % LANES;
    // Loses against every element: even where all are negative infinity, an element's index is lower.
    const Best none = {-INFINITY_F, 0x7fffffff};
    LINE_STRIDE(line, lines) {
        const i64 o = line / inner;
        const T* from = x + o * n * inner + (line - o * inner);
        Best best = none;
        for (i64 k = lane; k < n; k += LANES) {
            const Best here = {f(from[k * inner]), (int)k};
            if (better(here, best)) best = here;
        }
        if (LANES > 1) best = warp_best(best);
        if (LANES > 32) {
            const int warp = threadIdx.x >> 5, in_warp = threadIdx.x & 31;
            __syncthreads();
            if (in_warp == 0) {
                values[warp] = best.value;
                indices[warp] = best.index;
            }
            __syncthreads();
            const bool used = in_warp < (int)(blockDim.x >> 5);
            best.value = used ? values[in_warp] : none.value;
            best.index = used ? indices[in_warp] : none.index;
            best = warp_best(best);
        }
        if (lane == 0) {
            put(&y[line], best.value);
            index[line] = best.index;
        }
    }
}
