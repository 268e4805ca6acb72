// layer_norm_bwd -- gradient of layer norm with respect to its input.
// Computes     g = dy * weight; h = (x - mean) * rstd; dx = rstd * (g - mean over c of g - h * mean over c of g*h)
// Inputs       x [rows,C] TX; weight [C] TY; mean, rstd [rows] f32; dy [rows,C] TY
// Outputs      dx [rows,C] TX
// Requires     LANES is 32 or BLOCK; VEC divides C; all but mean and rstd at multiples of VEC elements; dx is dy or
//              overlaps nothing
// Launch       LANES threads a row, grid-stride, block BLOCK
// Traffic      read rows*C*(sizeof(TX) + sizeof(TY)) + C*sizeof(TY) + 8*rows, write rows*C*sizeof(TX) bytes
// Accumulates  f32, row held in registers
// Determinism  bitwise
// Source       arXiv:1607.06450

extern "C" __global__ void __launch_bounds__(BLOCK)
    layer_norm_bwd(const TX* __restrict__ x, const TY* __restrict__ weight, const float* __restrict__ mean,
                   const float* __restrict__ rstd, const TY* dy, TX* dx, i64 rows) {
    await_earlier_work();
    constexpr int PACKS = (C / VEC + LANES - 1) / LANES;
    __shared__ float scratch[32];
    const int lane = threadIdx.x % LANES;
    LINE_STRIDE(row, rows) {
        const float m = mean[row], r = rstd[row];
        float g[PACKS][VEC], h[PACKS][VEC];
        float sum_g = 0.0f, sum_gh = 0.0f;
#pragma unroll
        for (int p = 0; p < PACKS; ++p) {
            const int c = (p * LANES + lane) * VEC;
            if (c < C) {
                const Packed<TX, VEC> in = packed<VEC>(x + row * C + c);
                const Packed<TY, VEC> d = packed<VEC>(dy + row * C + c), w = packed<VEC>(weight + c);
#pragma unroll
                for (int k = 0; k < VEC; ++k) {
                    g[p][k] = f(d.v[k]) * f(w.v[k]);
                    h[p][k] = (f(in.v[k]) - m) * r;
                    sum_g += g[p][k];
                    sum_gh += g[p][k] * h[p][k];
                }
            }
        }
        const float mean_g = lanes_sum<LANES>(sum_g, scratch) / C;
        const float slope = lanes_sum<LANES>(sum_gh, scratch) / C;
#pragma unroll
        for (int p = 0; p < PACKS; ++p) {
            const int c = (p * LANES + lane) * VEC;
            if (c < C) {
                Packed<TX, VEC> out;
#pragma unroll
                for (int k = 0; k < VEC; ++k) put(&out.v[k], r * (g[p][k] - mean_g - h[p][k] * slope));
                put_packed(dx + row * C + c, out);
            }
        }
    }
}
