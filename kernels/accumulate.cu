// accumulate -- add a tensor to another, or copy it.
// Computes     y[i] = (BETA ? y[i] : 0) + x[i]
// Inputs       x [n] TX
// Outputs      y [n] TY; read where BETA is 1
// Requires     VEC divides n; x and y at multiples of VEC elements and without overlap
// Launch       grid-stride over packs of VEC, block 256
// Traffic      read n*sizeof(TX) + BETA*n*sizeof(TY), write n*sizeof(TY) bytes
// Accumulates  f32, rounded once
// Determinism  bitwise
// Source       torch.Tensor.add_, torch.Tensor.copy_

extern "C" __global__ void accumulate(const TX* __restrict__ x, TY* __restrict__ y, i64 packs) {
    await_earlier_work();
    GRID_STRIDE(i, packs) {
        const Packed<TX, VEC> from = packed<VEC>(x + i * VEC);
        Packed<TY, VEC> out;
#if BETA
        out = packed<VEC>(y + i * VEC);
#pragma unroll
        for (int k = 0; k < VEC; ++k) put(&out.v[k], f(out.v[k]) + f(from.v[k]));
#else
#pragma unroll
        for (int k = 0; k < VEC; ++k) put(&out.v[k], f(from.v[k]));
#endif
        put_packed(y + i * VEC, out);
    }
}
