// column_sum -- sums of the columns of a matrix, over ROWS rows a block.
// Computes     y[b,c] = (BETA ? y[b,c] : 0) + sum over rows b*ROWS <= r < min((b+1)*ROWS, R) of x[r,c]
// Inputs       x [R,C] TX
// Outputs      y [ceil(R/ROWS),C] TY; read where BETA is 1
// Requires     x and y do not overlap
// Launch       grid (ceil(C/32), ceil(R/ROWS)), block (32,32)
// Traffic      read R*C*sizeof(TX), write C*sizeof(TY)*ceil(R/ROWS) bytes
// Accumulates  f32: 32 partial sums a column, added in order
// Determinism  bitwise
// Source       torch.sum over rows

extern "C" __global__ void column_sum(const TX* __restrict__ x, TY* __restrict__ y, i64 rows, i64 columns) {
    await_earlier_work();
    __shared__ float part[32][33];
    const i64 c = (i64)blockIdx.x * 32 + threadIdx.x;
    const i64 first = (i64)blockIdx.y * ROWS;
    const i64 end = first + ROWS < rows ? first + ROWS : rows;
    float sum = 0.0f;
    if (c < columns)
        for (i64 r = first + threadIdx.y; r < end; r += 32) sum += f(x[r * columns + c]);
    part[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y == 0 && c < columns) {
        float total = 0.0f;
#pragma unroll
        for (int k = 0; k < 32; k++) total += part[k][threadIdx.x];
        TY* out = y + (i64)blockIdx.y * columns + c;
#if BETA
        total += f(*out);
#endif
        put(out, total);
    }
}
