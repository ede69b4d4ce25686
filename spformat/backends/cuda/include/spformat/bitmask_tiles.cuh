// What the kernels share that write a tile of a dense matrix (flat_tiles.cuh) as a part of a Bitmask.
#pragma once
#include "spformat/flat_tiles.cuh"

namespace spformat {

// The first byte of the bitmap whose first element is element f or a later one. n: elements; wide: bytes of a row.
__device__ __forceinline__ i64 byte_from(i64 f, i64 n, i64 M, i64 K, i64 wide) {
    if (f <= 0) return 0;
    if (f >= n) return M * wide;
    const i64 row = f / K;
    return row * wide + (f - row * K + 7) / 8;
}

// Writes the bytes of the bitmap that start in a tile whose first element is element `first`. whole: each of them is one of
// `flat`, the bits of the tile and of the seven elements behind it.
template <class T>
__device__ __forceinline__ void write_bytes(const u32* flat, bool whole, i64 first, i64 n, i64 M, i64 K, u8* __restrict__ bits) {
    using Sizes = Tile<T>;
    const int tid = threadIdx.x;
    const i64 wide = (K + 7) / 8;
    if (whole) {
        const int bytes = int(min(i64(Sizes::SIZE), n - first) / 8);
        u8* to = bits + first / 8;
        for (int q = tid * 16; q < bytes; q += TILE_THREADS * 16) {
            if (q + 16 <= bytes) {
                __stcs(reinterpret_cast<uint4*>(to + q), reinterpret_cast<const uint4*>(flat)[q / 16]);
            } else {
                for (int y = q; y < bytes; ++y) to[y] = reinterpret_cast<const u8*>(flat)[y];
            }
        }
        return;
    }
    const i64 from = byte_from(first, n, M, K, wide), end = byte_from(first + Sizes::SIZE, n, M, K, wide);
    if (from >= end) return;
    const Rows<Sizes::SIZE> rows(from, wide);
    for (int d = tid; d < end - from; d += TILE_THREADS) {
        i64 y;
        const i64 row = rows(d, y);
        const int p = int(row * K + 8 * y - first);
        u32 byte = __funnelshift_r(flat[p / 32], flat[p / 32 + 1], p % 32) & 255;
        if (K - 8 * y < 8) byte &= (1u << (K - 8 * y)) - 1;
        bits[from + d] = u8(byte);
    }
}

// Writes the values of a tile whose first element is element `first` of M rows of `length`, and the entries of indptr of the rows
// that start in it. `start` values are stored before it. flat: its bits; before, image and sums: memory of the block. A barrier
// must be behind the writes of `flat`. All threads of the block call it.
template <class T, class Ptr>
__device__ __forceinline__ void store_tile(
    const Unit<T> (&units)[Tile<T>::UNITS], const u32* flat, u32* before, T* image, u32* sums, i64 first, i64 M, i64 length, i64 start,
    T* __restrict__ data, Ptr* __restrict__ indptr) {
    using Sizes = Tile<T>;
    const int tid = threadIdx.x;
    const u32 total = bits_before_words<Sizes::WORDS>(flat, before, sums);
    T* to = data + start;
    const int head = head_of(to);
#pragma unroll
    for (int j = 0; j < Sizes::UNITS; ++j) {
        const int p = (j * TILE_THREADS + tid) * Sizes::WIDE;
        const u32 mask = flat[p / 32] >> p % 32;
        T* next = image + head + bits_before(flat, before, p);
#pragma unroll
        for (int i = 0; i < Sizes::WIDE; ++i)
            if (mask >> i & 1) *next++ = units[j][i];
    }
    const i64 n = M * length, stop = first + Sizes::SIZE;
    for (i64 row = (max(first, i64(0)) + length - 1) / length + tid; row <= M; row += TILE_THREADS) {
        const i64 p = row * length - first;
        if (p >= Sizes::SIZE && stop < n) break;  // the last tile writes the end of the last row, too
        indptr[row] = Ptr(start + (p < Sizes::SIZE ? bits_before(flat, before, int(p)) : total));
    }
    __syncthreads();
    for (int q = tid; q * Sizes::WIDE < head + int(total); q += TILE_THREADS) store_unit(to, image, head, int(total), q);
}

}  // namespace spformat
