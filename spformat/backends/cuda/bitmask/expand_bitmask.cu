// Bitmask as a dense matrix, every element written once. sm_80 and later. Launcher: expand_bitmask.py.
//
//   indptr   Ptr[M+1]       first value of each row
//   bits     u8[M, bytes]   bit b of byte y is column 8y+b; bits at or beyond K are 0
//   data     T[nnz]         values in row-major order, as unsigned words of the same width
//   x        T[M, ld]       the result, zeros where no bit is set
//
// A warp takes `width` columns of a row, 1,024 at a time: a lane holds 32 bits, a scan over the lanes says how many values
// come before each of them, and then lane l writes units l, l+32, .. of 16 bytes. Aligned: rows of x start on 16 bytes;
// otherwise a unit is one element.
#include "spformat/expand.cuh"

using namespace spformat;

constexpr int WARPS = 8, STEP = 1024;

// Columns 8*byte .. 8*byte+31 of a row of the mask; columns behind its last byte read as 0. words: rows are whole words.
__device__ __forceinline__ u32 mask_at(const u8* line, i64 byte, i64 bytes, bool words) {
    if (byte >= bytes) return 0;
    if (words) return *reinterpret_cast<const u32*>(line + byte);
    u32 word = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i)
        if (byte + i < bytes) word |= static_cast<u32>(line[byte + i]) << (8 * i);
    return word;
}

template <class T, class Ptr, bool Aligned>
__global__ void __launch_bounds__(WARPS * 32)
expand_bitmask(const Ptr* __restrict__ indptr, const u8* __restrict__ bits, const T* __restrict__ data, i64 M, i64 bytes,
               T* __restrict__ x, i64 ld, i64 segments, i64 width) {
    constexpr int P = Aligned ? 16 / sizeof(T) : 1, UNITS = STEP / P / 32;
    struct alignas(P * sizeof(T)) Unit { T v[P]; };
    const int lane = threadIdx.x % 32;
    const i64 task = static_cast<i64>(blockIdx.x) * WARPS + threadIdx.x / 32, row = task / segments;
    if (row >= M) return;
    const i64 c0 = (task - row * segments) * width, end = ld - c0 < width ? ld : c0 + width;
    const u8* line = bits + row * bytes;
    const bool words = bytes % 4 == 0;
    int skipped = 0;
    for (i64 y = 4 * lane; y < c0 / 8; y += 128) skipped += __popc(mask_at(line, y, bytes, words));
    const T* from = data + indptr[row] + __reduce_add_sync(~0u, skipped);
    u32 next = mask_at(line, c0 / 8 + 4 * lane, bytes, words);
    for (i64 c = c0; c < end; c += STEP) {
        const u32 word = next;
        next = mask_at(line, (c + STEP) / 8 + 4 * lane, bytes, words);
        int through = __popc(word);
#pragma unroll
        for (int d = 1; d < 32; d *= 2) {
            const int other = __shfl_up_sync(~0u, through, d);
            if (lane >= d) through += other;
        }
        const int before = through - __popc(word);
#pragma unroll 4
        for (int j = 0; j < UNITS; ++j) {
            if (c + j * 32 * P >= end) break;
            const int first = (j * 32 + lane) * P, bit = first % 32;
            const u32 owner = __shfl_sync(~0u, word, first / 32);
            const T* source = from + __shfl_sync(~0u, before, first / 32) + __popc(owner & ((1u << bit) - 1));
            const u32 mine = owner >> bit;
            Unit unit;
            u32 k = 0;  // values of the unit so far
#pragma unroll
            for (int e = 0; e < P; ++e) {
                unit.v[e] = 0;
                const bool present = mine >> e & 1;
                // A running count is faster for long units, popc for short ones: popc runs at a quarter of the rate.
                const u32 at = P > 4 ? k : __popc(mine & ((1u << e) - 1));
                if (present) unit.v[e] = source[at];
                k += present;
            }
            if (c + first < end) *reinterpret_cast<Unit*>(x + row * ld + c + first) = unit;
        }
        from += __shfl_sync(~0u, through, 31);
    }
}
