// adamw_step -- AdamW over a range of the flat arenas, with the bf16 working copy or, where SPLIT, of weights in halves.
// Computes     g = grad * scale; m += (1-beta1) (g-m); v = beta2 v + (1-beta2) g^2;
//              p = p * keep - step_size * m / (sqrt(v) * correction2 + eps); w = bf16(p); nothing where ok is 0
// Inputs       grad [n] TG; control [8] float of optimizer_control; one_minus_beta1, beta2, one_minus_beta2, eps f32
// Outputs      p, m, v [n] float, read and written; w [n] bf16 (where WORKING); where SPLIT, p [n] u16 and w [n] bf16 are
//              the halves of p (split.cuh), read and written
// Requires     n % 4 == 0; all aligned to four elements; no two overlap
// Launch       grid-stride over groups of four, block 256
// Traffic      read n*(12+sizeof(TG)), write n*(12+2*(WORKING && !SPLIT)) bytes
// Accumulates  f32
// Determinism  bitwise
// Source       arXiv:1711.05101; torch.optim.AdamW

extern "C" __global__ void __launch_bounds__(256)
    adamw_step(const TG* __restrict__ grad, TP* __restrict__ p, float* __restrict__ m, float* __restrict__ v,
               bf16* __restrict__ w, const float* __restrict__ control, float one_minus_beta1, float beta2,
               float one_minus_beta2, float eps, i64 groups) {
    await_earlier_work();
    if (control[0] == 0.0f) return;
    const float scale = control[1], step_size = control[3], correction2 = control[4];
#if DECAY
    const float keep = control[2];
#else
    const float keep = 1.0f;
#endif
    GRID_STRIDE(i, groups) {
        float g4[4], p4[4], m4[4], v4[4];
        load4(grad + i * 4, g4);
#if SPLIT
        join_n<4>(w + i * 4, p + i * 4, p4);
#else
        load4(p + i * 4, p4);
#endif
        load4(m + i * 4, m4);
        load4(v + i * 4, v4);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            // Which of these are fused is not left to the compiler: weights in halves get the bits of whole ones.
            const float g = __fmul_rn(g4[j], scale);
            m4[j] = __fmaf_rn(one_minus_beta1, __fsub_rn(g, m4[j]), m4[j]);
            v4[j] = __fmaf_rn(one_minus_beta2, __fmul_rn(g, g), __fmul_rn(beta2, v4[j]));
            const float ratio = __fdiv_rn(m4[j], __fmaf_rn(__fsqrt_rn(v4[j]), correction2, eps));
            p4[j] = __fmaf_rn(-step_size, ratio, __fmul_rn(p4[j], keep));
        }
        store4(m + i * 4, m4);
        store4(v + i * 4, v4);
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
