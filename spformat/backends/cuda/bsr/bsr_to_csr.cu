// BSR and DBSR to CSR: the nonzeros of the blocks, row by row, in two passes over the values. sm_80 and later.
// Launcher: bsr_to_csr.py.
//
//   row_ids  Ptr[listed]      DBSR: the block rows that hold blocks; BSR: null, all are listed
//   indptr   Ptr[listed + 1]  blocks of each listed block row
//   columns  Idx[nnzb]        block columns, ascending in a block row
//   data     T[nnzb, R, C]    values as unsigned words; those without a bit of `mask` are zeros
//   counts   u32[nnzb * R]    nonzeros in each line of a block, in the order of a CSR: block row, row, block
//   starts   i64[nnzb * R+1]  nonzeros before each of them
//
// A line is a row of a block: line s * R + r of data. `lanes` lanes, a power of two up to 32, read one together, so that a warp
// reads 32 / lanes lines side by side; it takes STEPS times as many, one behind the other, or a line that is wider in pieces.
#include "spformat/block_map.cuh"

using namespace spformat;

constexpr int THREADS = 256, STEPS = 32, DEPTH = 4;  // DEPTH: values that a lane loads at once

template <class T, class Idx, class Ptr, bool Fill>
__global__ void __launch_bounds__(THREADS)
lines_of_blocks(i64 listed, const Ptr* __restrict__ indptr, const Idx* __restrict__ columns, const T* __restrict__ data, i64 nnzb,
                u64 mask, int R, int C, int lanes, u32* __restrict__ counts, const i64* __restrict__ starts, void* __restrict__ indices,
                int wide, T* __restrict__ values) {
    const int lane = threadIdx.x % 32, side = lane % lanes, across = 32 / lanes;
    const i64 all = nnzb * R, begin = (i64(blockIdx.x) * THREADS + threadIdx.x) / 32 * (STEPS * across);
    if (begin >= all) return;
    const i64 end = begin + STEPS * across < all ? begin + STEPS * across : all;
    const Divisor height(R);
    const Ptr* ends = indptr + 1;
    const i64 first_block = height.of(begin), last_block = height.of(end - 1);
    const i64 first = warp_lower_bound(0, listed, [&](i64 i) { return ends[i] <= first_block; });
    const i64 last = warp_lower_bound(first, listed, [&](i64 i) { return ends[i] <= last_block; });
    const u32 mine = (lanes == 32 ? ~0u : (1u << lanes) - 1) << (lane - side);  // the lanes of this lane's line
    const T live = static_cast<T>(mask);
    const int pieces = (C + lanes - 1) / lanes;
    // The line of the next load, and the piece of it; the listed block row that the line lies in, and the blocks of that.
    i64 line = begin + lane / lanes, row = first, row_begin = indptr[row], row_end = ends[row], to = 0, column = 0;
    int next_piece = 0, piece = 0, nonzeros_before = 0;
#pragma unroll 1
    while (line - lane / lanes < end) {
        T value[DEPTH];
        i64 place[DEPTH], first_column[DEPTH];  // Fill: of the line's first nonzero; else of its count. Column of its first value
        bool live_line[DEPTH];
#pragma unroll
        for (int d = 0; d < DEPTH; ++d) {
            live_line[d] = line < end;
            if (next_piece == 0 && line < end) {
                const i64 s = height.of(line);
                if (s >= row_end) {
                    row = segment_of(ends, s, row + 1, last);
                    row_begin = indptr[row], row_end = ends[row];
                }
                to = row_begin * R + (line - s * R) * (row_end - row_begin) + (s - row_begin);
                if (Fill) to = starts[to], column = static_cast<i64>(columns[s]) * C;
            }
            const int c = next_piece * lanes + side;
            value[d] = line < end && c < C ? __ldcs(data + line * C + c) : T(0);
            place[d] = to, first_column[d] = column;
            if (++next_piece == pieces) next_piece = 0, line += across;
        }
#pragma unroll
        for (int d = 0; d < DEPTH; ++d) {
            const bool is_nonzero = value[d] & live;
            const u32 nonzeros = __ballot_sync(~0u, is_nonzero) & mine;
            if (Fill && is_nonzero) {
                const i64 at = place[d] + nonzeros_before + __popc(nonzeros & lanes_before());
                store_index(indices, wide, at, first_column[d] + piece * lanes + side);
                values[at] = value[d];
            }
            nonzeros_before += __popc(nonzeros);
            if (++piece == pieces) {
                if (!Fill && side == 0 && live_line[d]) counts[place[d]] = nonzeros_before;
                piece = nonzeros_before = 0;
            }
        }
    }
}

// The indptr of the CSR, of M rows: nonzeros before each row.
template <class Row, class Ptr>
__global__ void __launch_bounds__(THREADS)
row_starts(const Row* __restrict__ row_ids, i64 listed, const Ptr* __restrict__ indptr, i64 M, int R,
           const i64* __restrict__ starts, void* __restrict__ out, int wide) {
    const Divisor height(R);
    for (i64 m = i64(blockIdx.x) * THREADS + threadIdx.x; m <= M; m += i64(gridDim.x) * THREADS) {
        const i64 b = height.of(m);
        i64 i = b;
        bool stored = b < listed;
        if (row_ids) {
            i = segment_of(row_ids, b - 1, 0, listed);  // the first block row that is listed and not above
            stored = i < listed && row_ids[i] == b;
        }
        const i64 begin = indptr[i];
        store_index(out, wide, m, starts[begin * R + (stored ? (m - b * R) * (indptr[i + 1] - begin) : 0)]);
    }
}
