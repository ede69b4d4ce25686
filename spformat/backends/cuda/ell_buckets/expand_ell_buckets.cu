// ELL buckets as a dense matrix, every element written once. sm_80 and later. Launcher: expand_ell_buckets.py.
//
// The slots of a row lie in several buckets; `slots` lists those that hold an item, row by row, columns ascending.
//
//   indptr   i64[M+1]    slots[indptr[i] .. indptr[i+1]-1] belong to row i
//   slots    Slot[nnz]   places in indices and data
//   indices  Idx[S]      columns
//   data     T[S]        values, as unsigned words of the same width
//   x        T[M, ld]    the result, zeros where nothing is stored
#include "spformat/expand_rows.cuh"

using namespace spformat;

template <class T, class Slot, class Idx>
__global__ void __launch_bounds__(ROW_WARPS * 32)
expand_ell_buckets(const i64* __restrict__ indptr, const Slot* __restrict__ slots, const Idx* __restrict__ indices,
                   const T* __restrict__ data, i64 M, T* __restrict__ x, i64 ld, i64 segments, int width, int rows) {
    expand_rows(indptr, indices, data, slots, M, x, ld, segments, width, rows);
}
