// Sums over all tiles of a grid whose blocks count a tile each, added up by the block that finishes last. Blocks wait for nothing,
// so that a kernel that only reads runs as fast as memory; where a block must know its start while it runs, see look_back.cuh.
#pragma once
#include "spformat/prefix_sum.cuh"

namespace spformat {

// Says that the tile of this block holds `own`. One thread calls it. sums: u64[gridDim.x]; done: 0 before the launch. Returns how
// many blocks have said so before, for `add_up_tiles`.
__device__ __forceinline__ u64 publish_tile(u64 own, u64* sums, u64* done) {
    sums[blockIdx.x] = own;
    __threadfence();  // `own`, before this block counts as done
    return atomicAdd(done, 1ull);
}

// The sum of what each warp of the block has counted, at most 32 of them; all lanes of a warp call it.
template <int Warps> __device__ __forceinline__ u64 sum_of_counts(const u32 (&counts)[Warps]) {
    const int lane = threadIdx.x % 32;
    return sum_of_warp<u64>(lane < Warps ? counts[lane] : 0);
}

// In the block that finishes last, turns each of `sums` into the sum of those before it, writes the sum of all to *total, in host
// memory, and leaves 0 in *done. All threads of the block call it, with what `publish_tile` returned; a barrier must be behind it.
template <int Threads> __device__ __forceinline__ void add_up_tiles(u64 blocks_before, u64* sums, u64* done, u64* total) {
    constexpr int EACH = 8;
    const i64 tiles = gridDim.x;
    if (blocks_before != tiles - 1) return;
    __shared__ u64 room[33];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    __threadfence();  // the others' sums, after their fences
    u64 before = 0;
    for (i64 base = 0; base < tiles; base += Threads * EACH) {
        const i64 first = base + warp * (32 * EACH) + lane;
        u64 count[EACH];
#pragma unroll
        for (int e = 0; e < EACH; ++e) count[e] = first + e * 32 < tiles ? __ldcg(sums + first + e * 32) : 0;
        const u64 of_warp = sums_before<EACH>(count);
        u64 of_all;
        const u64 warps_before = __shfl_sync(~0u, sum_before_thread<Threads>(lane == 31 ? of_warp : u64(0), room, of_all), 0);
#pragma unroll
        for (int e = 0; e < EACH; ++e)
            if (first + e * 32 < tiles) sums[first + e * 32] = before + warps_before + count[e];
        before += of_all;
        __syncthreads();  // all have read `room`
    }
    if (threadIdx.x == 0) *const_cast<volatile u64*>(total) = before, *done = 0;
}

}  // namespace spformat
