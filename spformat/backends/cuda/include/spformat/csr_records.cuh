// Records of a CSR with 16-bit values: the items of 16 rows x 64 columns, each with its place in the A fragments of mma m16n8k16.
//
//   u32 item   low 16 bits: where its value lies in the fragments of the record (place_of), in bytes; high 16 bits: the value
//
// Items are in the order of rows, then of columns. The last one is repeated up to the next multiple of 16 bytes, so that a reader
// may place all of them. Records of a row tile follow each other in the order of K, row tiles in the order of rows; starts
// u32[records + 1] counts 16-byte pieces. The method is that of H. Xia et al., "Flash-LLM: Enabling cost-effective and
// highly-efficient large generative model inference with unstructured sparsity" (VLDB 2023): load sparse, multiply dense.
#pragma once
#include "spformat/dtypes.cuh"

namespace spformat::csr_records {

constexpr int IMAGE = 2048;  // bytes of the fragments of a record

// Where the element of a row 0..15 and a column 0..63 lies: 512 bytes for 16 columns, in them 16 bytes a lane, its four registers.
__device__ __forceinline__ u32 place_of(int row, int column) {
    const u32 lane = row % 8 * 4 + column % 8 / 2, word = row / 8 + column % 16 / 8 * 2;
    return column / 16 * 512 + lane * 16 + word * 4 + column % 2 * 2;
}
__device__ __forceinline__ int row_of(u32 item) { return item >> 6 & 7 | (item >> 2 & 1) << 3; }
__device__ __forceinline__ int column_of(u32 item) {
    return (item >> 9 & 3) << 4 | (item >> 3 & 1) << 3 | (item >> 4 & 3) << 1 | item >> 1 & 1;
}

// Items of a record, its repeated ones not counted.
__device__ __forceinline__ u32 count_of(const u32* items, u32 pieces) {
    u32 count = 4 * pieces;
    while (count > 1 && items[count - 1] == items[count - 2]) --count;
    return count;
}

// Zeros in the image of a warp, IMAGE bytes: before the first record is placed. Each lane writes what it reads afterwards.
__device__ __forceinline__ void clear_image(unsigned char* image) {
#pragma unroll
    for (int i = 0; i < 4; ++i) *reinterpret_cast<uint4*>(image + i * 512 + threadIdx.x % 32 * 16) = uint4{};
}

// a[i]: the fragment of columns 16i .. 16i+15 of the record at `items`, an address in shared memory, by way of `image`, which is
// zero before and afterwards. All lanes of the warp call it.
__device__ __forceinline__ void take_record(u32 (&a)[4][4], const uint4* items, u32 pieces, unsigned char* image) {
    const u32 lane = threadIdx.x % 32;
    auto place = [&](u32 item) { *reinterpret_cast<u16*>(image + (item & 0xFFFF)) = static_cast<u16>(item >> 16); };
    __syncwarp();
    for (u32 i = lane; i < pieces; i += 32) {
        const uint4 four = items[i];
        place(four.x), place(four.y), place(four.z), place(four.w);
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        uint4* const own = reinterpret_cast<uint4*>(image + i * 512 + lane * 16);
        const uint4 x = *own;
        a[i][0] = x.x, a[i][1] = x.y, a[i][2] = x.z, a[i][3] = x.w;
        *own = uint4{};
    }
}

// One element of C over the stored elements of row i, by ascending columns. b: a column of B, its elements b_k apart.
template <class T>
__device__ __noinline__ float stored_only(const u8* records, const u32* starts, int steps, int i, const T* b, i64 b_k) {
    static_assert(sizeof(T) == 2, "records have 16-bit values");
    float sum = 0;
    starts += static_cast<i64>(i / 16) * steps;
#pragma unroll 1
    for (int step = 0; step < steps; ++step, b += 64 * b_k) {
        const u32* items = reinterpret_cast<const u32*>(records + static_cast<u64>(starts[step]) * 16);
        const u32 count = count_of(items, starts[step + 1] - starts[step]);
#pragma unroll 1
        for (u32 at = 0; at < count; ++at) {
            if (row_of(items[at]) != i % 16) continue;
            const u16 bits = static_cast<u16>(items[at] >> 16);
            sum += to_float(reinterpret_cast<const T&>(bits)) * to_float(b[column_of(items[at]) * b_k]);
        }
    }
    return sum;
}

}  // namespace spformat::csr_records
