// C[M,N] = A[M,K] @ B[K,N], A vector n:m (NM-SpMM) with 128 or more rows per vector, on Hopper's warpgroup instructions.
//
//   a_map    TMA map of data T[W, Mp], boxes of 64 k x 64 rows, 128-byte swizzle
//   columns  int[Q, columns_ld]   column of every kept vector of a row group; -1: none, or past K (a zero row is used)
//   B        T, rows pitch_b bytes apart; pointer and pitch multiples of 16
//   c_map    TMA map of C[M, N], boxes of 64 x 64, 128-byte swizzle; used when by_copies
//   C        Out, element (m, n) at m*step_m + n*step_n, one step is 1; or, splits > 1, float[splits, M, N] partial sums
//
// A tile of 128 rows has one list of columns, so behind the loader this is a dense product whose K is the number of kept
// vectors. Hopper cannot gather rows with TMA: LOADERS warps fetch them with 16-byte cp.async (a warp per row of B), and
// A, which is contiguous, comes by TMA. Two warpgroups multiply, 64 rows x BN columns each. Both operands are contiguous
// along rows and columns, not along k ("MN-major").
//
// Persistent: a CTA takes items (row tiles fastest, then column tiles, then splits) in turn, and the loaders run ahead into
// the next item while C is written. Block 256 + 32*LOADERS threads.
#include "spformat/tma_store.cuh"
#include "spformat/vector_nm.cuh"
#include "spformat/wgmma.cuh"

namespace spformat::vector_nm {

struct Gathered {  // ctypes twin: spmm_vector_nm_sm90a.Gathered
    int M, K, group_rows, columns_ld, k_tiles, k_per_split, row_tiles, splits;
};

constexpr int DEPTH = 64, ROWS = 128;  // k and rows of a stage

template <class T, class Out, int BN, int STAGES, int LOADERS>
__global__ void __launch_bounds__(256 + 32 * LOADERS, 1)
spmm_vector_nm_sm90a(const __grid_constant__ TensorMap a_map, const Gathered s, const int* __restrict__ columns,
                     const T* __restrict__ B, u32 pitch_b, const __grid_constant__ TensorMap c_map, int by_copies,
                     Out* __restrict__ C, int N, i64 step_m, i64 step_n, i64 split_stride) {
    static_assert(sizeof(T) == 2, "16-bit values");
    static_assert(BN == 64 || BN == 128 || BN == 256, "whole 64-column groups, at most one instruction wide");
    constexpr int A_BYTES = DEPTH * ROWS * 2, B_BYTES = DEPTH * BN * 2, STAGE = A_BYTES + B_BYTES;
    static_assert(LOADERS == 4, "a whole warpgroup hands registers over, and there is room for one");
    constexpr int BLOCK = DEPTH * 128;  // bytes of 64 k x 64 columns
    constexpr int LINES = DEPTH / LOADERS;  // rows of B a loader fetches per stage
    extern __shared__ __align__(1024) unsigned char shared[];
    constexpr int PART = sizeof(Out) == 2 ? 64 : 32, PITCH = PART + 16 / sizeof(Out);  // C leaves in strips of 16 x PART
    constexpr int SLOTS = 2;  // of 64 x 64 sums, a warpgroup's, on their way out by copies; the strips take their place
    static_assert(8 * 16 * PITCH * sizeof(Out) <= 2 * SLOTS * STORE_SLOT, "strips fit");
    const u32 base = shared_address(shared), slots = base + STAGES * STAGE, full = slots + 2 * SLOTS * STORE_SLOT;
    const u32 empty = full + 8 * STAGES;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) barrier::init(full + 8 * i, 32 * LOADERS + 1), barrier::init(empty + 8 * i, 8);
        barrier::fence_init();
    }
    __syncthreads();
    const int tiles = s.row_tiles * cdiv(N, BN), items = tiles * s.splits;
    auto release = [&](u32 number) {  // a consumer warp is done with that stage
        if (lane == 0) barrier::arrive(empty + 8 * (number % STAGES));
    };

    if (warp >= 8) {  // the loaders
        give_registers<88>();  // addresses of a batch of copies, so that none waits for the registers of another
        const int w = warp - 8;
        u32 produced = 0;  // stages filled since the start
        // This lane's columns of an item: each is loaded one k tile ahead, the first of an item with the last before it.
        auto list_of = [&](int item) {
            const int split = item / tiles, row_tile = item % tiles % s.row_tiles;
            return columns + static_cast<i64>(row_tile * ROWS / s.group_rows) * s.columns_ld + split * s.k_per_split * DEPTH +
                   w * LINES + lane % LINES;
        };
        const int* list = list_of(blockIdx.x);
        int next = static_cast<int>(blockIdx.x) < items && s.k_tiles > 0 ? __ldg(list) : 0;
        for (int item = blockIdx.x; item < items; item += gridDim.x) {
            const int split = item / tiles, tile = item % tiles, row_tile = tile % s.row_tiles;
            const int first = split * s.k_per_split, last = min(first + s.k_per_split, s.k_tiles);
            constexpr int CHUNKS = BN / 8, ROW_STEP = 32 / CHUNKS;  // ROW_STEP rows of B per instruction of a warp
            constexpr int STEPS = LINES / ROW_STEP, PERIOD = 8 / ROW_STEP, BATCH = STEPS < 8 ? STEPS : 8;
            const int chunk = lane % CHUNKS, n = tile / s.row_tiles * BN + chunk * 8;
            const unsigned char* from = reinterpret_cast<const unsigned char*>(B + n);
            const int width = min(max(N - n, 0), 8) * 2;
            const int* after = item + gridDim.x < items ? list_of(item + gridDim.x) : list;
            for (int k = first; k < last; ++k, ++produced) {
                const u32 stage = produced % STAGES, to = base + stage * STAGE;
                const int mine = next;
                list = k + 1 < last ? list + DEPTH : after;
                next = __ldg(list);
                if (produced >= STAGES) barrier::wait(empty + 8 * stage, produced / STAGES - 1 & 1);
                if (w == 0 && lane == 0) {
                    barrier::expect(full + 8 * stage, A_BYTES);
                    tma::load_2d(to, a_map, full + 8 * stage, row_tile * ROWS, k * DEPTH);
                    tma::load_2d(to + BLOCK, a_map, full + 8 * stage, row_tile * ROWS + 64, k * DEPTH);
                }
                u32 place[PERIOD];  // of this lane's copies of PERIOD steps; then 1024 bytes on
#pragma unroll
                for (int i = 0; i < PERIOD; ++i) {
                    const int row = i * ROW_STEP + lane / CHUNKS;
                    place[i] = to + A_BYTES + chunk / 8 * BLOCK + (w * LINES + row) * 128 + ((chunk ^ row) % 8) * 16;
                }
                auto column = [&](int step) { return __shfl_sync(0xFFFFFFFF, mine, step * ROW_STEP + lane / CHUNKS); };
                if (__all_sync(0xFFFFFFFF, mine >= 0 && width == 16)) {  // every column is there and whole: no zeros to write
#pragma unroll
                    for (int step = 0; step < STEPS; step += BATCH) {
                        const unsigned char* source[BATCH];
#pragma unroll
                        for (int i = 0; i < BATCH; ++i)  // unsigned: one multiply-add instead of three
                            source[i] = from + static_cast<u64>(static_cast<u32>(column(step + i))) * pitch_b;
#pragma unroll
                        for (int i = 0; i < BATCH; ++i)
                            cp_async_16(place[(step + i) % PERIOD] + (step + i) / PERIOD * 1024, source[i]);
                    }
                } else {
#pragma unroll
                    for (int i = 0; i < STEPS; ++i) {
                        const int c = column(i);
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
        const int group = warp / 4;
        Out* strip = reinterpret_cast<Out*>(shared + STAGES * STAGE) + warp * 16 * PITCH;
        u32 consumed = 0, stored = 0;
        for (int item = blockIdx.x; item < items; item += gridDim.x) {
            const int split = item / tiles, tile = item % tiles;
            const int m0 = tile % s.row_tiles * ROWS + warp * 16, n0 = tile / s.row_tiles * BN;
            const int first = split * s.k_per_split, last = min(first + s.k_per_split, s.k_tiles);
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

            if constexpr (sizeof(Out) == 2) {
                if (by_copies) {
#pragma unroll
                    for (int part = 0; part < BN / 64; ++part, ++stored)
                        store_64x64<Out, SLOTS>(acc + part * 32, slots + (group * SLOTS + stored % SLOTS) * STORE_SLOT, c_map,
                                                m0 - warp % 4 * 16, n0 + part * 64, group + 1);
                    continue;
                }
            }
            const Target<Out> target{C + split * split_stride, step_m, step_n, s.M, N};
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
