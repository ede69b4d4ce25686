// Sums over all tiles of a grid in one launch: each block adds up what the tiles before its own have published, walking back
// until one knows its sum from the very first tile (Merrill and Garland, Single-pass Parallel Prefix Scan with Decoupled
// Look-back, 2016).
#pragma once
#include "spformat/prefix_sum.cuh"

namespace spformat {

// The sum of x over all tiles before `tile`. One warp of each block calls it, all lanes with the same x < 2^62. published:
// a word per tile, zeros before the launch. Tiles are numbered in the order in which blocks start (a counter, not
// blockIdx), so that a block waits only for blocks that are running.
__device__ __forceinline__ u64 sum_before_tile(u64 x, i64 tile, u64* published) {
    constexpr u64 OWN = 1ull << 62, ALL = 2ull << 62, VALUE = OWN - 1;  // own: the tile's x; all: with all tiles before it
    const int lane = threadIdx.x % 32;
    if (lane == 0) atomicExch(published + tile, tile ? OWN | x : ALL | x);
    u64 sum = 0;
    for (i64 at = tile - 1 - lane; tile; at -= 32) {
        u64 word = at < 0 ? ALL : 0;
        while (__any_sync(0xFFFFFFFF, word < OWN))
            if (word < OWN) word = *const_cast<volatile u64*>(published + at);
        const u32 whole = __ballot_sync(0xFFFFFFFF, word >= ALL);
        const bool counts = !whole || lane < __ffs(whole);  // up to the nearest tile that knows all before it
        sum += sum_of_warp<u64>(counts ? word & VALUE : 0);
        if (whole) break;
    }
    if (lane == 0 && tile) atomicExch(published + tile, ALL | (sum + x));
    return sum;
}

}  // namespace spformat
