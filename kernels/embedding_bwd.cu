// embedding_bwd -- gradient of a table: each row adds the gradients of its tokens, in their order.
// Computes     dw[v,c] = (BETA ? dw[v,c] : 0) + sum over n with ids[n] == v of dy[n,c]
// Inputs       ids [N] int; marks [V] u64 of embedding_mark; dy [N,C] TY
// Outputs      dw [V,C] TW; rows without a token are zero (or kept where BETA is 1)
// Requires     chunk % 256 == 0; N <= 64 * chunk; no two tensors overlap
// Launch       grid (ceil(V/ROWS), ceil(C/1024)), block 256: a block takes ROWS rows of the table, one after the other,
//              and scans the chunks that hold each
// Traffic      read N*C*sizeof(TY) once in total, and each chunk once for each row in it; write V*C*sizeof(TW) bytes
// Accumulates  f32
// Determinism  bitwise: tokens are added by position
// Source       torch.nn.functional.embedding

extern "C" __global__ void __launch_bounds__(256) embedding_bwd(const int* __restrict__ ids,
                                                               const u64* __restrict__ marks,
                                                               const TY* __restrict__ dy, TW* __restrict__ dw,
                                                               i64 tokens, i64 chunk, int rows) {
    await_earlier_work();
    __shared__ u32 hits[8];
    __shared__ int found[256];
    __shared__ u64 chunks[ROWS];
    const int first_row = blockIdx.x * ROWS, t = threadIdx.x, lane = t & 31, warp = t >> 5;
    const int c0 = blockIdx.y * 1024 + t;
    if (t < ROWS) chunks[t] = first_row + t < rows ? marks[first_row + t] : 0;
    __syncthreads();
    for (int line = 0; line < ROWS && first_row + line < rows; line++) {
        float acc[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        const int row = first_row + line;
        u64 left = chunks[line];
#if BETA
        if (left == 0) continue;
        // On its way while the tokens are looked for.
        float old[4];
#pragma unroll
        for (int j = 0; j < 4; j++) old[j] = c0 + j * 256 < C ? f(dw[(i64)row * C + c0 + j * 256]) : 0.0f;
#endif
        while (left) {
            const i64 first = (i64)(__ffsll((i64)left) - 1) * chunk;
            left &= left - 1;
            for (i64 base = first; base < first + chunk && base < tokens; base += 256) {
                const i64 i = base + t;
                const bool mine = i < tokens && ids[i] == row;
                const u32 mask = __ballot_sync(FULL_WARP, mine);
                if (lane == 0) hits[warp] = mask;
                __syncthreads();
                // The place of a token in the list is the number of tokens of the row before it.
                int place = __popc(mask & ((1u << lane) - 1)), count = 0;
#pragma unroll
                for (int k = 0; k < 8; k++) {
                    const int bits = __popc(hits[k]);
                    if (k < warp) place += bits;
                    count += bits;
                }
                if (mine) found[place] = t;
                __syncthreads();
                // Several tokens are under way at once, and added one after the other.
                for (int k = 0; k < count; k += 4) {
                    float v[4][4];
#pragma unroll
                    for (int a = 0; a < 4; a++) {
                        const TY* d = dy + (base + found[k + a < count ? k + a : k]) * C;
#pragma unroll
                        for (int j = 0; j < 4; j++) v[a][j] = c0 + j * 256 < C ? f(d[c0 + j * 256]) : 0.0f;
                    }
#pragma unroll
                    for (int a = 0; a < 4; a++)
#pragma unroll
                        for (int j = 0; j < 4; j++)
                            if (k + a < count) acc[j] += v[a][j];
                }
                __syncthreads();
            }
        }
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const int c = c0 + j * 256;
            if (c < C) {
                TW* out = dw + (i64)row * C + c;
#if BETA
                if (acc[j] != 0.0f) put(out, old[j] + acc[j]);
#else
                put(out, acc[j]);
#endif
            }
        }
    }
}
