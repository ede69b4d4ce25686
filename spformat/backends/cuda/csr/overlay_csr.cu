// Nonzeros of a CSR, or of ELL buckets, written over a dense matrix; its other elements stay. sm_80 and later.
// Launcher: overlay_csr.py.
//
//   indptr   Ptr[M+1]    items indptr[i] .. indptr[i+1]-1 belong to row i
//   slots    Slot[nnz]   place of each item in indices and data; null where item i is at place i
//   indices  Idx[..]     columns
//   data     T[..]       values, as unsigned words of the same width
//   M, nnz               rows; items, indptr[M]
//   mask                 the bits of a value that are all 0 in a zero: those of floats without the sign
//   x        T[M, ld]    the dense matrix
//
// Zeros are not written, because another part of a sum may have a nonzero in their place. No two threads write the same
// element: the columns of a row differ. A block of threads takes ITEMS consecutive items, however they are spread over rows.
#include "spformat/expand.cuh"

using namespace spformat;

constexpr int THREADS = 256, EACH = 4, ITEMS = THREADS * EACH;

template <class T, class Ptr, class Slot, class Idx>
__global__ void __launch_bounds__(THREADS)
overlay_csr(const Ptr* __restrict__ indptr, const Slot* __restrict__ slots, const Idx* __restrict__ indices,
            const T* __restrict__ data, i64 M, i64 nnz, i64 mask, T* __restrict__ x, i64 ld) {
    __shared__ i64 rows[2];  // of the first and of the last item of the block
    const i64 first = static_cast<i64>(blockIdx.x) * ITEMS, last = (first + ITEMS < nnz ? first + ITEMS : nnz) - 1;
    if (threadIdx.x < 64) {
        // The row of an item is the last that starts at or before it: empty rows before it start there, too.
        const i64 item = threadIdx.x < 32 ? first : last;
        const i64 after = warp_lower_bound(0, M, [&](i64 i) { return indptr[i] <= item; });
        if (threadIdx.x % 32 == 0) rows[threadIdx.x / 32] = after - 1;
    }
    i64 column[EACH];
    T value[EACH];
#pragma unroll
    for (int e = 0; e < EACH; ++e) {
        const i64 i = first + e * THREADS + threadIdx.x;
        value[e] = 0, column[e] = 0;
        if (i <= last) {
            const i64 at = slots ? static_cast<i64>(slots[i]) : i;
            value[e] = data[at], column[e] = indices[at];
        }
    }
    __syncthreads();
    const i64 from = rows[0], to = rows[1];
#pragma unroll
    for (int e = 0; e < EACH; ++e) {
        if (!(value[e] & static_cast<T>(mask))) continue;
        const i64 i = first + e * THREADS + threadIdx.x;
        i64 lo = from, hi = to;  // the last row in [from, to] that starts at or before the item
        while (lo < hi) {
            const i64 middle = (lo + hi + 1) / 2;
            if (indptr[middle] <= i) lo = middle;
            else hi = middle - 1;
        }
        x[lo * ld + column[e]] = value[e];
    }
}
