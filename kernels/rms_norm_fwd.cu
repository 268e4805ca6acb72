// rms_norm_fwd -- RMS norm forward, GROUP threads a row, the row held in registers; of a sum where ADD is 1.
// Computes     x = h[n,c] = x[n,c] + b[n,c] (where ADD, rounded to TX); rstd[n] = 1 / sqrt(mean_c(x[n,c]^2) + eps); y[n,c] = x[n,c] * rstd[n] * w[c]
// Inputs       x [N,C] TX; b [N,C] TB (where ADD); w [C] TW; eps f32
// Outputs      y [N,C] TY; rstd [N] f32; h [N,C] TX (where ADD)
// Requires     C % V == 0; rows aligned to V elements; no two tensors overlap
// Launch       grid ceil(N / (256/GROUP)), block 256; GROUP is 32 or 256
// Traffic      read N*C*sizeof(TX), write N*C*sizeof(TY) + 4*N bytes; with ADD also read N*C*sizeof(TB) and write
//              N*C*sizeof(TX)
// Accumulates  f32
// Determinism  bitwise
// Source       arXiv:1910.07467

#define ITER ((C + GROUP * V - 1) / (GROUP * V))

extern "C" __global__ void __launch_bounds__(256) rms_norm_fwd(const TX* __restrict__ x, const TW* __restrict__ w,
                                                              TY* __restrict__ y, float* __restrict__ rstd,
                                                              i64 rows, float eps
#if ADD
                                                              ,
                                                              const TB* __restrict__ b, TX* __restrict__ h
#endif
) {
    await_earlier_work();
#if GROUP != 32
    __shared__ float scratch[32];
#endif
    const int t = threadIdx.x % GROUP;
    const i64 row = (i64)blockIdx.x * (256 / GROUP) + threadIdx.x / GROUP;
    if (row >= rows) return;
    const TX* xr = x + row * C;
    float v[ITER][V];
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < ITER; i++) {
        const int c = (i * GROUP + t) * V;
        if (c < C) {
            load_n<V>(xr + c, v[i]);
#if ADD
            float branch[V];
            load_n<V>(b + row * C + c, branch);
#pragma unroll
            for (int j = 0; j < V; j++) v[i][j] = rounded<TX>(v[i][j] + branch[j]);
            store_n<V>(h + row * C + c, v[i]);
#endif
#pragma unroll
            for (int j = 0; j < V; j++) sum += v[i][j] * v[i][j];
        }
    }
#if GROUP == 32
    sum = warp_sum(sum);
#else
    sum = block_sum(sum, scratch);
#endif
    const float r = 1.0f / sqrtf(sum / C + eps);
    if (t == 0) rstd[row] = r;
#pragma unroll
    for (int i = 0; i < ITER; i++) {
        const int c = (i * GROUP + t) * V;
        if (c < C) {
            float g[V];
            load_n<V>(w + c, g);
#pragma unroll
            for (int j = 0; j < V; j++) v[i][j] = v[i][j] * r * g[j];
            store_n<V>(y + row * C + c, v[i]);
        }
    }
}
