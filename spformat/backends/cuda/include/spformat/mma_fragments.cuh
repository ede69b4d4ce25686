// A sparse matrix with 16-bit values in slots of 8 rows, from which ldmatrix reads fragments of mma.sync, and code shared by
// the kernels that read them. Written by mma_fragments.cu.
//
// A panel is 32 rows, a chunk DEPTH columns of A. A slot is eight rows of a panel in one column, 16 bytes; those without a
// value that is not zero are left out. The columns of which a panel has a slot in a chunk, 16 at a time, are its steps:
//   first  u32[P*Q + 1]   of chunk q of panel p, at p*Q + q: pieces of 16 bytes before its record (the low 28 bits), and its
//                         number of steps
//   pieces 16 bytes each  a record is a header of two pieces for each step, then the slots of rows 0-7, 8-15, 16-23, 24-31
//                         of the panel, each by step and place
//   header u8[16]         place by place: the column in the chunk
//          u32[4]         of rows 0-7, 16-23, 8-15, 24-31: bit i, there is a slot at place i; bits 16.., where the first of
//                         them lies, in pieces from the start of the record
// The unused places of a chunk's last step repeat a column that the panel uses there.
// Columns of a step are ordered so that any 8 of them differ modulo 8 as far as possible: they are the 8 lines of B that one
// phase of ldmatrix reads, and lines that differ modulo 8 lie in different banks.
//
// A product over panels multiplies zeros that are not stored. If B holds inf or NaN, 0 * inf puts a NaN where it does not
// belong; store_panel computes sums that are not finite again, over the values alone that are not zero.
#pragma once
#include "spformat/ldmatrix.cuh"
#include "spformat/mma.cuh"

namespace spformat {

constexpr int DEPTH = 128;               // columns of A, rows of B, in a chunk
constexpr int PANEL_ROWS = 32, MF = 2;   // of a panel: rows, fragments of 16 rows
constexpr int MOST_STEPS = DEPTH / 16;   // of a panel in a chunk
constexpr int HEADER = 32;               // bytes
constexpr int MOST_BYTES = MOST_STEPS * HEADER + PANEL_ROWS / 8 * DEPTH * 16;  // of a record

// Of an entry of `first`: the bytes before its record.
__device__ __forceinline__ u64 bytes_before(u32 first) { return static_cast<u64>(first & 0x0FFFFFFF) * 16; }

// The matrix in slots.
struct Slots {
    const u32* first;
    const u8* pieces;
    i64 Q;

    __device__ __forceinline__ const u8* record(u32 at) const { return pieces + bytes_before(at); }
};
__device__ __forceinline__ int steps_of(u32 first) { return first >> 28; }
// Pieces of the record between two entries of `first`.
__device__ __forceinline__ u32 pieces_between(u32 first, u32 next) { return (next - first) & 0x0FFFFFFF; }

// Where a header has the word of rows 8*eight .. 8*eight+7.
__host__ __device__ constexpr int word_of(int eight) { return eight % 2 * 2 + eight / 2; }

// The words of a step whose header is at `header` in shared memory, for this lane's addresses of its fragments.
__device__ __forceinline__ void load_words(u32 (&words)[MF], u32 header, int lane) {
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];"
                 : "=r"(words[0]), "=r"(words[1]) : "r"(header + 16 + lane / 8 % 2 * 8) : "memory");
}
// The fragments of a step in the registers of a warp, as m16n8k16 takes A. record: the address of the chunk's record in shared
// memory; zeros: of 16 bytes of zeros, for what has no slot.
__device__ __forceinline__ void load_fragments(u32 (&a)[MF][4], const u32 (&words)[MF], u32 record, u32 zeros, int lane) {
    const u32 bit = 1u << (lane / 16 * 8 + lane % 8);
#pragma unroll
    for (int m = 0; m < MF; ++m) {
        const u32 slot = record + (words[m] >> 16) * 16 + __popc(words[m] & (bit - 1)) * 16;
        ldmatrix_x4_trans(a[m], words[m] & bit ? slot : zeros);
    }
}

// One element of C over the values of row `row` that are not zero. b: column n of B, its elements b_row apart.
template <class T> __device__ __forceinline__ float stored_sum(const Slots& a, i64 row, const T* b, i64 b_row) {
    static_assert(sizeof(T) == 2, "slots have 16-bit values");
    const int eight = row % PANEL_ROWS / 8;
    const u32* first = a.first + row / PANEL_ROWS * a.Q;
    float sum = 0;
#pragma unroll 1
    for (i64 q = 0; q < a.Q; ++q) {
        const u8* record = a.record(first[q]);
#pragma unroll 1
        for (int step = 0; step < steps_of(first[q]); ++step) {
            const u8* header = record + step * HEADER;
            const u32 word = reinterpret_cast<const u32*>(header + 16)[word_of(eight)];
            const T* slot = reinterpret_cast<const T*>(record) + (word >> 16) * 8 + row % 8;
            for (u32 left = word & 0xFFFF; left; left &= left - 1, slot += 8) {
                const float value = to_float(*slot);
                if (value != 0) sum += value * to_float(b[(q * DEPTH + header[__ffs(left) - 1]) * b_row]);
            }
        }
    }
    return sum;
}
// The same by a call: fewer instructions where there are many places for it.
template <class T> __device__ __noinline__ float stored_only(const Slots& a, i64 row, const T* b, i64 b_row) {
    return stored_sum(a, row, b, b_row);
}

// Sums of 32 rows from row0, 8*NF columns from n0, to C: C[i][n] at i*c_row + n*c_col. B as in the kernels: B[k][n] at
// k*b_row + n*b_col.
template <class T, class Out, int NF>
__device__ __forceinline__ void store_panel(const float (&acc)[MF][NF][4], const Slots& a, i64 row0, i64 n0, i64 M, i64 N, const T* B,
                                            i64 b_row, i64 b_col, Out* C, i64 c_row, i64 c_col) {
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
