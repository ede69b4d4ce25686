// C[M,N] = A[M,K] @ B[K,N], A 2:4 sparse (format two-four), by wgmma.sp in tiles of 128 rows and any multiple of 16 columns,
// whole, in equal shares of the steps along K, or each by a cluster of blocks that have a part of K. sm_90a only.
// docs/decisions/0029-even-shares.md, 0055-parts-of-k.md.
//
//   weights    u32[Mp/16 * Kp/64 + SPARE, 288]  records of two_four_records.cu; Mp = pad(M, 32), Kp = pad(K, 64);
//                                          up to Span - 1 records behind the last one of a row of tiles are read, not used
//   b_map      tensor map of B: rows of N (BCol: of K), 16-byte aligned pitch, boxes of 64 x 64/Cluster (BCol: 64 x TN/Cluster),
//                                          128-byte swizzle
//   c          Out[M, N]                   row i at c + i*ldc (CCol: column n at c + n*ldc); every element is written
//   c_map      with `copied`: tensor map of C for store_64 in tma_store.cuh; 16-bit types
//   even       whether clusters share out the last rounds of tiles (even_shares.cuh); else they take whole tiles
//   sums       with `even`: f32[gridDim.x, TN/8, 256, 4], any contents; sums of a tile whose beginning is another block's
//   flags      with `even`: u32[2 * gridDim.x], 0 before and after: sums of a block and warpgroup are there
//   Epilogue   C = alpha * A @ B + beta * C + bias (Out[M] or null) instead of A @ B; C is read only if beta is not 0
//
// Grid: any number of clusters; they walk over all tiles. With Parts > 1 a cluster of so many blocks for each tile: each block
// multiplies its part of the steps, and then finishes every Parts-th strip of 16 columns, whose sums all of them send to its
// shared memory. A cluster of two takes two neighbouring tiles of rows with the same
// columns, over the same steps: each block issues half of every slab of B, and both get it (multicast). Where the number of tiles
// of rows is odd, the last one's neighbour multiplies rows that are not written. Groups of 8 such units that share columns of B go
// together.
// Warpgroup 0 issues copies of B, Stages slabs of 64 rows ahead; the other two each multiply 64 rows, with weights that come
// straight from memory to registers, in spans of Span slabs: one is multiplied while the next travels. All loads of a warp share
// one hardware scoreboard, so that no load may be younger than the span it waits for.
// Sums of a tile are added in the order of K whoever computes them: the same bits every run.
#include "spformat/affine.cuh"
#include "spformat/cp_async.cuh"
#include "spformat/even_shares.cuh"
#include "spformat/launch_order.cuh"
#include "spformat/parts_of_k.cuh"
#include "spformat/staged_store.cuh"
#include "spformat/tma_store.cuh"
#include "spformat/two_four_stream.cuh"
#include "spformat/two_four_wgmma.cuh"

using namespace spformat;

constexpr int DEPTH = 64;    // columns of A in a slab
constexpr int RECORD = 288;  // words
constexpr int ROWS = 128, GROUP = 8, WORKERS = 256;

// alpha, beta and bias for a panel of C. Only one panel of what C was is in registers at a time.
template <class Out, bool CCol, bool Epilogue> struct Affine {
    Out* c;
    i64 ldc;
    int row, M, N;
    float2 added;
    float alpha, beta;
    template <class Panel> __device__ __forceinline__ void operator()(Panel, float* sums, int col) const {
        if constexpr (Epilogue) affine_m16<Out, CCol, Panel::WIDTH / 8>(sums, c, ldc, row, col, M, N, added, alpha, beta);
    }
};

// Strips of 16 columns of a tile that each block of a cluster adds up, and bytes of shared memory for them from all parts.
template <int TN, int Parts> constexpr int own_strips = (TN / 16 + Parts - 1) / Parts;
// Those of one block: the last ones have fewer.
template <int TN, int Parts> __device__ __forceinline__ int own_strips_of(int part) {
    return max(0, min(own_strips<TN, Parts>, TN / 16 - part * own_strips<TN, Parts>));
}
constexpr int STRIP = ROWS * 16 * 4;
template <int TN, int Parts> constexpr int handed_over = Parts > 1 ? own_strips<TN, Parts> * Parts * STRIP : 0;

// The sums of a tile that Parts blocks of a cluster have a part of: each adds up strips of 16 columns that follow each other, in the
// order of the parts, and stores them. `shared` has room for handed_over bytes; no copy is on its way there. bar: counts what comes from
// the others, announced.
template <class Out, int TN, int Parts, bool CCol, bool Epilogue>
__device__ __forceinline__ void finish_strips(const float (&acc)[TN / 2], u32 shared, char* scratch, int part, u32 bar, bool vector,
                                              Affine<Out, CCol, Epilogue> affine, int col) {
    cluster::arrive();  // no block of the cluster reads its slabs any more: they have room for sums
    cluster::wait();
    constexpr int OWN = own_strips<TN, Parts>;
    const int count = own_strips_of<TN, Parts>(part);
    const u32 here = shared + (threadIdx.x - 128) * 16;
#pragma unroll
    for (int strip = 0; strip < TN / 16; ++strip) {
        const u32 to = here + (strip % OWN * Parts + part) * STRIP;
        parts_of_k::send<STRIP / 2>(acc + 8 * strip, to, strip / OWN, part, bar);
    }
    barrier::wait_cluster(bar, 0);  // what this thread stored itself, it reads itself
    float sums[8 * OWN] = {};
#pragma unroll
    for (int own = 0; own < OWN; ++own)
        if (own < count) parts_of_k::add<Parts, STRIP / 2>(sums + 8 * own, here + own * Parts * STRIP);
    affine.N = min(affine.N, col + TN);  // the last block's strips may be fewer
    store_panels<Out, CCol, 16 * OWN>(sums, scratch, affine.c, affine.ldc, affine.row, col + 16 * OWN * part, affine.M, affine.N, vector, affine);
}

template <class T, class Out, int TN, int Stages, int Span, int Cluster, int Parts, bool BCol, bool CCol, bool Epilogue>
__global__ void __cluster_dims__(Cluster * Parts, 1, 1) __launch_bounds__(WORKERS + 128, 1)
spmm_two_four_shares_sm90a(const u32* __restrict__ weights, int M, int K, const __grid_constant__ TensorMap b_map, Out* c, int N,
                           i64 ldc, const __grid_constant__ TensorMap c_map, int copied, int even, float4* sums, u32* flags, const Out* __restrict__ bias, float alpha, float beta) {
    constexpr int PANELS = BCol ? 1 : (TN + 63) / 64;                 // boxes of a slab
    constexpr int SLAB = BCol ? DEPTH * TN * 2 : PANELS * DEPTH * 128;  // bytes of a stage
    constexpr int BOX_Y = (BCol ? TN : DEPTH) / Cluster;              // lines of a box
    constexpr int SLOTS = 2, SCRATCH = SLOTS * STORE_SLOT / 4;        // of a warpgroup for C; bytes of a warp, where it stores alone
    constexpr bool AHEAD = !Epilogue && Parts == 1 && TN / 2 + 18 * Span <= 166;    // registers hold a span beside the sums and their addresses
    static_assert(TN % 16 == 0 && TN <= 256, "wgmma has up to 256 columns");
    static_assert((Cluster == 1 || Cluster == 2) && BOX_Y % 8 == 0, "boxes are whole 8-line groups of the swizzle");
    static_assert(Stages >= 2, "copies must run ahead of the product");
    static_assert(Parts == 1 || Cluster == 1, "parts of K are a cluster of their own");
    constexpr int RING = Stages * SLAB > handed_over<TN, Parts> ? Stages * SLAB : handed_over<TN, Parts>;  // slabs, then sums
    static_assert(store_m16_scratch<Out, 128 / int(sizeof(Out)) / 8> <= SCRATCH && ROWS_SCRATCH <= SCRATCH, "C fits its place");
    extern __shared__ __align__(1024) char shared[];
    __shared__ __align__(8) u64 barriers[2 * Stages + (Parts > 1)];  // full, empty; sums

    const u32 ring = (shared_address(shared) + 1023) & ~1023u;
    const u32 full = shared_address(barriers), empty = full + 8 * Stages, handed = empty + 8 * Stages;
    const int warpgroup = threadIdx.x / 128, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int slabs = cdiv(K, DEPTH), tiles_n = cdiv(N, TN), units_m = cdiv(cdiv(M, ROWS), Cluster);
    const int rank = Cluster > 1 ? int(cluster::rank()) : 0, clusters = gridDim.x / Cluster;

    const int part = Parts > 1 ? int(cluster::rank()) : 0;
    if (threadIdx.x == 0) {
        for (int s = 0; s < Stages; ++s) {
            barrier::init(full + 8 * s, 1);
            barrier::init(empty + 8 * s, 2 * Cluster);
        }
        if constexpr (Parts > 1) {
            barrier::init(handed, 1);
            barrier::expect(handed, own_strips_of<TN, Parts>(part) * ((Parts - 1) * STRIP));
        }
        barrier::fence_init();
        tma::prefetch(b_map);
    }
    const int place_in_grid = blockIdx.x / Cluster, number = even ? clusters - 1 - place_in_grid : place_in_grid;
    EvenShares work(units_m * tiles_n, slabs, clusters, number, even != 0);
    Piece piece;
    bool taken = false;
    auto next = [&] {
        if constexpr (Parts == 1) return work.next(piece);
        piece = {int(blockIdx.x) / Parts, slabs * part / Parts, slabs * (part + 1) / Parts};
        return !taken && (taken = true);
    };
    // Tile of the cluster -> first row of this block's, and first column.
    auto place = [&](int tile, int& row0, int& col0) {
        const int group = units_m > GROUP ? tile / (GROUP * tiles_n) : 0, top = group * GROUP, at = tile - top * tiles_n;
        const int height = min(GROUP, units_m - top), column = at / height;
        row0 = ((top + at - column * height) * Cluster + rank) * ROWS;
        col0 = column * TN;
    };
    const int warp_row = (warpgroup - 1) * 64 + warp % 4 * 16, tiles_m16 = cdiv(M, 32) * 2;
    // This warp's first record of a piece; rows at or beyond Mp repeat the last tile, they are never written.
    auto first_record = [&](int row0) {
        return weights + (i64(min((row0 + warp_row) / 16, tiles_m16 - 1)) * slabs + piece.begin) * RECORD;
    };
    int row0 = 0, col0 = 0;
    bool more = next();
    if (more) place(piece.tile, row0, col0);
    if (warpgroup > 0 && lane == 0 && more) bring_to_l2(first_record(row0), min(Span, piece.end - piece.begin) * (RECORD * 4));
    wait_for_launch_before();
    let_next_launch_begin();
    // Copies start at once, or when both blocks have their barriers; warps that multiply load weights meanwhile.
    constexpr int READY = 15;  // named barrier
    if constexpr (Cluster > 1) cluster::arrive();

    if (warpgroup == 0) {
        give_registers<40>();  // together as many as at the start, 168 each
        if constexpr (Cluster > 1) cluster::wait();
        else named_arrive(READY, WORKERS + 128);
        if (warp == 0 && lane == 0) {
            int stage = 0, phase = 0;
            while (more) {
                for (int slab = piece.begin; slab < piece.end; ++slab) {
                    barrier::wait(empty + 8 * stage, phase ^ 1);
                    barrier::expect(full + 8 * stage, SLAB);
                    const u32 to = ring + stage * SLAB;
#pragma unroll
                    for (int x = 0; x < PANELS; ++x) {
                        const u32 box = to + x * (DEPTH * 128) + rank * (BOX_Y * 128);
                        const int along = BCol ? slab * DEPTH : col0 + x * 64;
                        const int across = (BCol ? col0 : slab * DEPTH) + rank * BOX_Y;
                        if constexpr (Cluster > 1) tma::load_2d_multicast(box, b_map, full + 8 * stage, along, across, 3);
                        else tma::load_2d(box, b_map, full + 8 * stage, along, across);
                    }
                    if (++stage == Stages) stage = 0, phase ^= 1;
                }
                more = next();
                if (more) place(piece.tile, row0, col0);
            }
        }
        __syncwarp();
        if constexpr (Parts > 1) cluster::arrive(), cluster::wait();  // as those who multiply do
    } else {
        take_registers<232>();
        const u32 slots = ring + RING + (warpgroup - 1) * (SLOTS * STORE_SLOT);
        char* const scratch = shared + (slots - shared_address(shared)) + warp % 4 * SCRATCH;
        u32 stored = 0;  // panels of C
        const bool c_vector = vector_aligned(c, ldc);
        const u64 policy = tiles_n <= 4 ? evict_first() : evict_normal();  // weights that are read again later should stay in L2

        uint4 a[2][Span][2];
        u32 e[2][Span];
        const u32* from = weights;
        auto fetch = [&](int half) {
#pragma unroll
            for (int i = 0; i < Span; ++i) {
                a[half][i][0] = stream_16(from + i * RECORD + lane * 4, policy);
                a[half][i][1] = stream_16(from + i * RECORD + lane * 4 + 128, policy);
                e[half][i] = stream_4(from + i * RECORD + lane + 256, policy);
            }
            from += Span * RECORD;
        };
        auto start = [&] {
            from = first_record(row0);
            fetch(0);
        };
        auto start_next = [&] {
            place(piece.tile, row0, col0);
            start();
        };
        auto release = [&](int stage) {
            if constexpr (Cluster > 1) {  // a copy to this stage comes from either block
                if (threadIdx.x % 128 < Cluster) barrier::arrive_remote(empty + 8 * stage, threadIdx.x % 128);
            } else if (threadIdx.x % 128 == 0) {
                barrier::arrive(empty + 8 * stage);
            }
        };

        int stage = 0, phase = 0;
        if (more) start();
        if constexpr (Cluster > 1) cluster::wait();
        else named_barrier(READY, WORKERS + 128);
        while (more) {
            const int row = row0 + warp_row, col = col0, begin = piece.begin, end = piece.end, count = end - begin;
            float acc[TN / 2];
            float2 added = make_float2(0.0f, 0.0f);
            if constexpr (Epilogue) added = bias_m16(bias, row, M);
#pragma unroll 1
            for (int base = 0; base < count; base += 2 * Span) {
#pragma unroll
                for (int i = 0; i < 2 * Span; ++i) {
                    const int half = i / Span, slab = base + i;
                    if (slab >= count) break;
                    barrier::wait(full + 8 * stage, phase);
                    const u32 tile = ring + stage * SLAB;
                    wgmma::fence();
#pragma unroll
                    for (int s = 0; s < 2; ++s) {
                        const u64 b = rows_of_half<BCol>(tile, s);
                        multiply_half<T, TN, BCol>(acc, s, a[half][i % Span][s], e[half][i % Span], b, s > 0 || slab > 0);
                    }
                    wgmma::commit();
                    wgmma::wait<1>();  // the product before this one is done: its stage and its registers are free
                    if (slab > 0) release(stage == 0 ? Stages - 1 : stage - 1);
                    if (i % Span == 0 && slab + Span < count) fetch(half ^ 1);
                    if (++stage == Stages) stage = 0, phase ^= 1;
                }
            }
            wgmma::wait<0>();
            wgmma::pin(acc);
            release(stage == 0 ? Stages - 1 : stage - 1);
            if constexpr (Parts > 1) {
                const Affine<Out, CCol, Epilogue> affine{c, ldc, row, M, N, added, alpha, beta};
                finish_strips<Out, TN, Parts, CCol, Epilogue>(acc, ring, scratch, part, handed, c_vector, affine, col);
                break;
            }
            more = next();
            if (AHEAD && more) start_next();  // the next piece's first registers travel while this one is stored

            float4* const mine = sums + threadIdx.x - 128;  // where this thread's sums of block 0 are
            if (begin > 0) {
                const int own = work.share * Cluster + rank;
                hand_over<WORKERS>(acc, mine + i64(own) * (TN / 8 * WORKERS), flags + 2 * own + warpgroup - 1, warpgroup);
                if (!AHEAD && more) start_next();
                continue;
            }
            if (end < slabs) {
                constexpr int SUMS = TN / 8 * WORKERS;  // pieces of a block
                const int next = (work.share + 1) * Cluster + rank;
                take_over<WORKERS>(acc, mine + i64(next) * SUMS, Cluster * SUMS, flags + 2 * next + warpgroup - 1, 2 * Cluster,
                                   work.others(slabs - end), warpgroup);
            }
            const Affine<Out, CCol, Epilogue> affine{c, ldc, row, M, N, added, alpha, beta};
            constexpr int COPIED = CCol ? TN : TN / 64 * 64;  // columns that the copy engine can store
            if constexpr (sizeof(Out) == 2 && COPIED > 0) {
                if (copied) {
                    store_panels_64<Out, CCol, COPIED, SLOTS>(acc, slots, stored, c_map, row - warp % 4 * 16, col, warpgroup, affine);
                    if constexpr (TN > COPIED) {
                        if (threadIdx.x % 128 == 0) tma::store_wait_read<0>();  // the rest goes through the same memory
                        named_barrier(warpgroup, 128);
                        store_panels<Out, CCol, TN - COPIED, SCRATCH>(acc + COPIED / 2, scratch, c, ldc, row, col + COPIED, M, N, c_vector, affine);
                        named_barrier(warpgroup, 128);
                    }
                    if (!AHEAD && more) start_next();
                    continue;
                }
            }
            store_panels<Out, CCol, TN, SCRATCH>(acc, scratch, c, ldc, row, col, M, N, c_vector, affine);
            if (!AHEAD && more) start_next();
        }
        if (threadIdx.x % 128 == 0) tma::store_wait_read<0>();
        __syncwarp();
    }
    // The other block may still copy to this one's shared memory, or arrive in it.
    if constexpr (Cluster > 1) cluster::sync();
}
