// A Bitmask as a dense matrix, and its columns as CSR has them; every element is written once. sm_80 and later. Launcher:
// bitmask_unpack.py.
//
//   indptr   Ptr[M + 1]            first value of each row
//   bits     u8[M, ceil(K / 8)]    bit b of byte y is column 8y+b; bits of columns >= K are 0
//   starts   i64[chunks]           set bits before each CHUNK bytes of the bitmap; null where rows are short
//   data     T[nnz]                values in row-major order, as unsigned words of the same width
//   x        T[M, K]               the result, on 16 bytes, zeros where no bit is set
//   indices  Idx[nnz]              the result: the column of each value
//
// A block takes a tile of 16 KB of x, or TILE_THREADS words of 32 columns; see flat_tiles.cuh and bitmask_rank.cuh.
#include "spformat/bitmask_rank.cuh"

using namespace spformat;

// counts[c]: set bits of bytes c*CHUNK .. of the bitmap. A warp a chunk.
__global__ void __launch_bounds__(TILE_THREADS)
bitmask_chunks(const u8* __restrict__ bits, i64 bytes, u32* __restrict__ counts, i64 chunks) {
    const i64 chunk = (i64(blockIdx.x) * TILE_THREADS + threadIdx.x) / 32;
    if (chunk >= chunks) return;
    const i64 from = chunk * CHUNK, count = min(i64(CHUNK), bytes - from);
    u32 ones = 0;
    scan::each(bits + from, count, threadIdx.x % 32, 32, [&](u8 x) { ones += __popc(x); });
    ones = sum_of_warp(ones);
    if (threadIdx.x % 32 == 0) counts[chunk] = ones;
}

template <class T, class Ptr>
__global__ void __launch_bounds__(TILE_THREADS)
bitmask_to_dense(const Ptr* __restrict__ indptr, const u8* __restrict__ bits, const i64* __restrict__ starts,
                 const T* __restrict__ data, i64 nnz, T* __restrict__ x, i64 M, i64 K) {
    using Sizes = Tile<T>;
    __shared__ __align__(16) T image[Sizes::SIZE + Sizes::WIDE];
    __shared__ __align__(16) u32 flat[Sizes::WORDS + 1], before[Sizes::WORDS];
    __shared__ u32 sums[33];
    __shared__ i64 wide_sums[33];
    const int tid = threadIdx.x;
    const i64 n = M * K, wide = (K + 7) / 8, first = i64(blockIdx.x) * Sizes::SIZE;
    const int size = int(min(i64(Sizes::SIZE), n - first));
    if (K % 8 == 0) {  // the bitmap is one run of bits, as the elements are
        const u8* from = bits + first / 8;
        for (int q = tid; q < Sizes::WORDS / 4; q += TILE_THREADS) {
            uint4 v = make_uint4(0, 0, 0, 0);
            if (128 * (q + 1) <= size) {
                v = __ldcs(reinterpret_cast<const uint4*>(from) + q);
            } else {
                u32 w[4] = {0, 0, 0, 0};
                for (int y = 0; y < 16 && 8 * (16 * q + y) < size; ++y) w[y / 4] |= u32(from[16 * q + y]) << (8 * (y % 4));
                v = make_uint4(w[0], w[1], w[2], w[3]);
            }
            reinterpret_cast<uint4*>(flat)[q] = v;
        }
    } else {
        for (int w = tid; w <= Sizes::WORDS; w += TILE_THREADS) flat[w] = 0;
        __syncthreads();
        const i64 row0 = first / K, y0 = (first - row0 * K) / 8;  // the byte that has the first element
        const i64 last = first + size - 1, row1 = last / K, y1 = (last - row1 * K) / 8;
        const i64 from = row0 * wide + y0, end = row1 * wide + y1 + 1;
        const Rows<Sizes::SIZE> rows(from, wide);
        for (int d = tid; d < end - from; d += TILE_THREADS) {
            i64 y;
            const i64 row = rows(d, y);
            const int p = int(row * K + 8 * y - first);  // -7 .. size-1
            const u64 byte = p < 0 ? u64(bits[from + d]) >> -p : u64(bits[from + d]) << p % 32;
            const int w = max(p, 0) / 32;
            if (u32(byte)) atomicOr(flat + w, u32(byte));
            if (u32(byte >> 32)) atomicOr(flat + w + 1, u32(byte >> 32));  // the last word is for what lies behind the tile
        }
    }
    const i64 row = first / K;
    const i64 column = first - row * K;
    const i64 start = values_before(indptr, starts, bits, wide, row, column / 8, int(column % 8), wide_sums);
    __syncthreads();
    const u32 total = bits_before_words<Sizes::WORDS>(flat, before, sums);
    const int head = load_run<Sizes::SIZE>(data, start, int(total), nnz, image);
    __syncthreads();
#pragma unroll
    for (int j = 0; j < Sizes::UNITS; ++j) {
        const int p = (j * TILE_THREADS + tid) * Sizes::WIDE;
        const u32 mask = flat[p / 32] >> p % 32;
        u32 at = head + bits_before(flat, before, p);
        Unit<T> unit{};
#pragma unroll
        for (int i = 0; i < Sizes::WIDE; ++i)
            if (mask >> i & 1) unit.put(i, image[at++]);
        if (p + Sizes::WIDE <= size) {
            __stcs(reinterpret_cast<uint4*>(x + first + p), make_uint4(unit.w[0], unit.w[1], unit.w[2], unit.w[3]));
        } else {
#pragma unroll
            for (int i = 0; i < Sizes::WIDE; ++i)
                if (p + i < size) x[first + p + i] = unit[i];
        }
    }
}

// The word of 32 columns from column 32*w of a row of `wide` bytes; columns behind its last byte read as 0.
__device__ __forceinline__ u32 row_word(const u8* __restrict__ row, i64 w, i64 wide) {
    const u8* from = row + 4 * w;
    if (wide % 4 == 0) return __ldcs(reinterpret_cast<const u32*>(from));
    u32 word = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i)
        if (4 * w + i < wide) word |= u32(from[i]) << (8 * i);
    return word;
}

template <class Ptr, class Idx>
__global__ void __launch_bounds__(TILE_THREADS)
bitmask_columns(const Ptr* __restrict__ indptr, const u8* __restrict__ bits, const i64* __restrict__ starts,
                Idx* __restrict__ indices, i64 M, i64 wide) {
    __shared__ u16 places[TILE_THREADS * 32];  // of the set bits of the block, in order
    __shared__ Idx columns[TILE_THREADS];      // the first column of each word
    __shared__ u32 sums[33];
    __shared__ i64 wide_sums[33];
    const int tid = threadIdx.x;
    const i64 words = (wide + 3) / 4, first = i64(blockIdx.x) * TILE_THREADS;
    const Rows<TILE_THREADS> rows(first, words);
    i64 w, w0;
    const i64 row = rows(tid, w), row0 = rows(0, w0);
    u32 word = first + tid < M * words ? row_word(bits + row * wide, w, wide) : 0;
    columns[tid] = Idx(32 * w);
    u32 total;
    u32 at = sum_before_thread<TILE_THREADS>(u32(__popc(word)), sums, total);
    for (; word; word &= word - 1) places[at++] = u16(tid * 32 + __ffs(word) - 1);
    if (total == 0) return;
    const i64 start = values_before(indptr, starts, bits, wide, row0, 4 * w0, 0, wide_sums);
    __syncthreads();
    for (u32 i = tid; i < total; i += TILE_THREADS) __stcs(indices + start + i, Idx(columns[places[i] / 32] + places[i] % 32));
}
