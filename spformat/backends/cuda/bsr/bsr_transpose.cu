// The transpose of a BSR or DBSR as a BSR, without a sort: a bit map of the transposed grid numbers the blocks, and every block
// is moved, transposed, to its number. sm_80 and later. Launcher: bsr_transpose.py.
//
//   row_ids  Row[listed]      DBSR: the block rows that hold blocks; BSR: null, all are listed
//   indptr   Ptr[listed + 1]  blocks of each listed block row
//   columns  Idx[nnzb]        block columns
//   rows     i64[nnzb]        the block row of each block: mark_transposed writes it, move_blocks reads it
//   data     T[nnzb, R, C]    any words of the values' width
//   bits, starts              a block map of [Kb, Mb] blocks, block_map.cuh; bits are zeros before mark_transposed sets them
//   out      T[nnzb, C, R]    the transposed blocks
#include "spformat/block_map.cuh"

using namespace spformat;

constexpr int THREADS = 256;

template <class Row, class Ptr, class Idx>
__global__ void __launch_bounds__(THREADS)
mark_transposed(const Row* __restrict__ row_ids, i64 listed, const Ptr* __restrict__ indptr, const Idx* __restrict__ columns,
                i64 nnzb, i64* __restrict__ rows, u32* __restrict__ bits, i64 words) {
    const i64 s = i64(blockIdx.x) * THREADS + threadIdx.x, first = s - threadIdx.x % 32;
    if (first >= nnzb) return;
    const Ptr* ends = indptr + 1;
    const i64 from = warp_lower_bound(0, listed, [&](i64 i) { return ends[i] <= first; });
    if (s >= nnzb) return;
    const i64 i = segment_of(ends, s, from, listed - 1), b = row_ids ? static_cast<i64>(row_ids[i]) : i;
    rows[s] = b;
    atomicOr(bits + columns[s] * words + b / 32, 1u << (b % 32));
}

// Blocks of at most SIDE x SIDE values are moved `together` at a time, larger ones in tiles of that size, by a block of
// threads each; `down` and `across` count the tiles of a block.
constexpr int SIDE = 32, ROOM = 4 * SIDE * (SIDE + 1), MOST = 1024;  // MOST: blocks that are moved together

template <class T, class Idx>
__global__ void __launch_bounds__(THREADS)
move_blocks(const i64* __restrict__ rows, const Idx* __restrict__ columns, const T* __restrict__ data, i64 nnzb, int R, int C,
            const u32* __restrict__ bits, i64 words, const i64* __restrict__ starts, int together, int down, int across,
            T* __restrict__ out) {
    // One value beside each row of a tile, so that a column of it meets different banks.
    __shared__ T room[ROOM];
    __shared__ i64 number[MOST];
    const i64 tile = blockIdx.x, group = tile / (down * across), s0 = group * together;
    const int inside = static_cast<int>(tile - group * (down * across)), r0 = inside / across * SIDE, c0 = inside % across * SIDE;
    const int count = static_cast<int>(nnzb - s0 < together ? nnzb - s0 : together);
    const int height = R - r0 < SIDE ? R - r0 : SIDE, width = C - c0 < SIDE ? C - c0 : SIDE;
    const int pitch = width + 1, size = height * width, values = count * size;
    const Divisor blocks(size), lines(width), sides(height);
    for (int i = threadIdx.x; i < count; i += THREADS)
        number[i] = number_of(bits, starts, columns[s0 + i] * words + rows[s0 + i] / 32, rows[s0 + i]);
#pragma unroll 8
    for (int q = threadIdx.x; q < values; q += THREADS) {
        const int i = blocks.quotient(q), at = q - i * size, r = lines.quotient(at), c = at - r * width;
        room[(i * height + r) * pitch + c] = __ldcs(data + ((s0 + i) * R + r0 + r) * C + c0 + c);
    }
    __syncthreads();
#pragma unroll 8
    for (int q = threadIdx.x; q < values; q += THREADS) {
        const int i = blocks.quotient(q), at = q - i * size, c = sides.quotient(at), r = at - c * height;
        out[(number[i] * C + c0 + c) * R + r0 + r] = room[(i * height + r) * pitch + c];
    }
}
