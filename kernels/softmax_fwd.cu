// softmax_fwd -- softmax over an axis, or its logarithm.
// Computes     y[o,k,i] = e^(x[o,k,i] - m) / s, or with LOG x[o,k,i] - m - ln(s); m the maximum over k, or 0 where
//              that is negative infinity; s the sum of e^(x - m); 0, or with LOG negative infinity, where s is 0
// Inputs       x [outer,n,inner] T
// Outputs      y [outer,n,inner] T
// Requires     lines = outer*inner; LANES is 1, 32 or the size of the block; x and y do not overlap
// Launch       LANES threads a line, grid-stride, block 256
// Traffic      read lines*n*sizeof(T) (three times, twice from a cache), write lines*n*sizeof(T) bytes
// Accumulates  f32
// Determinism  bitwise
// Source       none

extern "C" __global__ void softmax_fwd(const T* __restrict__ x, T* __restrict__ y, i64 lines, i64 n, i64 inner) {
    await_earlier_work();
    __shared__ float scratch[32];
    const int lane = threadIdx.x % LANES;
    LINE_STRIDE(line, lines) {
        const i64 o = line / inner, start = o * n * inner + (line - o * inner);
        float max = -INFINITY_F;
        for (i64 k = lane; k < n; k += LANES) max = fmaxf(max, f(x[start + k * inner]));
        max = lanes_max<LANES>(max, scratch);
        // A NaN is not in the maximum, but it is in the sum.
        const float shift = max == -INFINITY_F ? 0.0f : max;
        float sum = 0.0f;
        for (i64 k = lane; k < n; k += LANES) sum += expf(f(x[start + k * inner]) - shift);
        sum = lanes_sum<LANES>(sum, scratch);
#if LOG
        const float log_sum = sum == 0.0f ? 0.0f : logf(sum);
        for (i64 k = lane; k < n; k += LANES) {
            put(&y[start + k * inner], f(x[start + k * inner]) - shift - log_sum);
        }
#else
        const float scale = sum == 0.0f ? 0.0f : 1.0f / sum;
        for (i64 k = lane; k < n; k += LANES) {
            put(&y[start + k * inner], expf(f(x[start + k * inner]) - shift) * scale);
        }
#endif
    }
}
