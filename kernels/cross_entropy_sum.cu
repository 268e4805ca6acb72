// cross_entropy_sum -- weighted sums of row losses; launched twice, the second time over the first one's sums.
// Computes     y[b] = factor (*on_device where given) * sum(weights[i] * x[i]) over the elements i that block b meets in a grid-stride loop
// Inputs       x [N] f32; weights [N] f32 or null (1); on_device [1] f32 or null
// Outputs      y [blocks] f32
// Requires     x and y do not overlap
// Launch       grid (1 to 256,1,1), block 256
// Traffic      read 4*N or 8*N bytes
// Accumulates  f32; each thread in order, then a fixed tree over the block
// Determinism  bitwise for one grid
// Source       none

extern "C" __global__ void cross_entropy_sum(const float* __restrict__ x, const float* __restrict__ weights,
                                             float* __restrict__ y, i64 n, const float* __restrict__ on_device,
                                             float factor) {
    await_earlier_work();
    __shared__ float scratch[32];
    float sum = 0.0f;
    GRID_STRIDE(i, n) sum += weights ? weights[i] * x[i] : x[i];
    sum = block_sum(sum, scratch);
    if (threadIdx.x == 0) y[blockIdx.x] = (on_device ? on_device[0] : factor) * sum;
}
