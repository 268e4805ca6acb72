// sgd_step -- SGD with momentum over a range of the flat arenas, with the bf16 working copy or, where SPLIT, of weights in
// halves.
// Computes     g = grad * scale; p *= keep; b = momentum * b + g; p -= lr * b; w = bf16(p);
//              nothing where ok is 0
// Inputs       grad [n] TG; control [8] float of optimizer_control; momentum f32
// Outputs      p, b [n] float, read and written; w [n] bf16 (where WORKING); where SPLIT, p [n] u16 and w [n] bf16 are
//              the halves of p (split.cuh), read and written
// Requires     n % 4 == 0; all aligned to four elements; no two overlap
// Launch       grid-stride over groups of four, block 256
// Traffic      read n*(8+sizeof(TG)), write n*(8+2*(WORKING && !SPLIT)) bytes
// Accumulates  f32
// Determinism  bitwise
// Source       torch.optim.SGD, with decoupled decay

extern "C" __global__ void __launch_bounds__(256)
    sgd_step(const TG* __restrict__ grad, TP* __restrict__ p, float* __restrict__ b, bf16* __restrict__ w,
             const float* __restrict__ control, float momentum, i64 groups) {
    await_earlier_work();
    if (control[0] == 0.0f) return;
    const float scale = control[1], lr = control[6];
#if DECAY
    const float keep = control[2];
#else
    const float keep = 1.0f;
#endif
    GRID_STRIDE(i, groups) {
        float g4[4], p4[4], b4[4];
        load4(grad + i * 4, g4);
#if SPLIT
        join_n<4>(w + i * 4, p + i * 4, p4);
#else
        load4(p + i * 4, p4);
#endif
        load4(b + i * 4, b4);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            // Which of these are fused is not left to the compiler: weights in halves get the bits of whole ones.
            b4[j] = __fmaf_rn(momentum, b4[j], __fmul_rn(g4[j], scale));
            p4[j] = __fmaf_rn(-lr, b4[j], __fmul_rn(p4[j], keep));
        }
        store4(b + i * 4, b4);
#if SPLIT
        split_n<4>(w + i * 4, p + i * 4, p4);
#else
        store4(p + i * 4, p4);
#if WORKING
        store4(w + i * 4, p4);
#endif
#endif
    }
}
