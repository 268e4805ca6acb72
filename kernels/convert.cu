// convert -- the same values in another element type.
// Computes     y[i] = (TY) x[i]
// Inputs       x [n] TX
// Outputs      y [n] TY
// Requires     x and y do not overlap
// Launch       grid-stride, block 256
// Traffic      read n*sizeof(TX), write n*sizeof(TY) bytes
// Accumulates  nothing; bf16 rounds to nearest even, floats to integers truncate
// Determinism  bitwise
// Source       torch.Tensor.to

#define IS_double 1
#define IS_float 2
#define IS_bf16 3
#define IS_int 4
#define KIND_(t) IS_##t
#define KIND(t) KIND_(t)

extern "C" __global__ void convert(const TX* __restrict__ x, TY* __restrict__ y, i64 n) {
    await_earlier_work();
    GRID_STRIDE(i, n) {
#if KIND(TX) == IS_bf16
        const float v = f(x[i]);
#else
        const TX v = x[i];
#endif
#if KIND(TY) == IS_bf16
        put(&y[i], (float)v);
#else
        y[i] = (TY)v;
#endif
    }
}
