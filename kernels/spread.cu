// spread -- the same value at every element of an axis: the backward of a sum.
// Computes     dx[o,k,i] = (BETA ? dx[o,k,i] : 0) + factor * dy[o,i]
// Inputs       dy [outer,INNER] TX; factor f32
// Outputs      dx [outer,N,INNER] TY, of n elements; read where BETA is 1
// Requires     VEC divides INNER, or N where INNER is 1; dx, and dy where INNER is not 1, at multiples of VEC
//              elements and without overlap
// Launch       grid-stride over packs of VEC, block 256
// Traffic      read outer*INNER*sizeof(TX) + BETA*n*sizeof(TY), write n*sizeof(TY) bytes
// Accumulates  f32, rounded once
// Determinism  bitwise
// Source       none

extern "C" __global__ void spread(const TX* __restrict__ dy, TY* __restrict__ dx, float factor, i64 n) {
    await_earlier_work();
    GRID_STRIDE(i, n / VEC) {
        const i64 at = i * VEC;
        float d[VEC];
#if INNER == 1
        const float one = f(dy[at / N]) * factor;
#pragma unroll
        for (int k = 0; k < VEC; ++k) d[k] = one;
#else
        const i64 row = at / INNER;
        const Packed<TX, VEC> in = packed<VEC>(dy + row / N * INNER + (at - row * INNER));
#pragma unroll
        for (int k = 0; k < VEC; ++k) d[k] = f(in.v[k]) * factor;
#endif
        Packed<TY, VEC> out;
#if BETA
        out = packed<VEC>(dx + at);
#pragma unroll
        for (int k = 0; k < VEC; ++k) d[k] += f(out.v[k]);
#endif
#pragma unroll
        for (int k = 0; k < VEC; ++k) put(&out.v[k], d[k]);
        put_packed(dx + at, out);
    }
}
