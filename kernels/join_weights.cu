// join_weights -- fp32 weights of their halves.
// Computes     x[i] of high[i] and low[i] (split.cuh)
// Inputs       high [n] bf16; low [n] u16
// Outputs      x [n] float
// Requires     no two overlap
// Launch       grid-stride, block 256
// Traffic      read 4*n, write 4*n bytes
// Accumulates  nothing
// Determinism  bitwise
// Source       the bits of IEEE 754 binary32

extern "C" __global__ void __launch_bounds__(256)
    join_weights(const bf16* __restrict__ high, const u16* __restrict__ low, float* __restrict__ x, i64 n) {
    await_earlier_work();
    GRID_STRIDE(i, n) x[i] = join_weight(high[i].bits, low[i]);
}
