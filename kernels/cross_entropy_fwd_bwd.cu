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

#define LOG2_E 1.4426950408889634f
#define LN_2 0.6931471805599453f
#define CHUNKS (COLUMNS / VEC)
// Blocks that a multiprocessor has registers for: three rows of 32,000 bf16 scores fit in its shared memory.
#define BLOCKS (THREADS == 512 && sizeof(T) == 2 ? 3 : 1024 / THREADS)
// Chunks that a thread has under way at once.
#define BATCH 4
typedef Packed<T, VEC> Chunk;

// e^(x - top) for many x: for scores of 8 bits of fraction one multiplication and the hardware's exponential, of which
// all are too large by the same factor, 2^excess.
struct Exponential {
    float top, shift, excess;
    __device__ __forceinline__ explicit Exponential(float top) : top(top) {
        shift = sizeof(T) == 2 ? top * LOG2_E : 0.0f;
        excess = sizeof(T) == 2 ? fmaf(top, LOG2_E, -shift) : 0.0f;
    }
    __device__ __forceinline__ float operator()(float x) const {
        if constexpr (sizeof(T) == 2) {
            float y;
            asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(fmaf(x, LOG2_E, -shift)));
            return y;
        } else {
            return expf(x - top);
        }
    }
};

// The larger of `top` and a chunk's scores; two at once where they are bf16.
struct Top {
    u32 pairs = 0xff80ff80u;
    float single = -INFINITY_F;
    __device__ __forceinline__ void see(const Chunk& chunk) {
        if constexpr (sizeof(T) == 2 && VEC % 2 == 0) {
            const u32* words = (const u32*)&chunk;
#pragma unroll
            for (int j = 0; j < VEC / 2; j++) {
                asm("max.bf16x2 %0, %0, %1;" : "+r"(pairs) : "r"(words[j]));
            }
        } else {
#pragma unroll
            for (int j = 0; j < VEC; j++) single = fmaxf(single, f(chunk.v[j]));
        }
    }
    __device__ __forceinline__ float value() const {
        return fmaxf(single, fmaxf(__uint_as_float(pairs << 16), __uint_as_float(pairs & 0xffff0000u)));
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    cross_entropy_fwd_bwd(T* __restrict__ x, const int* __restrict__ labels, const float* __restrict__ weights,
                          float* __restrict__ loss_out, int classes, int ignored, float smoothing, float z_loss,
                          const float* __restrict__ on_device, float factor) {
    await_earlier_work();
    extern __shared__ uint4 shared[];
    __shared__ float scratch[32];
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
    float total = 0.0f;
    Top highest;
    for (int first = threadIdx.x; first < CHUNKS; first += BATCH * THREADS) {
        Chunk batch[BATCH];
#pragma unroll
        for (int k = 0; k < BATCH; k++) {
            const int i = first + k * THREADS;
            if (i < CHUNKS) batch[k] = packed<VEC>(x + (i64)i * VEC);
        }
#pragma unroll
        for (int k = 0; k < BATCH; k++) {
            const int i = first + k * THREADS, c = i * VEC;
            if (i >= CHUNKS) continue;
            Chunk chunk = batch[k];
            // What is no class takes no part: e^-inf is 0.
            if (c + VEC > classes) {
#pragma unroll
                for (int j = 0; j < VEC; j++)
                    if (c + j >= classes) put(&chunk.v[j], -INFINITY_F);
            }
            highest.see(chunk);
            if (smoothing != 0.0f) {
#pragma unroll
                for (int j = 0; j < VEC; j++)
                    if (c + j < classes) total += f(chunk.v[j]);
            }
            kept[i] = chunk;
        }
    }
    // Sums leave the label out: near certainty 1 - p would lose the digits that the sum of all other p has.
    const bool has_label = label / VEC % THREADS == threadIdx.x;
    if (has_label) put(&((T*)shared)[label], -INFINITY_F);
    float top = block_max(highest.value(), scratch);
    if (top == -INFINITY_F) top = 0.0f;
    const Exponential exponential(top);
    float others = 0.0f;
#pragma unroll 1
    for (int i = threadIdx.x; i < CHUNKS; i += THREADS) {
        const Chunk chunk = kept[i];
#pragma unroll
        for (int j = 0; j < VEC; j++) others += exponential(f(chunk.v[j]));
    }
    // The sum's barriers also order every thread's read of the label's score before the stores below.
    others = block_sum(others, scratch);
    if (smoothing != 0.0f) total = block_sum(total, scratch);
    const float s = others + exponential(own), log_s = logf(s) - exponential.excess * LN_2;
    const float r = (on_device ? on_device[0] : factor) * (weights ? weights[row] : 1.0f);
    const float z = z_loss == 0.0f ? 0.0f : 2.0f * z_loss * (top + log_s);
    const float even = smoothing / (float)classes, slope = (1.0f + z) / s * r, offset = -even * r;
#pragma unroll 1
    for (int i = threadIdx.x; i < CHUNKS; i += THREADS) {
        Chunk chunk = kept[i];
#pragma unroll
        for (int j = 0; j < VEC; j++) put(&chunk.v[j], exponential(f(chunk.v[j])) * slope + offset);
        if (i * VEC + VEC > classes) {
#pragma unroll
            for (int j = 0; j < VEC; j++)
                if (i * VEC + j >= classes) put(&chunk.v[j], 0.0f);
        }
        put_packed(x + (i64)i * VEC, chunk);
    }
    // By the thread that wrote the label's chunk.
    if (has_label) put(&x[label], (z + smoothing - others / s * (1.0f + z) - even) * r);
    if (threadIdx.x == 0) {
        // The two large numbers are subtracted first, so that the loss of large scores keeps its digits.
        float loss = log_s - (own - top);
        if (smoothing != 0.0f) loss = (1.0f - smoothing) * loss + smoothing * (log_s - (total / (float)classes - top));
        if (z_loss != 0.0f) loss += z_loss * (top + log_s) * (top + log_s);
        loss_out[row] = loss;
    }
}
