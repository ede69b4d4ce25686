// BSR and DBSR as a dense matrix, every element written once. sm_80 and later. Launcher: expand_bsr.py.
//
//   row_ids  Row[listed]      Listed: the block rows that hold blocks, ascending; else there is none, and all are listed
//   indptr   Ptr[listed+1]    blocks indptr[i] .. indptr[i+1]-1 belong to listed block row i
//   indices  Idx[nnzb]        block columns, ascending in a block row
//   data     T[nnzb, R, C]    blocks, row-major, as unsigned words of the values' width
//   x        T[M, ld]         the result, zeros where no block is stored
//
// A block of threads writes `height` rows x `blocks` block columns of one block row; shared memory says which stored
// block each block column has. Aligned: rows of x, and the columns where a thread block starts, lie on 16 bytes, and a thread
// stores that many at once, a unit. Q: values that are loaded at once; the width of a block is a multiple of it.
#include "spformat/expand.cuh"

using namespace spformat;

constexpr int THREADS = 256, MOST = 2048;  // MOST: block columns that a block of threads may take

template <class T, class Row, class Ptr, class Idx, bool Listed, bool Aligned, int Q>
__global__ void __launch_bounds__(THREADS)
expand_bsr(const Row* __restrict__ row_ids, i64 listed, const Ptr* __restrict__ indptr, const Idx* __restrict__ indices,
           const T* __restrict__ data, i64 M, int R, int C, T* __restrict__ x, i64 ld, i64 segments, int blocks, int strips,
           int height) {
    constexpr int P = Aligned ? 16 / sizeof(T) : 1;
    static_assert(P % Q == 0, "a unit is whole pieces");
    struct alignas(P * sizeof(T)) Unit { T v[P]; };
    struct alignas(Q * sizeof(T)) Piece { T v[Q]; };
    __shared__ int stored[MOST];  // for each block column: its block's number, counted from `first`, or -1
    __shared__ i64 range[2];
    const i64 strip = blockIdx.x / segments, j0 = (blockIdx.x - strip * segments) * blocks;
    const i64 block_row = strip / strips;
    if (threadIdx.x < 32) {
        i64 at = block_row, lo = 0, hi = 0;
        bool present = true;
        if (Listed) {
            at = warp_lower_bound(0, listed, [&](i64 i) { return row_ids[i] < block_row; });
            present = at < listed && row_ids[at] == block_row;
        }
        if (present) {
            lo = indptr[at], hi = indptr[at + 1];
            if (segments > 1) {
                lo = warp_lower_bound(lo, hi, [&](i64 i) { return indices[i] < j0; });
                hi = warp_lower_bound(lo, hi - lo < blocks ? hi : lo + blocks, [&](i64 i) { return indices[i] < j0 + blocks; });
            }
        }
        if (threadIdx.x == 0) range[0] = lo, range[1] = hi;
    }
    for (int j = threadIdx.x; j < blocks; j += THREADS) stored[j] = -1;
    __syncthreads();
    const i64 first = range[0], end = range[1];
    for (i64 i = first + threadIdx.x; i < end; i += THREADS) {
        const i64 j = indices[i] - j0;
        if (static_cast<u64>(j) < static_cast<u64>(blocks)) stored[j] = static_cast<int>(i - first);
    }
    __syncthreads();

    const int r0 = static_cast<int>(strip - block_row * strips) * height;  // first row, counted in the block row
    const i64 row0 = block_row * R + r0, c0 = j0 * C;
    int rows = R - r0 < height ? R - r0 : height;
    if (M - row0 < rows) rows = static_cast<int>(M - row0);
    const int wide = static_cast<int>(ld - c0 < static_cast<i64>(blocks) * C ? ld - c0 : static_cast<i64>(blocks) * C);
    const int units = (wide + P - 1) / P, all = rows > 0 ? rows * units : 0;
    T* to = x + row0 * ld + c0;
#pragma unroll 4
    for (int q = threadIdx.x; q < all; q += THREADS) {
        const int r = static_cast<u32>(q) / static_cast<u32>(units), c = (q - r * units) * P;
        int j = static_cast<u32>(c) / static_cast<u32>(C), at = c - j * C;
        Unit unit;
#pragma unroll
        for (int e = 0; e < P; e += Q) {
            const int s = j < blocks ? stored[j] : -1;
            Piece piece{};
            if (s >= 0) piece = *reinterpret_cast<const Piece*>(data + ((first + s) * R + r0 + r) * C + at);
#pragma unroll
            for (int i = 0; i < Q; ++i) unit.v[e + i] = piece.v[i];
            at += Q;
            if (at == C) at = 0, ++j;
        }
        *reinterpret_cast<Unit*>(to + r * ld + c) = unit;
    }
}
