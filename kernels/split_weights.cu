// split_weights -- fp32 weights as halves.
// Computes     high[i], low[i]: the two halves of x[i] (split.cuh)
// Inputs       x [n] float
// Outputs      high [n] bf16; low [n] u16
// Requires     no two overlap
// Launch       grid-stride, block 256
// Traffic      read 4*n, write 4*n bytes
// Accumulates  nothing
// Determinism  bitwise
// Source       the bits of IEEE 754 binary32

extern "C" __global__ void __launch_bounds__(256)
    split_weights(const float* __restrict__ x, bf16* __restrict__ high, u16* __restrict__ low, i64 n) {
    await_earlier_work();
    GRID_STRIDE(i, n) split_weight(x[i], high[i].bits, low[i]);
}
