// binary -- a function of two numbers, at every element of the shape that both inputs broadcast to.
// Computes     y[i] = FORMULA, an expression in a = a[place of i] and b = b[place of i]
// Inputs       a TA, b TB: RANK axes with A_STRIDES and B_STRIDES, 0 where broadcast
// Outputs      y [n] TY, contiguous; SIZES are its axes, of which the first is not used
// Requires     y is b nowhere, and is a only where a is not broadcast; the last strides are 0 or 1; VEC divides
//              the last size where RANK > 1; y, and what has last stride 1, at multiples of VEC elements
// Launch       grid-stride over packs of VEC, block 256
// Traffic      read a and b once where they fit a cache, write n*sizeof(TY) bytes
// Accumulates  f32
// Determinism  bitwise
// Source       the operation's

__device__ __forceinline__ float function(float a, float b) { return FORMULA; }

// Where the inputs of output element i are.
__device__ __forceinline__ void places(i64 i, i64& a, i64& b) {
    constexpr i64 sizes[] = {SIZES}, a_strides[] = {A_STRIDES}, b_strides[] = {B_STRIDES};
    a = b = 0;
#pragma unroll
    for (int k = RANK - 1; k > 0; --k) {
        const i64 rest = i / sizes[k], index = i - rest * sizes[k];
        a += index * a_strides[k];
        b += index * b_strides[k];
        i = rest;
    }
    a += i * a_strides[0];
    b += i * b_strides[0];
}

// Neighbours, or one element several times.
template <int Count, bool Same, typename Elem>
__device__ __forceinline__ Packed<Elem, Count> neighbours(const Elem* p) {
    if constexpr (!Same) {
        return packed<Count>(p);
    } else {
        Packed<Elem, Count> values;
        const Elem one = *p;
#pragma unroll
        for (int k = 0; k < Count; ++k) values.v[k] = one;
        return values;
    }
}

extern "C" __global__ void binary(const TA* a, const TB* __restrict__ b, TY* y, i64 n) {
    await_earlier_work();
    constexpr i64 a_strides[] = {A_STRIDES}, b_strides[] = {B_STRIDES};
    i64 pa, pb;
    GRID_STRIDE(i, n / VEC) {
        places(i * VEC, pa, pb);
        const Packed<TA, VEC> va = neighbours<VEC, a_strides[RANK - 1] == 0>(a + pa);
        const Packed<TB, VEC> vb = neighbours<VEC, b_strides[RANK - 1] == 0>(b + pb);
        Packed<TY, VEC> out;
#pragma unroll
        for (int k = 0; k < VEC; ++k) put(&out.v[k], function(f(va.v[k]), f(vb.v[k])));
        put_packed(y + i * VEC, out);
    }
    const i64 tail = n / VEC * VEC;
    GRID_STRIDE(i, n - tail) {
        places(tail + i, pa, pb);
        put(&y[tail + i], function(f(a[pa]), f(b[pb])));
    }
}
