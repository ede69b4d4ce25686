// The largest values of a dense matrix as a Bitmask, in one pass over the matrix: no mask and no pruned array is written.
// sm_80 and later. Launcher: bitmask_pruned.py.
//
//   x        T[M, K]               row-major, as unsigned words; 0 < M*K < 2^31
//   s        Selection             of masks/magnitude_mask.cu, for `count` values of x
//   bits     u8[M, ceil(K / 8)]    bit b of byte y is column 8y+b; bits of columns >= K are 0
//   sums     u64[2 + tiles]        zeros before the launch and after it, see look_back.cuh
//   total    u64                   in host memory, becomes what `Kept` counts in all
//   data     T[count]              the values that stay in row-major order; zeros are none, so that there may be fewer
//   indptr   i32[M + 1]            values before each row
//
// The number of values is known before, so that nothing is counted first: a block counts what stays of its tile while it holds it
// in registers, learns from the blocks before it where the tile starts, and stores it.
#include "spformat/bitmask_tiles.cuh"
#include "spformat/largest.cuh"
#include "spformat/look_back.cuh"

using namespace spformat;

template <class T>
__global__ void __launch_bounds__(TILE_THREADS, sizeof(T) < 4 ? 5 : 4)  // as many as have room for their registers
prune_tiles(const T* __restrict__ x, i64 M, i64 K, Keys keys, const Selection* __restrict__ s, u8* __restrict__ bits, u64* sums,
            u64* total, T* __restrict__ data, int* __restrict__ indptr) {
    using Sizes = Tile<T>;
    constexpr int WARPS = TILE_THREADS / 32, N = Sizes::UNITS;
    __shared__ __align__(16) T image[Sizes::SIZE + Sizes::WIDE];
    __shared__ __align__(16) u32 flat[Sizes::WORDS + 1], before[Sizes::WORDS];
    __shared__ u32 room[33];
    __shared__ u64 of_warps[WARPS], shared_tile, before_tile, of_tile;
    const int tid = threadIdx.x, lane = tid % 32, warp = tid / 32, head = head_of(x);
    const i64 n = M * K, tile = taken_tile(sums, shared_tile), first = tile * Sizes::SIZE - head;
    const bool whole = K % 8 == 0 && head == 0;  // each byte of the result is one of `flat`
    Unit<T> units[N];
#pragma unroll
    for (int j = 0; j < N; ++j) units[j] = load_unit<true>(x, first + (j * TILE_THREADS + tid) * Sizes::WIDE, n);
    const Largest<T> rule(keys, s);
    u32 stays[N], equal[N], larger_here = 0, equal_here = 0;
    const auto of_unit = [&](const Unit<T>& u, u32& larger, u32& same) {
        rule.masks(make_uint4(u.w[0], u.w[1], u.w[2], u.w[3]), larger, same);
    };
#pragma unroll
    for (int j = 0; j < N; ++j) {
        of_unit(units[j], stays[j], equal[j]);
        larger_here += __popc(stays[j]), equal_here += __popc(equal[j]);
    }
    larger_here = __reduce_add_sync(~0u, larger_here), equal_here = __reduce_add_sync(~0u, equal_here);
    if (lane == 0) of_warps[warp] = Kept::packed(larger_here, equal_here);
    __syncthreads();
    if (warp == 0) {
        const u64 own = sum_of_warp<u64>(lane < WARPS ? of_warps[lane] : 0), others = sum_before(own, tile, sums, total);
        if (lane == 0) before_tile = others, of_tile = own;
    }
    __syncthreads();
    if (warp == 0) leave_tile_by_warp(sums);
    const Kept others(before_tile), own(of_tile);
    const i64 places = rule.ties - others.equal;  // for values of this tile that equal the smallest one
    if (places < i64(own.equal) && places > 0) {
#pragma unroll
        for (int j = 0; j < N; ++j) put_mask<T>(flat, j * TILE_THREADS + tid, equal[j]);
        __syncthreads();
        bits_before_words<Sizes::WORDS>(flat, before, room);
#pragma unroll
        for (int j = 0; j < N; ++j)
            equal[j] = first_bits(equal[j], places - bits_before(flat, before, (j * TILE_THREADS + tid) * Sizes::WIDE));
        __syncthreads();
    } else if (places <= 0) {
#pragma unroll
        for (int j = 0; j < N; ++j) equal[j] = 0;
    }
#pragma unroll
    for (int j = 0; j < N; ++j) put_mask<T>(flat, j * TILE_THREADS + tid, stays[j] | equal[j]);
    if (!whole && warp == 0) {  // the byte that starts at the last element of the tile needs seven more
        const i64 at = first + Sizes::SIZE + lane;
        Unit<T> one{};
        if (lane < 8 && at < n) one.put(0, x[at]);
        u32 larger, same;
        of_unit(one, larger, same);
        const u32 others_equal = __ballot_sync(~0u, same & 1);
        const bool stays_here = larger & 1 || (same & 1 && __popc(others_equal & ((1u << lane) - 1)) < places - i64(own.equal));
        const u32 halo = __ballot_sync(~0u, stays_here);
        if (lane == 0) flat[Sizes::WORDS] = halo;
    }
    __syncthreads();
    write_bytes<T>(flat, whole, first, n, M, K, bits);
    store_tile(units, flat, before, image, room, first, M, K, rule.start(others), data, indptr);
}
