// The order of the tiles of C in a product whose blocks take them one after the other.
#pragma once
#include "spformat/dtypes.cuh"

namespace spformat {

// Tiles that run at one time are neighbours in this order: those of a row of tiles, then those of the next one, so that A comes
// from memory once. Only `width` columns of tiles go together, as many as L2 has room for their part of B; then come the next
// ones, from the first row of tiles on. Nothing is computed ahead: the warps that call this have few registers to spare.
struct TileOrder {
    int rows, columns, width;  // of tiles; width: 1 .. columns
    __device__ __forceinline__ int row(int tile) const {
        const int group = tile / (rows * width);
        return (tile - group * rows * width) / width_of(group);
    }
    __device__ __forceinline__ int column(int tile) const {
        const int group = tile / (rows * width);
        return group * width + (tile - group * rows * width) % width_of(group);
    }
    // The last columns may be fewer.
    __device__ __forceinline__ int width_of(int group) const { return min(width, columns - group * width); }
};

}  // namespace spformat
