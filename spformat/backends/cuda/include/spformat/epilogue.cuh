// From tensor-core accumulators to C: whole 32-byte sectors where alignment allows, single elements where not.
#pragma once
#include "spformat/dtypes.cuh"
#include "spformat/units.cuh"

namespace spformat {

// 4x4 transpose of words among the four lanes of a quad: afterwards w[s] of lane t is what w[t] of lane s was.
__device__ __forceinline__ void transpose_quad(u32 (&w)[4]) {
    const bool odd = threadIdx.x & 1, high = threadIdx.x & 2;
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
        const u32 other = __shfl_xor_sync(~0u, odd ? w[i] : w[i + 1], 1);
        (odd ? w[i] : w[i + 1]) = other;
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const u32 other = __shfl_xor_sync(~0u, high ? w[i] : w[i + 2], 2);
        (high ? w[i] : w[i + 2]) = other;
    }
}

// Transpose of an 8x8 tile of 16-bit items spread over a warp as an mma accumulator: afterwards lane 4g+t has items 2t, 2t+1 of
// column g.
__device__ __forceinline__ u32 transpose_8x8(u32 word) {
    u32 turned;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(turned) : "r"(word));
    return turned;
}

// Eight 16-bit items to consecutive addresses; only the first `valid` exist.
template <class Out> __device__ __forceinline__ void store_eight(Out* to, const u32 (&w)[4], i64 valid) {
    if (valid >= 8 && reinterpret_cast<u64>(to) % 16 == 0) {
        *reinterpret_cast<uint4*>(to) = make_uint4(w[0], w[1], w[2], w[3]);
        return;
    }
#pragma unroll
    for (int i = 0; i < 8; ++i)
        if (i < valid) reinterpret_cast<u16*>(to)[i] = static_cast<u16>(w[i / 2] >> (16 * (i % 2)));
}

// A 16x16 tile in two m16n8 accumulators (columns 0-7 in `left`, 8-15 in `right`) to
// C[row][column] at c + row*ldc + column, or, Col, at c + row + column*ldc. Rows >= rows and columns >= columns do not
// exist (either may be <= 0). All 32 lanes call together.
template <class Out, bool Col>
__device__ __forceinline__ void store_16x16(Out* c, i64 ldc, i64 rows, i64 columns, const float (&left)[4], const float (&right)[4]) {
    const int g = (threadIdx.x % 32) / 4, t = threadIdx.x % 4;
    if constexpr (sizeof(Out) == 2) {
        if (reinterpret_cast<u64>(c) % 16 == 0 && ldc % 8 == 0) {  // the same for all lanes
            u32 w[4] = {pack2<Out>(left[0], left[1]), pack2<Out>(right[0], right[1]),
                        pack2<Out>(left[2], left[3]), pack2<Out>(right[2], right[3])};
            if constexpr (Col) {
                const u32 below = transpose_8x8(w[2]);
                w[2] = transpose_8x8(w[1]);
                w[0] = transpose_8x8(w[0]), w[1] = below, w[3] = transpose_8x8(w[3]);
            }
            transpose_quad(w);  // lane t holds eight neighbours along the contiguous axis
            const int across = g + 8 * (t / 2), along = 8 * (t % 2);
            if (across < (Col ? columns : rows)) store_eight(c + across * ldc + along, w, (Col ? rows : columns) - along);
            return;
        }
    }
    // Single elements, as the lanes have them: a store of the warp then touches eight sectors of 32 bytes.
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int row = g + 8 * (i / 2);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int column = 2 * t + 8 * half + i % 2;
            if (row < rows && column < columns)
                c[Col ? row + column * ldc : row * ldc + column] = from_float<Out>(half ? right[i] : left[i]);
        }
    }
}

// Zero in rows x columns elements of C, laid out as above, by `threads` threads, of which this is number `thread`. Lines may start
// anywhere: units of 16 bytes between boundaries, single elements at both ends.
template <class Out, bool Col>
__device__ __forceinline__ void store_zeros(Out* c, i64 ldc, i64 rows, i64 columns, int thread, int threads) {
    constexpr int vector = 16 / sizeof(Out);
    const i64 lines = Col ? columns : rows, length = Col ? rows : columns;
    const i64 pieces = cdiv<i64>(length, vector) + 1;  // one more where a line starts inside of a unit
    for (i64 i = thread; i < lines * pieces; i += threads) {
        Out* const line = c + i / pieces * ldc;
        const i64 first = i % pieces * vector - head_of(line);
        if (first >= 0 && first + vector <= length) {
            *reinterpret_cast<uint4*>(line + first) = make_uint4(0, 0, 0, 0);
        } else {
            for (int j = 0; j < vector; ++j)
                if (first + j >= 0 && first + j < length) line[first + j] = from_float<Out>(0.0f);
        }
    }
}

// How many entries of the increasing list `ids` (ids[i] >= i) come before the unlisted number of rank `rank`, counted
// from 0: that number is then rank + result. Searches positions first .. last; a warp calls together and halves the
// range five times per round of loads.
template <class I> __device__ __forceinline__ i64 entries_before_unlisted(const I* ids, i64 first, i64 last, i64 rank) {
    while (first < last) {
        const i64 step = cdiv<i64>(last - first, 32), probe = first + threadIdx.x % 32 * step;
        const int before = __popc(__ballot_sync(~0u, probe < last && ids[probe] - probe <= rank));
        if (first + before * step < last) last = first + before * step;
        if (before) first += (before - 1) * step + 1;
    }
    return first;
}

// Zeros in the rows of C of the block rows that row_ids[0 .. listed) leaves out: those of rank `begin` .. begin + count - 1
// among them. R: rows of C in a block row, of M in all; columns n0 .. n0 + columns - 1.
template <class Out, bool Col, int R, class I>
__device__ __forceinline__ void zero_unlisted(const I* row_ids, i64 listed, i64 begin, i64 count, i64 M, Out* c, i64 ldc,
                                              i64 n0, i64 columns, int thread, int threads) {
    const i64 unlisted = cdiv<i64>(M, R) - listed;
    i64 entry = entries_before_unlisted(row_ids, 0, listed, begin);
    for (i64 rank = begin; rank < begin + count && rank < unlisted; ++rank) {
        for (int steps = 0; entry < listed && row_ids[entry] - entry <= rank; ++steps) {
            ++entry;
            if (steps == 8) entry = entries_before_unlisted(row_ids, entry, listed, rank);
        }
        const i64 top = (rank + entry) * R, rows = M - top < R ? M - top : R;
        store_zeros<Out, Col>(c + (Col ? top + n0 * ldc : top * ldc + n0), ldc, rows, columns, thread, threads);
    }
}

}  // namespace spformat
