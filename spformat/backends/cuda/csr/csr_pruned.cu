// The largest values of a dense array as a CSR, in one pass over the array: no mask and no pruned array is written.
// sm_80 and later. Launcher: csr_pruned.py.
//
//   x        T[M, K]           row-major, as unsigned words of the width of its values; 0 < M*K < 2^31
//   s        Selection         of masks/magnitude_mask.cu, for `count` values of x
//   sums     u64[2 + blocks]   zeros before the launch and after it, see look_back.cuh
//   total    u64               in host memory, becomes what `Kept` counts in all
//   indptr   i32[M+1]          values that stay before each row, and in all; zeros do not count
//   indices  i32[count]        their columns; there may be fewer than `count`
//   data     T[count]          their values
//
// A warp takes a piece (csr_pieces.cuh). The number of values is known before, so that nothing is counted first: a block counts
// what stays of its pieces while it holds them in registers, learns from the blocks before it where they start, and stores them.
#include "spformat/csr_pieces.cuh"
#include "spformat/largest.cuh"
#include "spformat/look_back.cuh"

using namespace spformat;

constexpr int WARPS = 4;

template <class T, bool Narrow>
__global__ void __launch_bounds__(WARPS * 32)
prune_pieces(const T* __restrict__ x, i64 M, i64 K, i64 pieces, Keys keys, const Selection* __restrict__ s, u64* sums, u64* total,
             int* __restrict__ indptr, int* __restrict__ indices, T* __restrict__ data, i64 reciprocal) {
    constexpr int N = STEPS<T>;
    __shared__ Packed<T> packed[WARPS];
    __shared__ u64 shared_tile, of_warps[WARPS], before_tile;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, head = head_of(x);
    const i64 tile = taken_tile(sums, shared_tile), piece = tile * WARPS + warp;
    uint4 unit[N];  // of a piece behind the last one: zeros
#pragma unroll
    for (int i = 0; i < N; ++i) unit[i] = load_unit(x, head, M * K, (piece * N + i) * 32 + lane);
    const Largest<T> rule(keys, s);
    u32 stays[N], equal[N], larger_here = 0, equal_here = 0;
#pragma unroll
    for (int i = 0; i < N; ++i) {
        rule.masks(unit[i], stays[i], equal[i]);
        larger_here += __popc(stays[i]), equal_here += __popc(equal[i]);
    }
    larger_here = __reduce_add_sync(~0u, larger_here), equal_here = __reduce_add_sync(~0u, equal_here);
    if (lane == 0) of_warps[warp] = Kept::packed(larger_here, equal_here);
    __syncthreads();
    if (warp == 0) {
        const u64 mine = lane < WARPS ? of_warps[lane] : 0, of_block = sum_of_warp<u64>(mine);
        const u64 others = sum_before(of_block, tile, sums, total);
        if (lane == 0) before_tile = others;
    }
    __syncthreads();
    if (warp == 0) leave_tile_by_warp(sums);
    u64 both = before_tile;
#pragma unroll
    for (int w = 0; w < WARPS - 1; ++w) both += w < warp ? of_warps[w] : 0;
    const Kept before(both);
    const i64 room = rule.ties - before.equal;
    if (piece >= pieces) return;
    if (room < i64(equal_here)) {  // some of the values that equal the smallest one are too many
        i64 left = room;
#pragma unroll
        for (int i = 0; i < N; ++i) {
            const int mine = __popc(equal[i]), before_lane = sum_before_lane(mine);
            equal[i] = first_bits(equal[i], left - before_lane);
            left -= __shfl_sync(~0u, before_lane + mine, 31);
        }
        equal_here = room > 0 ? static_cast<u32>(room) : 0;
    }
#pragma unroll
    for (int i = 0; i < N; ++i) stays[i] |= equal[i];
    const auto bits_of = [&](int i) { return stays[i]; };
    store_piece<Narrow>(unit, bits_of, piece, pieces, head, M, K, rule.start(before), static_cast<int>(larger_here + equal_here),
                        packed[warp], indptr, indices, data, reciprocal);
}
