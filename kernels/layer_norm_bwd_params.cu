// layer_norm_bwd_params -- gradients of layer norm with respect to weight and bias, summed over segments of rows.
// Computes     dweight[p,c] = sum of dy[r,c] * (x[r,c] - mean[r]) * rstd[r], dbias[p,c] = sum of dy[r,c], over rows r
//              in p*segment .. (p+1)*segment
// Inputs       x [rows,C] TX; mean, rstd [rows] f32; dy [rows,C] TY
// Outputs      dweight, dbias [parts,C] f32
// Requires     parts = max(1, ceil(rows/segment)); VEC divides C; x and dy at multiples of VEC elements; outputs
//              overlap nothing
// Launch       a thread for VEC columns of a segment, grid-stride, block 256
// Traffic      read rows*C*(sizeof(TX) + sizeof(TY)), write 8*parts*C bytes
// Accumulates  f32
// Determinism  bitwise: how the work is cut depends on sizes alone
// Source       arXiv:1607.06450

extern "C" __global__ void layer_norm_bwd_params(const TX* __restrict__ x, const float* __restrict__ mean,
                                                 const float* __restrict__ rstd, const TY* __restrict__ dy,
                                                 float* __restrict__ dweight, float* __restrict__ dbias, i64 rows,
                                                 i64 parts, i64 segment) {
    await_earlier_work();
    GRID_STRIDE(i, parts * (C / VEC)) {
        const i64 part = i / (C / VEC), column = (i - part * (C / VEC)) * VEC;
        const i64 start = part * segment, end = start + segment < rows ? start + segment : rows;
        float dw[VEC], db[VEC];
#pragma unroll
        for (int k = 0; k < VEC; ++k) dw[k] = db[k] = 0.0f;
#pragma unroll 4
        for (i64 r = start; r < end; ++r) {
            const Packed<TX, VEC> in = packed<VEC>(x + r * C + column);
            const Packed<TY, VEC> d = packed<VEC>(dy + r * C + column);
            const float m = mean[r], s = rstd[r];
#pragma unroll
            for (int k = 0; k < VEC; ++k) {
                dw[k] += f(d.v[k]) * ((f(in.v[k]) - m) * s);
                db[k] += f(d.v[k]);
            }
        }
#pragma unroll
        for (int k = 0; k < VEC; ++k) {
            dweight[part * C + column + k] = dw[k];
            dbias[part * C + column + k] = db[k];
        }
    }
}
