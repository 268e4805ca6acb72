// embedding_fwd -- rows of a table by id.
// Computes     y[n,c] = w[ids[n],c]; NaN where an id is outside 0 <= id < V
// Inputs       w [>=V,C] TW, where SPLIT bf16 with low [>=V,C] u16, the halves of w (split.cuh); ids [N] int
// Outputs      y [N,C] TY
// Requires     n = N*C/VEC; C % VEC == 0; rows aligned to VEC elements
// Launch       grid-stride, block 256
// Traffic      read N*C*(sizeof(TW)+2*SPLIT), write N*C*sizeof(TY) bytes
// Accumulates  nothing
// Determinism  bitwise
// Source       torch.nn.functional.embedding

extern "C" __global__ void embedding_fwd(const TW* __restrict__ w, const int* __restrict__ ids, TY* __restrict__ y,
                                         i64 n, int vocabulary, const u16* __restrict__ low) {
    await_earlier_work();
    constexpr int PER_ROW = C / VEC;
    GRID_STRIDE(i, n) {
        const i64 row = i / PER_ROW, c = (i - row * PER_ROW) * VEC;
        const int id = ids[row];
        float v[VEC];
        if (id >= 0 && id < vocabulary) {
#if SPLIT
            join_n<VEC>(w + (i64)id * C + c, low + (i64)id * C + c, v);
#else
            load_n<VEC>(w + (i64)id * C + c, v);
#endif
        } else {
#pragma unroll
            for (int j = 0; j < VEC; j++) v[j] = NAN_F;
        }
        store_n<VEC>(y + row * C + c, v);
    }
}
