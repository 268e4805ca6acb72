// attention_wgmma_fwd -- attention of units of 64 queries of one head, forward, on Hopper.
// Computes     what attention_fwd computes, with probabilities rounded to bf16 before their product with v
// Inputs       q [B,queries,HEADS,D], k and v [B,keys,KV_HEADS,D] bf16 as tensor maps, innermost first, of boxes
//              64, 1, 64, 1 with the 128-byte swizzle; ranges [B,queries,2] int if MASK is 2
// Outputs      y [B,queries,HEADS,D] bf16; lse [B,queries,HEADS] f32
// Requires     D 64 or 128, scale > 0; q, k, v, y aligned to 16 bytes; sm_90a; outputs overlap nothing
// Launch       grid (at most ceil(ceil(queries/64)*GROUP/WORKERS)*B*KV_HEADS,1,1),
//              block 128*(WORKERS+1), dynamic shared 1024 + 2*WORKERS*128*D + 4*STAGES*KEYS*D bytes; HALF 1 leaves
//              out half of a causal step's keys where none of the unit's queries sees them, KEYS then being 128
// Traffic      read q once, k and v for each block's queries less what none of them sees; write y and lse
// Accumulates  f32, rescaled when a row's maximum grows
// Determinism  bitwise
// Source       arXiv:2307.08691, arXiv:2407.08608

// The softmax state of a lane's two rows, g and g + 8 of the warp's 16: the largest score, and this lane's part
// of the sum.
struct Rows {
    float m_low, m_high, l_low, l_high;
};

// Turns scores of keys s0.. into probabilities, relative to the new maximum; what was summed before counts
// shrink_low and shrink_high times.
template <int BLOCKS>
__device__ __forceinline__ void softmax(float (&s)[KEYS / 8][4], Rows& rows, int s0, const Reach& mine,
                                        const int* __restrict__ ranges, int b, int t_low, int queries, int keys,
                                        float unit, float& shrink_low, float& shrink_high) {
    if (mine.inner_lo > s0 || mine.inner_hi < s0 + 8 * BLOCKS) {
        const Span low = visible(ranges, b, t_low, queries, keys), high = visible(ranges, b, t_low + 8, queries, keys);
#pragma unroll
        for (int n = 0; n < BLOCKS; n++) {
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const int key = s0 + n * 8 + threadIdx.x % 4 * 2 + e;
                if (key < low.lo || key >= low.hi) s[n][e] = -INFINITY_F;
                if (key < high.lo || key >= high.hi) s[n][2 + e] = -INFINITY_F;
            }
        }
    }
    // Two chains a row, so that the next comparison need not wait for the last.
    float top_low[2] = {rows.m_low, rows.m_low}, top_high[2] = {rows.m_high, rows.m_high};
#pragma unroll
    for (int n = 0; n < BLOCKS; n++) {
#pragma unroll
        for (int e = 0; e < 2; e++) {
            top_low[e] = fmaxf(top_low[e], s[n][e]);
            top_high[e] = fmaxf(top_high[e], s[n][2 + e]);
        }
    }
    top_low[0] = fmaxf(top_low[0], top_low[1]);
    top_high[0] = fmaxf(top_high[0], top_high[1]);
    // The four lanes of a row.
#pragma unroll
    for (int x = 1; x < 4; x *= 2) {
        top_low[0] = fmaxf(top_low[0], __shfl_xor_sync(FULL_WARP, top_low[0], x));
        top_high[0] = fmaxf(top_high[0], __shfl_xor_sync(FULL_WARP, top_high[0], x));
    }
    const float m_low = top_low[0], m_high = top_high[0];
    const float base_low = m_low == -INFINITY_F ? 0.0f : m_low * unit;
    const float base_high = m_high == -INFINITY_F ? 0.0f : m_high * unit;
    shrink_low = exp2_fast(rows.m_low * unit - base_low);
    shrink_high = exp2_fast(rows.m_high * unit - base_high);
    rows.m_low = m_low;
    rows.m_high = m_high;
    float sum_low[2] = {rows.l_low * shrink_low, 0.0f}, sum_high[2] = {rows.l_high * shrink_high, 0.0f};
#pragma unroll
    for (int n = 0; n < BLOCKS; n++) {
#pragma unroll
        for (int e = 0; e < 2; e++) {
            s[n][e] = exp2_fast(s[n][e] * unit - base_low);
            s[n][2 + e] = exp2_fast(s[n][2 + e] * unit - base_high);
            sum_low[e] += s[n][e];
            sum_high[e] += s[n][2 + e];
        }
    }
    rows.l_low = sum_low[0] + sum_low[1];
    rows.l_high = sum_high[0] + sum_high[1];
}

template <int BLOCKS>
__device__ __forceinline__ void round_to_operand(u32 (&p)[KEYS / 16][4], const float (&s)[KEYS / 8][4]) {
#pragma unroll
    for (int k = 0; k < BLOCKS / 2; k++) a_of_c(p[k], s[2 * k], s[2 * k + 1]);
}

template <int KEYS_NOW>
__device__ __forceinline__ void score(float (&s)[KEYS / 8][4], u32 q_tile, u32 k_tile) {
#pragma unroll
    for (int k = 0; k < D / 16; k++) {
        wgmma<KEYS_NOW>(s, columns<64>(q_tile, k), columns<KEYS>(k_tile, k), k > 0);
    }
    products_commit();
}

// Workers issue their products in turns, so that one computes its softmax while the tensor cores serve another:
// left alone, all would wait for products at one time and for the softmax at another.
__device__ __forceinline__ void turn_wait(int worker) {
    if (WORKERS > 1) meet(8 + worker, 256);
}
__device__ __forceinline__ void turn_pass(int worker) {
    if (WORKERS > 1) meet_later(8 + (worker + 1) % WORKERS, 256);
}

extern "C" __global__ void __launch_bounds__(128 * (WORKERS + 1), 1)
    attention_wgmma_fwd(const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map,
                        const __grid_constant__ TensorMap v_map, const int* __restrict__ ranges,
                        bf16* __restrict__ y, float* __restrict__ lse, int batch, int queries, int keys, float scale,
                        int section) {
    extern __shared__ uint4 shared[];
    __shared__ u64 barriers[4 * STAGES + 4 * WORKERS];
    // What the copying warp says of an item: its batch row, key head, first unit, and the keys that its units see.
    __shared__ int orders[2][5];
    // Two places for the queries of each worker, then keys and values of each step.
    const u32 q_tiles = (shared_address(shared) + 1023) / 1024 * 1024;
    const u32 k_tiles = q_tiles + 2 * WORKERS * UNIT_BYTES, v_tiles = k_tiles + STAGES * STEP_BYTES;
    const u32 k_full = shared_address(barriers), k_empty = k_full + 8 * STAGES, v_full = k_empty + 8 * STAGES,
              v_empty = v_full + 8 * STAGES, q_full = v_empty + 8 * STAGES, q_empty = q_full + 16 * WORKERS;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            barrier_init(k_full + 8 * i, 1);
            barrier_init(v_full + 8 * i, 1);
            barrier_init(k_empty + 8 * i, 4 * WORKERS);
            barrier_init(v_empty + 8 * i, 4 * WORKERS);
        }
        for (int i = 0; i < 2 * WORKERS; i++) {
            barrier_init(q_full + 8 * i, 1);
            barrier_init(q_empty + 8 * i, 4);
        }
        barriers_ready();
    }
    // One warp waits for all: with every warp ptxas finds too few registers for the products of HALF and waits for each.
    if (threadIdx.x < 32) await_earlier_work();
    __syncthreads();
    const int units = (queries + 63) / 64 * GROUP, blocks = (units + WORKERS - 1) / WORKERS;
    const int items = blocks * batch * KV_HEADS, worker = __shfl_sync(FULL_WARP, (int)threadIdx.x / 128, 0) - 1;
    const int lane = threadIdx.x % 32, warp = __shfl_sync(FULL_WARP, (int)threadIdx.x / 32, 0) % 4;
    u32 step = 0;
    if (worker < 0) {
        give_registers<SPARE>();
        if (warp != 0) return;
        for (int round = 0;; round++) {
            const int item = item_of(round);
            if (round * gridDim.x >= items) break;
            if (item >= items) continue;
            const Work work = work_of(item, batch, blocks, section);
            // Late queries, which have most to do under a causal mask, come first.
            const int first_unit = (blocks - 1 - work.block) * WORKERS;
            int lo = keys, hi = 0;
            for (int i = 0; i < WORKERS && first_unit + i < units; i++) {
                const Reach r = reach(ranges, work.b, (first_unit + i) / GROUP * 64, queries, keys);
                lo = min(lo, r.lo);
                hi = max(hi, r.hi);
            }
            if (lane == 0) {
                for (int i = 0; i < WORKERS; i++) {
                    barrier_wait(q_empty + 8 * (2 * i + round % 2), (round / 2 & 1) ^ 1);
                }
                int* const order = orders[round % 2];
                order[0] = work.b;
                order[1] = work.kv;
                order[2] = first_unit;
                order[3] = lo;
                order[4] = hi;
                for (int i = 0; i < WORKERS; i++) {
                    const int unit = first_unit + i, place = 2 * i + round % 2;
                    if (unit >= units) {
                        barrier_arrive(q_full + 8 * place);
                        continue;
                    }
                    barrier_arrive_and_expect(q_full + 8 * place, UNIT_BYTES);
                    copy_rows<64>(q_tiles + place * UNIT_BYTES, q_map, q_full + 8 * place,
                                  work.kv * GROUP + unit % GROUP, unit / GROUP * 64, work.b);
                }
            }
            for (int tile = (hi + KEYS - 1) / KEYS - 1; tile >= lo / KEYS; tile--, step++) {
                const u32 stage = step % STAGES, parity = step / STAGES & 1;
                if (lane != 0) continue;
                barrier_wait(k_empty + 8 * stage, parity ^ 1);
                barrier_arrive_and_expect(k_full + 8 * stage, STEP_BYTES);
                copy_rows<KEYS>(k_tiles + stage * STEP_BYTES, k_map, k_full + 8 * stage, work.kv, tile * KEYS, work.b);
                barrier_wait(v_empty + 8 * stage, parity ^ 1);
                barrier_arrive_and_expect(v_full + 8 * stage, STEP_BYTES);
                copy_rows<KEYS>(v_tiles + stage * STEP_BYTES, v_map, v_full + 8 * stage, work.kv, tile * KEYS, work.b);
            }
        }
    } else {
        take_registers<SHARE>();
        const float unit = scale * LOG2_E;
        if (worker == WORKERS - 1) turn_pass(worker);
        for (int round = 0;; round++) {
            const int item = item_of(round);
            if (round * gridDim.x >= items) break;
            if (item >= items) continue;
            const int place = 2 * worker + round % 2;
            barrier_wait(q_full + 8 * place, round / 2 & 1);
            const int* const order = orders[round % 2];
            const int b = order[0], kv = order[1], lo = order[3], hi = order[4];
            const int my_unit = order[2] + worker;
            const bool busy = my_unit < units;
            const int t0 = my_unit / GROUP * 64, head = kv * GROUP + my_unit % GROUP;
            Reach mine = {keys, 0, 0, 0};
            if (busy) mine = reach(ranges, b, t0, queries, keys);
            const int t_low = t0 + warp * 16 + lane / 4, t_high = t_low + 8;
            const int last = (hi + KEYS - 1) / KEYS - 1, first = lo / KEYS;
            int my_last = first - 1, my_first = first;
            if (mine.hi > mine.lo) {
                my_last = (mine.hi + KEYS - 1) / KEYS - 1;
                my_first = mine.lo / KEYS;
            }
            // Steps of other workers only.
            auto skip = [&]() {
                const u32 stage = step % STAGES, parity = step / STAGES & 1;
                barrier_wait(k_full + 8 * stage, parity);
                barrier_wait(v_full + 8 * stage, parity);
                if (lane == 0) {
                    barrier_arrive(k_empty + 8 * stage);
                    barrier_arrive(v_empty + 8 * stage);
                }
                turn_wait(worker);
                turn_pass(worker);
                step++;
            };
            const u32 q_tile = q_tiles + place * UNIT_BYTES;
            for (int tile = last; tile > my_last; tile--) skip();
            float o[D / 8][4];
#pragma unroll
            for (int n = 0; n < D / 8; n++) o[n][0] = o[n][1] = o[n][2] = o[n][3] = 0.0f;
            Rows rows = {-INFINITY_F, -INFINITY_F, 0.0f, 0.0f};
            if (my_last >= my_first) {
                float s[KEYS / 8][4], shrink_low, shrink_high;
                u32 p[KEYS / 16][4];
                int s0 = my_last * KEYS;
                u32 stage = step % STAGES;
                barrier_wait(k_full + 8 * stage, step / STAGES & 1);
                turn_wait(worker);
                products_begin();
                // Of the first step's keys, the later half may be hidden from all.
                const bool half = HALF && mine.hi - s0 <= 64;
                if (half) {
                    score<64>(s, q_tile, k_tiles + stage * STEP_BYTES);
                    turn_pass(worker);
                    products_wait<0>();
                    hold(s);
                    softmax<8>(s, rows, s0, mine, ranges, b, t_low, queries, keys, unit, shrink_low,
                               shrink_high);
                    round_to_operand<8>(p, s);
                } else {
                    score<KEYS>(s, q_tile, k_tiles + stage * STEP_BYTES);
                    turn_pass(worker);
                    products_wait<0>();
                    hold(s);
                    softmax<KEYS / 8>(s, rows, s0, mine, ranges, b, t_low, queries, keys, unit, shrink_low,
                                      shrink_high);
                    round_to_operand<KEYS / 8>(p, s);
                }
                if (lane == 0) barrier_arrive(k_empty + 8 * stage);
                bool short_step = half;
                for (int tile = my_last - 1; tile >= my_first; tile--) {
                    const u32 next = (step + 1) % STAGES;
                    barrier_wait(k_full + 8 * next, (step + 1) / STAGES & 1);
                    barrier_wait(v_full + 8 * stage, step / STAGES & 1);
                    hold(s);
                    turn_wait(worker);
                    products_begin();
                    score<KEYS>(s, q_tile, k_tiles + next * STEP_BYTES);
#pragma unroll
                    for (int k = 0; k < KEYS / 16; k++) {
                        if (k == 4 && short_step) break;
                        wgmma<D, 1>(o, p[k], rows_of<KEYS>(v_tiles + stage * STEP_BYTES, k), 1);
                    }
                    products_commit();
                    turn_pass(worker);
                    products_wait<1>();
                    hold(s);
                    if (lane == 0) barrier_arrive(k_empty + 8 * next);
                    s0 = tile * KEYS;
                    softmax<KEYS / 8>(s, rows, s0, mine, ranges, b, t_low, queries, keys, unit, shrink_low,
                                      shrink_high);
                    // All of that while the product with the values runs.
                    hold(s);
                    products_wait<0>();
                    hold(o);
                    hold(p);
                    if (lane == 0) barrier_arrive(v_empty + 8 * stage);
#pragma unroll
                    for (int n = 0; n < D / 8; n++) {
                        o[n][0] *= shrink_low;
                        o[n][1] *= shrink_low;
                        o[n][2] *= shrink_high;
                        o[n][3] *= shrink_high;
                    }
                    round_to_operand<KEYS / 8>(p, s);
                    stage = next;
                    step++;
                    short_step = false;
                }
                barrier_wait(v_full + 8 * stage, step / STAGES & 1);
                hold(o);
                hold(p);
                products_begin();
#pragma unroll
                for (int k = 0; k < KEYS / 16; k++) {
                    if (k == 4 && short_step) break;
                    wgmma<D, 1>(o, p[k], rows_of<KEYS>(v_tiles + stage * STEP_BYTES, k), 1);
                }
                products_commit();
                products_wait<0>();
                hold(o);
                if (lane == 0) barrier_arrive(v_empty + 8 * stage);
                step++;
            }
            for (int tile = my_first - 1; tile >= first; tile--) skip();
            if (!busy) {
                __syncwarp();
                if (lane == 0) barrier_arrive(q_empty + 8 * place);
                continue;
            }
            float l_low = rows.l_low, l_high = rows.l_high;
#pragma unroll
            for (int x = 1; x < 4; x *= 2) {
                l_low += __shfl_xor_sync(FULL_WARP, l_low, x);
                l_high += __shfl_xor_sync(FULL_WARP, l_high, x);
            }
            // A sum of 0 is a query that sees nothing.
            const Span low = visible(ranges, b, t_low, queries, keys);
            const Span high = visible(ranges, b, t_high, queries, keys);
            const float out_low = low.hi < 0 ? NAN_F : l_low == 0.0f ? 0.0f : 1.0f / l_low;
            const float out_high = high.hi < 0 ? NAN_F : l_high == 0.0f ? 0.0f : 1.0f / l_high;
            // No warp of this worker reads its queries any more.
            meet(1 + worker, 128);
            const i64 row = (i64)b * queries * HEADS + head;
            store_rows<64>(y + row * D, HEADS * D, t0 + warp * 16, queries, q_tile, warp * 16, o, out_low, out_high);
            async_fence();
            __syncwarp();
            if (lane == 0) barrier_arrive(q_empty + 8 * place);
            if (lane % 4 == 0 && t_low < queries) {
                lse[row + (i64)t_low * HEADS] = low.hi < 0 ? NAN_F
                                                : l_low == 0.0f ? -INFINITY_F
                                                                : rows.m_low * scale + logf(l_low);
            }
            if (lane % 4 == 0 && t_high < queries) {
                lse[row + (i64)t_high * HEADS] = high.hi < 0 ? NAN_F
                                                 : l_high == 0.0f ? -INFINITY_F
                                                                  : rows.m_high * scale + logf(l_high);
            }
        }
    }
}
