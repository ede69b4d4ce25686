// Rows of a dense matrix of 16-bit values, put together in shared memory from A fragments of mma m16n8k16: so that a warp writes
// 512 bytes that follow each other. In pieces of 64 bytes, as fragments have them, the same bytes take up to twice as long.
#pragma once
#include "spformat/dtypes.cuh"

namespace spformat {

constexpr int IMAGE_COLUMNS = 256;               // that a warp writes at a time
constexpr int IMAGE_PITCH = IMAGE_COLUMNS * 2 + 16;  // bytes from row to row: rows of a fragment start in different banks

// a[i]: the fragment of columns 16i .. 16i+15 of 16 rows x 64 columns, to row `row` and column `column` of an image that starts on
// 16 bytes. All lanes of the warp call it.
__device__ __forceinline__ void put_fragments(unsigned char* image, const u32 (&a)[4][4], int row, int column) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    unsigned char* const to = image + (row + g) * IMAGE_PITCH + (column + 2 * t) * 2;
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int r = 0; r < 4; ++r) *reinterpret_cast<u32*>(to + r % 2 * (8 * IMAGE_PITCH) + (16 * i + r / 2 * 8) * 2) = a[i][r];
}

// One row of an image to `to`, its first `columns` elements. Aligned: to starts on 16 bytes, and columns is a multiple of 8. All
// lanes of the warp call it.
template <bool Aligned>
__device__ __forceinline__ void write_row(u16* to, const unsigned char* image, int columns) {
    const int lane = threadIdx.x % 32;
    if constexpr (Aligned) {
        if (8 * lane < columns) reinterpret_cast<uint4*>(to)[lane] = reinterpret_cast<const uint4*>(image)[lane];
    } else {
        for (int i = lane; i < columns; i += 32) to[i] = reinterpret_cast<const u16*>(image)[i];
    }
}

}  // namespace spformat
