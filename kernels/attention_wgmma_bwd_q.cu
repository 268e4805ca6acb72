// attention_wgmma_bwd_q -- gradient of units of 64 queries of one head for each worker, or for TEAM workers, of which
// each takes every TEAM-th step, on Hopper, and what the gradient of the keys needs of them.
// Computes     what attention_delta and attention_bwd_q compute, with ds rounded to bf16 before its product with k
// Inputs       q, k, v as attention_wgmma_fwd, dy [B,queries,HEADS,D] bf16 as such a map; y [B,queries,HEADS,D]
//              bf16; lse [B,queries,HEADS] f32; ranges [B,queries,2] int if MASK is 2; angles [B,queries,D/2] float2
//              of rope_angles if TURN is 1: dq is turned back by them
// Outputs      dq [B,queries,HEADS,D] bf16, tokens Q_STRIDE elements apart; sums [B,HEADS,padded,2] f32 with
//              padded = ceil(queries/64)*64: lse/ln(2), infinite for a query that sees nothing, and
//              delta = sum(dy*y); if MASK is 2 spans [B,padded,2] int, ranges without bad ones, and reaches
//              [B,padded/64,4] int
// Requires     D 64 or 128; all aligned to 16 bytes; sm_90a; outputs overlap nothing
// Launch       grid (at most ceil(ceil(queries/64)*GROUP/UNITS)*B*KV_HEADS,1,1) with UNITS = WORKERS/TEAM,
//              block 128*(WORKERS+1), dynamic shared 1024 + 2*PLACES*UNITS*128*D + 4*STAGES*KEYS*D + (TEAM-1)*256*D bytes
// Traffic      read q, dy and y once, k and v for each block's queries less what none of them sees; write dq, sums
// Accumulates  f32; the sums of a team are added in the order of its workers
// Determinism  bitwise (no atomics)
// Source       arXiv:2307.08691, arXiv:2407.08608

// Units of a block.
#define UNITS (WORKERS / TEAM)
static_assert(TEAM == 1 || (TEAM == 2 && WORKERS == 2 && STAGES % 2 == 0), "a block is one team");

extern "C" __global__ void __launch_bounds__(128 * (WORKERS + 1), 1)
    attention_wgmma_bwd_q(const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map,
                          const __grid_constant__ TensorMap v_map, const __grid_constant__ TensorMap dy_map,
                          const int* __restrict__ ranges, const bf16* __restrict__ y, const float* __restrict__ lse,
                          bf16* __restrict__ dq, float2* __restrict__ sums, int2* __restrict__ spans,
                          int4* __restrict__ reaches, int batch, int queries, int keys, float scale, int section,
                          const float* __restrict__ angles) {
    extern __shared__ uint4 shared[];
    __shared__ u64 barriers[2 * STAGES + 2 * PLACES * UNITS];
    // PLACES for the queries and as many for the dy of each unit, then keys and values of each step.
    const u32 q_tiles = (shared_address(shared) + 1023) / 1024 * 1024;
    const u32 dy_tiles = q_tiles + PLACES * UNITS * UNIT_BYTES, k_tiles = dy_tiles + PLACES * UNITS * UNIT_BYTES;
    const u32 v_tiles = k_tiles + STAGES * STEP_BYTES;
#if TEAM == 2
    const u32 team_sums = v_tiles + STAGES * STEP_BYTES;
#endif
    const u32 full = shared_address(barriers), empty = full + 8 * STAGES, q_full = empty + 8 * STAGES,
              q_empty = q_full + 8 * PLACES * UNITS;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            barrier_init(full + 8 * i, 1);
            barrier_init(empty + 8 * i, 4 * UNITS);
        }
        for (int i = 0; i < PLACES * UNITS; i++) {
            barrier_init(q_full + 8 * i, 1);
            barrier_init(q_empty + 8 * i, 4 * TEAM);
        }
        barriers_ready();
    }
    __syncthreads();
    await_earlier_work();
    const int tiles = (queries + 63) / 64, units = tiles * GROUP, blocks = (units + UNITS - 1) / UNITS;
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
            const int first_unit = (blocks - 1 - work.block) * UNITS;
            int lo = keys, hi = 0;
            for (int i = 0; i < UNITS; i++) {
                const int unit = first_unit + i, place = PLACES * i + round % PLACES;
                if (lane == 0) barrier_wait(q_empty + 8 * place, (round / PLACES & 1) ^ 1);
                if (unit >= units) {
                    if (lane == 0) barrier_arrive(q_full + 8 * place);
                    continue;
                }
                const int first = unit / GROUP * 64, head = work.kv * GROUP + unit % GROUP;
                const Reach r = reach(ranges, work.b, first, queries, keys);
                lo = min(lo, r.lo);
                hi = max(hi, r.hi);
                if (lane == 0) {
                    const u32 barrier = q_full + 8 * place;
                    barrier_arrive_and_expect(barrier, 2 * UNIT_BYTES);
                    copy_rows<64>(q_tiles + place * UNIT_BYTES, q_map, barrier, head, first, work.b);
                    copy_rows<64>(dy_tiles + place * UNIT_BYTES, dy_map, barrier, head, first, work.b);
                }
            }
            for (int tile = lo / KEYS; tile < (hi + KEYS - 1) / KEYS; tile++, step++) {
                const u32 stage = step % STAGES;
                if (lane != 0) continue;
                barrier_wait(empty + 8 * stage, (step / STAGES & 1) ^ 1);
                barrier_arrive_and_expect(full + 8 * stage, 2 * STEP_BYTES);
                copy_rows<KEYS>(k_tiles + stage * STEP_BYTES, k_map, full + 8 * stage, work.kv, tile * KEYS, work.b);
                copy_rows<KEYS>(v_tiles + stage * STEP_BYTES, v_map, full + 8 * stage, work.kv, tile * KEYS, work.b);
            }
        }
    } else {
        take_registers<SHARE>();
        const float unit = scale * LOG2_E;
        for (int round = 0;; round++) {
            const int item = item_of(round);
            if (round * gridDim.x >= items) break;
            if (item >= items) continue;
            const Work work = work_of(item, batch, blocks, section);
            const int first_unit = (blocks - 1 - work.block) * UNITS;
            int lo = keys, hi = 0;
            Reach mine = {keys, 0, 0, 0};
            for (int i = 0; i < UNITS && first_unit + i < units; i++) {
                const Reach r = reach(ranges, work.b, (first_unit + i) / GROUP * 64, queries, keys);
                lo = min(lo, r.lo);
                hi = max(hi, r.hi);
                if (i == worker / TEAM) mine = r;
            }
            const int my_unit = first_unit + worker / TEAM;
            const bool busy = my_unit < units;
            const int t0 = my_unit / GROUP * 64, head = work.kv * GROUP + my_unit % GROUP;
            const int t_low = t0 + warp * 16 + lane / 4;
            const int place = PLACES * (worker / TEAM) + round % PLACES;
            const u32 q_tile = q_tiles + place * UNIT_BYTES, dy_tile = dy_tiles + place * UNIT_BYTES;
            const i64 row = (i64)work.b * queries * HEADS + head;
            float delta = 0.0f, lse_mine = 0.0f;
            if (busy) {
                // Two lanes a row: a half of y times dy each.
                const int r = warp * 16 + lane / 2, t = t0 + r;
                uint4 part[D / 16];
#pragma unroll
                for (int i = 0; i < D / 16; i++) part[i] = make_uint4(0, 0, 0, 0);
                lse_mine = INFINITY_F;
                if (t < queries) {
                    const uint4* from = (const uint4*)(y + (row + (i64)t * HEADS) * D) + lane % 2 * (D / 16);
#pragma unroll
                    for (int i = 0; i < D / 16; i++) part[i] = from[i];
                    lse_mine = lse[row + (i64)t * HEADS] * LOG2_E;
                    if (lse_mine == -INFINITY_F) lse_mine = INFINITY_F;
                }
                barrier_wait(q_full + 8 * place, round / PLACES & 1);
#pragma unroll
                for (int i = 0; i < D / 16; i++) {
                    const int chunk = lane % 2 * (D / 16) + i;
                    u32 x[4];
                    const u32 at = dy_tile + (chunk / 8 * 64 + r) * 128 + ((chunk % 8) ^ r % 8) * 16;
                    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                                 : "r"(at)
                                 : "memory");
                    const u32 z[4] = {part[i].x, part[i].y, part[i].z, part[i].w};
#pragma unroll
                    for (int e = 0; e < 4; e++) {
                        delta += __uint_as_float(x[e] << 16) * __uint_as_float(z[e] << 16);
                        delta += __uint_as_float(x[e] & 0xffff0000u) * __uint_as_float(z[e] & 0xffff0000u);
                    }
                }
                delta += __shfl_xor_sync(FULL_WARP, delta, 1);
                if (lane % 2 == 0 && worker % TEAM == 0) {
                    sums[((i64)work.b * HEADS + head) * tiles * 64 + t] = make_float2(lse_mine, delta);
                }
#if MASK == 2
                if (head == 0 && worker % TEAM == 0) {
                    if (lane % 2 == 0) {
                        const Span span = visible(ranges, work.b, t, queries, keys);
                        spans[(i64)work.b * tiles * 64 + t] = make_int2(span.lo, max(span.hi, 0));
                    }
                    if (warp == 0 && lane == 0) {
                        reaches[(i64)work.b * tiles + t0 / 64] =
                            make_int4(mine.lo, mine.hi, mine.inner_lo, mine.inner_hi);
                    }
                }
#endif
            } else {
                barrier_wait(q_full + 8 * place, round / PLACES & 1);
            }
            const float delta_low = __shfl_sync(FULL_WARP, delta, lane / 4 * 2);
            const float delta_high = __shfl_sync(FULL_WARP, delta, lane / 4 * 2 + 16);
            const float lse_low = __shfl_sync(FULL_WARP, lse_mine, lane / 4 * 2);
            const float lse_high = __shfl_sync(FULL_WARP, lse_mine, lane / 4 * 2 + 16);
            const int first = lo / KEYS, end = (hi + KEYS - 1) / KEYS;
            int my_first = end, my_end = end;
            if (mine.hi > mine.lo) {
                my_first = mine.lo / KEYS;
                my_end = (mine.hi + KEYS - 1) / KEYS;
            }
            // Steps of other workers only.
            auto skip = [&]() {
                const u32 stage = step % STAGES;
                barrier_wait(full + 8 * stage, step / STAGES & 1);
                if (lane == 0) barrier_arrive(empty + 8 * stage);
                step++;
            };
            for (int tile = first; tile < my_first; tile++) skip();
            float sum[D / 8][4], s[KEYS / 8][4], dp[KEYS / 8][4];
#pragma unroll
            for (int n = 0; n < D / 8; n++) sum[n][0] = sum[n][1] = sum[n][2] = sum[n][3] = 0.0f;
            // The stage that the product in flight reads, plus one; 0 if none.
            u32 held = 0;
            // The product with the keys of the step before is done.
            auto release = [&]() {
                if (held != 0 && lane == 0) barrier_arrive(empty + 8 * (held - 1));
            };
            for (int tile = my_first; tile < my_end; tile++, step++) {
#if TEAM == 2
                // By the number of the stage, so that a worker sees every phase of the barriers that it waits at.
                if (step % TEAM != worker) continue;
#endif
                const u32 stage = step % STAGES, k_tile = k_tiles + stage * STEP_BYTES;
                const u32 v_tile = v_tiles + stage * STEP_BYTES;
                barrier_wait(full + 8 * stage, step / STAGES & 1);
                products_begin();
#pragma unroll
                for (int k = 0; k < D / 16; k++) {
                    wgmma<KEYS>(s, columns<64>(q_tile, k), columns<KEYS>(k_tile, k), k > 0);
                }
                products_commit();
                if (D == 128) {
                    // The product of the step before ends here, so that dp may take the registers of its operand.
                    products_wait<1>();
                    hold(sum);
                    release();
                    held = stage + 1;
                    products_begin();
                }
#pragma unroll
                for (int k = 0; k < D / 16; k++) {
                    wgmma<KEYS>(dp, columns<64>(dy_tile, k), columns<KEYS>(v_tile, k), k > 0);
                }
                products_commit();
                products_wait<1>();
                hold(s);
                if (D == 64) {
                    release();
                    held = stage + 1;
                }
                const int s0 = tile * KEYS;
                if (mine.inner_lo > s0 || mine.inner_hi < s0 + KEYS) {
                    const Span low = visible(ranges, work.b, t_low, queries, keys);
                    const Span high = visible(ranges, work.b, t_low + 8, queries, keys);
#pragma unroll
                    for (int n = 0; n < KEYS / 8; n++) {
#pragma unroll
                        for (int e = 0; e < 2; e++) {
                            const int key = s0 + n * 8 + lane % 4 * 2 + e;
                            if (key < low.lo || key >= low.hi) s[n][e] = -INFINITY_F;
                            if (key < high.lo || key >= high.hi) s[n][2 + e] = -INFINITY_F;
                        }
                    }
                }
#pragma unroll
                for (int n = 0; n < KEYS / 8; n++) {
#pragma unroll
                    for (int e = 0; e < 2; e++) {
                        s[n][e] = exp2_fast(s[n][e] * unit - lse_low);
                        s[n][2 + e] = exp2_fast(s[n][2 + e] * unit - lse_high);
                    }
                }
                hold(s);
                products_wait<0>();
                hold(dp);
#pragma unroll
                for (int n = 0; n < KEYS / 8; n++) {
#pragma unroll
                    for (int e = 0; e < 2; e++) {
                        s[n][e] *= dp[n][e] - delta_low;
                        s[n][2 + e] *= dp[n][2 + e] - delta_high;
                    }
                }
                u32 ds[KEYS / 16][4];
#pragma unroll
                for (int k = 0; k < KEYS / 16; k++) a_of_c(ds[k], s[2 * k], s[2 * k + 1]);
                hold(ds);
                hold(sum);
                products_begin();
#pragma unroll
                for (int k = 0; k < KEYS / 16; k++) wgmma<D, 1>(sum, ds[k], rows_of<KEYS>(k_tile, k), 1);
                products_commit();
            }
            products_wait<0>();
            hold(sum);
            release();
            for (int tile = my_end; tile < end; tile++) skip();
            if (!busy) {
                if (lane == 0) barrier_arrive(q_empty + 8 * place);
                continue;
            }
#if TEAM == 2
            // The second worker hands its sums to the first, which has read those of the item before by then.
            constexpr int READY = 3, READ = 4;
            const u32 own_sums = team_sums + threadIdx.x % 128 * 16;
            if (worker == 1) {
                if (round > 0) meet(READ, 256);
                put_sums(own_sums, sum);
                meet_later(READY, 256);
                __syncwarp();
                if (lane == 0) barrier_arrive(q_empty + 8 * place);
                continue;
            }
            meet(READY, 256);
            add_sums(sum, own_sums);
            // No one waits for the last of these.
            if ((round + 1) * gridDim.x < items && item_of(round + 1) < items) meet_later(READ, 256);
#endif
            const Span low = visible(ranges, work.b, t_low, queries, keys);
            const Span high = visible(ranges, work.b, t_low + 8, queries, keys);
            // No warp of this worker reads its queries any more.
            meet(1 + worker, 128);
#if TURN
            turn_back(sum, angles + (i64)work.b * queries * D, t0 + warp * 16, queries);
#endif
            store_rows<64>(dq + (i64)work.b * queries * Q_STRIDE + head * D, Q_STRIDE, t0 + warp * 16, queries, q_tile,
                           warp * 16, sum, low.hi < 0 ? NAN_F : scale, high.hi < 0 ? NAN_F : scale);
            async_fence();
            __syncwarp();
            if (lane == 0) barrier_arrive(q_empty + 8 * place);
        }
    }
}
