// rope_angles -- cosines and sines of rotary positions.
// Computes     a = positions[n] * INV_FREQ[i]: SCALING*cos(a) and SCALING*sin(a); NaN for a negative position
// Inputs       positions [N] int
// Outputs      angles [N,HALF] float2
// Requires     items = N*HALF
// Launch       grid-stride over items, block 128
// Traffic      read 4*N, write 8*N*HALF bytes
// Accumulates  f64, rounded once
// Determinism  bitwise
// Source       arXiv:2104.09864

__constant__ double inv_freq[HALF] = {INV_FREQ};

extern "C" __global__ void __launch_bounds__(128) rope_angles(const int* __restrict__ positions,
                                                             float2* __restrict__ angles, i64 items) {
    await_earlier_work();
    GRID_STRIDE(k, items) {
        const int position = positions[k / HALF];
        double c, s;
        sincos((double)position * inv_freq[k % HALF], &s, &c);
        const float cosine = (float)(c * (double)(SCALING)), sine = (float)(s * (double)(SCALING));
        angles[k] = position < 0 ? make_float2(NAN_F, NAN_F) : make_float2(cosine, sine);
    }
}
