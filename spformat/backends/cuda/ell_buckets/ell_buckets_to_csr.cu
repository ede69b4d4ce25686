// ELL buckets back to CSR. sm_80 and later. Launcher: ell_buckets_to_csr.py.
//
//   row_ids  Row[R], indices Idx[S], data T[S], source Source[S]   a valid ELL bucket matrix
//   tables   i64[3][buckets+1]   as ell_buckets.cuh has them; or null, then `few` holds it
//   counts   Count[M]            u32 or u64, zeros before the launch; then the items of each row
//   to_*     Idx[nnz], T[nnz]    the arrays of the CSR
#include "spformat/ell_buckets.cuh"

using namespace spformat;
using ell_buckets::bucket_of;
using ell_buckets::Buckets;

constexpr int THREADS = 256, BATCH = 8;  // BATCH: slots of a thread

template <class Row, class Idx, class Count>
__global__ void __launch_bounds__(THREADS)
count_items(const Row* __restrict__ row_ids, const Idx* __restrict__ indices, const i64* __restrict__ tables,
          const __grid_constant__ ell_buckets::FewBuckets few, int count, i64 rows,
            Count* counts) {
    const i64 row = static_cast<i64>(blockIdx.x) * THREADS + threadIdx.x;
    if (row >= rows) return;
    const Buckets buckets(tables ? tables : few.table, count);
    const int b = bucket_of(row, buckets.rows, count);
    const int items = ell_buckets::items_of(indices + buckets.slot(b, row), static_cast<int>(buckets.widths[b]));
    atomicAdd(counts + row_ids[row], static_cast<Count>(items));
}

// Items of an ELL row are neighbours in the CSR, so that neighbouring lanes write neighbours.
template <class T, class Idx, class Source>
__global__ void __launch_bounds__(THREADS)
scatter_items(const Idx* __restrict__ indices, const T* __restrict__ values, const Source* __restrict__ source, i64 slots,
              Idx* __restrict__ to_indices, T* __restrict__ to_values) {
    const i64 start = static_cast<i64>(blockIdx.x) * (THREADS * BATCH) + threadIdx.x;
    Source to[BATCH];
    Idx column[BATCH];
    T value[BATCH];
#pragma unroll
    for (int j = 0; j < BATCH; ++j) {
        const i64 slot = start + j * THREADS;
        to[j] = -1, column[j] = 0, value[j] = 0;
        if (slot < slots) to[j] = source[slot], column[j] = indices[slot], value[j] = values[slot];
    }
#pragma unroll
    for (int j = 0; j < BATCH; ++j)
        if (to[j] >= 0) to_indices[to[j]] = column[j], to_values[to[j]] = value[j];
}
