// max_bwd -- gradient of a maximum over an axis.
// Computes     dx[o,k,i] = (BETA ? dx[o,k,i] : 0) + (k == index[o,i] ? dy[o,i] : 0)
// Inputs       dy [outer,INNER] TX; index [outer,INNER] int
// Outputs      dx [outer,N,INNER] TY, of n elements; read where BETA is 1
// Requires     dx overlaps nothing
// Launch       grid-stride, block 256
// Traffic      read outer*INNER*(sizeof(TX) + 4), write n*sizeof(TY) bytes (with BETA only where k is index)
// Accumulates  f32, rounded once
// Determinism  bitwise
// Source       none

extern "C" __global__ void max_bwd(const TX* __restrict__ dy, const int* __restrict__ index, TY* __restrict__ dx,
                                   i64 n) {
    await_earlier_work();
    GRID_STRIDE(at, n) {
        const i64 row = at / INNER, o = row / N, k = row - o * N;
        const i64 line = o * INNER + (at - row * INNER);
        const bool here = index[line] == (int)k;
#if BETA
        if (here) put(&dx[at], f(dx[at]) + f(dy[line]));
#else
        put(&dx[at], here ? f(dy[line]) : 0.0f);
#endif
    }
}
