// Single items of a sparse matrix, added to a tile of sums in shared memory: for each a row of B, from L2.
#pragma once
#include "spformat/dtypes.cuh"
#include "spformat/gather.cuh"

namespace spformat {

// The items of a tile, and the share of this warp in them: begin .. end - 1. Its next 32 are loaded ahead, one a lane.
template <class T> struct TileItems {
    const u32* column;
    const u16* place;  // row in the tile, ascending
    const T* value;
    u32 begin, end;
    u32 k = 0;  // of the next item of this lane
    int row = 0;
    float a = 0;

    __device__ __forceinline__ TileItems(const u32* columns, const u16* places, const T* values, u32 items, int warps)
        : column(columns), place(places), value(values) {
        const u32 share = cdiv<u32>(items, warps), warp = threadIdx.x / 32;
        begin = warp * share < items ? warp * share : items;
        end = begin + share < items ? begin + share : items;
        fetch(begin);
    }
    __device__ __forceinline__ void fetch(u32 from) {
        const u32 i = from + threadIdx.x % 32;
        if (i < end) k = column[i], row = place[i], a = to_float(value[i]);
    }
};

// The columns of a lane in a tile of BN: neighbours, or 32 apart where B has no alignment.
template <int BN, bool WideB> __device__ __forceinline__ int column_of(int v) {
    return WideB ? threadIdx.x % 32 * (BN / 32) + v : threadIdx.x % 32 + 32 * v;
}

// Rows of B for the items at .. at + Depth - 1 that lanes hold, k their columns: the values in the columns of this lane, zeros
// where there is none. Full: the tile has all its columns, so that a row is one load, without a branch.
template <class T, int BN, bool WideB, bool Full, int Depth>
__device__ __forceinline__ void load_rows(T (&w)[Depth][BN / 32], const T* b, i64 ldb, u32 k, int at, int live, int n_left) {
#pragma unroll
    for (int d = 0; d < Depth; ++d) {
        const T* row = b + static_cast<i64>(__shfl_sync(~0u, k, at + d)) * ldb;
        if constexpr (Full) {
            using W = word_t<BN / 32 * sizeof(T)>;
            reinterpret_cast<W&>(w[d]) = load_if(reinterpret_cast<const W*>(row + column_of<BN, WideB>(0)), at + d < live);
        } else {
#pragma unroll
            for (int v = 0; v < BN / 32; ++v) {
                const int c = column_of<BN, WideB>(v);
                w[d][v] = at + d < live && c < n_left ? row[c] : from_float<T>(0.0f);
            }
        }
    }
}

// tile [.., Pitch] += the items times their rows of b, BN columns of it, of which n_left exist. The whole block calls; it must meet
// afterwards before the tile is read. A row inside a share is added by its warp; the sum of a row that goes on from
// the share before goes to carry [Warps, BN], and is added after all, in order: the same bits every time.
template <int BN, int Pitch, int Warps, bool WideB, class T>
__device__ __forceinline__ void add_items(TileItems<T>& items, float* tile, float* carry, int* carry_row, const T* b, i64 ldb,
                                          int n_left) {
    constexpr int V = BN / 32, Depth = V * sizeof(T) <= 4 ? 16 : 8;  // columns of a lane; rows of B that are in flight
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    if (threadIdx.x < Warps) carry_row[threadIdx.x] = -1;
    __syncthreads();
    const u32 end = items.end;
    float row_sum[V] = {};
    int current = items.begin < end ? items.place[items.begin] : -1;
    bool goes_on = items.begin > 0 && items.begin < end && items.place[items.begin - 1] == current;
    auto flush = [&] {
        float* const to = (goes_on ? carry + warp * BN : tile + current * Pitch) + column_of<BN, WideB>(0);
        if (goes_on && lane == 0) carry_row[warp] = current;
        if constexpr (WideB) {
            struct alignas(4 * V) Line { float x[V]; };
            Line line = *reinterpret_cast<const Line*>(to);
#pragma unroll
            for (int v = 0; v < V; ++v) line.x[v] = goes_on ? row_sum[v] : line.x[v] + row_sum[v];
            *reinterpret_cast<Line*>(to) = line;
        } else {
#pragma unroll
            for (int v = 0; v < V; ++v) to[32 * v] = goes_on ? row_sum[v] : to[32 * v] + row_sum[v];
        }
#pragma unroll
        for (int v = 0; v < V; ++v) row_sum[v] = 0;
        goes_on = false;
    };
    for (u32 at = items.begin; at < end; at += 32) {
        const u32 k = items.k;
        const int row = items.row, live = end - at < 32 ? static_cast<int>(end - at) : 32;
        const float a = items.a;
        items.fetch(at + 32);
        for (int g = 0; g < live; g += Depth) {
            alignas(V * sizeof(T)) T w[Depth][V];
            if (WideB && n_left == BN) load_rows<T, BN, WideB, WideB>(w, b, ldb, k, g, live, n_left);
            else load_rows<T, BN, WideB, false>(w, b, ldb, k, g, live, n_left);
#pragma unroll
            for (int d = 0; d < Depth; ++d) {
                const int r = __shfl_sync(~0u, row, g + d);
                const float x = __shfl_sync(~0u, a, g + d);
                if (g + d < live) {
                    if (r != current) flush(), current = r;
#pragma unroll
                    for (int v = 0; v < V; ++v) row_sum[v] += x * to_float(w[d][v]);
                }
            }
        }
    }
    if (items.begin < end) flush();
    __syncthreads();
    for (int c = threadIdx.x; c < BN; c += 32 * Warps)
        for (int w = 1; w < Warps; ++w)
            if (carry_row[w] >= 0) tile[carry_row[w] * Pitch + c] += carry[w * BN + c];
}

}  // namespace spformat
