// Records of a Bitmask with 16-bit values: 16 rows x 64 columns of it in the order of the registers of mma m16n8k16.
//
//   bytes 0..15     u16[8]    where the values of each group start, in bytes from the start of the record
//   bytes 16..143   u32[32]   the bits of lane 4g+t: bit 4q+i is element i of its group q
//   bytes 144..     values    group by group, in a group lane by lane, of a lane in the order of its elements; then up to
//                             the next multiple of 16 bytes nothing
//
// Group q = 2k+s is rows g+8s, columns 16k .. 16k+15. The four elements of lane 4g+t in it are its columns 2t, 2t+1, 2t+8,
// 2t+9: registers s and s+2 of the A fragment. The 128 elements of a group lie in lane order, so that what a warp reads at a
// time lies within 256 bytes. Records of a row tile follow each other in the order of K, row tiles in the order of rows;
// starts u32[records + 1] counts 16-byte pieces.
#pragma once
#include "spformat/dtypes.cuh"

namespace spformat {

constexpr int RECORD_BITS = 16, RECORD_VALUES = 144;

// Byte k of before[s]: the bytes of values that the lanes before this one have in group 2k+s. All lanes call it. The fields
// of a whole warp's sum may overflow, those of the lanes before one do not (at most 31 * 4 * 2): sums modulo 2^32 are exact.
__device__ __forceinline__ void bytes_before(u32 bits, u32 (&before)[2]) {
    u32 x = bits - (bits >> 1 & 0x55555555u);
    x = (x & 0x33333333u) + (x >> 2 & 0x33333333u);  // set bits of every group
    const u32 own[2] = {x << 1 & 0x1E1E1E1Eu, x >> 3 & 0x1E1E1E1Eu};
    before[0] = own[0], before[1] = own[1];
#pragma unroll
    for (int d = 1; d < 32; d *= 2)
#pragma unroll
        for (int s = 0; s < 2; ++s)
            asm volatile(
                    "{\n.reg .pred p;\n.reg .b32 x;\nshfl.sync.up.b32 x|p, %0, %1, 0, 0xFFFFFFFF;\n@p add.u32 %0, %0, x;\n}"
                    : "+r"(before[s])
                    : "r"(d));
    before[0] -= own[0], before[1] -= own[1];
}

// One element of C over the stored elements of row i, by ascending columns. b: a column of B, its elements b_k apart.
template <class T>
__device__ __forceinline__ float stored_sum(const u8* records, const u32* starts, int steps, int i, const T* b, i64 b_k) {
    static_assert(sizeof(T) == 2, "records have 16-bit values");
    float sum = 0;
    starts += static_cast<i64>(i / 16) * steps;
#pragma unroll 1
    for (int group = 4 * steps; group; --group, b += 16 * b_k) {  // 16 columns each
        const u8* record = records + static_cast<u64>(*starts) * 16;
        const int q = -group & 3;
        if (q == 3) ++starts;
        const int shift = q * 8 + i / 8 % 2 * 4;
        const u8* values = record + reinterpret_cast<const u16*>(record)[shift / 4];
        u32 mask = 0;  // bit 4t+e: element e of lane t of the four that have the row
#pragma unroll 1
        for (int lane = 0; lane < i % 8 * 4 + 4; ++lane) {
            const u32 bits = reinterpret_cast<const u32*>(record + RECORD_BITS)[lane] >> shift & 15;
            if (lane < i % 8 * 4) values += 2 * __popc(bits);
            else mask |= bits << (lane % 4 * 4);
        }
#pragma unroll 1
        for (int c = 0; c < 16; ++c) {
            const int bit = c % 8 / 2 * 4 + c / 8 * 2 + c % 2;
            if (mask >> bit & 1)
                sum += to_float(reinterpret_cast<const T*>(values)[__popc(mask & ((1u << bit) - 1))]) * to_float(b[c * b_k]);
        }
    }
    return sum;
}
// The same by a call: fewer instructions where there are many places for it.
template <class T>
__device__ __noinline__ float stored_only(const u8* records, const u32* starts, int steps, int i, const T* b, i64 b_k) {
    return stored_sum(records, starts, steps, i, b, b_k);
}

}  // namespace spformat
