// embedding_bwd -- gradient of a table: each row adds the gradients of its tokens, in their order.
// Computes     dw[v,c] = (BETA ? dw[v,c] : 0) + sum over n with ids[n] == v of dy[n,c]
// Inputs       ids [N] int; dy [N,C] TY
// Outputs      dw [V,C] TW; rows without a token are zero (or kept where BETA is 1)
// Requires     no two tensors overlap
// Launch       grid (V, ceil(C/1024)), block 256: one block a row of the table, which scans all ids
// Traffic      read N*C*sizeof(TY) once in total, and the ids V times from the cache; write V*C*sizeof(TW)
// Accumulates  f32
// Determinism  bitwise: tokens are added in groups of 256, by position
// Source       torch.nn.functional.embedding

extern "C" __global__ void __launch_bounds__(256) embedding_bwd(const int* __restrict__ ids,
                                                               const TY* __restrict__ dy, TW* __restrict__ dw,
                                                               i64 tokens) {
    __shared__ u32 hits[2][4][8];
    const int row = blockIdx.x, t = threadIdx.x, lane = t & 31, warp = t >> 5;
    const int c0 = blockIdx.y * 1024 + t;
    float acc[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    int parity = 0;
    for (i64 base = 0; base < tokens; base += 1024, parity ^= 1) {
#pragma unroll
        for (int k = 0; k < 4; k++) {
            const i64 i = base + k * 256 + t;
            const u32 mask = __ballot_sync(FULL_WARP, i < tokens && ids[i] == row);
            if (lane == 0) hits[parity][k][warp] = mask;
        }
        // One barrier a round is enough: the next round writes the other half.
        __syncthreads();
        for (int word = 0; word < 32; word++) {
            u32 mask = hits[parity][word >> 3][word & 7];
            while (mask) {
                const i64 token = base + word * 32 + (__ffs(mask) - 1);
                mask &= mask - 1;
                const TY* d = dy + token * C;
#pragma unroll
                for (int j = 0; j < 4; j++)
                    if (c0 + j * 256 < C) acc[j] += f(d[c0 + j * 256]);
            }
        }
    }
#pragma unroll
    for (int j = 0; j < 4; j++) {
        const int c = c0 + j * 256;
        if (c < C) {
            TW* out = dw + (i64)row * C + c;
#if BETA
            if (acc[j] != 0.0f) put(out, f(*out) + acc[j]);
#else
            put(out, acc[j]);
#endif
        }
    }
}
