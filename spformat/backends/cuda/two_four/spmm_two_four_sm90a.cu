// C[M,N] = A[M,K] @ B[K,N], A 2:4 sparse (format two-four), by wgmma.sp with A in registers. sm_90a only.
//
//   weights    u32[Mp/16 * Kp/64 + SPARE, 288]  records of two_four_records.cu; Mp = pad(M, 32), Kp = pad(K, 64);
//                                          up to Span - 1 records behind the last one of a row of tiles are read, not used
//   b_map      tensor map of B: rows of N (BCol: of K), 16-byte aligned pitch, boxes of 64 x BOX_Y, 128-byte swizzle
//   a_map      with Shared: tensor map of the records as u64[Mp/16, Kp/64 * 144], boxes of 144 x TM/16
//   c          Out[M, N]                   row i at c + i*ldc (CCol: column n at c + n*ldc); every element is written
//   Epilogue   C = alpha * A @ B + beta * C + bias (Out[M] or null) instead of A @ B; C is read only if beta is not 0
//   c_map      with `copied`: tensor map of C for store_64 in tma_store.cuh; 16-bit types
//
// Every peer brings A through shared memory, whose 128 bytes a clock then limit wgmma.sp. Here the weights are laid out once,
// when the plan is built, in the order of the registers: each warp reads its operand with contiguous 512-byte loads, straight
// from L2, and only B passes through shared memory (TMA, shared by the thread blocks of a cluster through multicast).
//
// With Shared the records come through shared memory after all, by TMA: a tile as large as 128 x 256 is then faster, because
// loads from L2 to registers hold up what wgmma reads of B. A warp loads its operand of a slab while the one before multiplies.
//
// Grid: persistent; a cluster of Cluster blocks takes Cluster row tiles of TM rows with the same TN columns, tile after tile.
// With Splits = 2 it has twice as many, each half takes half of K, then adds up half of the columns, and there is one tile a
// cluster. With `copied` C leaves through shared memory and the copy engine while the next tile multiplies.
// Warpgroup 0 issues copies of B, Stages slabs of 64 rows ahead; the other WG warpgroups each multiply 64*MT rows. Weights
// come in spans of Span slabs: one is multiplied while the next travels. All loads of a warp share one hardware
// scoreboard, so that waiting for some means waiting for all; hence no load may be younger than the span it waits for.
#include "spformat/affine.cuh"
#include "spformat/cp_async.cuh"
#include "spformat/launch_order.cuh"
#include "spformat/staged_store.cuh"
#include "spformat/tma.cuh"
#include "spformat/tma_store.cuh"
#include "spformat/two_four_stream.cuh"
#include "spformat/two_four_wgmma.cuh"

using namespace spformat;

constexpr int DEPTH = 64;    // columns of A in a slab
constexpr int RECORD = 288;  // words
constexpr int BROUGHT = 8;   // records of a tile of 16 rows that are on their way to L2 before the launch before is over

// Two blocks of a cluster share K: each sends half of its sums to the other and adds what it gets to the half number Keep.
// `sums`: this thread's place for what it gets, pieces of 16 bytes, Threads apart; `bar` completes when all of it is there.
// `peer`, `peer_bar`: the same in the other block.
template <int Keep, int Threads, int MT, int Sums>
__device__ __forceinline__ void exchange_halves(float (&acc)[MT][Sums], u32 sums, u32 bar, u32 peer, u32 peer_bar) {
    constexpr int HALF = Sums / 2;
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int i = 0; i < HALF; i += 4)
            cluster::store_async_4(peer + (m * HALF + i) * (Threads * 4), acc[m] + (1 - Keep) * HALF + i, peer_bar);
    barrier::wait_cluster(bar, 0);
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int i = 0; i < HALF; i += 4) {
            float* const x = acc[m] + Keep * HALF + i;
            const float4 other = load_shared_4(sums + (m * HALF + i) * (Threads * 4));
            x[0] += other.x, x[1] += other.y, x[2] += other.z, x[3] += other.w;
        }
}

template <class T, class Out, int WG, int MT, int TN, int Stages, int Span, int Slots, int Cluster, int Splits, int Group,
          bool Shared, bool BCol, bool CCol, bool Epilogue>
__global__ void __cluster_dims__(Cluster * Splits, 1, 1) __launch_bounds__((WG + 1) * 128, 1)
spmm_two_four_sm90a(const u32* __restrict__ weights, int M, int K, const __grid_constant__ TensorMap b_map,
                    Out* c, int N, i64 ldc, const __grid_constant__ TensorMap c_map, const __grid_constant__ TensorMap a_map, int copied, const Out* __restrict__ bias,
                    float alpha, float beta) {
    constexpr int TM = 64 * MT * WG, B_SLAB = DEPTH * TN * 2, A_SLAB = Shared ? TM / 16 * RECORD * 4 : 0, S = Stages;
    constexpr int SLAB = B_SLAB + A_SLAB;  // bytes of a stage
    constexpr int SUMS = Splits > 1 ? TM * TN * 2 : 0;  // bytes of half a tile's sums
    constexpr int PANEL = 128 / int(sizeof(Out)) < TN / Splits ? 128 / int(sizeof(Out)) : TN / Splits;  // columns
    constexpr int SCRATCH = Slots * STORE_SLOT / 4;  // bytes of a warp, where it stores alone
    static_assert(store_m16_scratch<Out, PANEL / 8> <= SCRATCH && ROWS_SCRATCH <= SCRATCH, "both ways to store use the same memory");
    // A block issues 1/Cluster of each slab of B: a range of k of every 64-column panel; BCol: a range of columns.
    constexpr int BOX_Y = (BCol ? TN : DEPTH) / Cluster;
    static_assert(TN % 64 == 0 && BOX_Y % 8 == 0, "boxes are whole 8-line groups of the swizzle");
    static_assert(S >= 2, "copies must run ahead of the product");
    static_assert(!Shared || Span == 1, "a slab in registers, and the one that is multiplied");
    static_assert(!Shared || SLAB % 1024 == 0, "the swizzle of B is a function of the address");
    extern __shared__ __align__(1024) char shared[];
    __shared__ __align__(8) u64 barriers[2 * S + (Splits > 1 ? WG : 0)];  // full, empty, the other part's sums are there

    const u32 ring = (shared_address(shared) + 1023) & ~1023u;
    const u32 full = shared_address(barriers), empty = full + 8 * S;
    const int warpgroup = threadIdx.x / 128, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int block = Cluster * Splits > 1 ? int(cluster::rank()) : 0, rank = block % Cluster, part = block / Cluster;
    const int slabs = cdiv(K, DEPTH), begin = int(i64(slabs) * part / Splits);
    const int count = int(i64(slabs) * (part + 1) / Splits) - begin;  // slabs of this part
    const int tiles_n = cdiv(N, TN), units_m = cdiv(cdiv(M, TM), Cluster);
    const i64 units = i64(units_m) * tiles_n;

    if (threadIdx.x == 0) {
        for (int s = 0; s < S; ++s) {
            barrier::init(full + 8 * s, 1);
            barrier::init(empty + 8 * s, WG * Cluster);
        }
        for (int w = 0; w < WG && Splits > 1; ++w) {
            barrier::init(full + 8 * (2 * S + w), 1);
            barrier::expect(full + 8 * (2 * S + w), SUMS / WG);
        }
        barrier::fence_init();
        tma::prefetch(b_map);
        if constexpr (Shared) tma::prefetch(a_map);
    }
    const u64 policy = N <= 4 * TN ? evict_first() : evict_normal();  // weights that are read again later should stay in L2
    const int tiles_m16 = cdiv(M, 32) * 2;

    // Unit -> first row of this block's tile and first column; Group units that share columns of B go together.
    auto place = [&](i64 unit, int& row0, int& col0) {
        const i64 per_group = i64(Group) * tiles_n;
        const bool small = units < i64(1) << 31;  // divisions of 64 bits take hundreds of clocks
        const int group = small ? int(u32(unit) / u32(per_group)) : int(unit / per_group);
        const int first = group * Group, at = int(unit - group * per_group), height = min(Group, units_m - first);
        row0 = ((first + at % height) * Cluster + rank) * TM;
        col0 = at / height * TN;
    };
    const int warp_row = (warpgroup - 1) * (64 * MT) + warp % 4 * 16;
    // This warp's first record of row tile m; rows at or beyond Mp repeat the last tile, they are never written.
    auto first_record = [&](int row0, int m) {
        return weights + (i64(min((row0 + warp_row + m * 64) / 16, tiles_m16 - 1)) * slabs + begin) * RECORD;
    };
    const i64 first_unit = blockIdx.x / (Cluster * Splits);
    if (warpgroup > 0 && lane < MT && first_unit < units && count > 0) {
        int row0, col0;
        place(first_unit, row0, col0);
        bring_to_l2(first_record(row0, lane), min(BROUGHT, count) * (RECORD * 4));
    }
    wait_for_launch_before();
    let_next_launch_begin();
    // Copies start at once, or when the whole cluster has its barriers; warps that multiply load weights meanwhile.
    constexpr int READY = 15;  // named barrier
    if constexpr (Cluster * Splits > 1) cluster::arrive();

    if (warpgroup == 0) {
        if constexpr (WG > 1) give_registers<24>();
        if constexpr (Cluster > 1) cluster::wait();
        else named_arrive(READY, (WG + 1) * 128);
        if (warp == 0 && lane == 0) {
            int stage = 0, phase = 0;
            for (i64 unit = first_unit; unit < units; unit += gridDim.x / (Cluster * Splits)) {
                int row0, col0;
                place(unit, row0, col0);
                for (int slab = begin; slab < begin + count; ++slab) {
                    barrier::wait(empty + 8 * stage, phase ^ 1);
                    barrier::expect(full + 8 * stage, SLAB);
                    if constexpr (Shared)
                        tma::load_2d(ring + stage * SLAB + B_SLAB, a_map, full + 8 * stage, slab * (RECORD / 2), row0 / 16);
#pragma unroll
                    for (int x = 0; x < (BCol ? 1 : TN); x += 64) {
                        const u32 to = ring + stage * SLAB + x * (DEPTH * 2) + rank * (BOX_Y * 128);
                        const int first = BCol ? slab * DEPTH : col0 + x;
                        const int across = (BCol ? col0 : slab * DEPTH) + rank * BOX_Y;
                        if constexpr (Cluster > 1)
                            tma::load_2d_multicast(to, b_map, full + 8 * stage, first, across,
                                                   u16(((1 << Cluster) - 1) << (part * Cluster)));
                        else tma::load_2d(to, b_map, full + 8 * stage, first, across);
                    }
                    if (++stage == S) stage = 0, phase ^= 1;
                }
            }
        }
        __syncwarp();
        if constexpr (Splits > 1 && Cluster == 1) cluster::wait();
    } else {
        if constexpr (WG > 1) take_registers<WG == 3 ? 160 : 240>();
        const u32 slots = ring + S * SLAB + (warpgroup - 1) * (Slots * STORE_SLOT);
        char* scratch = shared + (slots - shared_address(shared)) + warp % 4 * SCRATCH;
        const bool c_vector = vector_aligned(c, ldc);

        uint4 a[2][Span][MT][2];
        u32 e[2][Span][MT];
        const u32* from[MT];
        auto fetch = [&](int half) {
#pragma unroll
            for (int m = 0; m < MT; ++m) {
#pragma unroll
                for (int i = 0; i < Span; ++i) {
                    a[half][i][m][0] = stream_16(from[m] + i * RECORD + lane * 4, policy);
                    a[half][i][m][1] = stream_16(from[m] + i * RECORD + lane * 4 + 128, policy);
                    e[half][i][m] = stream_4(from[m] + i * RECORD + lane + 256, policy);
                }
                from[m] += Span * RECORD;
            }
        };
        auto take = [&](int half, u32 records) {  // the same from this warp's record of each row tile in shared memory
#pragma unroll
            for (int m = 0; m < MT; ++m) {
                const u32 record = records + (warp_row + m * 64) / 16 * (RECORD * 4);
                a[half][0][m][0] = shared_16(record + lane * 16);
                a[half][0][m][1] = shared_16(record + lane * 16 + 512);
                e[half][0][m] = shared_4(record + lane * 4 + 1024);
            }
        };
        auto start = [&](int row0) {
            if constexpr (!Shared) {
#pragma unroll
                for (int m = 0; m < MT; ++m) from[m] = first_record(row0, m);
                fetch(0);
            }
        };
        auto release = [&](int stage) {
            if constexpr (Cluster > 1) {
                if (threadIdx.x % 128 < Cluster) barrier::arrive_remote(empty + 8 * stage, part * Cluster + threadIdx.x % 128);
            } else if (threadIdx.x % 128 == 0) {
                barrier::arrive(empty + 8 * stage);
            }
        };

        int stage = 0, phase = 0, row0, col0;
        u32 stored = 0;  // panels of C
        i64 unit = first_unit;
        if (unit < units) {
            place(unit, row0, col0);
            start(row0);
        }
        if constexpr (Cluster > 1) cluster::wait();
        else named_barrier(READY, (WG + 1) * 128);
        while (unit < units) {
            float acc[MT][TN / 2];
            float2 added[MT];
#pragma unroll
            for (int m = 0; m < MT && Epilogue; ++m) added[m] = bias_m16(bias, row0 + warp_row + m * 64, M);
#pragma unroll 1
            for (int base = 0; base < count; base += 2 * Span) {
#pragma unroll
                for (int i = 0; i < 2 * Span; ++i) {
                    const int half = i / Span, slab = base + i;
                    if (slab >= count) break;
                    barrier::wait(full + 8 * stage, phase);
                    const u32 tile = ring + stage * SLAB;
                    if constexpr (Shared) take(half, tile + B_SLAB);
                    wgmma::fence();
#pragma unroll
                    for (int s = 0; s < 2; ++s) {
                        const u64 b = rows_of_half<BCol>(tile, s);
#pragma unroll
                        for (int m = 0; m < MT; ++m) {
                            const u32 word = e[half][i % Span][m];
                            const int more = s == 0 ? slab > 0 : 1;
                            multiply_half<T, TN, BCol>(acc[m], s, a[half][i % Span][m][s], word, b, more);
                        }
                    }
                    wgmma::commit();
                    wgmma::wait<1>();  // the product before this one is done: its stage and its registers are free
                    if (slab > 0) release(stage == 0 ? S - 1 : stage - 1);
                    if (!Shared && i % Span == 0 && slab + Span < count) fetch(half ^ 1);
                    if (++stage == S) stage = 0, phase ^= 1;
                }
            }
            wgmma::wait<0>();
#pragma unroll
            for (int m = 0; m < MT; ++m) wgmma::pin(acc[m]);
            release(stage == 0 ? S - 1 : stage - 1);
            const int row = row0 + warp_row, col = col0;
            unit += gridDim.x / (Cluster * Splits);
            if (unit < units) {  // the next tile's first registers travel while this one is stored
                place(unit, row0, col0);
                start(row0);
            }
            // alpha, beta and bias to what this block stores of row tile m, from column n0 on.
            auto finish = [&](float* sums, int m, int n0) {
                if constexpr (Epilogue)
                    affine_m16<Out, CCol, TN / 8 / Splits>(sums, c, ldc, row + m * 64, col + n0, M, N, added[m], alpha, beta);
            };
            // COLUMNS columns from n0 on of row tile m, by the copy engine or by ordinary stores.
            constexpr int COLUMNS = TN / Splits;
            auto store = [&](float* sums, int m, int n0) {
                if constexpr (sizeof(Out) == 2 && (CCol || COLUMNS % 64 == 0)) {
                    if (copied) {
                        store_panels_64<Out, CCol, COLUMNS, Slots>(sums, slots, stored, c_map, row - warp % 4 * 16 + m * 64, col + n0,
                                                                   warpgroup, Unchanged{});
                        return;
                    }
                }
                if constexpr (!CCol) {
                    if (!c_vector) return store_rows<Out, COLUMNS, SCRATCH>(sums, scratch, c, ldc, row + m * 64, col + n0, M, N);
                }
#pragma unroll
                for (int n = 0; n < COLUMNS; n += PANEL)
                    store_m16<Out, CCol, PANEL / 8>(sums + n / 2, scratch, c, ldc, row + m * 64, col + n0 + n, M, N, c_vector);
            };
            if constexpr (Splits > 1) {
                static_assert(Splits == 2, "two halves");
                constexpr int THREADS = WG * 128, HALF = TN / 4;  // sums of a thread that it keeps, and that it hands over
                const u32 sums = ring + S * SLAB + WG * Slots * STORE_SLOT + (threadIdx.x - 128) * 16;
                const u32 bar = full + 8 * (2 * S + warpgroup - 1), other = (1 - part) * Cluster + rank;
                const u32 peer = cluster::map(sums, other), peer_bar = cluster::map(bar, other);
                if constexpr (Cluster == 1) cluster::wait();
                if (part == 0) {
                    exchange_halves<0, THREADS>(acc, sums, bar, peer, peer_bar);
#pragma unroll
                    for (int m = 0; m < MT; ++m) finish(acc[m], m, 0), store(acc[m], m, 0);
                } else {
                    exchange_halves<1, THREADS>(acc, sums, bar, peer, peer_bar);
#pragma unroll
                    for (int m = 0; m < MT; ++m) finish(acc[m] + HALF, m, TN / 2), store(acc[m] + HALF, m, TN / 2);
                }
            } else {
#pragma unroll
                for (int m = 0; m < MT; ++m) finish(acc[m], m, 0), store(acc[m], m, 0);
            }
        }
        if (threadIdx.x % 128 == 0) tma::store_wait_read<0>();
        __syncwarp();
    }
    if constexpr (Cluster > 1) cluster::sync();  // peers may still copy to, and arrive in, this block's shared memory
}
