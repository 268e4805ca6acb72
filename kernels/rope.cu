// rope -- rotary positions of half-split heads; the inverse rotation with DIRECTION -1.
// Computes     c, s = angles[n,i], s times DIRECTION; y1 = x1*c - x2*s, y2 = x2*c + x1*s, for pairs (i, i+HALF) of the
//              first ROTATED heads; of the others those below TOUCHED are copied
// Inputs       x [N,HEADS,2*HALF] T; angles [N,HALF] float2, of rope_angles
// Outputs      y [N,HEADS,2*HALF] T, its first TOUCHED heads
// Requires     HALF % VEC == 0; x and y aligned to VEC elements; y may be x; items = N*ceil(TOUCHED/EACH)*HALF/VEC
// Launch       grid-stride over items (VEC pairs of EACH heads of one token), block 256
// Traffic      read and write N*TOUCHED*2*HALF*sizeof(T) bytes each, read 8*N*HALF
// Accumulates  f32
// Determinism  bitwise
// Source       arXiv:2104.09864

extern "C" __global__ void __launch_bounds__(256) rope(const T* x, const float2* __restrict__ angles, T* y, i64 items) {
    await_earlier_work();
    typedef Packed<T, VEC> Chunk;
    constexpr int CHUNKS = HALF / VEC, GROUPS = (TOUCHED + EACH - 1) / EACH;
    GRID_STRIDE(k, items) {
        const int i = (int)(k % CHUNKS) * VEC, first = (int)(k / CHUNKS % GROUPS) * EACH;
        const i64 token = k / (CHUNKS * GROUPS);
        float c[VEC], s[VEC];
        // Two angles with one instruction where a thread has more than one.
        constexpr int PAIR = VEC > 1 ? 2 : 1;
#pragma unroll
        for (int j = 0; j < VEC; j += PAIR) {
            const Packed<float, 2 * PAIR> pair = packed<2 * PAIR>((const float*)(angles + token * HALF + i + j));
#pragma unroll
            for (int p = 0; p < PAIR; p++) {
                c[j + p] = pair.v[2 * p];
                s[j + p] = pair.v[2 * p + 1] * (float)(DIRECTION);
            }
        }
#pragma unroll
        for (int e = 0; e < EACH; e++) {
            const int head = first + e;
            if (head >= TOUCHED) break;
            const i64 at = (token * HEADS + head) * (2 * HALF) + i;
            Chunk low = packed<VEC>(x + at), high = packed<VEC>(x + at + HALF);
            if (head < ROTATED) {
#pragma unroll
                for (int j = 0; j < VEC; j++) {
                    const float a = f(low.v[j]), b = f(high.v[j]);
                    put(&low.v[j], a * c[j] - b * s[j]);
                    put(&high.v[j], b * c[j] + a * s[j]);
                }
            }
            put_packed(y + at, low);
            put_packed(y + at + HALF, high);
        }
    }
}
