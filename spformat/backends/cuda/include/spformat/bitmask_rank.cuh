// How many values of a Bitmask lie before a place in it. Rows are indptr Ptr[M + 1] and bits u8[M, wide]; the bits of a row
// follow those of the row before without a gap, and those behind its last column are 0.
//
// A block counts the bits from the start of the row. Where rows are long (bitmask_unpack.py says which), that would be most of
// the work; a kernel has then counted the bits of every CHUNK bytes of the whole bitmap, and `starts` are their sums.
#pragma once
#include "spformat/flat_tiles.cuh"
#include "spformat/scan.cuh"

namespace spformat {

constexpr int CHUNK = 4096;

// The set bits before bit `bit` of byte `byte` of row `row`, to all threads of the block, which all call it. starts i64[]: bits
// before each CHUNK bytes of the bitmap, or null. sums: shared memory for 33 sums.
template <class Ptr>
__device__ __forceinline__ i64 values_before(const Ptr* __restrict__ indptr, const i64* __restrict__ starts,
                                             const u8* __restrict__ bits, i64 wide, i64 row, i64 byte, int bit, i64* sums) {
    const i64 end = row * wide + byte;
    const i64 from = starts ? end / CHUNK * CHUNK : row * wide;
    const i64 known = starts ? starts[end / CHUNK] : i64(indptr[row]);
    if (end == from && bit == 0) return known;
    u32 ones = 0;
    scan::each(bits + from, end - from, threadIdx.x, TILE_THREADS, [&](u8 x) { ones += __popc(x); });
    if (bit && threadIdx.x == 0) ones += __popc(bits[end] & ((1u << bit) - 1));
    i64 total;
    sum_before_thread<TILE_THREADS>(i64(ones), sums, total);
    return known + total;
}

}  // namespace spformat
