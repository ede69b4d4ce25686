// Dense rows from items that are listed row by row, columns ascending (CSR, and ELL buckets through a list of slots).
#pragma once
#include "spformat/expand.cuh"

namespace spformat {

constexpr int ROW_WARPS = 8, ROW_IMAGE = 4096;  // warps of a block; bytes that a warp writes at a time

template <int bytes> struct Unsigned { using type = u32; };
template <> struct Unsigned<8> { using type = u64; };

// Item i is at place i of its arrays.
struct InOrder {
    __device__ __forceinline__ i64 operator[](i64 i) const { return i; }
};

// Each warp writes one image: `width` columns of one row, or `rows` whole rows (then segments = 1 and width = ld), whose
// items 32 / rows lanes take. indptr Ptr[M+1]; item i of the matrix has column indices[place[i]] and value data[place[i]].
template <class T, class Ptr, class Idx, class Place>
__device__ __forceinline__ void expand_rows(const Ptr* __restrict__ indptr, const Idx* __restrict__ indices,
                                            const T* __restrict__ data, Place place, i64 M, T* __restrict__ x, i64 ld,
                                            i64 segments, int width, int rows) {
    constexpr int BATCH = 8;  // items of a lane whose loads are in flight together
    __shared__ __align__(16) unsigned char images[ROW_WARPS][ROW_IMAGE + 16];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const i64 task = static_cast<i64>(blockIdx.x) * ROW_WARPS + warp, group = task / segments;
    const i64 row0 = group * rows, c0 = (task - group * segments) * width;
    if (row0 >= M) return;
    const int live = static_cast<int>(M - row0 < rows ? M - row0 : rows);
    const int wide = static_cast<int>(ld - c0 < width ? ld - c0 : width);
    const int count = (live - 1) * width + wide;
    T* to = x + row0 * ld + c0;
    T* image = reinterpret_cast<T*>(images[warp]);
    const int head = head_of(to), lanes = 32 / rows, r = lane / lanes;
    clear_image(image, head + count, lane, 32);
    __syncwarp();
    if (r < live) {
        i64 at = indptr[row0 + r];
        const i64 end = indptr[row0 + r + 1];
        if (c0 > 0) at = warp_lower_bound(at, end, [&](i64 i) { return indices[place[i]] < c0; });
        using Offset = typename Unsigned<sizeof(Idx)>::type;  // from the first column; huge for what lies before it
        const int most = static_cast<int>(end - at < wide ? end - at : wide);  // columns differ, so there are no more
        T* line = image + head + r * width;
        for (int i = lane % lanes; i < most; i += lanes * BATCH) {
            Offset offset[BATCH];
            T value[BATCH];
#pragma unroll
            for (int b = 0; b < BATCH; ++b) {
                offset[b] = wide;
                if (i + b * lanes < most) {
                    const i64 p = place[at + (i + b * lanes)];
                    offset[b] = static_cast<Offset>(indices[p]) - static_cast<Offset>(c0), value[b] = data[p];
                }
            }
#pragma unroll
            for (int b = 0; b < BATCH; ++b)
                if (offset[b] < static_cast<Offset>(wide)) line[offset[b]] = value[b];
            if (offset[BATCH - 1] >= static_cast<Offset>(wide)) break;  // what follows belongs to later segments
        }
    }
    __syncwarp();
    constexpr int P = 16 / sizeof(T);
    for (int q = lane; q * P < head + count; q += 32) store_unit(to, image, head, count, q);
}

}  // namespace spformat
