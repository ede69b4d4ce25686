// A Bitmask with 16-bit values as records (include/spformat/bitmask_records.cuh), and back. sm_80 and later. One warp a record.
//
//   indptr Ptr[M+1], bitmask u8[M, bytes], data u16[nnz]    the arrays of the format: first value of each row, bit b of byte y
//                                                           is column 8y+b, values in row-major order
//   before u32[M, steps]     values of a row before column 64*step (bitmask_slices.cu)
//   counts u32[M, steps]     values of a row in columns 64*step .. 64*step+63
//   firsts Ptr[M * steps]    the sums of all counts before each
#include "spformat/bitmask.cuh"
#include "spformat/bitmask_records.cuh"

using namespace spformat;

// The bits of row `row`, columns 64*step .. 64*step+63.
__device__ __forceinline__ u64 row_bits(const u8* bitmask, i64 row, i64 step, i64 M, i64 bytes) {
    return row < M ? mask_bytes(bitmask + row * bytes, step * 8, bytes) : 0;
}

// sizes[record]: its 16-byte pieces.
extern "C" __global__ void bitmask_record_sizes(const u8* __restrict__ bitmask, u32* __restrict__ sizes, i64 M, i64 bytes,
                                                i64 steps, i64 records) {
    const i64 record = (static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x) / 32;
    if (record >= records) return;
    const int lane = threadIdx.x % 32;
    const u32 mine = lane < 16 ? __popcll(row_bits(bitmask, record / steps * 16 + lane, record % steps, M, bytes)) : 0;
    const u32 values = __reduce_add_sync(0xFFFFFFFFu, mine);
    if (lane == 0) sizes[record] = (RECORD_VALUES + 2 * values + 15) / 16;
}

template <class Ptr>
__global__ void bitmask_records(const Ptr* __restrict__ indptr, const u8* __restrict__ bitmask, const u16* __restrict__ data,
                                const u32* __restrict__ before, const u32* __restrict__ starts, u8* __restrict__ out, i64 M,
                                i64 bytes, i64 steps, i64 records) {
    const i64 record = (static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x) / 32;
    if (record >= records) return;
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    u8* to = out + static_cast<i64>(starts[record]) * 16;
    const i64 row = record / steps * 16 + g, step = record % steps;
    const u64 words[2] = {row_bits(bitmask, row, step, M, bytes), row_bits(bitmask, row + 8, step, M, bytes)};
    u32 bits = 0;
    for (int q = 0; q < 8; ++q) {
        const u32 half = static_cast<u32>(words[q % 2] >> (q / 2 * 16 + 2 * t));
        bits |= (half & 3 | half >> 6 & 12) << (4 * q);
    }
    u32 lanes[2];
    bytes_before(bits, lanes);
    reinterpret_cast<u32*>(to + RECORD_BITS)[lane] = bits;
    u32 start = RECORD_VALUES;
    for (int q = 0; q < 8; ++q) {
        if (lane == 0) reinterpret_cast<u16*>(to)[q] = static_cast<u16>(start);
        const u32 first = lanes[q % 2] >> (q / 2 * 8) & 255, group = bits >> (4 * q) & 15;
        const i64 r = row + q % 2 * 8;
        u16* put = reinterpret_cast<u16*>(to + start + first);
        for (int i = 0; i < 4; ++i)
            if (group >> i & 1) {
                const int column = q / 2 * 16 + 2 * t + i % 2 + i / 2 * 8;
                const u64 below = words[q % 2] & ((u64(1) << column) - 1);
                *put++ = data[indptr[r] + before[r * steps + step] + __popcll(below)];
            }
        start += __shfl_sync(0xFFFFFFFFu, first + 2 * __popc(group), 31);
    }
}

// The bits of row lane/4 + 8*side of a record, columns 0 .. 63, from its bits. All lanes call it.
__device__ __forceinline__ u64 bits_of_row(u32 bits, int side, int t) {
    u64 word = 0;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        const u64 group = bits >> (8 * k + 4 * side) & 15;
        word |= (group & 3 | (group & 12) << 6) << (16 * k + 2 * t);
    }
    word |= __shfl_xor_sync(0xFFFFFFFFu, word, 1);
    return word | __shfl_xor_sync(0xFFFFFFFFu, word, 2);
}

extern "C" __global__ void bitmask_of_records(const u8* __restrict__ in, const u32* __restrict__ starts, u8* __restrict__ bitmask,
                                              u32* __restrict__ counts, i64 M, i64 bytes, i64 steps, i64 records) {
    const i64 record = (static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x) / 32;
    if (record >= records) return;
    const int lane = threadIdx.x % 32, t = lane % 4;
    const u8* from = in + static_cast<u64>(starts[record]) * 16;
    const u32 bits = reinterpret_cast<const u32*>(from + RECORD_BITS)[lane];
    const i64 step = record % steps, left = bytes - 8 * step;
    const u64 words[2] = {bits_of_row(bits, 0, t), bits_of_row(bits, 1, t)};
    const i64 row = record / steps * 16 + lane / 4 + 8 * t;  // of lanes 0 and 1 of the row
    if (t > 1 || row >= M) return;
    u8* to = bitmask + row * bytes + 8 * step;
    if (bytes % 8 == 0) *reinterpret_cast<u64*>(to) = words[t];
    else
        for (int i = 0; i < 8 && i < left; ++i) to[i] = static_cast<u8>(words[t] >> (8 * i));
    counts[row * steps + step] = __popcll(words[t]);
}

template <class Ptr>
__global__ void values_of_records(const u8* __restrict__ in, const u32* __restrict__ starts, const Ptr* __restrict__ firsts,
                                  u16* __restrict__ data, i64 steps, i64 records) {
    const i64 record = (static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x) / 32;
    if (record >= records) return;
    const int lane = threadIdx.x % 32, t = lane % 4;
    const u8* from = in + static_cast<u64>(starts[record]) * 16;
    const u32 bits = reinterpret_cast<const u32*>(from + RECORD_BITS)[lane];
    const i64 row = record / steps * 16 + lane / 4, step = record % steps;
    const u64 words[2] = {bits_of_row(bits, 0, t), bits_of_row(bits, 1, t)};
    u32 lanes[2];
    bytes_before(bits, lanes);
    for (int q = 0; q < 8; ++q) {
        const u32 group = bits >> (4 * q) & 15;
        const i64 r = row + q % 2 * 8;
        if (!group) continue;
        const u32 first = reinterpret_cast<const u16*>(from)[q] + (lanes[q % 2] >> (q / 2 * 8) & 255);
        const u16* take = reinterpret_cast<const u16*>(from + first);
        u16* to = data + firsts[r * steps + step];
        for (int i = 0; i < 4; ++i)
            if (group >> i & 1) {
                const int column = q / 2 * 16 + 2 * t + i % 2 + i / 2 * 8;
                to[__popcll(words[q % 2] & ((u64(1) << column) - 1))] = *take++;
            }
    }
}
