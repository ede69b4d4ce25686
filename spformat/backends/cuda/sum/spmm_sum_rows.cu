// C[M,N] = (A1 + A2)[M,K] @ B[K,N] for A1 in BSR or DBSR and A2 in CSR, B and C row-major: one launch whose first thread blocks
// multiply blocks, and whose others gather rows of B, as spmm_csr.cu does. float32 sums; mma.sync for the blocks of
// 16-bit values, CUDA cores for float32. sm_80 and later.
//
//   bins, records, indices, values, nnz, cuts   A2: the arguments of spmm_csr
//   tasks    BlockTask[task_count]  what is multiplied at a time: neighbouring blocks of a tile of rows, the longest tasks first
//   of_tile  {u32 first, count}[tiles]  the tasks of each tile of BM rows, by their number; count 0: the tile has no blocks
//   blocks   T[nnzb, R, C]     block_columns  A::Index[nnzb]
//   partial  float[tasks, column tiles, BM, BN]   what the tasks leave
//   ready    u32[tasks, column tiles]  zeros, before the launch and after it; a tile uses that of its first task
//
// Grid: x = `leading` blocks that take tasks, then those that gather; y = column panels of LANES * VEC * TILES columns. A column
// tile has BN columns, one panel or several, and its tasks belong to the first of these.
//
// Rows of C are written by those who gather, empty rows of A2 too. A row in a tile with blocks waits until all tasks of its tile
// are done and adds what they left, in their order: the same operands give the same bits. Nobody who multiplies blocks
// waits, and they start first, so that somebody always goes on (blocks of threads start in the order of their numbers).
//
// The counter of a tile goes up by one with each task, then with each row and panel that has added, and so back to zero.
//
//   A      Blocks<Index, R, C>   BM  rows of a tile: of R rows of blocks, BM at a time   WideA  C values are whole 16-byte units
//   other template arguments: those of spmm_csr
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

// The tiles of rows of the blocks, and what their tasks leave for the columns of one tile.
template <class A, int BM, int BN> struct Left {
    static constexpr u32 PER_BLOCK = cdiv(A::R, BM);  // tiles of a row of blocks
    const TileTasks* of_tile;
    float* partial;
    u32* ready;
    i64 M, column_tiles, column_tile;
    u32 panels;  // that read it

    struct Place {
        TileTasks tasks;
        int rows, row;  // of the tile, and the row in it
    };
    __device__ __forceinline__ Place place(i64 tile, int row) const {
        const i64 first = tile / PER_BLOCK * A::R + tile % PER_BLOCK * BM;
        const i64 of_block = A::R - tile % PER_BLOCK * BM, of_matrix = M - first;
        const i64 rows = of_block < BM ? of_block : BM;
        return {of_tile[tile], static_cast<int>(of_matrix < rows ? of_matrix : rows), row};
    }
    __device__ __forceinline__ Place place(i64 row) const {
        const i64 block_row = row / A::R;
        const u32 in_block = static_cast<u32>(row - block_row * A::R);
        return place(block_row * PER_BLOCK + in_block / BM, static_cast<int>(in_block % BM));
    }
    __device__ __forceinline__ u32* counter(const TileTasks& t) const { return ready + t.first * column_tiles + column_tile; }
    __device__ __forceinline__ float* sums(u32 task) const { return partial + (task * column_tiles + column_tile) * (BM * BN); }

    // One more task is done, or one more row of a panel was added.
    __device__ __forceinline__ void count(const Place& p) const {
        atomicInc(counter(p.tasks), p.tasks.count + p.rows * panels - 1);
    }
    // Until all tasks are done.
    __device__ __forceinline__ void wait(const TileTasks& t) const {
        if (!t.count) return;
        const volatile u32* const done = counter(t);
        while (*done < t.count) {
        }
        __threadfence();
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
                  float* __restrict__ sums, u32* __restrict__ arrived, float* partial, u32* ready, const T* __restrict__ B,
                  Out* __restrict__ C, int n, int ldb, i64 ldc, i64 prefetch) {
    constexpr int COLUMNS = LANES * VEC * TILES, PANELS = BN / COLUMNS;
    constexpr bool WideB = VEC * sizeof(T) == 16;
    static_assert(BN % COLUMNS == 0, "a column tile is whole panels");
    using Steps = BlockSteps<T, A, BM, BN, THREADS / 128>;
    const i64 column_tiles = cdiv<i64>(n, BN), column_tile = blockIdx.y / PANELS;
    const u32 panels_left = gridDim.y - static_cast<u32>(column_tile) * PANELS;
    const Left<A, BM, BN> left{of_tile, partial, ready, M, column_tiles, column_tile, panels_left < PANELS ? panels_left : PANELS};

    if (blockIdx.x < leading) {
        if (blockIdx.y % PANELS) return;
        extern __shared__ __align__(16) char ring[];
        const i64 n0 = column_tile * BN;
        const int n_left = n - n0 < BN ? static_cast<int>(n - n0) : BN;
        for (int t = blockIdx.x; t < task_count; t += leading) {
            const BlockTask task = tasks[t];
            Sums<T, BM, BN, THREADS / 128> sum;
            const Steps steps{blocks, block_columns + task.block, task.block, task.blocks * A::C,
                              static_cast<int>(task.tile % left.PER_BLOCK) * BM, reinterpret_cast<const char*>(B + n0), ldb,
                              static_cast<int>(K), n_left};
            steps.template multiply<WideA, WideB>(sum, reinterpret_cast<T*>(ring));
            sum.template put<BN>(left.sums(task.number));
            __threadfence();
            __syncthreads();  // all have stored, and the ring is free
            if (threadIdx.x == 0) left.count(left.place(task.tile, 0));
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
    const int in_tile = col - static_cast<int>(column_tile) * BN;
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
                const auto p = left.place(row);
                left.wait(p.tasks);
                float total = 0;
                for (u32 j = 0; j < p.tasks.count; ++j)
                    total += __ldcg(left.sums(p.tasks.first + j) + p.row * BN + c - column_tile * BN);
                return total;
            };
            if (store_piece<LANES>(C, ldc, pieces, record.row, block, n, col, sum, first, more)) {
                __syncthreads();  // all have added
                const auto p = left.place(cuts[3ll * record.row]);
                if (threadIdx.x == 0 && p.tasks.count) left.count(p);
            }
        } else {
            typename Left<A, BM, BN>::Place p{};
            if (first) p = left.place(static_cast<i64>(record.row));
            left.wait(p.tasks);
            __syncwarp();  // no lane waits any more when one counts below, after which the counter may be zero
            for (u32 j = 0; j < p.tasks.count; ++j) {
                constexpr int BYTES = 4 * VEC < 16 ? 4 * VEC : 16, WORDS = 4 * VEC / BYTES, PER_WORD = VEC / WORDS;
                using W = word_t<BYTES>;
                const float* const from = left.sums(p.tasks.first + j) + p.row * BN + in_tile;
                W words[TILES][WORDS];
#pragma unroll
                for (int t = 0; t < TILES; ++t)
#pragma unroll
                    for (int i = 0; i < WORDS; ++i) words[t][i] = __ldcg(reinterpret_cast<const W*>(from + t * LANES * VEC) + i);
#pragma unroll
                for (int t = 0; t < TILES; ++t)
#pragma unroll
                    for (int v = 0; v < VEC; ++v) sum[t][v] += reinterpret_cast<const float*>(&words[t][v / PER_WORD])[v % PER_WORD];
            }
            if (first) store_row<LANES>(C + static_cast<i64>(record.row) * ldc + col, sum, width);
            __syncwarp();  // all lanes of a row have read
            if (first && lane == 0 && p.tasks.count) left.count(p);
        }
        task = next, next = after, batch = next_batch;
    }
}
