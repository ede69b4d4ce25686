// The order of the tiles of C in a product whose blocks take them one after the other.
#pragma once
#include "spformat/dtypes.cuh"

namespace spformat {

struct Place {
    int row, column;  // of tiles
};

// Tiles that run at one time are neighbours in this order: those of a row of tiles, then those of the next one, so that A comes
// from memory once. Only `together` columns of tiles do so, as many as L2 has room for their part of B; then come the next
// ones, from the first row of tiles on. With one column at a time all rows of tiles come first.
struct TileOrder {
    int rows, columns, together;  // of tiles; together: 1 .. columns
    // Two divisions: 0.1 us each. Loaders, for which all others wait, call it once for a tile.
    __device__ __forceinline__ Place place(int tile) const {
        const int first = tile / (rows * together) * together, width = min(together, columns - first);
        const int rest = tile - first * rows, row = rest / width;
        return {row, first + rest - row * width};
    }
};

}  // namespace spformat
