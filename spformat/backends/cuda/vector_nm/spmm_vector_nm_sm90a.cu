// C[M,N] = A[M,K] @ B[K,N], A vector n:m (NM-SpMM) with 128 or more rows per vector, on Hopper's warpgroup instructions.
//
//   a_map    TMA map of data T[W, Mp], boxes of 64 k x 64 rows, 128-byte swizzle
//   columns  int[Q, columns_ld]   column of every kept vector of a row group; -1: none, or past K (a zero row is used)
//   B        T, rows pitch_b bytes apart; pointer and pitch multiples of 16
//   c_map    TMA map of C for store_64 in tma_store.cuh; used when by_copies, with BN a multiple of 64 where C is row-major
//   C        Out, element (m, n) at m*step_m + n*step_n, one step is 1
//   even     whether blocks share out the last rounds of tiles by steps along K (even_shares.cuh); else they take whole tiles
//   sums     with `even`: f32[gridDim.x, BN/8, 256, 4], any contents; sums of a tile whose beginning is another block's
//   flags    with `even`: u32[2 * gridDim.x], 0 before and after: sums of a block and warpgroup are there
//   together columns of tiles that do so (tile_order.cuh)
//
// A tile of 128 rows has one list of columns, so behind the loader this is a dense product whose K is the number of kept
// vectors. Hopper cannot gather rows with TMA: LOADERS warps fetch them with 16-byte cp.async (a warp per row of B), and
// A, which is contiguous, comes by TMA. Two warpgroups multiply, 64 rows x BN columns each. Both operands are contiguous
// along rows and columns, not along k ("MN-major").
//
// Persistent: a block takes pieces (in the order of tile_order.cuh) in turn, and the loaders run ahead into the next
// piece while C is written. Sums of a tile are added in the order of K whoever computes them: the same bits every run.
// Block 256 + 32*LOADERS threads.
#include "spformat/even_shares.cuh"
#include "spformat/launch_order.cuh"
#include "spformat/tile_order.cuh"
#include "spformat/tma_store.cuh"
#include "spformat/vector_nm.cuh"
#include "spformat/wgmma.cuh"

namespace spformat::vector_nm {

struct Gathered {  // ctypes counterpart: spmm_vector_nm_sm90a.Gathered
    int M, K, group_rows, columns_ld, k_tiles, row_tiles;
};

constexpr int DEPTH = 64, ROWS = 128, WORKERS = 256;  // k and rows of a stage; threads that multiply
constexpr int READY = 15;  // named barrier: the others are there

template <class T, class Out, int BN, int STAGES, int LOADERS>
__global__ void __launch_bounds__(256 + 32 * LOADERS, 1)
spmm_vector_nm_sm90a(const __grid_constant__ TensorMap a_map, const Gathered s, const int* __restrict__ columns,
                     const T* __restrict__ B, u32 pitch_b, const __grid_constant__ TensorMap c_map, int by_copies,
                     Out* __restrict__ C, int N, i64 step_m, i64 step_n, int even, float4* sums, u32* flags, int together) {
    static_assert(sizeof(T) == 2, "16-bit values");
    static_assert(BN % 32 == 0 && BN <= 256, "whole strips of C, at most one instruction wide");
    constexpr int A_BYTES = DEPTH * ROWS * 2, BLOCK = DEPTH * 128;  // of 64 k x 64 columns
    constexpr int B_BYTES = (BN + 63) / 64 * BLOCK, STAGE = A_BYTES + B_BYTES;
    static_assert(LOADERS == 4, "a whole warpgroup hands registers over, and there is room for one");
    constexpr int LINES = DEPTH / LOADERS;  // rows of B a loader fetches per stage
    extern __shared__ __align__(1024) unsigned char shared[];
    constexpr int PART = sizeof(Out) == 2 && BN % 64 == 0 ? 64 : 32, PITCH = PART + 16 / sizeof(Out);  // C leaves in strips of 16 x PART
    constexpr int SLOTS = 2;  // of 64 x 64 sums, a warpgroup's, on their way out by copies; the strips take their place
    constexpr int STRIP = 2 * SLOTS * STORE_SLOT / 8;  // bytes of a warp for them
    static_assert(16 * PITCH * sizeof(Out) <= STRIP && ROWS_SCRATCH <= STRIP, "strips fit");
    const u32 base = shared_address(shared), slots = base + STAGES * STAGE, full = slots + 2 * SLOTS * STORE_SLOT;
    const u32 empty = full + 8 * STAGES;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) barrier::init(full + 8 * i, 32 * LOADERS + 1), barrier::init(empty + 8 * i, 8);
        barrier::fence_init();
    }
    const TileOrder order{s.row_tiles, cdiv(N, BN), together};
    EvenShares work(s.row_tiles * order.columns, s.k_tiles, gridDim.x, even ? gridDim.x - 1 - blockIdx.x : blockIdx.x, even != 0);
    Piece piece;
    bool more = work.next(piece);
    wait_for_launch_before();
    let_next_launch_begin();
    auto release = [&](u32 count) {  // a consumer warp is done with that stage
        if (lane == 0) barrier::arrive(empty + 8 * (count % STAGES));
    };

    if (warp >= 8) {  // the loaders
        give_registers<88>();  // addresses of a batch of copies, so that none waits for the registers of another
        const int w = warp - 8;
        const u64 policy = evict_first();
        u32 produced = 0;  // stages filled since the start
        // This lane's columns of a piece: each is loaded one k tile ahead, the first of a piece with the last before it.
        auto list_of = [&](int row_tile, int begin) {
            const int group = row_tile * ROWS / s.group_rows;
            return columns + static_cast<i64>(group) * s.columns_ld + begin * DEPTH + w * LINES + lane % LINES;
        };
        Place place = more ? order.place(piece.tile) : Place{};
        const int* list = more ? list_of(place.row, piece.begin) : columns;
        int next = more && s.k_tiles > 0 ? __ldg(list) : 0;
        named_barrier(READY, 256 + 32 * LOADERS);
        while (more) {
            const int row_tile = place.row, first = piece.begin, last = piece.end;
            constexpr int CHUNKS = BN / 8, ROW_STEP = 32 / CHUNKS;  // ROW_STEP rows of B per instruction of a warp
            constexpr int STEPS = LINES / ROW_STEP, PERIOD = 8 / ROW_STEP, BATCH = STEPS < 8 ? STEPS : 8;
            static_assert(8 % ROW_STEP == 0, "the swizzle comes round after whole steps");
            const bool copies = lane < ROW_STEP * CHUNKS;  // all lanes, or those with whole rows
            const int chunk = lane % CHUNKS, n = place.column * BN + chunk * 8;
            const unsigned char* from = reinterpret_cast<const unsigned char*>(B + n);
            const int width = min(max(N - n, 0), 8) * 2;
            more = work.next(piece);
            if (more) place = order.place(piece.tile);
            const int* after = more ? list_of(place.row, piece.begin) : list;
            for (int k = first; k < last; ++k, ++produced) {
                const u32 stage = produced % STAGES, to = base + stage * STAGE;
                const int mine = next;
                list = k + 1 < last ? list + DEPTH : after;
                next = __ldg(list);
                if (produced >= STAGES) barrier::wait(empty + 8 * stage, produced / STAGES - 1 & 1);
                if (w == 0 && lane == 0) {
                    barrier::expect(full + 8 * stage, A_BYTES);
                    tma::load_2d(to, a_map, full + 8 * stage, row_tile * ROWS, k * DEPTH, policy);
                    tma::load_2d(to + BLOCK, a_map, full + 8 * stage, row_tile * ROWS + 64, k * DEPTH, policy);
                }
                u32 place[PERIOD];  // of this lane's copies of PERIOD steps; then 1024 bytes on
#pragma unroll
                for (int i = 0; i < PERIOD; ++i) {
                    const int row = i * ROW_STEP + lane / CHUNKS;
                    place[i] = to + A_BYTES + chunk / 8 * BLOCK + (w * LINES + row) * 128 + ((chunk ^ row) % 8) * 16;
                }
                auto column = [&](int step) { return __shfl_sync(0xFFFFFFFF, mine, step * ROW_STEP + lane / CHUNKS % ROW_STEP); };
                if (__all_sync(0xFFFFFFFF, mine >= 0 && width == 16)) {  // every column is there and whole: no zeros to write
#pragma unroll
                    for (int step = 0; step < STEPS; step += BATCH) {
                        const unsigned char* source[BATCH];
#pragma unroll
                        for (int i = 0; i < BATCH; ++i)  // unsigned: one multiply-add instead of three
                            source[i] = from + static_cast<u64>(static_cast<u32>(column(step + i))) * pitch_b;
#pragma unroll
                        for (int i = 0; i < BATCH; ++i)
                            if (copies) cp_async_16(place[(step + i) % PERIOD] + (step + i) / PERIOD * 1024, source[i]);
                    }
                } else {
#pragma unroll
                    for (int i = 0; i < STEPS; ++i) {
                        const int c = column(i);
                        if (copies)
                            cp_async_16(place[i % PERIOD] + i / PERIOD * 1024, from + static_cast<u64>(c < 0 ? 0 : c) * pitch_b,
                                        c < 0 ? 0 : width);
                    }
                }
                barrier::arrive_after_copies(full + 8 * stage);  // a loader waits for free stages only, never for its copies
            }
        }
        cp_async_wait<0>();
    } else {
        take_registers<208>();
        named_barrier(READY, 256 + 32 * LOADERS);
        const int group = warp / 4;
        Out* strip = reinterpret_cast<Out*>(shared + STAGES * STAGE + warp * STRIP);
        u32 consumed = 0, stored = 0;
        while (more) {
            const Place place = order.place(piece.tile);
            const int m0 = place.row * ROWS + warp * 16, n0 = place.column * BN;
            const int first = piece.begin, last = piece.end;
            float acc[BN / 2] = {};
            for (int k = first; k < last; ++k, ++consumed) {
                const u32 stage = consumed % STAGES, from = base + stage * STAGE;
                barrier::wait(full + 8 * stage, consumed / STAGES & 1);
                tma::fence_shared();  // cp.async wrote through the generic proxy, wgmma reads through the async proxy
                const u64 a = wgmma::descriptor(from + group * BLOCK, BLOCK, 1024, wgmma::B128);
                const u64 b = wgmma::descriptor(from + A_BYTES, BLOCK, 1024, wgmma::B128);
                wgmma::pin(acc);
                wgmma::fence();
#pragma unroll
                for (int i = 0; i < DEPTH / 16; ++i)  // 16 k = two groups of 8: 2048 bytes, 128 units of a descriptor
                    wgmma::ss<T, BN, 1, 1>(acc, a + i * 128, b + i * 128);
                wgmma::commit();
                wgmma::pin(acc);
                wgmma::wait<1>();
                if (k > first) release(consumed - 1);
            }
            wgmma::wait<0>();
            wgmma::pin(acc);
            if (last > first) release(consumed - 1);
            more = work.next(piece);

            float4* const mine = sums + threadIdx.x;  // where this thread's sums of block 0 are
            if (first > 0) {
                const int own = work.share;
                hand_over<WORKERS>(acc, mine + static_cast<i64>(own) * (BN / 8 * WORKERS), flags + 2 * own + group, group + 1);
                continue;
            }
            if (last < s.k_tiles) {
                constexpr int SUMS = BN / 8 * WORKERS;  // pieces of a block
                const int next = work.share + 1;
                take_over<WORKERS>(acc, mine + static_cast<i64>(next) * SUMS, SUMS, flags + 2 * next + group, 2,
                                   work.others(s.k_tiles - last), group + 1);
            }

            if constexpr (sizeof(Out) == 2) {
                const u32 mine_out = slots + group * SLOTS * STORE_SLOT;
                const int top = m0 - warp % 4 * 16;
                if (by_copies && step_m == 1) {
                    store_panels_64<Out, true, BN, SLOTS>(acc, mine_out, stored, c_map, top, n0, group + 1, Unchanged{});
                    continue;
                }
                if constexpr (BN % 64 == 0) {
                    if (by_copies) {
                        store_panels_64<Out, false, BN, SLOTS>(acc, mine_out, stored, c_map, top, n0, group + 1, Unchanged{});
                        continue;
                    }
                }
            }
            if (step_n == 1 && !vector_aligned(C, step_m)) {
                store_rows<Out, BN, STRIP>(acc, reinterpret_cast<char*>(strip), C, step_m, m0, n0, s.M, N);
                __syncwarp();
                continue;
            }
            const Target<Out> target{C, step_m, step_n, s.M, N};
#pragma unroll
            for (int part = 0; part < BN / PART; ++part) {
#pragma unroll
                for (int j = 0; j < PART / 8; ++j)
#pragma unroll
                    for (int h = 0; h < 2; ++h) {
                        const float x = acc[(part * PART / 8 + j) * 4 + 2 * h], y = acc[(part * PART / 8 + j) * 4 + 2 * h + 1];
                        Out* out = strip + (lane / 4 + 8 * h) * PITCH + 8 * j + lane % 4 * 2;
                        if constexpr (sizeof(Out) == 2) *reinterpret_cast<u32*>(out) = pack2<Out>(x, y);
                        else *reinterpret_cast<float2*>(out) = make_float2(x, y);
                    }
                __syncwarp();
                store_warp_tile<PART>(target, strip, 16, PITCH, m0, n0 + part * PART, lane);
                __syncwarp();
            }
        }
        if (stored && threadIdx.x % 128 == 0) tma::store_wait_read<0>();
    }
}

}  // namespace spformat::vector_nm
