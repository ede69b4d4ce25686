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

// Where the values of one row lie in a record: by columns 16k .. 16k+15, bit 4t+i of mask[k] is element i of lane t of the
// row, and from[k] the bytes from the start of the record to the first of its values there.
struct RecordRow {
    u32 mask[4], from[4];

    __device__ __forceinline__ RecordRow(const u8* record, int row) {
        const u32* bits = reinterpret_cast<const u32*>(record + RECORD_BITS);
        const int first = row % 8 * 4, side = row / 8 % 2 * 4;
        u32 before = 0;  // byte k: values of the group in the lanes of the rows above
        for (int lane = 0; lane < first; ++lane) {
            u32 x = bits[lane] >> side & 0x0F0F0F0Fu;
            x -= x >> 1 & 0x05050505u;
            before += (x & 0x03030303u) + (x >> 2 & 0x03030303u);
        }
        u32 own[4];
#pragma unroll
        for (int t = 0; t < 4; ++t) own[t] = bits[first + t] >> side;
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            mask[k] = 0;
#pragma unroll
            for (int t = 0; t < 4; ++t) mask[k] |= (own[t] >> 8 * k & 15) << 4 * t;
            from[k] = reinterpret_cast<const u16*>(record)[2 * k + side / 4] + 2 * (before >> 8 * k & 255);
        }
    }
};

// The bit of RecordRow::mask that stands for column c of 16.
__device__ __forceinline__ int record_bit(int c) { return c % 8 / 2 * 4 + c / 8 * 2 + c % 2; }

// One element of C over the stored elements of row i, by ascending columns. b: a column of B, its elements b_k apart.
template <class T>
__device__ __noinline__ float stored_only(const u8* records, const u32* starts, int steps, i64 i, const T* b, i64 b_k) {
    static_assert(sizeof(T) == 2, "records have 16-bit values");
    const u32* start = starts + i / 16 * steps;
    float sum = 0;
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
        const u8* record = records + static_cast<u64>(start[step]) * 16;
        const RecordRow row(record, static_cast<int>(i % 16));
#pragma unroll
        for (int k = 0; k < 4; ++k)
#pragma unroll 1
            for (int c = 0; c < 16 && row.mask[k]; ++c) {
                const int bit = record_bit(c);
                if (!(row.mask[k] >> bit & 1)) continue;
                const u32 at = row.from[k] + 2 * __popc(row.mask[k] & ((1u << bit) - 1));
                sum += to_float(*reinterpret_cast<const T*>(record + at)) * to_float(b[(64 * i64(step) + 16 * k + c) * b_k]);
            }
    }
    return sum;
}

}  // namespace spformat
