// copy_rows -- a block of columns of one matrix to a block of columns of another.
// Computes     y[r, y_start + j] = (BETA ? y[r, y_start + j] : 0) + x[r, x_start + j], j < width
// Inputs       x TX: rows x_stride elements apart
// Outputs      y TY: rows y_stride elements apart; read where BETA is 1
// Requires     WIDTH = width/VEC; ROWS is 1 if there is more than one row; VEC divides width, starts and (with
//              ROWS) strides; x and y at multiples of VEC elements and without overlap
// Launch       grid-stride over packs of VEC, block 256
// Traffic      read rows*width*sizeof(TX), write rows*width*sizeof(TY) bytes
// Accumulates  f32, rounded once
// Determinism  bitwise
// Source       none

extern "C" __global__ void copy_rows(const TX* __restrict__ x, TY* __restrict__ y, i64 packs, i64 x_start,
                                     i64 x_stride, i64 y_start, i64 y_stride) {
    await_earlier_work();
    GRID_STRIDE(i, packs) {
#if ROWS
        const i64 row = i / WIDTH, column = (i - row * WIDTH) * VEC;
#else
        const i64 row = 0, column = i * VEC;
#endif
        const Packed<TX, VEC> from = packed<VEC>(x + row * x_stride + x_start + column);
        TY* to = y + row * y_stride + y_start + column;
        Packed<TY, VEC> out;
#if BETA
        out = packed<VEC>(to);
#pragma unroll
        for (int k = 0; k < VEC; ++k) put(&out.v[k], f(out.v[k]) + f(from.v[k]));
#else
#pragma unroll
        for (int k = 0; k < VEC; ++k) put(&out.v[k], f(from.v[k]));
#endif
        put_packed(to, out);
    }
}
