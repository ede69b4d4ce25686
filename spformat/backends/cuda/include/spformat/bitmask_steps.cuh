// Bitmask with few columns: what kernels share whose warps take R rows and a slice of K, 64 columns a step.
#pragma once
#include "spformat/bitmask.cuh"

namespace spformat {

constexpr int MASK_STEP = 64;     // columns of A that a warp takes at a time
constexpr int MASK_AHEAD = 1024;  // bytes of a row's values that are prefetched into L2

// What lane l < R knows of row l of its warp: the bits of the next step, and where the values of that step start and those of
// the slice end. Other lanes know nothing (live is false).
template <class T> struct RowSteps {
    const T* values;  // of the first row of the block
    const u8* bits;
    i64 bytes, k, k_end;  // bytes of a row's bits; columns of the next step, of the end of the slice
    u64 next;
    u32 at, end;
    bool live, aligned;

    // row: of this lane; row0: the first of the block. s: which of `slices` slices of `slice` columns.
    template <class Ptr>
    __device__ __forceinline__ RowSteps(const Ptr* indptr, const u8* bitmask, const T* data, const u32* before, i64 M, i64 K,
                                        i64 slice, i64 row0, i64 row, bool has_row, int s, int slices) {
        const i64 first = indptr[row0];
        values = data + first;
        asm("" : "+l"(values));  // one base, so that an address is one multiply-add
        bytes = (K + 7) / 8, k = min(K, s * slice), k_end = min(K, k + slice);
        live = has_row && row < M && k < k_end;
        bits = bitmask + (live ? row : 0) * bytes;
        aligned = bytes % 8 == 0 && reinterpret_cast<u64>(bitmask) % 8 == 0;
        at = end = 0;
        if (!live) return;
        const u32 row_start = static_cast<u32>(indptr[row] - first);
        at = row_start + before[row * slices + s];
        end = s + 1 < slices ? row_start + before[row * slices + s + 1] : static_cast<u32>(indptr[row + 1] - first);
        for (i64 y = k / 8; y < (k_end + 7) / 8 && y < k / 8 + MASK_AHEAD; y += 128) prefetch_line(bits + y);
        for (u32 i = at; i < end && i < at + MASK_AHEAD / sizeof(T); i += 128 / sizeof(T)) prefetch_line(values + i);
    }
    // To the step that begins at column `column`, whose values start at `position`.
    __device__ __forceinline__ void restart(i64 column, u32 position) {
        k = column, at = position;
        next = live ? mask_word(bits, k / 8, bytes, aligned) : 0;
    }
    // The step as rows[2*l], rows[2*l + 1]: for each half of its bits, these and where their values start. R lanes write. Then on
    // to the next step.
    template <int R> __device__ __forceinline__ void publish(uint2* rows) {
        const u32 low = static_cast<u32>(next), high = static_cast<u32>(next >> 32);
        const int lane = threadIdx.x % 32;
        if (lane < R) {
            rows[2 * lane] = make_uint2(low, at);
            rows[2 * lane + 1] = make_uint2(high, at + __popc(low));
        }
        at += __popc(low) + __popc(high);
        k += MASK_STEP;
        if (!live) return;
        next = k < k_end ? mask_word(bits, k / 8, bytes, aligned) : 0;
        if (at + MASK_AHEAD / sizeof(T) < end) prefetch_line(values + at + MASK_AHEAD / sizeof(T));
    }
};

}  // namespace spformat
