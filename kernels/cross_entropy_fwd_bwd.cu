// cross_entropy_fwd_bwd -- loss of each row of scores and, in their place, their gradient; one block a row, one pass.
// Computes     loss as cross_entropy_fwd; x[n,c] becomes what cross_entropy_bwd gives for a dy of 1
// Inputs       x [N,COLUMNS] T; labels [N] int; weights [N] f32 or null (1); on_device [1] f32 or null
// Outputs      x [N,COLUMNS] T; loss [N] f32
// Requires     COLUMNS % VEC == 0, x aligned to VEC elements; 1 <= classes <= COLUMNS; no two arrays overlap
// Launch       grid (N,1,1), block 256 or 512, dynamic shared COLUMNS*sizeof(T) bytes: the row
// Traffic      read and write N*COLUMNS*sizeof(T) bytes each, read 8*N, write 4*N
// Accumulates  f32; a fixed tree over the block
// Determinism  bitwise
// Source       PyTorch torch.nn.functional.cross_entropy; arXiv:2204.02311, section 5, for the z-loss

// e^x: the hardware's exponential where scores have 8 bits of fraction.
__device__ __forceinline__ float exponential(float x) { return sizeof(T) == 2 ? __expf(x) : expf(x); }

extern "C" __global__ void __launch_bounds__(THREADS, 1024 / THREADS)
    cross_entropy_fwd_bwd(T* __restrict__ x, const int* __restrict__ labels, const float* __restrict__ weights,
                          float* __restrict__ loss_out, int classes, int ignored, float smoothing, float z_loss,
                          const float* __restrict__ on_device, float factor) {
    await_earlier_work();
    extern __shared__ uint4 shared[];
    __shared__ float scratch[32];
    typedef Packed<T, VEC> Chunk;
    // Each thread reads back only what it put there itself.
    Chunk* kept = (Chunk*)shared;
    const i64 row = blockIdx.x;
    const int label = labels[row];
    const bool known = label >= 0 && label < classes;
    x += row * COLUMNS;
    if (label == ignored || !known) {
        const float fill = label == ignored ? 0.0f : NAN_F;
        for (int c = threadIdx.x; c < COLUMNS; c += THREADS) put(&x[c], c < classes ? fill : 0.0f);
        if (threadIdx.x == 0) loss_out[row] = fill;
        return;
    }
    const float own = f(x[label]);
    float top = -INFINITY_F, total = 0.0f;
#pragma unroll 4
    for (int i = threadIdx.x; i < COLUMNS / VEC; i += THREADS) {
        Chunk chunk = packed<VEC>(x + (i64)i * VEC);
#pragma unroll
        for (int j = 0; j < VEC; j++) {
            // What is no class takes no part: e^-inf is 0.
            if (i * VEC + j >= classes) put(&chunk.v[j], -INFINITY_F);
            top = fmaxf(top, f(chunk.v[j]));
            if (smoothing != 0.0f && i * VEC + j < classes) total += f(chunk.v[j]);
        }
        kept[i] = chunk;
    }
    top = block_max(top, scratch);
    if (top == -INFINITY_F) top = 0.0f;
    // Without the label: near certainty 1 - p would lose the digits that the sum of all other p has.
    float others = 0.0f;
#pragma unroll 4
    for (int i = threadIdx.x; i < COLUMNS / VEC; i += THREADS) {
        const Chunk chunk = kept[i];
#pragma unroll
        for (int j = 0; j < VEC; j++) {
            const float e = exponential(f(chunk.v[j]) - top);
            others += i * VEC + j == label ? 0.0f : e;
        }
    }
    // The sum's barriers also order every thread's read of the label's score before the stores below.
    others = block_sum(others, scratch);
    if (smoothing != 0.0f) total = block_sum(total, scratch);
    const float s = others + exponential(own - top), log_s = logf(s);
    const float r = (on_device ? on_device[0] : factor) * (weights ? weights[row] : 1.0f);
    const float z = z_loss == 0.0f ? 0.0f : 2.0f * z_loss * (top + log_s);
    const float even = smoothing / (float)classes, scale = (1.0f + z) / s;
#pragma unroll 4
    for (int i = threadIdx.x; i < COLUMNS / VEC; i += THREADS) {
        Chunk chunk = kept[i];
#pragma unroll
        for (int j = 0; j < VEC; j++) {
            float d = (exponential(f(chunk.v[j]) - top) * scale - even) * r;
            if (i * VEC + j == label) d = (z + smoothing - others / s * (1.0f + z) - even) * r;
            put(&chunk.v[j], i * VEC + j < classes ? d : 0.0f);
        }
        put_packed(x + (i64)i * VEC, chunk);
    }
    if (threadIdx.x == 0) {
        // The two large numbers are subtracted first, so that the loss of large scores keeps its digits.
        float loss = log_s - (own - top);
        if (smoothing != 0.0f) loss = (1.0f - smoothing) * loss + smoothing * (log_s - (total / (float)classes - top));
        if (z_loss != 0.0f) loss += z_loss * (top + log_s) * (top + log_s);
        loss_out[row] = loss;
    }
}
