// CSR to the blocks of BSR and DBSR in two passes over the items: the first marks their blocks, the second puts every value at
// its place. sm_80 and later. Launcher: bsr_from_csr.py.
//
//   indptr, indices, data  the CSR, ordered; data as unsigned words; items whose value has no bit of `mask` are zeros and dropped
//   bits, starts           a block map, block_map.cuh; bits are zeros before the first pass
//   outer_bits, .._starts  the map of its words, if it has only those that are not 0; `across`: of Words
//   blocks  T[nnzb, R, C]  zeros before the second pass
//
// A warp takes CHUNK items side by side, whatever rows they are of, so that long rows and empty ones cost nothing extra.
#include "spformat/block_map.cuh"

using namespace spformat;

constexpr int THREADS = 256, CHUNK = 1024, DEPTH = 4;  // DEPTH: items that a lane loads at once

template <class T, class Idx, class Ptr, bool Scatter>
__global__ void __launch_bounds__(THREADS)
items_to_blocks(const Ptr* __restrict__ indptr, i64 M, const Idx* __restrict__ indices, const T* __restrict__ data, i64 nnz,
                u64 mask, int R, int C, u32* __restrict__ bits, const u32* __restrict__ outer_bits,
                const i64* __restrict__ outer_starts, i64 across, const i64* __restrict__ starts, T* __restrict__ blocks) {
    const i64 begin = (i64(blockIdx.x) * THREADS + threadIdx.x) / 32 * CHUNK;
    if (begin >= nnz) return;
    const i64 end = begin + CHUNK < nnz ? begin + CHUNK : nnz;
    const int lane = threadIdx.x % 32;
    const Ptr* ends = indptr + 1;
    const i64 first_row = warp_lower_bound(0, M, [&](i64 r) { return ends[r] <= begin; });
    const i64 last_row = warp_lower_bound(first_row, M, [&](i64 r) { return ends[r] <= end - 1; });
    const T live = static_cast<T>(mask);
    const Divisor height(R), width(C);
    const Words words{outer_bits, outer_starts, across};
    i64 row = first_row, row_end = ends[row], b = height.of(row);  // of the lane's current item
    i64 marked = -1;                                               // the block that the lane marked last
#pragma unroll 1
    for (i64 base = begin + lane; base - lane < end; base += DEPTH * 32) {
        i64 column[DEPTH];
        T value[DEPTH];
#pragma unroll
        for (int d = 0; d < DEPTH; ++d) {
            const bool there = base + d * 32 < end;
            column[d] = there ? static_cast<i64>(__ldcs(indices + base + d * 32)) : 0;
            value[d] = there ? __ldcs(data + base + d * 32) : T(0);
        }
#pragma unroll
        for (int d = 0; d < DEPTH; ++d) {
            const i64 i = base + d * 32;
            const bool nonzero = value[d] & live;
            if (i >= row_end && i < end) {
                row = segment_of(ends, i, row + 1, last_row);
                row_end = ends[row], b = height.of(row);
            }
            const i64 j = width.of(column[d]);
            if (Scatter) {
                if (!nonzero) continue;
                const i64 number = number_of(bits, starts, words.of(b, j), j);
                blocks[(number * R + (row - b * R)) * C + (column[d] - j * C)] = value[d];
            } else {
                // Neighbouring items are mostly of one block: the first of them marks it.
                const i64 block = nonzero ? words.of(b, j) * 32 + j % 32 : -1, before = __shfl_up_sync(~0u, block, 1);
                if (nonzero && block != marked && (lane == 0 || block != before)) set_bits(bits, block / 32, 1u << (block % 32));
                if (nonzero) marked = block;
            }
        }
    }
}
