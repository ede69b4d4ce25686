// Whether the arrays of a CSR are valid, in one pass: as CSR.check_memory and check_canonical require. It does not say where.
//
//   indptr   Pointer[rows + 1]
//   indices  Column[items]
//   bad      becomes 1 if something is wrong
#include "spformat/scan.cuh"

namespace spformat {

template <class Column, class Pointer>
__global__ void __launch_bounds__(scan::THREADS)
csr_scan(const Pointer* __restrict__ indptr, const Column* __restrict__ indices, i64 rows, i64 columns, i64 items, u64* bad) {
    bool wrong = scan::bad_pointer(indptr, rows, items);
    wrong |= scan::bad_columns(indices, items, columns, indptr, rows);
    scan::report(wrong, bad);
}

}  // namespace spformat
