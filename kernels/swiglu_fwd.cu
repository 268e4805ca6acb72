// swiglu_fwd -- gated activation of a packed pair, forward.
// Computes     y[n,c] = silu(x[n,c]) * x[n,F+c], silu(g) = g / (1 + e^-g)
// Inputs       x [N,2F] T
// Outputs      y [N,F] T
// Requires     packs = N*F/VEC; VEC divides F; x and y at multiples of VEC elements and without overlap
// Launch       grid-stride over packs of VEC, block 256
// Traffic      read 2*N*F*sizeof(T), write N*F*sizeof(T) bytes
// Accumulates  f32
// Determinism  bitwise
// Source       arXiv:2002.05202

// e^x: the hardware's exponential where values have 8 bits of fraction.
__device__ __forceinline__ float exponential(float x) { return sizeof(T) == 2 ? __expf(x) : expf(x); }
// 1 / (1 + e^-g), with the hardware's reciprocal likewise.
__device__ __forceinline__ float logistic(float g) {
    return sizeof(T) == 2 ? __fdividef(1.0f, 1.0f + exponential(-g)) : 1.0f / (1.0f + exponential(-g));
}

extern "C" __global__ void __launch_bounds__(256) swiglu_fwd(const T* __restrict__ x, T* __restrict__ y, i64 packs) {
    await_earlier_work();
    constexpr int PER_ROW = F / VEC;
    GRID_STRIDE(i, packs) {
        const i64 row = i / PER_ROW;
        const int c = (int)(i - row * PER_ROW) * VEC;
        const Packed<T, VEC> gate = packed<VEC>(x + row * (2 * F) + c);
        const Packed<T, VEC> up = packed<VEC>(x + row * (2 * F) + F + c);
        Packed<T, VEC> out;
#pragma unroll
        for (int k = 0; k < VEC; ++k) {
            const float g = f(gate.v[k]);
            put(&out.v[k], g * logistic(g) * f(up.v[k]));
        }
        put_packed(y + i * VEC, out);
    }
}
