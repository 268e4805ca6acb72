// sum_of_squares -- partial sums of squares of a flat array.
// Computes     part[b] = sum over the elements of block b of x[i]^2
// Inputs       x [n] T
// Outputs      part [blocks] float
// Launch       grid as many blocks as part has elements, block 256; grid-stride over groups of four
// Traffic      read n*sizeof(T) bytes
// Accumulates  f32 within a block, blocks are added in f64 by the reader
// Determinism  bitwise: elements go to blocks by the length and the grid alone
// Requires     x aligned to four elements
// Source       torch.nn.utils.clip_grad_norm_

extern "C" __global__ void __launch_bounds__(256) sum_of_squares(const T* __restrict__ x, float* __restrict__ part,
                                                                i64 n) {
    await_earlier_work();
    __shared__ float scratch[32];
    float sum = 0.0f;
    GRID_STRIDE(i, n / 4) {
        float v[4];
        load4(x + i * 4, v);
        sum += (v[0] * v[0] + v[1] * v[1]) + (v[2] * v[2] + v[3] * v[3]);
    }
    if (blockIdx.x == 0 && threadIdx.x < (n & 3)) {
        const float v = f(x[(n & ~(i64)3) + threadIdx.x]);
        sum += v * v;
    }
    sum = block_sum(sum, scratch);
    if (threadIdx.x == 0) part[blockIdx.x] = sum;
}
