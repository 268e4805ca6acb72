// swiglu_bwd -- gated activation of a packed pair, backward.
// Computes     s = 1 / (1 + e^-g); dg = dy * u * s * (1 + g * (1 - s)); du = dy * g * s
// Inputs       x [N,2F] T: g = x[n,c], u = x[n,F+c]; dy [N,F] T
// Outputs      dx [N,2F] T
// Requires     packs = N*F/VEC; VEC divides F; all at multiples of VEC elements; no two tensors overlap
// Launch       grid-stride over packs of VEC, block 256
// Traffic      read 3*N*F*sizeof(T), write 2*N*F*sizeof(T) bytes
// Accumulates  f32
// Determinism  bitwise
// Source       arXiv:2002.05202

// e^x: the hardware's exponential where values have 8 bits of fraction.
__device__ __forceinline__ float exponential(float x) { return sizeof(T) == 2 ? __expf(x) : expf(x); }
// 1 / (1 + e^-g), with the hardware's reciprocal likewise.
__device__ __forceinline__ float logistic(float g) {
    return sizeof(T) == 2 ? __fdividef(1.0f, 1.0f + exponential(-g)) : 1.0f / (1.0f + exponential(-g));
}

extern "C" __global__ void __launch_bounds__(256) swiglu_bwd(const T* __restrict__ x, const T* __restrict__ dy,
                                                            T* __restrict__ dx, i64 packs) {
    await_earlier_work();
    constexpr int PER_ROW = F / VEC;
    GRID_STRIDE(i, packs) {
        const i64 row = i / PER_ROW, at = row * (2 * F) + (i - row * PER_ROW) * VEC;
        const Packed<T, VEC> gate = packed<VEC>(x + at), up = packed<VEC>(x + at + F);
        const Packed<T, VEC> d = packed<VEC>(dy + i * VEC);
        Packed<T, VEC> dgate, dup;
#pragma unroll
        for (int k = 0; k < VEC; ++k) {
            const float g = f(gate.v[k]), upstream = f(d.v[k]), s = logistic(g);
            put(&dgate.v[k], upstream * f(up.v[k]) * s * (1.0f + g * (1.0f - s)));
            put(&dup.v[k], upstream * g * s);
        }
        put_packed(dx + at, dgate);
        put_packed(dx + at + F, dup);
    }
}
