// The values of a dense matrix as a Bitmask, all of them or the largest, in one pass over the matrix: no mask and no pruned array is
// written. sm_80 and later. Launcher: bitmask_one_pass.py.
//
//   x        T[M, K]               row-major, as unsigned words; 0 < M*K < 2^31
//   s        Selection             of masks/magnitude_mask.cu, for `capacity` values of x
//   live     T                     the bits of a value that decide whether it is zero
//   bits     u8[M, ceil(K / 8)]    bit b of byte y is column 8y+b; bits of columns >= K are 0
//   sums     u64[2 + tiles]        zeros before the launch and after it, see look_back.cuh
//   total    u64                   in host memory, becomes what `Kept` counts in all
//   data     T[capacity]           the values that stay in row-major order; zeros are none, so that there may be fewer. If there
//                                  are more, some are not written, and `total` says so
//   indptr   i32[M + 1]            values before each row
//
// A bound of the number of values is known before, so that nothing is counted first: a block counts what stays of its tile while
// it holds it in registers, learns from the blocks before it where the tile starts, and stores it. Where all values stay, a sample
// of the tiles gives a bound that is nearly always one.
#include "spformat/bitmask_tiles.cuh"
#include "spformat/largest.cuh"
#include "spformat/look_back.cuh"

using namespace spformat;

// The rule by which all nonzeros stay, as `Largest` has it.
template <class T> struct Nonzero {
    T live;
    static constexpr i64 ties = 0;
    __device__ __forceinline__ void masks(const Unit<T>& unit, u32& larger, u32& equal) const {
        larger = nonzeros(unit, live), equal = 0;
    }
    __device__ __forceinline__ i64 start(const Kept& before) const { return before.larger; }
};

// A rule on a unit, as a tile has it.
template <class T> struct LargestOfUnit : Largest<T> {
    using Largest<T>::Largest;
    __device__ __forceinline__ void masks(const Unit<T>& u, u32& larger, u32& equal) const {
        Largest<T>::masks(make_uint4(u.w[0], u.w[1], u.w[2], u.w[3]), larger, equal);
    }
};

template <class T, class Rule>
__device__ __forceinline__ void write_tile(const T* __restrict__ x, i64 M, i64 K, const Rule& rule, u8* __restrict__ bits, u64* sums,
                                           u64* total, i64 capacity, T* __restrict__ data, int* __restrict__ indptr) {
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
    u32 stays[N], equal[N], larger_here = 0, equal_here = 0;
#pragma unroll
    for (int j = 0; j < N; ++j) {
        rule.masks(units[j], stays[j], equal[j]);
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
        rule.masks(one, larger, same);
        const u32 others_equal = __ballot_sync(~0u, same & 1);
        const bool stays_here = larger & 1 || (same & 1 && __popc(others_equal & ((1u << lane) - 1)) < places - i64(own.equal));
        const u32 halo = __ballot_sync(~0u, stays_here);
        if (lane == 0) flat[Sizes::WORDS] = halo;
    }
    __syncthreads();
    write_bytes<T>(flat, whole, first, n, M, K, bits);
    const i64 start = rule.start(others), most = capacity - start;
    store_tile(units, flat, before, image, room, first, M, K, start, most > 0 ? most : 0, data, indptr);
}

template <class T>
__global__ void __launch_bounds__(TILE_THREADS, sizeof(T) < 4 ? 5 : 4)  // as many as have room for their registers
prune_tiles(const T* __restrict__ x, i64 M, i64 K, Keys keys, const Selection* __restrict__ s, u8* __restrict__ bits, u64* sums,
            u64* total, i64 capacity, T* __restrict__ data, int* __restrict__ indptr) {
    write_tile(x, M, K, LargestOfUnit<T>(keys, s), bits, sums, total, capacity, data, indptr);
}

template <class T>
__global__ void __launch_bounds__(TILE_THREADS, sizeof(T) == 2 ? 4 : 5)
pack_tiles(const T* __restrict__ x, i64 M, i64 K, u64 live, u8* __restrict__ bits, u64* sums, u64* total, i64 capacity,
           T* __restrict__ data, int* __restrict__ indptr) {
    write_tile(x, M, K, Nonzero<T>{T(live)}, bits, sums, total, capacity, data, indptr);
}

// total: in host memory, becomes the nonzeros of every `step`-th tile, a block each. sums: two zeros before the launch and after it.
template <class T>
__global__ void __launch_bounds__(TILE_THREADS)
sample_tiles(const T* __restrict__ x, i64 n, i64 step, u64 live, u64* sums, u64* total) {
    using Sizes = Tile<T>;
    const i64 first = blockIdx.x * step * Sizes::SIZE - head_of(x);
    Unit<T> units[Sizes::UNITS];
#pragma unroll
    for (int j = 0; j < Sizes::UNITS; ++j)
        units[j] = load_unit<false>(x, first + (j * TILE_THREADS + threadIdx.x) * Sizes::WIDE, n);
    u32 count = 0;
#pragma unroll
    for (int j = 0; j < Sizes::UNITS; ++j) count += __popc(nonzeros(units[j], T(live)));
    count = __reduce_add_sync(~0u, count);
    if (threadIdx.x % 32 == 0) atomicAdd(sums, static_cast<u64>(count));
    __threadfence();
    __syncthreads();
    if (threadIdx.x != 0 || atomicAdd(sums + 1, 1ull) != gridDim.x - 1) return;
    *const_cast<volatile u64*>(total) = atomicExch(sums, 0ull);
    sums[1] = 0;
}
