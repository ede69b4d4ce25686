// What kernels on Bitmask share: reading the bits, and the sums that must be done again. Rows are indptr Ptr[M+1], bits
// u8[M, bytes] (bit b of byte y is column 8y+b) and data T[nnz] in row-major order.
//
// A tile that is expanded to dense multiplies zeros that are not stored. If B holds inf or NaN, 0 * inf puts a NaN where it
// does not belong; a sum that is not finite is computed again by stored_only, over the stored elements alone.
#pragma once
#include "spformat/dtypes.cuh"

namespace spformat {

__device__ __forceinline__ void prefetch_line(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }

// Columns 8*byte .. 8*byte+63 of one row of the bitmask; columns after the row's last byte read as 0. aligned: rows are whole
// 8-byte words.
__device__ __noinline__ u64 mask_bytes(const u8* row, i64 byte, i64 bytes) {
    u64 word = 0;
    for (int i = 0; i < 8 && byte + i < bytes; ++i) word |= static_cast<u64>(row[byte + i]) << (8 * i);
    return word;
}
__device__ __forceinline__ u64 mask_word(const u8* row, i64 byte, i64 bytes, bool aligned) {
    return aligned ? *reinterpret_cast<const u64*>(row + byte) : mask_bytes(row, byte, bytes);
}

// One element of C over the stored elements of row i, in order. b: a column of B, its elements b_k apart.
template <class T, class Ptr>
__device__ __noinline__ sum_t<T> stored_only(const Ptr* indptr, const u8* bits, const T* data, i64 i, i64 bytes,
                                                            const T* b, i64 b_k) {
    sum_t<T> sum = 0;
    i64 at = indptr[i];
    for (i64 y = 0; y < bytes; ++y)
        for (u32 byte = bits[i * bytes + y]; byte; byte &= byte - 1)
            sum += widen(data[at++]) * widen(b[(8 * y + __ffs(byte) - 1) * b_k]);
    return sum;
}

// Adds the partial sums[RANGES][ROWS][NT] of a block, one for each range of K, in their order, and stores them; all threads
// call it. again(row, n): the same element of C over the stored elements of A alone, asked for where the sum is not finite.
template <class Sum, class Out, int ROWS, int NT, int RANGES, class Again>
__device__ __forceinline__ void store_sums(const Sum* sums, i64 row0, i64 n0, i64 M, i64 N, Out* C, i64 c_row, i64 c_col,
                                           Again again) {
    for (int e = threadIdx.x; e < ROWS * NT; e += blockDim.x) {
        // Neighbouring threads take neighbours in C, whichever way it lies.
        const int r = c_row == 1 ? e % ROWS : e / NT, j = c_row == 1 ? e / ROWS : e % NT;
        const i64 row = row0 + r, n = n0 + j;
        if (row >= M || n >= N) continue;
        Sum sum = 0;
#pragma unroll
        for (int w = 0; w < RANGES; ++w) sum += sums[(w * ROWS + r) * NT + j];
        if (!isfinite(sum)) sum = again(row, n);
        C[row * c_row + n * c_col] = narrow<Out>(sum);
    }
}

// The same for A as it is stored.
template <class T, class Out, class Ptr, int ROWS, int NT, int RANGES>
__device__ __forceinline__ void store_sums(const sum_t<T>* sums, const Ptr* indptr, const u8* bits, const T* data,
                                           i64 bytes, i64 row0, i64 n0, i64 M, i64 N, const T* B, i64 b_k, i64 b_n, Out* C,
                                           i64 c_row, i64 c_col) {
    store_sums<sum_t<T>, Out, ROWS, NT, RANGES>(sums, row0, n0, M, N, C, c_row, c_col, [&](i64 row, i64 n) {
        return stored_only<T, Ptr>(indptr, bits, data, row, bytes, B + n * b_n, b_k);
    });
}

}  // namespace spformat
