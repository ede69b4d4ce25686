// C[M,N] = A[M,K] @ B[K,N], A in SR-BCRS(t, g): columns of t x 1 vectors in groups of g, per tile of t rows. CUDA cores.
//
//   indptr   Ptr[Mv+1]      first group of each row tile
//   indices  Index[G, g]    column of each vector; -1 (no vector) at the end of a tile
//   data     T[G, t, g]     element (r, s) of a group: row r of the tile, vector s
//   B        T: B[k][n] at k*b_row + n*b_col          C  Out: C[i][n] at i*c_row + n*c_col
//
// Any t and g. A warp sums 8 rows of a tile x 32*COLS columns of C: 32 vectors at a time are brought to shared memory,
// then each live one loads its row of B (lane l: columns l, l+32, ..) and adds it, weighted, to the 8 rows.
// Grid: x = units of (tile, 8 rows), WARPS/SPLIT a block; y walks tiles of 32*COLS columns. SPLIT warps share a unit, warp
// by warp batches of 32 vectors, and their sums are added in the order of the warps: the same bits every run.
//
// Layout after Magicube (Li et al., SC'22) and SparseTIR (Ye et al., ASPLOS'23).
#include "spformat/dtypes.cuh"
#include "spformat/launch_order.cuh"

using namespace spformat;

template <class T, class Out, class Ptr, class Index, int COLS, int WARPS, int SPLIT>
__global__ void __launch_bounds__(32 * WARPS)
    spmm_sr_bcrs(const Ptr* __restrict__ indptr, const Index* __restrict__ indices, const T* __restrict__ data, i64 M, int t,
                 int g, const T* __restrict__ B, Out* __restrict__ C, i64 N, i64 b_row, i64 b_col, i64 c_row, i64 c_col) {
    static_assert(WARPS % SPLIT == 0, "a block holds whole units of SPLIT warps");
    using Sum = sum_t<T>;
    constexpr int ROWS = 8, BATCH = 32, UNROLL = 4;
    struct alignas(16) Weights { Sum row[ROWS]; };
    __shared__ Weights weights[WARPS][BATCH];
    __shared__ i64 b_offsets[WARPS][BATCH];
    __shared__ Sum partial[SPLIT > 1 ? WARPS : 1][32 * COLS];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, part = warp % SPLIT;
    wait_for_launch_before();
    const i64 unit = static_cast<i64>(blockIdx.x) * (WARPS / SPLIT) + warp / SPLIT;
    const int units_per_tile = cdiv(t, ROWS);
    const i64 tile = unit / units_per_tile;
    const int row0 = static_cast<int>(unit % units_per_tile) * ROWS;  // in the tile
    const bool live = tile * t + row0 < M;
    const i64 group0 = live ? indptr[tile] : 0;
    const i64 count = live ? (indptr[tile + 1] - group0) * g : 0;

    for (i64 n0 = static_cast<i64>(blockIdx.y) * 32 * COLS; n0 < N; n0 += static_cast<i64>(gridDim.y) * 32 * COLS) {
        const T* from[COLS];
#pragma unroll
        for (int c = 0; c < COLS; ++c) from[c] = B + (n0 + lane + 32 * c < N ? (n0 + lane + 32 * c) * b_col : 0);
        Sum acc[ROWS][COLS] = {};
        for (i64 v0 = static_cast<i64>(part) * BATCH; v0 < count; v0 += SPLIT * BATCH) {
            const i64 v = v0 + lane;
            i64 column = -1;
            Weights w = {};
            if (v < count) column = indices[group0 * g + v];
            if (column >= 0) {
                const i64 at = ((group0 + v / g) * t + row0) * g + v % g;
#pragma unroll
                for (int r = 0; r < ROWS; ++r)
                    if (row0 + r < t) w.row[r] = widen(data[at + static_cast<i64>(r) * g]);
            }
            weights[warp][lane] = w;
            b_offsets[warp][lane] = column < 0 ? -1 : column * b_row;
            __syncwarp();
            const int batch = static_cast<int>(min(count - v0, static_cast<i64>(BATCH)));
            for (int j = 0; j < batch; j += UNROLL) {
                Sum b[UNROLL][COLS];
#pragma unroll
                for (int u = 0; u < UNROLL; ++u) {
                    const i64 offset = b_offsets[warp][j + u];  // slots past the batch hold -1
#pragma unroll
                    for (int c = 0; c < COLS; ++c) b[u][c] = offset < 0 ? Sum(0) : widen(from[c][offset]);
                }
#pragma unroll
                for (int u = 0; u < UNROLL; ++u) {
                    const Weights w = weights[warp][j + u];
#pragma unroll
                    for (int r = 0; r < ROWS; ++r)
#pragma unroll
                        for (int c = 0; c < COLS; ++c) acc[r][c] += w.row[r] * b[u][c];
                }
            }
            __syncwarp();
        }
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            if constexpr (SPLIT > 1) {
                __syncthreads();
#pragma unroll
                for (int c = 0; c < COLS; ++c) partial[warp][lane + 32 * c] = acc[r][c];
                __syncthreads();
                if (part == 0)
#pragma unroll
                    for (int s = 1; s < SPLIT; ++s)
#pragma unroll
                        for (int c = 0; c < COLS; ++c) acc[r][c] += partial[warp + s][lane + 32 * c];
            }
            const i64 row = tile * t + row0 + r;
            if (part == 0 && row0 + r < t && row < M)
#pragma unroll
                for (int c = 0; c < COLS; ++c)
                    if (n0 + lane + 32 * c < N) C[row * c_row + (n0 + lane + 32 * c) * c_col] = narrow<Out>(acc[r][c]);
        }
    }
}
