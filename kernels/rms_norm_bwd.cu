// rms_norm_bwd -- RMS norm backward: gradient of x, and partial sums for the gradient of w.
// Computes     g = dy * w; dx = rstd * (g - x * rstd * rstd * mean_c(g * x)), added to dx where BETA is 1;
//              dw_part[b,c] = sum over the rows of block b of dy * x * rstd
// Inputs       x [N,C] TX; w [C] TW; dy [N,C] TY; rstd [N] f32
// Outputs      dx [N,C] TX (where WANT_X), and the same as bf16 in narrow [N,C] (where NARROW); dw_part [blocks,C] f32 (where WANT_W)
// Requires     C % V == 0; rows aligned to V elements; no two tensors overlap
// Launch       grid min(ceil(N / (256/GROUP)), 264), block 256; GROUP is 32 (C <= 1024) or 256
// Traffic      read N*C*(sizeof(TX) + sizeof(TY)), write N*C*sizeof(TX) bytes; the partial sums are small
// Accumulates  f32
// Determinism  bitwise: rows go to blocks by number alone
// Source       arXiv:1910.07467

#define ITER ((C + GROUP * V - 1) / (GROUP * V))
#define GROUPS (256 / GROUP)

extern "C" __global__ void __launch_bounds__(256) rms_norm_bwd(const TX* __restrict__ x, const TW* __restrict__ w,
                                                              const TY* __restrict__ dy,
                                                              const float* __restrict__ rstd, TX* __restrict__ dx,
                                                              float* __restrict__ dw_part, i64 rows
#if NARROW
                                                              ,
                                                              bf16* __restrict__ narrow
#endif
) {
    await_earlier_work();
#if GROUP != 32
    __shared__ float scratch[32];
#endif
    const int t = threadIdx.x % GROUP, group = threadIdx.x / GROUP;
#if WANT_W
    float dw[ITER][V];
#pragma unroll
    for (int i = 0; i < ITER; i++)
#pragma unroll
        for (int j = 0; j < V; j++) dw[i][j] = 0.0f;
#endif
    // Every thread of a group has the same row, so the reductions below meet whole groups.
    for (i64 row = (i64)blockIdx.x * GROUPS + group; row < rows; row += (i64)gridDim.x * GROUPS) {
        const float r = rstd[row];
        float xs[ITER][V], g[ITER][V];
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < ITER; i++) {
            const int c = (i * GROUP + t) * V;
            if (c < C) {
                float ws[V];
                load_n<V>(x + row * C + c, xs[i]);
                load_n<V>(dy + row * C + c, g[i]);
                load_n<V>(w + c, ws);
#if WANT_X && BETA
                // On its way while the row's sum is taken; registers for it there are none.
                if (t * V * sizeof(TX) % 128 == 0) prefetch(dx + row * C + c);
#endif
#pragma unroll
                for (int j = 0; j < V; j++) {
#if WANT_W
                    dw[i][j] += g[i][j] * xs[i][j] * r;
#endif
                    g[i][j] *= ws[j];
                    sum += g[i][j] * xs[i][j];
                }
            }
        }
#if WANT_X
#if GROUP == 32
        sum = warp_sum(sum);
#else
        sum = block_sum(sum, scratch);
#endif
        const float mean = sum * r / C;
#pragma unroll
        for (int i = 0; i < ITER; i++) {
            const int c = (i * GROUP + t) * V;
            if (c < C) {
#pragma unroll
                for (int j = 0; j < V; j++) g[i][j] = r * (g[i][j] - xs[i][j] * r * mean);
#if BETA
                float old[V];
                load_n<V>(dx + row * C + c, old);
#pragma unroll
                for (int j = 0; j < V; j++) g[i][j] += old[j];
#endif
                store_n<V>(dx + row * C + c, g[i]);
#if NARROW
                store_n<V>(narrow + row * C + c, g[i]);
#endif
            }
        }
#endif
    }
#if WANT_W
#if GROUP == 32
    __shared__ float part[GROUPS][C];
#pragma unroll
    for (int i = 0; i < ITER; i++) {
        const int c = (i * GROUP + t) * V;
        if (c < C) {
#pragma unroll
            for (int j = 0; j < V; j++) part[group][c + j] = dw[i][j];
        }
    }
    __syncthreads();
    for (int c = threadIdx.x; c < C; c += 256) {
        float sum = 0.0f;
#pragma unroll
        for (int k = 0; k < GROUPS; k++) sum += part[k][c];
        dw_part[(i64)blockIdx.x * C + c] = sum;
    }
#else
#pragma unroll
    for (int i = 0; i < ITER; i++) {
        const int c = (i * GROUP + t) * V;
        if (c < C) {
#pragma unroll
            for (int j = 0; j < V; j++) dw_part[(i64)blockIdx.x * C + c + j] = dw[i][j];
        }
    }
#endif
#endif
}
