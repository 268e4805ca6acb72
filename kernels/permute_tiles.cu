// permute_tiles -- axes in another order, where the last axis changes: transposes of tiles.
// Computes     y[b,q,c] = x[b,c,q] for each outer index b, at place y_outer(b) + q*y_stride + c of y and at place
//              x_outer(b) + c*x_stride + q of x
// Inputs       x T; q < q_size is the axis that is last in x
// Outputs      y T; c < c_size is the axis that is last in y
// Requires     b has RANK axes SIZES with X_STRIDES and Y_STRIDES, of which the first size is not used; x and y do
//              not overlap
// Launch       grid-stride over tiles of 32 x 32, block (32,8)
// Traffic      read n*sizeof(T), write n*sizeof(T) bytes
// Accumulates  nothing
// Determinism  bitwise
// Source       none

extern "C" __global__ void permute_tiles(const T* __restrict__ x, T* __restrict__ y, i64 tiles, i64 q_size,
                                         i64 c_size, i64 x_stride, i64 y_stride) {
    await_earlier_work();
    constexpr i64 sizes[] = {SIZES}, x_strides[] = {X_STRIDES}, y_strides[] = {Y_STRIDES};
    // One column more than a tile has, so that neighbours of a column are in different banks.
    __shared__ T tile[32][33];
    const i64 q_tiles = (q_size + 31) / 32, c_tiles = (c_size + 31) / 32;
    for (i64 at = blockIdx.x; at < tiles; at += gridDim.x) {
        i64 left = at / q_tiles;
        const i64 q0 = (at - left * q_tiles) * 32;
        const i64 outer = left / c_tiles, c0 = (left - outer * c_tiles) * 32;
        i64 x_place = 0, y_place = 0;
        left = outer;
#pragma unroll
        for (int k = RANK - 1; k > 0; --k) {
            const i64 rest = left / sizes[k], index = left - rest * sizes[k];
            x_place += index * x_strides[k];
            y_place += index * y_strides[k];
            left = rest;
        }
        x_place += left * x_strides[0];
        y_place += left * y_strides[0];
        for (int r = threadIdx.y; r < 32; r += 8) {
            const i64 c = c0 + r, q = q0 + threadIdx.x;
            if (c < c_size && q < q_size) tile[r][threadIdx.x] = x[x_place + c * x_stride + q];
        }
        __syncthreads();
        for (int r = threadIdx.y; r < 32; r += 8) {
            const i64 q = q0 + r, c = c0 + threadIdx.x;
            if (c < c_size && q < q_size) y[y_place + q * y_stride + c] = tile[threadIdx.x][r];
        }
        __syncthreads();
    }
}
