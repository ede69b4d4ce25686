// The sums of all counts before each of them, in one launch. sm_80 and later. Launcher: offsets.py.
//
//   counts   Count[n]       at least 0
//   starts   Start[n+1]     starts[i] = counts[0] + .. + counts[i-1]; the last one is the sum of all
//   states   u64[tiles]     zeros before the launch and after it: what each tile has published
//   control  u64[2]         likewise: how many tiles are taken, how many are done
//   total    u64            in host memory, becomes the sum of all counts; or null
//
// A block sums a tile of counts, and adds to it what the tiles before it have published: look_back.cuh.
#include "spformat/look_back.cuh"

using namespace spformat;

constexpr int THREADS = 512, EACH = 8, TILE = THREADS * EACH;

template <class Count, class Start>
__global__ void __launch_bounds__(THREADS)
offsets(const Count* __restrict__ counts, i64 n, Start* __restrict__ starts, u64* states, u64* control, u64* total) {
    __shared__ u64 sums[33], shared_tile, shared_before;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (threadIdx.x == 0) shared_tile = atomicAdd(control, 1ull);
    __syncthreads();
    const i64 tile = shared_tile, first = tile * TILE + warp * (32 * EACH) + lane;
    u64 count[EACH], of_warp = 0;
#pragma unroll
    for (int e = 0; e < EACH; ++e) count[e] = first + e * 32 < n ? static_cast<u64>(counts[first + e * 32]) : 0;
#pragma unroll
    for (int e = 0; e < EACH; ++e) {  // from here on count[e] is the sum of the warp's counts before it
        const u64 before = sum_before_lane(count[e]), sum = __shfl_sync(~0u, before + count[e], 31);
        count[e] = of_warp + before;
        of_warp += sum;
    }
    u64 of_tile;
    const u64 warps_before = __shfl_sync(~0u, sum_before_thread<THREADS>(lane == 31 ? of_warp : u64(0), sums, of_tile), 0);
    if (warp == 0) {
        const u64 before = sum_before_tile(of_tile, tile, states);
        if (lane == 0) shared_before = before;
    }
    __syncthreads();
    const u64 before = shared_before + warps_before;
#pragma unroll
    for (int e = 0; e < EACH; ++e)
        if (first + e * 32 < n) starts[first + e * 32] = static_cast<Start>(before + count[e]);
    if (tile == gridDim.x - 1 && threadIdx.x == 0) {
        starts[n] = static_cast<Start>(shared_before + of_tile);
        if (total) *const_cast<volatile u64*>(total) = shared_before + of_tile;
    }
    __syncthreads();  // all threads have read shared_tile
    if (threadIdx.x == 0) shared_tile = atomicAdd(control + 1, 1ull);
    __syncthreads();
    if (shared_tile != gridDim.x - 1) return;
    for (i64 i = threadIdx.x; i < gridDim.x; i += THREADS) states[i] = 0;  // every other block is past its look-back
    if (threadIdx.x < 2) control[threadIdx.x] = 0;
}
