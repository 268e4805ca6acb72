// permute -- axes in another order, where the last axis is the last one before too, or is short.
// Computes     y[i] = x[sum over axes k of index_k(i) * STRIDES[k]]
// Inputs       x T
// Outputs      y [n] T, contiguous; SIZES are its axes, of which the first is not used
// Requires     VEC > 1 only if the last stride is 1 and VEC divides the last size and every other stride; x and y
//              at multiples of VEC elements and without overlap
// Launch       grid-stride over packs of VEC, block 256
// Traffic      read n*sizeof(T) or up to 32 bytes an element, write n*sizeof(T) bytes
// Accumulates  nothing
// Determinism  bitwise
// Source       none

extern "C" __global__ void permute(const T* __restrict__ x, T* __restrict__ y, i64 n) {
    await_earlier_work();
    constexpr i64 sizes[] = {SIZES}, strides[] = {STRIDES};
    GRID_STRIDE(i, n / VEC) {
        i64 left = i * VEC, place = 0;
#pragma unroll
        for (int k = RANK - 1; k > 0; --k) {
            const i64 rest = left / sizes[k];
            place += (left - rest * sizes[k]) * strides[k];
            left = rest;
        }
        put_packed(y + i * VEC, packed<VEC>(x + place + left * strides[0]));
    }
}
