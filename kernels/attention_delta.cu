// attention_delta -- the row sums that attention's backward subtracts, one warp a row.
// Computes     delta[n] = sum(dy[n,:] * y[n,:])
// Inputs       y, dy [N,D] T
// Outputs      delta [N] f32
// Requires     D % VEC == 0, y and dy aligned to VEC elements; delta overlaps nothing
// Launch       grid (ceil(N/8),1,1), block 256
// Traffic      read 2*N*D*sizeof(T), write 4*N bytes
// Accumulates  f32, a fixed tree over the warp
// Determinism  bitwise
// Source       arXiv:2205.14135

extern "C" __global__ void attention_delta(const T* __restrict__ y, const T* __restrict__ dy,
                                           float* __restrict__ delta, i64 rows) {
    await_earlier_work();
    const i64 row = (i64)blockIdx.x * 8 + threadIdx.x / 32;
    if (row >= rows) return;
    float sum = 0.0f;
    for (int d = threadIdx.x % 32 * VEC; d < D; d += 32 * VEC) {
        const Pack<T, VEC> a = *(const Pack<T, VEC>*)(y + row * D + d), b = *(const Pack<T, VEC>*)(dy + row * D + d);
#pragma unroll
        for (int i = 0; i < VEC; i++) sum += f(a.x[i]) * f(b.x[i]);
    }
    sum = warp_sum(sum);
    if (threadIdx.x % 32 == 0) delta[row] = sum;
}
