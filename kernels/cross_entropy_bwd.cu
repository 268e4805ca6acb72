// cross_entropy_bwd -- gradient of the scores, one block a row; may overwrite the scores.
// Computes     p = e^(x[n,c]-m[n])/s[n]; r = dy*weights[n]*factor (*on_device where given), z = 2*z_loss*(m[n]+log(s[n])), e = smoothing/classes;
//              dx[n,c] = r*(p*(1+z) - e), and r*(z + smoothing - (sum of the other p)*(1+z) - e) at the label;
//              exactly 0 in columns from `classes` on and in rows whose label is `ignored`; NaN in rows whose label
//              is no class
// Inputs       x [N,columns] T; labels [N] int; m, s [N] f32; weights [N] f32 or null (1); dy [1] f32; on_device [1] f32 or null
// Outputs      dx [N,columns] T
// Requires     columns % VEC == 0, x and dx aligned to VEC elements; dx may be x
// Launch       grid (N,1,1), block 256 or 512
// Traffic      read N*classes*sizeof(T) + 12*N, write N*columns*sizeof(T) bytes
// Accumulates  f32; a fixed tree over the block
// Determinism  bitwise
// Source       PyTorch torch.nn.functional.cross_entropy; arXiv:2204.02311, section 5, for the z-loss

// e^x: the hardware's exponential where scores have 8 bits of fraction.
__device__ __forceinline__ float exponential(float x) { return sizeof(T) == 2 ? __expf(x) : expf(x); }

extern "C" __global__ void cross_entropy_bwd(const T* x, const int* __restrict__ labels,
                                             const float* __restrict__ max_in, const float* __restrict__ sum_in,
                                             const float* __restrict__ weights, const float* __restrict__ dy, T* dx,
                                             i64 columns, int classes, int ignored, float smoothing, float z_loss,
                                             const float* __restrict__ on_device, float factor) {
    await_earlier_work();
    __shared__ float scratch[32];
    const i64 row = blockIdx.x, step = (i64)blockDim.x * VEC, start = (i64)threadIdx.x * VEC;
    const int label = labels[row];
    x += row * columns;
    dx += row * columns;
    const bool known = label >= 0 && label < classes;
    if (label == ignored || !known) {
        const float fill = label == ignored ? 0.0f : NAN_F;
        for (i64 c = start; c < columns; c += step) {
            Pack<T, VEC> chunk;
#pragma unroll
            for (int j = 0; j < VEC; j++) put(&chunk.x[j], c + j < classes ? fill : 0.0f);
            *(Pack<T, VEC>*)(dx + c) = chunk;
        }
        return;
    }
    const float m = max_in[row], s = sum_in[row];
    const float r = dy[0] * (on_device ? on_device[0] : factor) * (weights ? weights[row] : 1.0f);
    const float z = z_loss == 0.0f ? 0.0f : 2.0f * z_loss * (m + logf(s));
    const float even = smoothing / (float)classes, scale = (1.0f + z) / s;
    float others = 0.0f;
    for (i64 c = start; c < columns; c += step) {
        Pack<T, VEC> chunk = *(const Pack<T, VEC>*)(x + c);
#pragma unroll
        for (int j = 0; j < VEC; j++) {
            float d = 0.0f;
            if (c + j < classes && c + j != label) {
                const float e = exponential(f(chunk.x[j]) - m);
                others += e;
                d = (e * scale - even) * r;
            }
            put(&chunk.x[j], d);
        }
        *(Pack<T, VEC>*)(dx + c) = chunk;
    }
    // Near certainty 1 - p would have lost its digits: the label's p - 1 is minus the sum of all other p.
    // The sum's barriers order this store after the pass above, which wrote 0 there.
    others = block_sum(others, scratch) / s;
    if (threadIdx.x == 0) put(&dx[label], (z + smoothing - others * (1.0f + z) - even) * r);
}
