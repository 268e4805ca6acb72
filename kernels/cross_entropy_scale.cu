// cross_entropy_scale -- multiplies a gradient by the gradient of the loss, unless that is 1.
// Computes     x[i] = x[i] * dy[0]
// Inputs       x [packs*VEC] T; dy [1] f32
// Outputs      x [packs*VEC] T
// Requires     x aligned to VEC elements
// Launch       grid-stride over packs of VEC, block 256
// Traffic      nothing where dy is 1; else read and write packs*VEC*sizeof(T) bytes each
// Accumulates  nothing
// Determinism  bitwise
// Source       the chain rule

extern "C" __global__ void __launch_bounds__(256) cross_entropy_scale(T* __restrict__ x, const float* __restrict__ dy,
                                                                     i64 packs) {
    await_earlier_work();
    const float factor = dy[0];
    if (factor == 1.0f) return;
    GRID_STRIDE(i, packs) {
        Packed<T, VEC> chunk = packed<VEC>(x + i * VEC);
#pragma unroll
        for (int j = 0; j < VEC; j++) put(&chunk.v[j], f(chunk.v[j]) * factor);
        put_packed(x + i * VEC, chunk);
    }
}
