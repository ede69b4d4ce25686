// Whether the arrays of an SR-BCRS are valid, in one pass: as SRBCRS.check_memory and check_canonical require.
//
//   indptr   Pointer[tiles + 1]    not trusted: a tile is walked only where its ends are in order and inside 0 .. groups
//   indices  Column[groups, g]
//   data     T[groups, t, g]       values as unsigned words; `mask` has the bits that decide whether one is zero
//   bad      becomes 1 if something is wrong
//
// A block takes a tile of t rows; a thread takes vectors.
#include "spformat/scan.cuh"

namespace spformat {

template <class T, class Column, class Pointer>
__global__ void __launch_bounds__(scan::THREADS)
sr_bcrs_scan(const Pointer* __restrict__ indptr, const Column* __restrict__ indices, const T* __restrict__ data, i64 M, i64 K,
             i64 tiles, i64 groups, int t, int g, u64 mask, u64* bad) {
    const T live = (T)mask;
    bool wrong = scan::bad_pointer(indptr, tiles, groups);
    for (i64 tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        const i64 start = indptr[tile], stop = indptr[tile + 1];
        if (start < 0 || start > stop || stop > groups) continue;  // the pointer is wrong
        const i64 first = start * g, rows = M - tile * t;          // rows: of the tile inside the matrix
        for (i64 i = first + threadIdx.x; i < stop * g; i += scan::THREADS) {
            const i64 column = indices[i], group = i / g;
            const int slot = (int)(i - group * g);
            const T* value = data + group * t * g + slot;
            T held = 0;
#pragma unroll 8
            for (int r = 0; r < t; ++r) {
                const T v = value[r * g];
                wrong |= v && !(v & live);  // a -0.0
                wrong |= r >= rows && (v & live);
                held |= v & live;
            }
            if (column == -1) {
                wrong |= held || slot == 0 || group != stop - 1;
            } else {
                wrong |= column < 0 || column >= K || !held;
                if (i > first) wrong |= indices[i - 1] >= column || (slot && indices[i - 1] == -1);
            }
        }
    }
    scan::report(wrong, bad);
}

}  // namespace spformat
