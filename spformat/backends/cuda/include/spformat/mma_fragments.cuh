// Fragments of mma.sync: a sparse matrix converted for tensor cores, and code shared by the kernels that read it.
// Written by mma_fragments.cu.
//
// A panel is 16*MF rows, a chunk DEPTH columns of A. The columns that a panel uses in a chunk, 16 at a time, are its steps:
//   first  u32[P*Q + 1]             first step of chunk q of panel p, at p*Q + q
//   steps  u8[count, 16 + MF*512]   16 places: the column in the chunk, 1 byte each; then MF A fragments of m16n8k16, lane
//                                   by lane, 16 bytes each
// The unused places of a chunk's last step repeat a column that the panel uses there, with zeros for values.
// Columns of a step are ordered so that any 8 of them differ modulo 8 as far as possible: they are the 8 lines of B that one
// phase of ldmatrix reads, and lines that differ modulo 8 lie in different banks.
//
// A product over panels multiplies zeros that are not stored: rows of a panel share steps, steps are filled up. If B holds inf or NaN, 0 * inf
// puts a NaN where it does not belong; store_panel computes sums that are not finite again, over the stored vectors alone.
#pragma once
#include "spformat/dtypes.cuh"
#include "spformat/mma.cuh"

namespace spformat {

constexpr int DEPTH = 128;               // columns of A, rows of B, in a chunk
constexpr int MOST_STEPS = DEPTH / 16;   // of a panel in a chunk
template <int MF> constexpr int STEP_BYTES = 16 + MF * 512;

// The matrix as it is stored, SR-BCRS(t, g).
template <class T, class Ptr, class Index> struct Vectors {
    const Ptr* indptr;
    const Index* indices;
    const T* data;
    int t, g;
};

// One element of C over the stored vectors of its tile, in order. b: column n of B, its elements b_row apart.
template <class T, class Ptr, class Index>
__device__ float stored_only(const Vectors<T, Ptr, Index>& a, i64 row, const T* b, i64 b_row) {
    const i64 tile = row / a.t, group0 = a.indptr[tile];
    const i64 count = (static_cast<i64>(a.indptr[tile + 1]) - group0) * a.g;
    float sum = 0;
    for (i64 v = 0; v < count; ++v) {
        const i64 k = a.indices[group0 * a.g + v];
        if (k >= 0) sum += to_float(a.data[((group0 + v / a.g) * a.t + row % a.t) * a.g + v % a.g]) * to_float(b[k * b_row]);
    }
    return sum;
}

// Sums of 16*MF rows from row0, 8*NF columns from n0, to C: C[i][n] at i*c_row + n*c_col. B as in the kernels: B[k][n] at
// k*b_row + n*b_col.
template <class T, class Out, class Ptr, class Index, int MF, int NF>
__device__ __forceinline__ void store_panel(const float (&acc)[MF][NF][4], const Vectors<T, Ptr, Index>& a, i64 row0, i64 n0, i64 M,
                                            i64 N, const T* B, i64 b_row, i64 b_col, Out* C, i64 c_row, i64 c_col) {
    struct alignas(2 * sizeof(Out)) Pair { Out x, y; };
    const int lane = threadIdx.x % 32;
    const bool pairs = c_col == 1 && c_row % 2 == 0 && reinterpret_cast<u64>(C) % sizeof(Pair) == 0;
    row0 += lane / 4, n0 += lane % 4 * 2;
    bool finite = true;
#pragma unroll
    for (int m = 0; m < MF; ++m)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            Out* to = C + (row0 + m * 16 + h * 8) * c_row + n0 * c_col;
            const i64 columns = row0 + m * 16 + h * 8 < M ? N - n0 : 0;
#pragma unroll
            for (int j = 0; j < NF; ++j) {
                const float x = acc[m][j][2 * h], y = acc[m][j][2 * h + 1];
                finite = finite && isfinite(x) && isfinite(y);
                if (pairs && 8 * j + 1 < columns) {
                    *reinterpret_cast<Pair*>(to + 8 * j) = Pair{from_float<Out>(x), from_float<Out>(y)};
                } else {
                    if (8 * j < columns) to[8 * j * c_col] = from_float<Out>(x);
                    if (8 * j + 1 < columns) to[(8 * j + 1) * c_col] = from_float<Out>(y);
                }
            }
        }
    if (finite) return;
#pragma unroll 1
    for (int i = 0; i < MF * NF * 4; ++i) {
        const i64 row = row0 + i / (NF * 4) * 16 + i / 2 % 2 * 8, n = n0 + i / 4 % NF * 8 + i % 2;
        if (row >= M || n >= N) continue;
        Out* to = C + row * c_row + n * c_col;
        if (!isfinite(to_float(*to))) *to = from_float<Out>(stored_only(a, row, B + n * b_col, b_row));
    }
}

}  // namespace spformat
