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

// For kernels whose blocks take a tile each and add up what the tiles hold. `sums` is u64[2 + tiles], zeros before the launch and
// after it: how many tiles are taken, how many are done, and a word per tile. total: in host memory, or null.

// The tile of this block. All threads call it; it ends with a barrier.
__device__ __forceinline__ i64 taken_tile(u64* sums, u64& shared) {
    if (threadIdx.x == 0) shared = atomicAdd(sums, 1ull);
    __syncthreads();
    return static_cast<i64>(shared);
}

// The sum of `own` over all tiles before this one. One warp of the block calls it. The last tile writes the total.
__device__ __forceinline__ u64 sum_before(u64 own, i64 tile, u64* sums, u64* total) {
    const u64 before = sum_before_tile(own, tile, sums + 2);
    if (total && tile == gridDim.x - 1 && threadIdx.x % 32 == 0) *const_cast<volatile u64*>(total) = before + own;
    return before;
}

// The end of a block, after `sum_before`: the last one leaves zeros in `sums`. All threads call it.
__device__ __forceinline__ void leave_tile(u64* sums, u64& shared) {
    __syncthreads();  // all threads have read `shared`, and the warp that looked back has done so
    if (threadIdx.x == 0) {
        __threadfence();  // what this block has published, before it counts as done
        shared = atomicAdd(sums + 1, 1ull);
    }
    __syncthreads();
    if (shared != gridDim.x - 1) return;
    for (i64 i = threadIdx.x; i < gridDim.x + i64(2); i += blockDim.x) sums[i] = 0;
}

// The same, called by the warp that looked back alone, so that the others of the block need not wait.
__device__ __forceinline__ void leave_tile_by_warp(u64* sums) {
    u64 done = 0;
    if (threadIdx.x % 32 == 0) {
        __threadfence();
        done = atomicAdd(sums + 1, 1ull);
    }
    if (__shfl_sync(~0u, done, 0) != gridDim.x - 1) return;
    for (i64 i = threadIdx.x % 32; i < gridDim.x + i64(2); i += 32) sums[i] = 0;
}

// starts[tile] from what each of the block's warps, at most 32, has counted; a barrier must be behind it. Warp 0 does it, so that
// the others need not wait.
template <int Warps> __device__ __forceinline__ void write_start_of_tile(
    const u32 (&counts)[Warps], i64 tile, i64* __restrict__ starts, u64* sums, u64* total) {
    if (threadIdx.x >= 32) return;
    const u64 own = sum_of_warp<u64>(threadIdx.x < Warps ? counts[threadIdx.x] : 0);
    const u64 before = sum_before(own, tile, sums, total);
    if (threadIdx.x == 0) starts[tile] = static_cast<i64>(before);
}

// Start starts[n+1]: the sums of count(0) .. count(n-1) before each of them, and of all. count(i) is called once. The block has
// OFFSETS_THREADS threads, and Each counts of a thread are a tile.
constexpr int OFFSETS_THREADS = 512, OFFSETS_EACH = 8;

template <int Each = OFFSETS_EACH, class Start, class Count>
__device__ __forceinline__ void write_starts(i64 n, Count number, Start* __restrict__ starts, u64* sums, u64* total) {
    __shared__ u64 room[33], shared_tile, shared_before;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const i64 tile = taken_tile(sums, shared_tile), first = tile * (OFFSETS_THREADS * Each) + warp * (32 * Each) + lane;
    u64 count[Each], of_warp = 0;
#pragma unroll
    for (int e = 0; e < Each; ++e) count[e] = first + e * 32 < n ? static_cast<u64>(number(first + e * 32)) : 0;
#pragma unroll
    for (int e = 0; e < Each; ++e) {  // from here on count[e] is the sum of the warp's counts before it
        const u64 before = sum_before_lane(count[e]), sum = __shfl_sync(~0u, before + count[e], 31);
        count[e] = of_warp + before;
        of_warp += sum;
    }
    u64 of_tile;
    const u64 own = lane == 31 ? of_warp : u64(0);
    const u64 warps_before = __shfl_sync(~0u, sum_before_thread<OFFSETS_THREADS>(own, room, of_tile), 0);
    if (warp == 0) {
        const u64 before = sum_before(of_tile, tile, sums, total);
        if (lane == 0) shared_before = before;
    }
    __syncthreads();
    const u64 before = shared_before + warps_before;
#pragma unroll
    for (int e = 0; e < Each; ++e)
        if (first + e * 32 < n) starts[first + e * 32] = static_cast<Start>(before + count[e]);
    if (tile == gridDim.x - 1 && threadIdx.x == 0) starts[n] = static_cast<Start>(shared_before + of_tile);
    leave_tile(sums, shared_tile);
}

}  // namespace spformat
