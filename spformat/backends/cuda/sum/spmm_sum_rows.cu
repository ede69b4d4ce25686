// C[M,N] = (A1 + A2)[M,K] @ B[K,N] for A1 in BSR or DBSR and A2 in CSR, B and C row-major: one launch whose first thread blocks
// multiply blocks, and whose others gather rows of B, as spmm_csr.cu does. float32 sums; mma.sync for the blocks of
// 16-bit values, CUDA cores for float32. sm_80 and later.
//
//   bins, records, indices, values, nnz, cuts   A2: the arguments of spmm_csr
//   tasks    BlockTask[task_count]  what is multiplied at a time: neighbouring blocks of a tile of rows, the longest tasks first
//   of_tile  {u32 first, count}[tiles]  the tasks of each tile of BM rows, by their number; count 0: the tile has no blocks
//   blocks   T[nnzb, R, C]     block_columns  A::Index[nnzb]
//   left     float[tasks, BM, column tiles * BN]   what the tasks leave: zeros, before the launch and after it
//
// Grid: x = `leading` blocks that take tasks, then those that gather; y = column panels of LANES * VEC * TILES columns. A column
// tile has BN columns, one panel or several, and its tasks belong to the first of these.
//
// Rows of C are written by those who gather, empty rows of A2 too. A row in a tile with blocks takes what the tasks of its
// tile left, in their order, as soon as it is there (left_sums.cuh): the same operands give the same bits. Nobody who
// multiplies blocks waits, and they start first, so that somebody always goes on (blocks of threads start in the order of their
// numbers).
//
//   A      Blocks<Index, R, C>   BM  rows of a tile: of R rows of blocks, BM at a time   WideA  C values are whole 16-byte units
//   other template arguments: those of spmm_csr
#include "spformat/left_sums.cuh"
#include "spformat/row_bins.cuh"
#include "spformat/tile_blocks.cuh"

using namespace spformat;

namespace {

struct BlockTask {
    i64 block;          // the first
    u32 blocks, number;
    i64 tile;
};
struct TileTasks { u32 first, count; };

// The tiles of rows of the blocks, and what their tasks leave.
template <class A, int BM> struct Left {
    static constexpr u32 PER_BLOCK = cdiv(A::R, BM);  // tiles of a row of blocks
    const TileTasks* of_tile;
    float* sums;
    i64 pitch;

    // Rows of a tile.
    static __device__ __forceinline__ int rows(i64 tile, i64 M) {
        const i64 of_block = A::R - tile % PER_BLOCK * BM, of_matrix = M - (tile / PER_BLOCK * A::R + tile % PER_BLOCK * BM);
        return static_cast<int>(min(i64{BM}, min(of_block, of_matrix)));
    }
    __device__ __forceinline__ float* of_task(u32 task) const { return sums + task * (BM * pitch); }
    // f(from) for what the tasks of a row leave in it, in their order.
    template <class F> __device__ __forceinline__ void each(i64 row, F f) const {
        const i64 block_row = row / A::R;
        const u32 in_block = static_cast<u32>(row - block_row * A::R);
        const TileTasks tasks = of_tile[block_row * PER_BLOCK + in_block / BM];
        for (u32 j = 0; j < tasks.count; ++j) f(of_task(tasks.first + j) + in_block % BM * pitch);
    }
};

}  // namespace

template <class T, class Out, class Index, int VEC, int LANES, int TILES, int BATCH, int DEPTH, int THREADS, int BLOCKS,
          bool CUT, class A, int BM, int BN, bool WideA>
__global__ void __launch_bounds__(THREADS, BLOCKS)
    spmm_sum_rows(const __grid_constant__ Bins bins, const Record* __restrict__ records, const Index* __restrict__ indices,
                  const T* __restrict__ values, i64 nnz, i64 K, const i64* __restrict__ cuts,
                  const BlockTask* __restrict__ tasks, const TileTasks* __restrict__ of_tile, int task_count, int leading,
                  const T* __restrict__ blocks, const typename A::Index* __restrict__ block_columns, i64 M,
                  float* __restrict__ sums, u32* __restrict__ arrived, float* left_sums, const T* __restrict__ B,
                  Out* __restrict__ C, int n, int ldb, i64 ldc, i64 prefetch) {
    constexpr int COLUMNS = LANES * VEC * TILES, PANELS = BN / COLUMNS;
    constexpr bool WideB = VEC * sizeof(T) == 16;
    static_assert(BN % COLUMNS == 0, "a column tile is whole panels");
    using Steps = BlockSteps<T, A, BM, BN, THREADS / 128>;
    using TileSums = Sums<T, BM, BN, THREADS / 128>;
    const int column_tiles = cdiv(n, BN);
    const Left<A, BM> left{of_tile, left_sums, static_cast<i64>(column_tiles) * BN};

    if (blockIdx.x < leading) {
        if (blockIdx.y % PANELS) return;
        extern __shared__ __align__(16) char ring[];
        const int n0 = static_cast<int>(blockIdx.y) / PANELS * BN, n_left = min(BN, n - n0);
        for (int t = blockIdx.x; t < task_count; t += leading) {
            const BlockTask task = tasks[t];
            TileSums sum;
            const Steps steps{blocks, block_columns + task.block, task.block, task.blocks * A::C,
                              static_cast<int>(task.tile % Left<A, BM>::PER_BLOCK) * BM, reinterpret_cast<const char*>(B + n0), ldb,
                              static_cast<int>(K), n_left};
            steps.template multiply<WideA, WideB>(sum, reinterpret_cast<T*>(ring));
            const int rows = left.rows(task.tile, M);
            float* const tile = left.of_task(task.number) + n0;
            sum.each([&](int row, int column, const float* x) {
                float* const to = tile + row * left.pitch + column;
                if (row >= rows || column >= n_left) return;  // nobody takes it
                if (column + TileSums::Side > n_left) {
#pragma unroll
                    for (int i = 0; i < TileSums::Side; ++i)
                        if (column + i < n_left) leave(to + i, x[i]);
                } else if constexpr (TileSums::Side == 2) {
                    leave(to, x[0], x[1]);
                } else {
                    leave(to, x[0], x[1], x[2], x[3]);
                }
            });
            __syncthreads();  // the ring is free
        }
        return;
    }

    using Batch = spformat::Batch<T, Index, LANES, BATCH>;
    constexpr int SLOTS = THREADS / LANES, LOG_SLOTS = log2_of(SLOTS);
    __shared__ float scratch[THREADS / 32 * TILES * VEC * LANES];
    const int lane = threadIdx.x % LANES, slot = threadIdx.x / LANES;
    const unsigned me = blockIdx.x - leading, width_of_grid = gridDim.x - leading;
    const Pieces<float> pieces{cuts, sums, arrived};

    // Two tasks ahead the record is loaded, one task ahead the first batch of items.
    Task task = locate(bins, records, me, slot, LOG_SLOTS);
    Task next = locate(bins, records, me + width_of_grid, slot, LOG_SLOTS);
    if (prefetch) {  // bytes of B
        const i64 threads = static_cast<i64>(width_of_grid) * gridDim.y * THREADS;
        const i64 thread = (static_cast<i64>(blockIdx.y) * width_of_grid + me) * THREADS + threadIdx.x;
        prefetch_l2(indices, nnz * sizeof(Index), thread, threads);
        prefetch_l2(values, nnz * sizeof(T), thread, threads);
        prefetch_l2(B, prefetch, thread, threads);
    }
    const auto fetch = [&](const Task& t) {
        Batch batch;
        const int part = slot & ((1 << t.log) - 1);
        fetch_first(batch, reinterpret_cast<const Record&>(t.record), part, indices, values, lane);
        return batch;
    };
    Batch batch = fetch(task);

    const int col = (blockIdx.y * TILES * LANES + lane) * VEC, width = n - col;
    const GlobalPanel<T, VEC, LANES> panel{B + col, ldb, width};
    for (unsigned block = me; block < bins.blocks; block += width_of_grid) {
        const Task after = locate(bins, records, block + 2 * width_of_grid, slot, LOG_SLOTS);
        const Batch next_batch = fetch(next);
        const Record& record = reinterpret_cast<const Record&>(task.record);
        const int part = slot & ((1 << task.log) - 1);
        float sum[TILES][VEC] = {};
        gather_row<DEPTH, VEC, TILES>(sum, batch, indices + record.start, values + record.start, record.length, part, task.log,
                                      panel, lane);
        combine_slots<LANES, TILES, VEC>(sum, task.log, scratch);
        const bool first = task.live && part == 0;
        if (CUT && block < bins.pieces) {  // known of the block, so that the compiler sees its warps whole
            const auto more = [&](i64 row, int c) {
                float total = 0;
                left.each(row, [&](float* from) { total += take(from + c); });
                return total;
            };
            store_piece<LANES>(C, ldc, pieces, record.row, block, n, col, sum, first, more);
        } else {
            if (first) {
                left.each(record.row, [&](float* from) { add_left_row<LANES>(sum, from + col, width, lane); });
                store_row<LANES>(C + static_cast<i64>(record.row) * ldc + col, sum, width);
            }
            __syncwarp();  // all lanes have added
            if (first) left.each(record.row, [&](float* from) { clear_row<LANES, TILES, VEC>(from + col, width); });
            __syncwarp();
        }
        task = next, next = after, batch = next_batch;
    }
}
