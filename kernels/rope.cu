// rope -- rotary positions of half-split heads; the inverse rotation with DIRECTION -1.
// Computes     a = positions[n] * INV_FREQ[i], c = SCALING*cos(a), s = DIRECTION*SCALING*sin(a);
//              y1 = x1*c - x2*s, y2 = x2*c + x1*s, for pairs (i, i+HALF) of the first ROTATED heads; the other
//              heads are copied. A negative position gives NaN
// Inputs       x [N,HEADS,2*HALF] T; positions [N] int
// Outputs      y [N,HEADS,2*HALF] T
// Requires     HALF % VEC == 0; x and y aligned to VEC elements; y may be x
// Launch       grid (ceil(N/TOKENS),1,1), block 256
// Traffic      read and write N*HEADS*2*HALF*sizeof(T) bytes each
// Accumulates  angles, cosines and sines f64, rounded once; the rotation f32
// Determinism  bitwise
// Source       arXiv:2104.09864

__constant__ double inv_freq[HALF] = {INV_FREQ};

extern "C" __global__ void rope(const T* x, const int* __restrict__ positions, T* y, i64 tokens) {
    await_earlier_work();
    typedef Pack<T, VEC> Chunk;
    __shared__ float cosine[TOKENS * HALF], sine[TOKENS * HALF];
    const i64 first = (i64)blockIdx.x * TOKENS;
    const int count = (int)min((i64)TOKENS, tokens - first);
    for (int k = threadIdx.x; k < count * HALF; k += blockDim.x) {
        const int position = positions[first + k / HALF];
        double c, s;
        sincos((double)position * inv_freq[k % HALF], &s, &c);
        cosine[k] = position < 0 ? NAN_F : (float)(c * (double)(SCALING));
        sine[k] = position < 0 ? NAN_F : (float)(s * (double)(SCALING)) * (float)(DIRECTION);
    }
    __syncthreads();
    const int chunks = HALF / VEC;
    for (int k = threadIdx.x; k < count * HEADS * chunks; k += blockDim.x) {
        const int i = k % chunks * VEC, head = k / chunks % HEADS, token = k / chunks / HEADS;
        const i64 at = ((first + token) * HEADS + head) * (2 * HALF) + i;
        Chunk low = *(const Chunk*)(x + at), high = *(const Chunk*)(x + at + HALF);
        if (head < ROTATED) {
#pragma unroll
            for (int j = 0; j < VEC; j++) {
                const float a = f(low.x[j]), b = f(high.x[j]);
                const float c = cosine[token * HALF + i + j], s = sine[token * HALF + i + j];
                put(&low.x[j], a * c - b * s);
                put(&high.x[j], b * c + a * s);
            }
        }
        *(Chunk*)(y + at) = low;
        *(Chunk*)(y + at + HALF) = high;
    }
}
