// mma -- tensor cores and asynchronous copies, sm_80 and later.
// Fragments of mma.m16n8k16, with g = lane / 4 and c = lane % 4, two bf16 a register, the lower column (A) or
// row (B) in the lower half:
//   A [16,16]  a0 (row g, columns 2c..), a1 (row g+8, columns 2c..), a2 (row g, columns 2c+8..), a3 (row g+8, columns 2c+8..)
//   B [16,8]   b0 (rows 2c.., column g), b1 (rows 2c+8.., column g)
//   C [16,8]   c0, c1 (row g, columns 2c, 2c+1), c2, c3 (row g+8, the same columns); f32

// c += A B
__device__ __forceinline__ void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// Four 8x8 matrices; lanes 8i..8i+7 point at the rows of matrix i. Register i of a lane holds elements 2c and
// 2c+1 of row g of matrix i; transposed, rows 2c and 2c+1 of column g.
__device__ __forceinline__ void ldmatrix(u32 (&r)[4], const bf16* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(row))
                 : "memory");
}
__device__ __forceinline__ void ldmatrix_transposed(u32 (&r)[4], const bf16* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(row))
                 : "memory");
}

// The fragment A of rows row..row+16 and columns column..column+16 of a tile.
__device__ __forceinline__ void load_a(u32 (&a)[4], const bf16* tile, int pitch, int row, int column) {
    const int lane = threadIdx.x % 32;
    ldmatrix(a, tile + (row + lane % 16) * pitch + column + lane / 16 * 8);
}
// Two fragments B, {b0,b1} and {b2,b3}, of the transpose of a tile: their 16 columns are the tile's rows from
// `column` on, their 16 rows the tile's columns from `row` on.
__device__ __forceinline__ void load_b_of_transpose(u32 (&b)[4], const bf16* tile, int pitch, int row, int column) {
    const int lane = threadIdx.x % 32;
    ldmatrix(b, tile + (column + lane / 16 * 8 + lane % 8) * pitch + row + lane / 8 % 2 * 8);
}
// Two fragments B, {b0,b1} and {b2,b3}, of rows row..row+16 and columns column..column+16 of a tile.
__device__ __forceinline__ void load_b(u32 (&b)[4], const bf16* tile, int pitch, int row, int column) {
    const int lane = threadIdx.x % 32;
    ldmatrix_transposed(b, tile + (row + lane % 16) * pitch + column + lane / 16 * 8);
}

// Two floats as bf16, the first in the lower half.
__device__ __forceinline__ u32 pack_bf16(float low, float high) {
    u32 r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}

// The fragment A of two neighbouring fragments C, rounded to bf16.
__device__ __forceinline__ void a_of_c(u32 (&a)[4], const float (&left)[4], const float (&right)[4]) {
    a[0] = pack_bf16(left[0], left[1]);
    a[1] = pack_bf16(left[2], left[3]);
    a[2] = pack_bf16(right[0], right[1]);
    a[3] = pack_bf16(right[2], right[3]);
}

// 2^x, about 2 ulp.
__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Copies BYTES (4, 8 or 16) to shared memory, or zeros without reading where !valid; done after copies_wait.
template <int BYTES>
__device__ __forceinline__ void copy_async(void* to, const void* from, bool valid) {
    const int bytes = valid ? BYTES : 0;
    if (BYTES == 16) {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "r"(bytes)
                     : "memory");
    } else {
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared_address(to)), "l"(from), "n"(BYTES),
                     "r"(bytes)
                     : "memory");
    }
}
// Waits for this thread's copies; a barrier then shows them to the block.
__device__ __forceinline__ void copies_wait() { asm volatile("cp.async.wait_all;" ::: "memory"); }
