// Binary search of a thread in ascending indices.
#pragma once
#include "spformat/integers.cuh"

namespace spformat {

// The first i in [lo, hi) with columns[i] >= bound, or hi.
template <class Idx> __device__ __forceinline__ i64 first_from(const Idx* __restrict__ columns, i64 lo, i64 hi, i64 bound) {
    while (lo < hi) {
        const i64 middle = lo + (hi - lo) / 2;
        if (columns[middle] < bound) lo = middle + 1;
        else hi = middle;
    }
    return lo;
}

}  // namespace spformat
