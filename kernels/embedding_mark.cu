// embedding_mark -- for each row of a table, in which chunks of the tokens it occurs.
// Computes     bit n / chunk of marks[ids[n]] is set for each token n; ids outside 0..rows are left out
// Inputs       ids [N] int
// Outputs      marks [rows] u64, zero before
// Requires     N <= 64 * chunk
// Launch       grid-stride, block 256
// Traffic      read 4*N bytes; marks stay in the cache
// Accumulates  bits, by an atomic or: the order does not matter
// Determinism  bitwise
// Source       none

extern "C" __global__ void __launch_bounds__(256) embedding_mark(const int* __restrict__ ids, u64* __restrict__ marks,
                                                                i64 tokens, i64 chunk, int rows) {
    await_earlier_work();
    GRID_STRIDE(i, tokens) {
        const int id = ids[i];
        if (id >= 0 && id < rows) atomicOr(&marks[id], 1ull << (i / chunk));
    }
}
