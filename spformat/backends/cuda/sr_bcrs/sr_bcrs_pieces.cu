// Counts of the pieces of each tile -> where each piece starts in its tile, and where each tile starts. sm_80 and later.
// Launcher: sr_bcrs_pieces.py.
//
//   counts   u32[n, pieces]   items of each piece; becomes the sum of the pieces before it
//   lengths  u32[n]           ceil(items of the tile / g): below 2^32, as the items of a tile must be
//   starts   Start[n+1]       the sums of all lengths before each, and of all
//   sums     u64[2 + blocks]  zeros before the launch and after it; total: in host memory; see look_back.cuh
//
// Of many pieces, neighbouring `lanes` of a warp, a power of two, take a tile together, and lengths are added up by offsets.cu.
#include "spformat/tile_pieces.cuh"

using namespace spformat;

constexpr int THREADS = 256;

// At most FEW pieces: a thread takes a tile.
template <class Start>
__global__ void __launch_bounds__(OFFSETS_THREADS)
tile_starts(u32* __restrict__ counts, i64 n, i64 pieces, int g, Start* __restrict__ starts, u64* sums, u64* total) {
    const auto length = [=](i64 tile) { return length_of_tile(counts + tile * pieces, pieces, g); };
    write_starts<1>(n, length, starts, sums, total);
}

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
