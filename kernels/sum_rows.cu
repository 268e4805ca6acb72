// sum_rows -- sums of the rows of a matrix, each cut into segments.
// Computes     y[r,p] = (BETA ? y[r,p] : 0) + sum(x[r, p*segment .. (p+1)*segment]) / divisor
// Inputs       x [rows,n] TX; divisor f32
// Outputs      y [rows,parts] TY; read where BETA is 1
// Requires     parts = max(1, ceil(n/segment)); x and y do not overlap
// Launch       a warp a segment, grid-stride, block 256
// Traffic      read rows*n*sizeof(TX), write rows*parts*sizeof(TY) bytes
// Accumulates  f32, in 128 partial sums a segment
// Determinism  bitwise: how the work is cut depends on sizes alone
// Source       none

extern "C" __global__ void sum_rows(const TX* __restrict__ x, TY* __restrict__ y, i64 rows, i64 n, i64 parts,
                                    i64 segment, float divisor) {
    await_earlier_work();
    const int lane = threadIdx.x & 31;
    const i64 first = ((i64)blockIdx.x * blockDim.x + threadIdx.x) >> 5;
    const i64 warps = ((i64)gridDim.x * blockDim.x) >> 5;
    for (i64 w = first; w < rows * parts; w += warps) {
        const i64 row = w / parts, start = (w - row * parts) * segment;
        const i64 end = start + segment < n ? start + segment : n;
        const TX* from = x + row * n;
        float acc[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        i64 k = start + lane;
        for (; k + 96 < end; k += 128) {
#pragma unroll
            for (int j = 0; j < 4; ++j) acc[j] += f(from[k + 32 * j]);
        }
        for (; k < end; k += 32) acc[0] += f(from[k]);
        const float sum = warp_sum((acc[0] + acc[1]) + (acc[2] + acc[3])) / divisor;
        if (lane == 0) put(&y[w], (BETA ? f(y[w]) : 0.0f) + sum);
    }
}
