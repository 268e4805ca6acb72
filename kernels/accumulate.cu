// accumulate -- add a tensor to another, or copy it.
// Computes     y[i] = (BETA ? y[i] : 0) + x[i]
// Inputs       x [n] TX
// Outputs      y [n] TY; read where BETA is 1
// Requires     x and y do not overlap
// Launch       grid-stride, block 256
// Traffic      read n*sizeof(TX) + BETA*n*sizeof(TY), write n*sizeof(TY) bytes
// Accumulates  f32, rounded once
// Determinism  bitwise
// Source       torch.Tensor.add_, torch.Tensor.copy_

extern "C" __global__ void accumulate(const TX* __restrict__ x, TY* __restrict__ y, i64 n) {
    GRID_STRIDE(i, n) {
#if BETA
        put(&y[i], f(y[i]) + f(x[i]));
#else
        put(&y[i], f(x[i]));
#endif
    }
}
