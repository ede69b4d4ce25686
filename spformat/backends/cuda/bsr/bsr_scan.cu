// Whether the arrays of a BSR or DBSR are valid, in one pass: as their check_memory and check_canonical require.
//
//   row_ids  Row[rows]          DBSR: the block rows that are listed; BSR: null, all of them are
//   indptr   Pointer[rows + 1]
//   indices  Column[blocks]
//   data     T[blocks, R, C]    values as unsigned words; `live` masks the bits that decide whether one is zero
//   bad      becomes 1 if something is wrong
//
// `span` lanes read a block. If it lies on an edge of the matrix, they read the part outside of the matrix a second time.
#include "spformat/scan.cuh"

namespace spformat {

template <class T, class Column, class Pointer, class Row>
__global__ void __launch_bounds__(scan::THREADS)
bsr_scan(const Row* __restrict__ row_ids, const Pointer* __restrict__ indptr, const Column* __restrict__ indices,
         const T* __restrict__ data, i64 M, i64 K, i64 rows, i64 blocks, int R, int C, u64 mask, int span, u64* bad) {
    const T live = (T)mask;
    const i64 Mb = (M + R - 1) / R, Kb = (K + C - 1) / C, size = (i64)R * C;
    bool wrong = scan::bad_pointer(indptr, rows, blocks);
    wrong |= scan::bad_columns(indices, blocks, Kb, indptr, rows);
    if (row_ids)
#pragma unroll 1
        for (i64 i = scan::thread(); i < rows; i += scan::threads()) {
            const i64 id = row_ids[i];
            wrong |= id < 0 || id >= Mb || (i && row_ids[i - 1] >= id);
            wrong |= indptr[i] >= indptr[i + 1];  // a row is listed because it has blocks
        }
    // The first block of the last block row; where that is not listed, none.
    const bool ends = rows && (!row_ids || row_ids[rows - 1] == Mb - 1);
    const i64 last = ends ? (i64)indptr[rows - 1] : blocks;
    scan::share(blocks, span, [&](i64 b, int lane) {
        const bool there = b < blocks;
        const T* block = data + b * size;
        bool held = false;
        scan::each(block, there ? size : 0, lane, span, [&](T value) {
            held |= value & live;
            wrong |= value && !(value & live);  // a -0.0
        });
        held = scan::summed(held, span);
        if (!there) return;
        wrong |= !held;
        const int rows_inside = b >= last ? M % R : 0, columns_inside = indices[b] == Kb - 1 ? K % C : 0;  // 0: all
        if (rows_inside || columns_inside)
#pragma unroll 1
            for (int i = lane; i < size; i += span)
                wrong |= ((rows_inside && i / C >= rows_inside) || (columns_inside && i % C >= columns_inside)) && block[i] & live;
    });
    scan::report(wrong, bad);
}

}  // namespace spformat
