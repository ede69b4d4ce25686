// A dense matrix as a Bitmask: the bits and how many of them lie before each tile; then the values and the
// pointer. sm_80 and later. Launcher: bitmask_pack.py.
//
//   x        T[M, K]               row-major, as unsigned words; `live` masks the bits that decide whether one is zero
//   bits     u8[M, ceil(K / 8)]    bit b of byte y is column 8y+b; bits of columns >= K are 0
//   starts   i64[tiles]            nonzeros before each tile
//   sums     u64[2 + tiles]        zeros before the launch and after it, see look_back.cuh
//   nonzeros u64                   in host memory, becomes the number of nonzeros
//   data     T[nnz]                the nonzeros in row-major order
//   indptr   Ptr[M + 1]            nonzeros before each row
//
// A tile is 16 KB of memory, the first one the 16 KB from the boundary of 16 bytes at or before x; see flat_tiles.cuh. The
// values of a tile are put together in shared memory, so that whole units of 16 bytes are written.
#include "spformat/bitmask_tiles.cuh"
#include "spformat/look_back.cuh"

using namespace spformat;

template <class T>
__global__ void __launch_bounds__(TILE_THREADS)
bitmask_bits(const T* __restrict__ x, i64 M, i64 K, u64 live, u8* __restrict__ bits, i64* __restrict__ starts, u64* sums,
             u64* nonzeros_of_all) {
    using Sizes = Tile<T>;
    __shared__ __align__(16) u32 flat[Sizes::WORDS + 1];
    __shared__ u32 counts[TILE_THREADS / 32];
    __shared__ u64 shared_tile;
    const int tid = threadIdx.x, lane = tid % 32, head = head_of(x);
    const i64 n = M * K, tile = taken_tile(sums, shared_tile), first = tile * Sizes::SIZE - head;
    const bool whole = K % 8 == 0 && head == 0;  // each byte of the result is one of `flat`
    Unit<T> units[Sizes::UNITS];
#pragma unroll
    for (int j = 0; j < Sizes::UNITS; ++j)
        units[j] = load_unit<false>(x, first + (j * TILE_THREADS + tid) * Sizes::WIDE, n);
    u32 count = 0;
#pragma unroll
    for (int j = 0; j < Sizes::UNITS; ++j) {
        const u32 mask = nonzeros(units[j], T(live));
        count += __popc(mask);
        put_mask<T>(flat, j * TILE_THREADS + tid, mask);
    }
    if (!whole && tid < 32) {  // the byte that starts at the last element of the tile needs seven more
        const i64 at = first + Sizes::SIZE + lane;
        const u32 halo = __ballot_sync(~0u, lane < 8 && at < n && (x[at] & T(live)) != 0);
        if (lane == 0) flat[Sizes::WORDS] = halo;
    }
    count = sum_of_warp(count);
    if (lane == 0) counts[tid / 32] = count;
    __syncthreads();
    write_start_of_tile(counts, tile, starts, sums, nonzeros_of_all);
    write_bytes<T>(flat, whole, first, n, M, K, bits);
    leave_tile(sums, shared_tile);
}

// rows: M; length: elements of a row. Tiles are taken from the last to the first, because the last ones that
// bitmask_bits has read may still be in L2.
template <class T, class Ptr>
__global__ void __launch_bounds__(TILE_THREADS, 5)  // five blocks have enough bytes in flight
bitmask_values(const T* __restrict__ x, i64 M, i64 length, u64 live, const i64* __restrict__ starts, T* __restrict__ data,
               Ptr* __restrict__ indptr) {
    using Sizes = Tile<T>;
    __shared__ __align__(16) T image[Sizes::SIZE + Sizes::WIDE];
    __shared__ __align__(16) u32 flat[Sizes::WORDS], before[Sizes::WORDS];
    __shared__ u32 sums[33];
    const int tid = threadIdx.x, tile = gridDim.x - 1 - blockIdx.x;
    const i64 n = M * length, first = i64(tile) * Sizes::SIZE - head_of(x);
    Unit<T> units[Sizes::UNITS];
#pragma unroll
    for (int j = 0; j < Sizes::UNITS; ++j)
        units[j] = load_unit<true>(x, first + (j * TILE_THREADS + tid) * Sizes::WIDE, n);
#pragma unroll
    for (int j = 0; j < Sizes::UNITS; ++j) put_mask<T>(flat, j * TILE_THREADS + tid, nonzeros(units[j], T(live)));
    __syncthreads();
    store_tile(units, flat, before, image, sums, first, M, length, starts[tile], data, indptr);
}
