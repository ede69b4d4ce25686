// Records of a CSR with 16-bit values: the items of 64 rows x 64 columns, each with its place in the A fragments of mma m16n8k16.
//
//   bytes 0..15   u16[8]   where the items of each 16 rows start, and where the last ones end: five numbers, in pieces of 16 bytes
//                          from the start of the record
//   bytes 16..    u32      an item. Low 16 bits: where its value lies in the fragments of its 16 rows (place_of), in bytes; high
//                          16 bits: the value
//
// Items are in the order of rows, then of columns. The last one of 16 rows is repeated up to the next multiple of 16 bytes, so
// that a reader may place all of them. Records of 64 rows follow each other in the order of K; starts u32[records + 1] counts
// pieces. The method is that of H. Xia et al., "Flash-LLM: Enabling cost-effective and highly-efficient large generative model
// inference with unstructured sparsity" (VLDB 2023): load sparse, multiply dense.
#pragma once
#include "spformat/dtypes.cuh"

namespace spformat::csr_records {

constexpr int ROWS = 64, COLUMNS = 64, PARTS = 4;  // of a record: a part is 16 rows
constexpr int IMAGE = 2048;                        // bytes of the fragments of a part

// Where the element of a row 0..15 and a column 0..63 lies: 512 bytes for 16 columns, in them 16 bytes a lane, its four registers.
__device__ __forceinline__ u32 place_of(int row, int column) {
    const u32 lane = row % 8 * 4 + column % 8 / 2, word = row / 8 + column % 16 / 8 * 2;
    return column / 16 * 512 + lane * 16 + word * 4 + column % 2 * 2;
}
__device__ __forceinline__ int row_of(u32 item) { return item >> 6 & 7 | (item >> 2 & 1) << 3; }
__device__ __forceinline__ int column_of(u32 item) {
    return (item >> 9 & 3) << 4 | (item >> 3 & 1) << 3 | (item >> 4 & 3) << 1 | item >> 1 & 1;
}

// The items of a part, its repeated ones not counted.
struct Part {
    const u32* items;
    u32 count;

    __device__ __forceinline__ Part(const u8* record, int part) {
        const u16* const starts = reinterpret_cast<const u16*>(record);
        items = reinterpret_cast<const u32*>(record + starts[part] * 16);
        count = 4 * (starts[part + 1] - starts[part]);
        while (count > 1 && items[count - 1] == items[count - 2]) --count;
    }
};

// Zeros in the image of a warp, IMAGE bytes: before the first items are placed. Each lane writes what it reads afterwards.
__device__ __forceinline__ void clear_image(unsigned char* image) {
#pragma unroll
    for (int i = 0; i < 4; ++i) *reinterpret_cast<uint4*>(image + i * 512 + threadIdx.x % 32 * 16) = uint4{};
}

// a[i]: the fragment of columns 16i .. 16i+15 of a part of the record at `record` in shared memory, by way of `image`, which is
// zero before and afterwards. All lanes of the warp call it.
__device__ __forceinline__ void take_part(u32 (&a)[4][4], const unsigned char* record, int part, unsigned char* image) {
    const u16* const starts = reinterpret_cast<const u16*>(record);
    const u32 lane = threadIdx.x % 32, first = starts[part], pieces = starts[part + 1] - first;
    const uint4* const items = reinterpret_cast<const uint4*>(record) + first;
    auto place = [&](u32 item) { *reinterpret_cast<u16*>(image + (item & 0xFFFF)) = static_cast<u16>(item >> 16); };
    uint4 four;
    if (lane < pieces) four = items[lane];
    __syncwarp();
    if (lane < pieces) place(four.x), place(four.y), place(four.z), place(four.w);
#pragma unroll 1
    for (u32 i = lane + 32; i < pieces; i += 32) {  // few matrices have more than 128 items in 16 x 64 elements
        four = items[i];
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
__device__ __forceinline__ float stored_sum(const u8* records, const u32* starts, int steps, int i, const T* b, i64 b_k) {
    static_assert(sizeof(T) == 2, "records have 16-bit values");
    float sum = 0;
    starts += static_cast<i64>(i / ROWS) * steps;
#pragma unroll 1
    for (int step = 0; step < steps; ++step, b += COLUMNS * b_k) {
        const Part part(records + static_cast<u64>(starts[step]) * 16, i / 16 % PARTS);
#pragma unroll 1
        for (u32 at = 0; at < part.count; ++at) {
            const u32 item = part.items[at];
            if (row_of(item) != i % 16) continue;
            const u16 bits = static_cast<u16>(item >> 16);
            sum += to_float(reinterpret_cast<const T&>(bits)) * to_float(b[column_of(item) * b_k]);
        }
    }
    return sum;
}

}  // namespace spformat::csr_records
