// Where the buckets of an ELL bucket matrix lie, for kernels that convert or check one.
#pragma once
#include "spformat/integers.cuh"

namespace spformat {
namespace ell_buckets {

constexpr int MOST_WIDTHS = 64;  // the same as MOST_INTS in formats/declare.py

// The widths of the buckets of a part, ascending.
struct Widths {
    int count;
    int width[MOST_WIDTHS];
};

// The bucket that holds number x, where `first` has the first number of each.
__device__ __forceinline__ int bucket_of(i64 x, const i64* first, int buckets) {
    int low = 0, high = buckets - 1;
    while (low < high) {
        const int middle = (low + high + 1) / 2;
        if (first[middle] <= x)
            low = middle;
        else
            high = middle - 1;
    }
    return low;
}

// Views of a table that comes with the arguments of a kernel where it is small, because a copy to the device takes the host
// as long as the kernel. Its counterpart: FewBuckets in ell_buckets_launch.py.
constexpr int FEW = 126;
struct FewBuckets {
    i64 table[FEW];
};

// Views of i64[3][B+1]: of each bucket the first ELL row and the first slot, then their numbers in all; the widths.
struct Buckets {
    const i64 *rows, *slots, *widths;
    int count;
    __device__ __forceinline__ Buckets(const i64* tables, int buckets)
        : rows(tables), slots(rows + buckets + 1), widths(slots + buckets + 1), count(buckets) {}
    __device__ __forceinline__ i64 slot(int bucket, i64 row) const {
        return slots[bucket] + (row - rows[bucket]) * widths[bucket];
    }
};

// The number of items in an ELL row of a valid matrix: at least one, PAD after the last.
template <class Idx> __device__ __forceinline__ int items_of(const Idx* indices, int width) {
    int items = 1, most = width;
    while (items < most) {
        const int middle = (items + most) / 2;
        if (indices[middle] < 0)
            most = middle;
        else
            items = middle + 1;
    }
    return items;
}

}  // namespace ell_buckets
}  // namespace spformat
