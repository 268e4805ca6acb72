// softmax_bwd -- gradient of softmax over an axis, or of its logarithm.
// Computes     dx = y * (dy - sum over k of dy*y); with LOG dx = dy - e^y * sum over k of dy, 0 where all y of the
//              line are negative infinity
// Inputs       y [outer,n,inner] T, the output of forward; dy [outer,n,inner] T
// Outputs      dx [outer,n,inner] T
// Requires     lines = outer*inner; LANES is 1, 32 or the size of the block; dx is dy or overlaps nothing
// Launch       LANES threads a line, grid-stride, block 256
// Traffic      read 2*lines*n*sizeof(T) (twice, once from a cache), write lines*n*sizeof(T) bytes
// Accumulates  f32
// Determinism  bitwise
// Source       none

extern "C" __global__ void softmax_bwd(const T* __restrict__ y, const T* dy, T* dx, i64 lines, i64 n, i64 inner) {
    await_earlier_work();
    __shared__ float scratch[32];
    const int lane = threadIdx.x % LANES;
    LINE_STRIDE(line, lines) {
        const i64 o = line / inner, start = o * n * inner + (line - o * inner);
        float sum = 0.0f;
#if LOG
        float shown = 0.0f;
        for (i64 k = lane; k < n; k += LANES) {
            sum += f(dy[start + k * inner]);
            if (f(y[start + k * inner]) != -INFINITY_F) shown = 1.0f;
        }
        sum = lanes_sum<LANES>(sum, scratch);
        shown = lanes_max<LANES>(shown, scratch);
        for (i64 k = lane; k < n; k += LANES) {
            const i64 at = start + k * inner;
            put(&dx[at], shown > 0.0f ? f(dy[at]) - expf(f(y[at])) * sum : 0.0f);
        }
#else
        for (i64 k = lane; k < n; k += LANES) sum += f(dy[start + k * inner]) * f(y[start + k * inner]);
        sum = lanes_sum<LANES>(sum, scratch);
        for (i64 k = lane; k < n; k += LANES) {
            const i64 at = start + k * inner;
            put(&dx[at], f(y[at]) * (f(dy[at]) - sum));
        }
#endif
    }
}
