// What the kernels share that write a sparse matrix as a dense one. Values are moved as unsigned words of their width.
//
// A dense row is put together in shared memory, as an image of the 16-byte units it will have in device memory: element i of
// a run that starts at `to` stands at image[head_of(to) + i]. So whole units are written with 16-byte stores, whatever the
// alignment of the row, and only the ends of a run are written element by element. Stores are ordinary ones: the product
// reads the matrix next, and a small one is still in L2 then.
#pragma once
#include "spformat/units.cuh"

namespace spformat {

// Zeros in the first `count` elements of an image, which starts on 16 bytes, and up to the end of their last unit.
template <class T> __device__ __forceinline__ void clear_image(T* image, int count, int thread, int threads) {
    const int units = (count * static_cast<int>(sizeof(T)) + 15) / 16;
    for (int q = thread; q < units; q += threads) reinterpret_cast<uint4*>(image)[q] = make_uint4(0, 0, 0, 0);
}

// Unit q of the image of `count` elements that start at `to`; elements outside the run are left alone.
template <class T> __device__ __forceinline__ void store_unit(T* to, const T* image, int head, int count, int q) {
    constexpr int P = 16 / sizeof(T);
    const int at = q * P, end = head + count;
    T* base = to - head;
    if (at >= head && at + P <= end) {
        *reinterpret_cast<uint4*>(base + at) = *reinterpret_cast<const uint4*>(image + at);
    } else {
        for (int e = at; e < at + P; ++e)
            if (e >= head && e < end) base[e] = image[e];
    }
}

// The first i in [lo, hi) for which below(i) is false, or hi; below is true up to there and false from there on. All lanes of a
// warp call it; each round tests 32 places, so that a range of 1,000 takes two rounds.
template <class Below> __device__ __forceinline__ i64 warp_lower_bound(i64 lo, i64 hi, Below below) {
    while (lo < hi) {
        const i64 step = (hi - lo + 31) / 32, i = lo + (threadIdx.x % 32) * step;
        const int before = __popc(__ballot_sync(~0u, i < hi && below(i)));
        if (before == 0) break;
        const i64 next = lo + before * step;
        lo = next - step + 1;
        if (next < hi) hi = next;
    }
    return lo;
}

}  // namespace spformat
