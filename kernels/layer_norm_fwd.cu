// layer_norm_fwd -- layer norm of rows.
// Computes     y[r,c] = (x[r,c] - mean[r]) * rstd[r] * weight[c] + (BIAS ? bias[c] : 0);
//              rstd = 1 / sqrt(var + eps), var = sum over c of (x - mean)^2 / C
// Inputs       x [rows,C] TX; weight [C], bias [C] TY (bias null without BIAS); eps f32
// Outputs      y [rows,C] TY; mean, rstd [rows] f32
// Requires     LANES is 32 or BLOCK; VEC divides C; all but mean and rstd at multiples of VEC elements; outputs
//              overlap nothing
// Launch       LANES threads a row, grid-stride, block BLOCK
// Traffic      read rows*C*sizeof(TX) + 2*C*sizeof(TY), write rows*C*sizeof(TY) + 8*rows bytes
// Accumulates  f32, variance about the mean in a second pass over registers
// Determinism  bitwise
// Source       arXiv:1607.06450

extern "C" __global__ void __launch_bounds__(BLOCK)
    layer_norm_fwd(const TX* __restrict__ x, const TY* __restrict__ weight, const TY* __restrict__ bias,
                   TY* __restrict__ y, float* __restrict__ mean, float* __restrict__ rstd, float eps, i64 rows) {
    await_earlier_work();
    constexpr int PACKS = (C / VEC + LANES - 1) / LANES;
    __shared__ float scratch[32];
    const int lane = threadIdx.x % LANES;
    LINE_STRIDE(row, rows) {
        float v[PACKS][VEC];
        float sum = 0.0f;
#pragma unroll
        for (int p = 0; p < PACKS; ++p) {
            const int c = (p * LANES + lane) * VEC;
            if (c < C) {
                const Packed<TX, VEC> in = packed<VEC>(x + row * C + c);
#pragma unroll
                for (int k = 0; k < VEC; ++k) sum += v[p][k] = f(in.v[k]);
            }
        }
        const float m = lanes_sum<LANES>(sum, scratch) / C;
        float squares = 0.0f;
#pragma unroll
        for (int p = 0; p < PACKS; ++p) {
            if ((p * LANES + lane) * VEC < C) {
#pragma unroll
                for (int k = 0; k < VEC; ++k) {
                    v[p][k] -= m;
                    squares += v[p][k] * v[p][k];
                }
            }
        }
        const float r = 1.0f / sqrtf(lanes_sum<LANES>(squares, scratch) / C + eps);
#pragma unroll
        for (int p = 0; p < PACKS; ++p) {
            const int c = (p * LANES + lane) * VEC;
            if (c < C) {
                const Packed<TY, VEC> w = packed<VEC>(weight + c);
                Packed<TY, VEC> out;
#if BIAS
                const Packed<TY, VEC> b = packed<VEC>(bias + c);
#endif
#pragma unroll
                for (int k = 0; k < VEC; ++k) {
                    float value = v[p][k] * r * f(w.v[k]);
#if BIAS
                    value += f(b.v[k]);
#endif
                    put(&out.v[k], value);
                }
                put_packed(y + row * C + c, out);
            }
        }
        if (lane == 0) {
            mean[row] = m;
            rstd[row] = r;
        }
    }
}
