// column_sum_many -- sums of the columns of several matrices of one size, each to a place of its own.
// Computes     y[p[j]+c] = (bit j of betas ? y[p[j]+c] : 0) + sum over r < rows of x[j,r,c], for each matrix j
// Inputs       x [J,R,C] f32; p: word j % 16 of places j / 16
// Outputs      y [n] TY; read where bits of betas are 1
// Requires     J <= 64; no two ranges p[j]..p[j]+C meet; x and y do not overlap
// Launch       grid (ceil(C/32), J), block (32,32)
// Traffic      read 4*J*R*C, write J*C*sizeof(TY) bytes
// Accumulates  f32: 32 partial sums a column, added in order, as column_sum
// Determinism  bitwise
// Source       torch.sum over rows

struct Places {
    u64 at[16];
};

extern "C" __global__ void __launch_bounds__(1024)
    column_sum_many(const float* __restrict__ x, TY* __restrict__ y, const __grid_constant__ Places p0,
                    const __grid_constant__ Places p1, const __grid_constant__ Places p2,
                    const __grid_constant__ Places p3, u64 betas, i64 rows, i64 columns) {
    await_earlier_work();
    __shared__ float part[32][33];
    const int job = blockIdx.y, word = job % 16;
    const i64 c = (i64)blockIdx.x * 32 + threadIdx.x;
    const float* from = x + job * rows * columns + c;
    float sum = 0.0f;
    if (c < columns)
        for (i64 r = threadIdx.y; r < rows; r += 32) sum += from[r * columns];
    part[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y == 0 && c < columns) {
        float total = 0.0f;
#pragma unroll
        for (int k = 0; k < 32; k++) total += part[k][threadIdx.x];
        const u64 at = job < 32 ? (job < 16 ? p0.at[word] : p1.at[word]) : (job < 48 ? p2.at[word] : p3.at[word]);
        TY* out = y + at + c;
        if (betas >> job & 1) total += f(*out);
        put(out, total);
    }
}
