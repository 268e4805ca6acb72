// unary_fwd -- a function of one number, at every element.
// Computes     y[i] = function(x[i], p, q), whose body is the define BODY
// Inputs       x [n] T; p, q f32
// Outputs      y [n] T
// Requires     x and y at multiples of VEC*sizeof(T) bytes; y is x or does not overlap it
// Launch       grid-stride over packs of VEC, block 256
// Traffic      read n*sizeof(T), write n*sizeof(T) bytes
// Accumulates  f32
// Determinism  bitwise
// Source       the operation's

__device__ __forceinline__ float function(float x, float p, float q) { BODY }

extern "C" __global__ void unary_fwd(const T* x, T* y, float p, float q, i64 n) {
    await_earlier_work();
    GRID_STRIDE(i, n / VEC) {
        const Packed<T, VEC> in = packed<VEC>(x + i * VEC);
        Packed<T, VEC> out;
#pragma unroll
        for (int k = 0; k < VEC; ++k) put(&out.v[k], function(f(in.v[k]), p, q));
        put_packed(y + i * VEC, out);
    }
    const i64 tail = n / VEC * VEC;
    GRID_STRIDE(i, n - tail) put(&y[tail + i], function(f(x[tail + i]), p, q));
}
