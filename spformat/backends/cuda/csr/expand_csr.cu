// CSR as a dense matrix, every element written once. sm_80 and later. Launcher: expand_csr.py.
//
//   indptr   Ptr[M+1]    items indptr[i] .. indptr[i+1]-1 belong to row i
//   indices  Idx[nnz]    their columns, ascending in a row
//   data     T[nnz]      their values, as unsigned words of the same width
//   x        T[M, ld]    the result, zeros where nothing is stored
#include "spformat/expand_rows.cuh"

using namespace spformat;

template <class T, class Ptr, class Idx>
__global__ void __launch_bounds__(ROW_WARPS * 32)
expand_csr(const Ptr* __restrict__ indptr, const Idx* __restrict__ indices, const T* __restrict__ data, i64 M,
           T* __restrict__ x, i64 ld, i64 segments, int width, int rows) {
    expand_rows(indptr, indices, data, InOrder{}, M, x, ld, segments, width, rows);
}
