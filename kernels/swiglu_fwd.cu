// swiglu_fwd -- gated activation of a packed pair, forward.
// Computes     y[n,c] = silu(x[n,c]) * x[n,F+c], silu(g) = g / (1 + e^-g)
// Inputs       x [N,2F] T
// Outputs      y [N,F] T
// Requires     n = N*F; x and y do not overlap
// Launch       grid-stride, block 256
// Traffic      read 2*N*F*sizeof(T), write N*F*sizeof(T) bytes
// Accumulates  f32
// Determinism  bitwise
// Source       arXiv:2002.05202

extern "C" __global__ void swiglu_fwd(const T* __restrict__ x, T* __restrict__ y, i64 n) {
    GRID_STRIDE(i, n) {
        const i64 row = i / F, c = i - row * F;
        const float g = f(x[row * 2 * F + c]), u = f(x[row * 2 * F + F + c]);
        put(&y[i], g / (1.0f + expf(-g)) * u);
    }
}
