// cross_entropy_fwd -- loss of each row of scores, one block a row, one pass.
// Computes     m = max(x[n,:]), s = sum(e^(x[n,:]-m)) over the first `classes` columns;
//              loss = (1-smoothing)*(log(s) - (x[n,label]-m)) + smoothing*(log(s) - (mean(x[n,:])-m))
//                     + z_loss*(m+log(s))^2; a row of negative infinities has m = 0; a row whose label is
//              `ignored` has 0 in all three; a label that is no class gives NaN
// Inputs       x [N,columns] T; labels [N] int
// Outputs      m, s, loss [N] f32
// Requires     columns % VEC == 0, x aligned to VEC elements; 1 <= classes <= columns
// Launch       grid (N,1,1), block 256 or 512
// Traffic      read N*classes*sizeof(T) + 4*N, write 12*N bytes
// Accumulates  f32, rescaled when the maximum grows; a fixed tree over the block
// Determinism  bitwise
// Source       arXiv:1805.02867 (online softmax)

// e^x: the hardware's exponential where scores have 8 bits of fraction.
__device__ __forceinline__ float exponential(float x) { return sizeof(T) == 2 ? __expf(x) : expf(x); }
__device__ __forceinline__ float shift(float m) { return m == -INFINITY_F ? 0.0f : m; }

extern "C" __global__ void cross_entropy_fwd(const T* __restrict__ x, const int* __restrict__ labels,
                                             float* __restrict__ max_out, float* __restrict__ sum_out,
                                             float* __restrict__ loss_out, i64 columns, int classes, int ignored,
                                             float smoothing, float z_loss) {
    await_earlier_work();
    __shared__ float scratch[32];
    const i64 row = blockIdx.x;
    const int label = labels[row];
    if (label == ignored) {
        if (threadIdx.x == 0) max_out[row] = sum_out[row] = loss_out[row] = 0.0f;
        return;
    }
    x += row * columns;
    float m = -INFINITY_F, s = 0.0f, total = 0.0f;
    for (i64 c = (i64)threadIdx.x * VEC; c < classes; c += (i64)blockDim.x * VEC) {
        const Pack<T, VEC> chunk = *(const Pack<T, VEC>*)(x + c);
        const bool whole = c + VEC <= classes;
        float v[VEC], top = m;
#pragma unroll
        for (int j = 0; j < VEC; j++) {
            v[j] = whole || c + j < classes ? f(chunk.x[j]) : -INFINITY_F;
            top = fmaxf(top, v[j]);
        }
        if (smoothing != 0.0f) {
#pragma unroll
            for (int j = 0; j < VEC; j++)
                if (whole || c + j < classes) total += v[j];
        }
        const float base = shift(top);
        // The maximum seldom grows; where it does not the factor would be 1.
        if (top > m) s *= exponential(m - base);
#pragma unroll
        for (int j = 0; j < VEC; j++) s += exponential(v[j] - base);
        m = top;
    }
    const float top = shift(block_max(m, scratch));
    s = block_sum(s * exponential(m - top), scratch);
    if (smoothing != 0.0f) total = block_sum(total, scratch);
    if (threadIdx.x == 0) {
        const bool known = label >= 0 && label < classes;
        const float log_s = logf(s);
        // The two large numbers are subtracted first, so that the loss of large scores keeps its digits.
        float loss = known ? log_s - (f(x[label]) - top) : NAN_F;
        if (smoothing != 0.0f) {
            const float even = log_s - (total / (float)classes - top);
            loss = (1.0f - smoothing) * loss + smoothing * even;
        }
        if (z_loss != 0.0f) loss += z_loss * (top + log_s) * (top + log_s);
        max_out[row] = top;
        sum_out[row] = s;
        loss_out[row] = loss;
    }
}
