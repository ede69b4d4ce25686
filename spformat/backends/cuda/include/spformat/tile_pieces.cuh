// Tiles that were counted in a few pieces: where each piece starts in its tile, and each tile among all.
#pragma once
#include "spformat/last_block.cuh"
#include "spformat/look_back.cuh"

namespace spformat {

constexpr int FEW = 8;  // pieces that a thread loads together

// ceil(items / g) of a tile; its counts u32[pieces], at most FEW, become the items before each piece.
__device__ __forceinline__ u64 length_of_tile(u32* counts, i64 pieces, int g) {
    u32 own[FEW], items = 0;
#pragma unroll
    for (int i = 0; i < FEW; ++i) own[i] = i < pieces ? *const_cast<volatile u32*>(counts + i) : 0;
#pragma unroll
    for (int i = 0; i < FEW; ++i) {
        if (i < pieces) counts[i] = items;
        items += own[i];
    }
    return (static_cast<u64>(items) + g - 1) / g;
}

// starts[n+1]: the lengths of all tiles before each, and of all, by the block that finishes last; no launch of its own. All threads
// of all blocks call it when they have counted. finished: 0 before the launch and after it. n <= FEW_TILES; total: in host memory.
constexpr int FEW_TILES = 2048;

template <int Threads>
__device__ __forceinline__ void starts_by_last_block(u32* counts, i64 n, i64 pieces, int g, int* starts, u64* finished, u64* total) {
    __shared__ u64 sums[33];
    if (!is_last_block(finished)) return;
    const int each = static_cast<int>((n + Threads - 1) / Threads), first = threadIdx.x * each;
    const int end = static_cast<int>(first + each < n ? first + each : n);
    u64 mine = 0, all;
#pragma unroll 1
    for (int tile = first; tile < end; ++tile) {
        const u64 length = length_of_tile(counts + tile * pieces, pieces, g);
        starts[tile] = static_cast<int>(length);
        mine += length;
    }
    u64 before = sum_before_thread<Threads>(mine, sums, all);
#pragma unroll 1
    for (int tile = first; tile < end; ++tile) {
        const int length = starts[tile];
        starts[tile] = static_cast<int>(before);
        before += length;
    }
    if (threadIdx.x == 0) {
        starts[n] = static_cast<int>(all), *finished = 0;
        *const_cast<volatile u64*>(total) = all;
    }
}

}  // namespace spformat
