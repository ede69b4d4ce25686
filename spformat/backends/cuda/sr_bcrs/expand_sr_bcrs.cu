// SR-BCRS as a dense matrix, every element written once. sm_80 and later. Launcher: expand_sr_bcrs.py.
//
//   indptr   Ptr[Mv+1]     first group of each row tile
//   indices  Idx[G, g]     column of each vector, ascending in a tile, -1 after the last
//   data     T[G, t, g]    element (r, s): row r of the tile, vector s; unsigned words of the values' width
//   x        T[M, ld]      the result, zeros where no vector is stored
//
// A block of threads writes `width` columns (whole 16-byte units) of one row tile through images of its t rows in shared
// memory. Wide: g values are a multiple of 16 bytes, and so many are loaded at once; otherwise one.
#include "spformat/expand.cuh"

using namespace spformat;

constexpr int THREADS = 256, IMAGES = 32 * 1024, TALLEST = 256;  // IMAGES: bytes of the images, without the ends of lines

template <class T, class Ptr, class Idx, bool Wide>
__global__ void __launch_bounds__(THREADS)
expand_sr_bcrs(const Ptr* __restrict__ indptr, const Idx* __restrict__ indices, const T* __restrict__ data, i64 M, int t,
               int g, T* __restrict__ x, i64 ld, i64 segments, int width) {
    constexpr int UNIT = 16 / sizeof(T), P = Wide ? UNIT : 1;
    struct alignas(P * sizeof(T)) Unit { T v[P]; };
    struct alignas(P * sizeof(Idx) < 16 ? P * sizeof(Idx) : 16) Columns { Idx v[P]; };
    __shared__ __align__(16) unsigned char images[IMAGES + TALLEST * 16];
    __shared__ i64 range[2];
    T* image = reinterpret_cast<T*>(images);
    const i64 tile = blockIdx.x / segments, c0 = (blockIdx.x - tile * segments) * width, row0 = tile * t;
    const int wide = static_cast<int>(ld - c0 < width ? ld - c0 : width);
    const int rows = static_cast<int>(M - row0 < t ? M - row0 : t), pitch = width + UNIT;
    T* to = x + row0 * ld + c0;
    if (threadIdx.x < 32) {
        i64 lo = indptr[tile], hi = indptr[tile + 1];
        if (segments > 1) {  // by the first column of groups, which is never PAD: the group before may reach into the segment
            const i64 begin = lo;
            lo = warp_lower_bound(lo, hi, [&](i64 n) { return indices[n * g] < c0; });
            hi = warp_lower_bound(lo, hi, [&](i64 n) { return indices[n * g] < c0 + wide; });
            if (lo > begin) --lo;
        }
        if (threadIdx.x == 0) range[0] = lo, range[1] = hi;
    }
    clear_image(image, t * pitch, threadIdx.x, THREADS);
    __syncthreads();

    const i64 first = range[0];
    const int pieces = g / P, of_group = t * pieces;
    const i64 all = (range[1] - first) * of_group;
    const T* from = data + first * t * g;
    const Idx* columns = indices + first * g;
#pragma unroll 2
    for (i64 q = threadIdx.x; q < all; q += THREADS) {
        const int n = static_cast<u32>(q) / static_cast<u32>(of_group), rest = static_cast<int>(q) - n * of_group;
        const int r = static_cast<u32>(rest) / static_cast<u32>(pieces), s = (rest - r * pieces) * P;
        const Unit unit = *reinterpret_cast<const Unit*>(from + q * P);
        const Columns at = *reinterpret_cast<const Columns*>(columns + static_cast<i64>(n) * g + s);
        T* line = image + r * pitch + head_of(to + r * ld);
#pragma unroll
        for (int e = 0; e < P; ++e) {
            const i64 c = at.v[e] - c0;
            if (static_cast<u64>(c) < static_cast<u64>(wide)) line[c] = unit.v[e];
        }
    }
    __syncthreads();
    const int units = pitch / UNIT;
    for (int q = threadIdx.x; q < rows * units; q += THREADS) {
        const int r = static_cast<u32>(q) / static_cast<u32>(units);
        T* row = to + r * ld;
        const int head = head_of(row), u = q - r * units;
        if (u * UNIT < head + wide) store_unit(row, image + r * pitch, head, wide, u);
    }
}
