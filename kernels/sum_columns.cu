// sum_columns -- sums over the middle axis, cut into segments.
// Computes     y[o,p,i] = (BETA ? y[o,p,i] : 0) + sum over k in p*segment .. (p+1)*segment of x[o,k,i] / divisor
// Inputs       x [outer,n,inner] TX; divisor f32
// Outputs      y [outer,parts,inner] TY; read where BETA is 1
// Requires     parts = max(1, ceil(n/segment)); VEC divides inner; x at a multiple of VEC*sizeof(TX) bytes; x and
//              y do not overlap
// Launch       a thread for VEC columns of a segment, grid-stride, block 256
// Traffic      read outer*n*inner*sizeof(TX), write outer*parts*inner*sizeof(TY) bytes
// Accumulates  f32, in 4 partial sums a segment
// Determinism  bitwise: how the work is cut depends on sizes alone
// Source       none

extern "C" __global__ void sum_columns(const TX* __restrict__ x, TY* __restrict__ y, i64 outer, i64 n, i64 inner,
                                       i64 parts, i64 segment, float divisor) {
    await_earlier_work();
    const i64 packs = inner / VEC;
    GRID_STRIDE(i, outer * parts * packs) {
        const i64 line = i / packs, column = (i - line * packs) * VEC;
        const i64 o = line / parts, start = (line - o * parts) * segment;
        const i64 end = start + segment < n ? start + segment : n;
        const TX* from = x + o * n * inner + column;
        float acc[4][VEC];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
#pragma unroll
            for (int v = 0; v < VEC; ++v) acc[j][v] = 0.0f;
        }
        i64 k = start;
        for (; k + 3 < end; k += 4) {
            Packed<TX, VEC> rows[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) rows[j] = packed<VEC>(from + (k + j) * inner);
#pragma unroll
            for (int j = 0; j < 4; ++j) {
#pragma unroll
                for (int v = 0; v < VEC; ++v) acc[j][v] += f(rows[j].v[v]);
            }
        }
        for (; k < end; ++k) {
            const Packed<TX, VEC> row = packed<VEC>(from + k * inner);
#pragma unroll
            for (int v = 0; v < VEC; ++v) acc[0][v] += f(row.v[v]);
        }
        TY* to = y + line * inner + column;
#pragma unroll
        for (int v = 0; v < VEC; ++v) {
            const float sum = ((acc[0][v] + acc[1][v]) + (acc[2][v] + acc[3][v])) / divisor;
            put(&to[v], (BETA ? f(to[v]) : 0.0f) + sum);
        }
    }
}
