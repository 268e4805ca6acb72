// optimizer_control -- decides what the update of this step does, on the device.
// Computes     norm = sqrt(sum of part); ok = norm and loss are finite and nothing halts;
//              scale = grad_scale * min(1, max_norm / (grad_scale * norm + 1e-6)) (no clipping at max_norm 0);
//              steps += ok; step_size = lr / (1 - beta1^steps); correction2 = 1 / sqrt(1 - beta2^steps)
// Inputs       part [parts] float; loss [1] float or null; rate [1] f64: lr; grad_scale, max_norm, weight_decay,
//              beta1, beta2 f64 as their bits
// Outputs      norm_out [1] float; control [8] float: ok, scale, keep, step_size, correction2, norm, 0, 0;
//              counters [3] i64: steps done, halted (0 or 1), steps left out
// Requires     no two arrays overlap
// Launch       grid 1, block 256
// Traffic      4*parts bytes
// Accumulates  f64
// Determinism  bitwise
// Source       arXiv:1711.05101; torch.nn.utils.clip_grad_norm_

extern "C" __global__ void __launch_bounds__(256) optimizer_control(const float* __restrict__ part, int parts,
                                                                   const float* __restrict__ loss,
                                                                   float* __restrict__ control,
                                                                   i64* __restrict__ counters,
                                                                   float* __restrict__ norm_out,
                                                                   const double* __restrict__ rate,
                                                                   u64 grad_scale_bits, u64 max_norm_bits,
                                                                   u64 weight_decay_bits, u64 beta1_bits,
                                                                   u64 beta2_bits, int halt) {
    await_earlier_work();
    __shared__ double sums[8];
    double sum = 0.0;
    for (int i = threadIdx.x; i < parts; i += 256) sum += part[i];
#pragma unroll
    for (int o = 16; o > 0; o >>= 1) sum += __shfl_xor_sync(FULL_WARP, sum, o);
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x != 0) return;
    sum = ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
    const double lr = rate[0], grad_scale = __longlong_as_double(grad_scale_bits);
    const double max_norm = __longlong_as_double(max_norm_bits);
    const double weight_decay = __longlong_as_double(weight_decay_bits);
    const double beta1 = __longlong_as_double(beta1_bits), beta2 = __longlong_as_double(beta2_bits);
    const double norm = sqrt(sum) * fabs(grad_scale);
    const bool finite = norm - norm == 0.0 && (loss == nullptr || *loss - *loss == 0.0f);
    const bool ok = finite && counters[1] == 0;
    if (ok) counters[0] += 1;
    else counters[2] += 1;
    if (!finite && halt) counters[1] = 1;
    double scale = grad_scale;
    if (max_norm > 0.0) {
        const double clip = max_norm / (norm + 1e-6);
        if (clip < 1.0) scale *= clip;
    }
    const double t = (double)counters[0];
    control[0] = ok ? 1.0f : 0.0f;
    control[1] = (float)scale;
    control[2] = (float)(1.0 - lr * weight_decay);
    control[3] = (float)(lr / (1.0 - pow(beta1, t)));
    control[4] = (float)(1.0 / sqrt(1.0 - pow(beta2, t)));
    control[5] = (float)norm;
    control[6] = (float)lr;
    control[7] = 0.0f;
    norm_out[0] = (float)norm;
}
