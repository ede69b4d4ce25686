// Counts of the pieces of each tile -> where each piece starts in its tile, and the length of each tile. sm_80 and later.
// Launcher: sr_bcrs_pieces.py.
//
//   counts   u32[n, pieces]  items of each piece; becomes the sum of the pieces before it
//   lengths  u32[n]          ceil(items of the tile / g): below 2^32, as the items of a tile must be
//
// Neighbouring `lanes` of a warp, a power of two, take a tile together.
#include "spformat/prefix_sum.cuh"

using namespace spformat;

constexpr int THREADS = 256;

__global__ void __launch_bounds__(THREADS) tile_lengths(u32* counts, i64 n, i64 pieces, int g, int lanes, u32* lengths) {
    const i64 tile = (blockIdx.x * static_cast<i64>(THREADS) + threadIdx.x) / lanes;
    const int lane = threadIdx.x % lanes;
    u32 items = 0;
    for (i64 first = 0; first < pieces; first += lanes) {
        const bool mine = tile < n && first + lane < pieces;
        u32* at = counts + tile * pieces + first + lane;
        const u32 own = mine ? *at : 0;
        u32 sum = own;
        for (int d = 1; d < lanes; d *= 2) {
            const u32 other = __shfl_up_sync(~0u, sum, d, lanes);
            if (lane >= d) sum += other;
        }
        if (mine) *at = items + sum - own;
        items += __shfl_sync(~0u, sum, lanes - 1, lanes);
    }
    if (tile < n && lane == 0) lengths[tile] = static_cast<u32>((static_cast<u64>(items) + g - 1) / g);
}
