// Products of 2:4 weights in registers by wgmma.sp, for Hopper: a slab is 64 columns of A, two halves of 32.
#pragma once
#include "spformat/wgmma.cuh"

namespace spformat {

// The rows of B of half `s` of the slab whose tile of B, 128-byte swizzle, is at `tile`.
template <bool BCol> __device__ __forceinline__ u64 rows_of_half(u32 tile, int s) {
    return BCol ? wgmma::descriptor(tile + s * 64, 0, 1024, wgmma::B128)
                : wgmma::descriptor(tile + s * 4096, 64 * 128, 1024, wgmma::B128);
}

// acc += half `s` (0 or 1) of a slab: values x and metadata `word` of this lane, rows b. accumulate: 0 where acc holds nothing.
template <class T, int TN, bool BCol>
__device__ __forceinline__ void multiply_half(float (&acc)[TN / 2], int s, uint4 x, u32 word, u64 b, int accumulate) {
    const u32 v[4] = {x.x, x.y, x.z, x.w};
    if (s == 0) wgmma::sp_rs<T, TN, 0, !BCol>(acc, v, b, word, accumulate);
    else wgmma::sp_rs<T, TN, 1, !BCol>(acc, v, b, word, accumulate);
}

}  // namespace spformat
