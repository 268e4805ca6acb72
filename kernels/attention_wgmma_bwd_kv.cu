// attention_wgmma_bwd_kv -- gradients of 64 keys and values of one key head for each worker, or for TEAM workers, of
// which each takes every TEAM-th step, on Hopper. SPLIT blocks share an item where it is more than 1: each has some of
// the query heads.
// Computes     what attention_bwd_kv computes, with p and ds rounded to bf16 before their products with dy and q
// Inputs       q, k, v, dy as attention_wgmma_bwd_q; sums, spans, reaches as that kernel leaves them;
//              angles [B,keys,D/2] float2 of rope_angles if TURN is 1: dk is turned back by them
// Outputs      dk, dv [B,keys,KV_HEADS,D] bf16, tokens K_STRIDE elements apart
// Requires     D 64 or 128; all aligned to 16 bytes; sm_90a; outputs overlap nothing
// Launch       grid (at most ceil(keys/(64*UNITS))*B*KV_HEADS,1,1) with UNITS = WORKERS/TEAM, block 128*(WORKERS+1);
//              with SPLIT above 1 exactly SPLIT times so many blocks, in clusters of SPLIT, which divides the query heads
//              of a key head;
//              dynamic shared 1024 + 2*PLACES*UNITS*128*D + STAGES*(2*128*D + 1024) + (TEAM-1)*UNITS*32768 bytes;
//              PLACES 1 with heads of 128
// Traffic      read k and v once, q and dy for each block's keys less what meets none of them; write dk and dv
// Accumulates  f32; the sums of a team are added in the order of its workers, then those of a cluster from its
//              own on by rank
// Determinism  bitwise (no atomics)
// Source       arXiv:2307.08691, arXiv:2407.08608

// Sums and spans of 64 queries.
#define ROW_BYTES (64 * 8)
// Pieces of 64 keys of a block.
#define UNITS (WORKERS / TEAM)
// Query heads of a block.
#define PER_BLOCK (GROUP / SPLIT)
static_assert(SPLIT == 1 || (TEAM == 2 && GROUP % SPLIT == 0), "blocks that share an item hand over a team's sums");
static_assert(D == 64 || PLACES == 1, "sums of values take the place of keys and values");
static_assert(TEAM == 1 || (TEAM == 2 && WORKERS == 2 && STAGES % 2 == 0), "a block is one team");

// What queries 64*tile.. see, as bwd_q found it or by rule.
__device__ __forceinline__ Reach reach_of(const int4* __restrict__ reaches, int b, int tile, int tiles, int queries,
                                          int keys) {
#if MASK == 2
    const int4 r = reaches[(i64)b * tiles + tile];
    const Reach found = {r.x, r.y, r.z, r.w};
    return found;
#else
    return reach(0, b, tile * 64, queries, keys);
#endif
}

// The sums of a lane's two queries of fragment n.
__device__ __forceinline__ void load_sums(float (&lse)[2], float (&delta)[2], u32 rows, int n) {
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(lse[0]), "=f"(delta[0]), "=f"(lse[1]), "=f"(delta[1])
                 : "r"(rows + (n * 8 + threadIdx.x % 4 * 2) * 8)
                 : "memory");
}

// Whether there is a round of this number, and the item of the block, or of its cluster, in it.
__device__ __forceinline__ bool has_round(int round, int items) {
    return SPLIT > 1 ? round == 0 : round * gridDim.x < items;
}
__device__ __forceinline__ int item_in(int round) { return SPLIT > 1 ? blockIdx.x / SPLIT : item_of(round); }

#if SPLIT > 1
// Adds sums that another block of the cluster holds at the same place.
__device__ __forceinline__ void add_sums_of(float (&c)[D / 8][4], u32 from, int rank) {
    u32 there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(from), "r"(rank));
#pragma unroll
    for (int n = 0; n < D / 8; n++) {
        float x[4];
        asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                     : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3])
                     : "r"(there + n * 2048)
                     : "memory");
#pragma unroll
        for (int e = 0; e < 4; e++) c[n][e] += x[e];
    }
}
#endif

extern "C" __global__ void
#if SPLIT > 1
__cluster_dims__(SPLIT, 1, 1)
#endif
    __launch_bounds__(128 * (WORKERS + 1), 1)
    attention_wgmma_bwd_kv(const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map,
                           const __grid_constant__ TensorMap v_map, const __grid_constant__ TensorMap dy_map,
                           const float2* __restrict__ sums, const int2* __restrict__ spans,
                           const int4* __restrict__ reaches, bf16* __restrict__ dk, bf16* __restrict__ dv, int batch,
                           int queries, int keys, float scale, int section, const float* __restrict__ angles) {
    extern __shared__ uint4 shared[];
    __shared__ u64 barriers[2 * STAGES + 2 * PLACES];
    // Keys and values of an item, PLACES times; then queries, dy, and the numbers of each of their rows.
    const u32 k_tiles = (shared_address(shared) + 1023) / 1024 * 1024;
    const u32 v_tiles = k_tiles + PLACES * UNITS * UNIT_BYTES, q_tiles = v_tiles + PLACES * UNITS * UNIT_BYTES;
    const u32 dy_tiles = q_tiles + STAGES * UNIT_BYTES, row_tiles = dy_tiles + STAGES * UNIT_BYTES;
    // Where workers and blocks hand over their sums: of heads of 128 those of values in the place of keys and values,
    // which no one reads by then.
    const u32 team_sums = row_tiles + STAGES * 2 * ROW_BYTES, key_sums = team_sums + threadIdx.x % 128 * 16;
    const u32 value_sums = D == 128 ? k_tiles + threadIdx.x % 128 * 16 : key_sums + D / 8 * 2048;
    const u32 full = shared_address(barriers), empty = full + 8 * STAGES, k_full = empty + 8 * STAGES,
              k_empty = k_full + 8 * PLACES;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            barrier_init(full + 8 * i, 1);
            barrier_init(empty + 8 * i, 4 * UNITS);
        }
        for (int i = 0; i < PLACES; i++) {
            barrier_init(k_full + 8 * i, 1);
            barrier_init(k_empty + 8 * i, 4 * WORKERS);
        }
        barriers_ready();
    }
    __syncthreads();
    await_earlier_work();
    const int tiles = (queries + 63) / 64, blocks = (keys + 64 * UNITS - 1) / (64 * UNITS);
    const int items = blocks * batch * KV_HEADS, worker = __shfl_sync(FULL_WARP, (int)threadIdx.x / 128, 0) - 1;
    const int lane = threadIdx.x % 32, warp = __shfl_sync(FULL_WARP, (int)threadIdx.x / 32, 0) % 4;
    const int rank = SPLIT > 1 ? blockIdx.x % SPLIT : 0;
    u32 step = 0;
    if (worker < 0) {
        give_registers<SPARE>();
        if (warp != 0 || lane != 0) return;
        for (int round = 0;; round++) {
            if (!has_round(round, items)) break;
            const int item = item_in(round);
            if (item >= items) continue;
            const Work work = work_of(item, batch, blocks, section);
            const int s0 = work.block * 64 * UNITS, place = round % PLACES;
            barrier_wait(k_empty + 8 * place, (round / PLACES & 1) ^ 1);
            barrier_arrive_and_expect(k_full + 8 * place, 2 * UNITS * UNIT_BYTES);
            for (int i = 0; i < UNITS; i++) {
                const u32 at = (place * UNITS + i) * UNIT_BYTES;
                copy_rows<64>(k_tiles + at, k_map, k_full + 8 * place, work.kv, s0 + 64 * i, work.b);
                copy_rows<64>(v_tiles + at, v_map, k_full + 8 * place, work.kv, s0 + 64 * i, work.b);
            }
            for (int tile = 0; tile < tiles; tile++) {
                const Reach r = reach_of(reaches, work.b, tile, tiles, queries, keys);
                if (r.lo >= s0 + 64 * UNITS || r.hi <= s0) continue;
                const int first_head = work.kv * GROUP + rank * PER_BLOCK;
                for (int head = first_head; head < first_head + PER_BLOCK; head++, step++) {
                    const u32 stage = step % STAGES, barrier = full + 8 * stage;
                    barrier_wait(empty + 8 * stage, (step / STAGES & 1) ^ 1);
                    barrier_arrive_and_expect(barrier, 2 * UNIT_BYTES + (MASK == 2 ? 2 : 1) * ROW_BYTES);
                    copy_rows<64>(q_tiles + stage * UNIT_BYTES, q_map, barrier, head, tile * 64, work.b);
                    copy_rows<64>(dy_tiles + stage * UNIT_BYTES, dy_map, barrier, head, tile * 64, work.b);
                    const u32 rows = row_tiles + stage * 2 * ROW_BYTES;
                    copy_bulk(rows, sums + (((i64)work.b * HEADS + head) * tiles + tile) * 64, ROW_BYTES, barrier);
                    if (MASK == 2) {
                        copy_bulk(rows + ROW_BYTES, spans + ((i64)work.b * tiles + tile) * 64, ROW_BYTES, barrier);
                    }
                }
            }
        }
    } else {
        take_registers<SHARE>();
        const float unit = scale * LOG2_E;
        for (int round = 0;; round++) {
            if (!has_round(round, items)) break;
            const int item = item_in(round);
            if (item >= items) continue;
            const Work work = work_of(item, batch, blocks, section);
            const int piece = worker / TEAM, block_s0 = work.block * 64 * UNITS, place = round % PLACES;
            const int s0 = block_s0 + 64 * piece;
            const u32 k_tile = k_tiles + (place * UNITS + piece) * UNIT_BYTES;
            const u32 v_tile = v_tiles + (place * UNITS + piece) * UNIT_BYTES;
            float dk_sum[D / 8][4], dv_sum[D / 8][4], s[8][4], dp[8][4];
#pragma unroll
            for (int n = 0; n < D / 8; n++) {
#pragma unroll
                for (int e = 0; e < 4; e++) dk_sum[n][e] = dv_sum[n][e] = 0.0f;
            }
            barrier_wait(k_full + 8 * place, round / PLACES & 1);
            // The stage that the products in flight read, plus one; 0 if none.
            u32 held = 0;
            for (int tile = 0; tile < tiles; tile++) {
                const Reach r = reach_of(reaches, work.b, tile, tiles, queries, keys);
                if (r.lo >= block_s0 + 64 * UNITS || r.hi <= block_s0) continue;
                const bool mine = r.lo < s0 + 64 && r.hi > s0;
                const bool whole = r.inner_lo <= s0 && r.inner_hi >= s0 + 64;
                for (int i = 0; i < PER_BLOCK; i++, step++) {
#if TEAM == 2
                    // By the number of the stage, so that a worker sees every phase of the barriers that it waits at.
                    if (step % TEAM != worker) continue;
#endif
                    const u32 stage = step % STAGES, q_tile = q_tiles + stage * UNIT_BYTES;
                    const u32 dy_tile = dy_tiles + stage * UNIT_BYTES, rows = row_tiles + stage * 2 * ROW_BYTES;
                    barrier_wait(full + 8 * stage, step / STAGES & 1);
                    if (!mine) {
                        if (held != 0) {
                            // The copies may need the stage that the last products read.
                            products_wait<0>();
                            hold(dk_sum);
                            hold(dv_sum);
                            __syncwarp();
                            if (lane == 0) barrier_arrive(empty + 8 * (held - 1));
                            held = 0;
                        }
                        if (lane == 0) barrier_arrive(empty + 8 * stage);
                        continue;
                    }
                    products_begin();
                    // Scores and dy v^T, transposed: keys g and g + 8 of the warp's 16 by 64 queries.
#pragma unroll
                    for (int k = 0; k < D / 16; k++) {
                        wgmma<64>(s, columns<64>(k_tile, k), columns<64>(q_tile, k), k > 0);
                    }
                    products_commit();
                    // The products of the step before end here, so that dp may take the registers of their operands.
                    products_wait<1>();
                    hold(dk_sum);
                    hold(dv_sum);
                    __syncwarp();
                    if (held != 0 && lane == 0) barrier_arrive(empty + 8 * (held - 1));
                    held = stage + 1;
                    products_begin();
#pragma unroll
                    for (int k = 0; k < D / 16; k++) {
                        wgmma<64>(dp, columns<64>(v_tile, k), columns<64>(dy_tile, k), k > 0);
                    }
                    products_commit();
                    products_wait<1>();
                    hold(s);
                    if (!whole) {
                        const int key = s0 + warp * 16 + lane / 4;
#pragma unroll
                        for (int n = 0; n < 8; n++) {
#pragma unroll
                            for (int e = 0; e < 2; e++) {
                                const int at = n * 8 + lane % 4 * 2 + e;
#if MASK == 2
                                Span span;
                                asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];"
                                             : "=r"(span.lo), "=r"(span.hi)
                                             : "r"(rows + ROW_BYTES + at * 8)
                                             : "memory");
#else
                                const Span span = visible(0, work.b, tile * 64 + at, queries, keys);
#endif
                                if (key < span.lo || key >= span.hi) s[n][e] = -INFINITY_F;
                                if (key + 8 < span.lo || key + 8 >= span.hi) s[n][2 + e] = -INFINITY_F;
                            }
                        }
                    }
                    float delta[8][2];
#pragma unroll
                    for (int n = 0; n < 8; n++) {
                        float lse[2];
                        load_sums(lse, delta[n], rows, n);
#pragma unroll
                        for (int e = 0; e < 2; e++) {
                            s[n][e] = exp2_fast(s[n][e] * unit - lse[e]);
                            s[n][2 + e] = exp2_fast(s[n][2 + e] * unit - lse[e]);
                        }
                    }
                    u32 p[4][4], ds[4][4];
#pragma unroll
                    for (int k = 0; k < 4; k++) a_of_c(p[k], s[2 * k], s[2 * k + 1]);
                    hold(s);
                    hold(p);
                    products_wait<0>();
                    hold(dp);
                    hold(dv_sum);
                    products_begin();
#pragma unroll
                    for (int k = 0; k < 4; k++) wgmma<D, 1>(dv_sum, p[k], rows_of<64>(dy_tile, k), 1);
                    products_commit();
#pragma unroll
                    for (int n = 0; n < 8; n++) {
#pragma unroll
                        for (int e = 0; e < 2; e++) {
                            s[n][e] *= dp[n][e] - delta[n][e];
                            s[n][2 + e] *= dp[n][2 + e] - delta[n][e];
                        }
                    }
#pragma unroll
                    for (int k = 0; k < 4; k++) a_of_c(ds[k], s[2 * k], s[2 * k + 1]);
                    hold(ds);
                    hold(dk_sum);
                    products_begin();
#pragma unroll
                    for (int k = 0; k < 4; k++) wgmma<D, 1>(dk_sum, ds[k], rows_of<64>(q_tile, k), 1);
                    products_commit();
                }
            }
            products_wait<0>();
            hold(dk_sum);
            hold(dv_sum);
            __syncwarp();
            if (held != 0 && lane == 0) barrier_arrive(empty + 8 * (held - 1));
#if TEAM == 2
            // Each worker hands over one kind of sums: the first ends with the gradients of keys, the second with those
            // of values. Both have ended the item before when they meet.
            constexpr int DONE = 3, READY = 4;
            meet(DONE, 256);
            if (worker == 0) put_sums(value_sums, dv_sum);
            if (worker == 1) put_sums(key_sums, dk_sum);
            meet(READY, 256);
            if (worker == 0) add_sums(dk_sum, key_sums);
            if (worker == 1) add_sums(dv_sum, value_sums);
#endif
#if SPLIT > 1
            // The first block of the cluster ends with the gradients of keys, the second with those of values; warps
            // that have ended count as meeting.
            if (worker == 0 && rank != 0) put_sums(key_sums, dk_sum);
            if (worker == 1 && rank != 1) put_sums(value_sums, dv_sum);
            cluster_arrive();
            cluster_wait();
            for (int other = 0; other < SPLIT; other++) {
                if (worker == 0 && rank == 0 && other != 0) add_sums_of(dk_sum, key_sums, other);
                if (worker == 1 && rank == 1 && other != 1) add_sums_of(dv_sum, value_sums, other);
            }
            // The sums stay until the others have read them.
            cluster_arrive();
            cluster_wait();
#endif
            // No warp of this worker reads its keys and values, or sums, any more.
            meet(1 + worker, 128);
            const i64 offset = (i64)work.b * keys * K_STRIDE + work.kv * D;
            if ((TEAM == 1 || worker == 0) && rank == 0) {
#if TURN
                turn_back(dk_sum, angles + (i64)work.b * keys * D, s0 + warp * 16, keys);
#endif
                store_rows<64>(dk + offset, K_STRIDE, s0 + warp * 16, keys, TEAM == 1 ? k_tile : team_sums, warp * 16,
                               dk_sum, scale, scale);
            }
            if ((TEAM == 1 || worker == 1) && (SPLIT == 1 || rank == 1)) {
                store_rows<64>(dv + offset, K_STRIDE, s0 + warp * 16, keys, v_tile, warp * 16, dv_sum, 1.0f, 1.0f);
            }
            async_fence();
            __syncwarp();
            if (lane == 0) barrier_arrive(k_empty + 8 * place);
        }
    }
}
