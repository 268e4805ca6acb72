// dropout -- zeroes elements at random and scales the others; its own backward.
// Computes     y[i] = x[i] * (word i % 4 of random block counter + i / 4 >= threshold ? scale : 0)
// Inputs       x [n] T; seed, stream, counter of the generator; threshold, scale
// Outputs      y [n] T
// Requires     with PACKED both at multiples of 4*sizeof(T) bytes; y is x or does not overlap it
// Launch       grid-stride over blocks of 4, block 256
// Traffic      read n*sizeof(T), write n*sizeof(T) bytes
// Accumulates  nothing
// Determinism  bitwise: an element's number depends on its position alone
// Source       Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011

// Philox4x32-10: the four words of block `counter`.
__device__ __forceinline__ void random_block(u64 seed, u64 stream, u64 counter, u32* c) {
    u32 k0 = (u32)seed, k1 = (u32)(seed >> 32);
    c[0] = (u32)counter;
    c[1] = (u32)(counter >> 32);
    c[2] = (u32)stream;
    c[3] = (u32)(stream >> 32);
#pragma unroll
    for (int round = 0; round < 10; ++round) {
        const u64 p0 = (u64)0xD2511F53u * c[0], p1 = (u64)0xCD9E8D57u * c[2];
        const u32 c1 = c[1], c3 = c[3];
        c[0] = (u32)(p1 >> 32) ^ c1 ^ k0;
        c[1] = (u32)p1;
        c[2] = (u32)(p0 >> 32) ^ c3 ^ k1;
        c[3] = (u32)p0;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
}

extern "C" __global__ void dropout(const T* x, T* y, u64 seed, u64 stream, u64 counter, u32 threshold, float scale,
                                   i64 n) {
    await_earlier_work();
    GRID_STRIDE(i, (n + 3) / 4) {
        u32 words[4];
        random_block(seed, stream, counter + (u64)i, words);
        const i64 at = i * 4;
        if (PACKED && at + 4 <= n) {
            const Packed<T, 4> in = packed<4>(x + at);
            Packed<T, 4> out;
#pragma unroll
            for (int k = 0; k < 4; ++k) put(&out.v[k], f(in.v[k]) * (words[k] >= threshold ? scale : 0.0f));
            put_packed(y + at, out);
        } else {
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                if (at + k < n) put(&y[at + k], f(x[at + k]) * (words[k] >= threshold ? scale : 0.0f));
            }
        }
    }
}
