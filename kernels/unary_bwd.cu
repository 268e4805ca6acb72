// unary_bwd -- gradient of a function of one number, at every element.
// Computes     dx[i] = derivative(saved[i], dy[i]), whose body is the define BODY; SAVED names the input (x) or
//              output (y) that was saved
// Inputs       saved [n] T; dy [n] T
// Outputs      dx [n] T
// Requires     all at multiples of VEC*sizeof(T) bytes; dx is dy or overlaps nothing
// Launch       grid-stride over packs of VEC, block 256
// Traffic      read 2*n*sizeof(T), write n*sizeof(T) bytes
// Accumulates  f32
// Determinism  bitwise
// Source       the operation's

__device__ __forceinline__ float derivative(float SAVED, float dy) { BODY }

extern "C" __global__ void unary_bwd(const T* __restrict__ saved, const T* dy, T* dx, i64 n) {
    await_earlier_work();
    GRID_STRIDE(i, n / VEC) {
        const Packed<T, VEC> s = packed<VEC>(saved + i * VEC), d = packed<VEC>(dy + i * VEC);
        Packed<T, VEC> out;
#pragma unroll
        for (int k = 0; k < VEC; ++k) put(&out.v[k], derivative(f(s.v[k]), f(d.v[k])));
        put_packed(dx + i * VEC, out);
    }
    const i64 tail = n / VEC * VEC;
    GRID_STRIDE(i, n - tail) put(&dx[tail + i], derivative(f(saved[tail + i]), f(dy[tail + i])));
}
