// swiglu_bwd -- gated activation of a packed pair, backward.
// Computes     s = 1 / (1 + e^-g); dg = dy * u * s * (1 + g * (1 - s)); du = dy * g * s
// Inputs       x [N,2F] T: g = x[n,c], u = x[n,F+c]; dy [N,F] T
// Outputs      dx [N,2F] T
// Requires     n = N*F; no two tensors overlap
// Launch       grid-stride, block 256
// Traffic      read 3*N*F*sizeof(T), write 2*N*F*sizeof(T) bytes
// Accumulates  f32
// Determinism  bitwise
// Source       arXiv:2002.05202

extern "C" __global__ void swiglu_bwd(const T* __restrict__ x, const T* __restrict__ dy, T* __restrict__ dx,
                                      i64 n) {
    GRID_STRIDE(i, n) {
        const i64 row = i / F, c = i - row * F;
        const float g = f(x[row * 2 * F + c]), u = f(x[row * 2 * F + F + c]), d = f(dy[i]);
        const float s = 1.0f / (1.0f + expf(-g));
        put(&dx[row * 2 * F + c], d * u * s * (1.0f + g * (1.0f - s)));
        put(&dx[row * 2 * F + F + c], d * g * s);
    }
}
