// add_bias -- add a row to every row of a matrix, in place.
// Computes     y[n,c] = y[n,c] + b[c]
// Inputs       b [C] TB
// Outputs      y [N,C] T, read and written
// Requires     n = N*C; b and y do not overlap
// Launch       grid-stride, block 256
// Traffic      read and write N*C*sizeof(T) bytes
// Accumulates  f32, rounded once more after the product
// Determinism  bitwise
// Source       torch.nn.functional.linear, its bias

extern "C" __global__ void add_bias(const TB* __restrict__ b, T* __restrict__ y, i64 n) {
    await_earlier_work();
    GRID_STRIDE(i, n) { put(&y[i], f(y[i]) + f(b[i % C])); }
}
