// A run of records that follow each other in memory, copied to shared memory by a block of threads: for kernels that write a matrix
// in records (csr_records.cuh, bitmask_records.cuh) as a dense one.
#pragma once
#include "spformat/cp_async.cuh"
#include "spformat/dense_rows.cuh"
#include "spformat/ldmatrix.cuh"

namespace spformat {

// Up to EACH records of a line, out of `steps`: what makes up IMAGE_COLUMNS columns. blockIdx.x numbers the runs.
struct RecordRun {
    static constexpr int COLUMNS = 64, EACH = IMAGE_COLUMNS / COLUMNS;
    u32 line, first, count;  // the line, the first step, records
    const u32* starts;       // of the records, in 16-byte pieces, and behind them where the last one ends
    u32 begin;

    __device__ __forceinline__ RecordRun(const u32* __restrict__ all, u32 steps) {
        const u32 runs = (steps + EACH - 1) / EACH;  // of a line
        line = blockIdx.x / runs, first = (blockIdx.x - line * runs) * EACH, count = min(EACH, steps - first);
        starts = all + static_cast<u64>(line) * steps + first;
        begin = starts[0];
    }
    // Starts the copy of all records to `to`, 16-byte aligned. All threads of the block call it.
    __device__ __forceinline__ void copy(const u8* __restrict__ records, unsigned char* to) const {
        const u8* from = records + static_cast<u64>(begin) * 16;
        const u32 pieces = starts[count] - begin, at = shared_address(to);
        for (u32 i = threadIdx.x; i < pieces; i += blockDim.x) cp_async_16(at + 16 * i, from + 16 * static_cast<u64>(i));
        cp_async_commit();
    }
    // Bytes between the first record and record k.
    __device__ __forceinline__ u32 offset(u32 k) const { return (starts[k] - begin) * 16; }
    // The rows of these records, ROWS of a line, from their image to x, as far as x [M, ld] has them. All WARPS warps of the block
    // call it. Aligned: rows of x start on 16 bytes.
    template <bool Aligned, int ROWS, int WARPS>
    __device__ __forceinline__ void write_rows(u16* x, const unsigned char* image, i64 M, i64 ld) const {
        const i64 left = ld - static_cast<i64>(first) * COLUMNS, own = count * COLUMNS, row0 = static_cast<i64>(line) * ROWS;
        const int columns = static_cast<int>(left < own ? left : own), warp = threadIdx.x / 32;
#pragma unroll
        for (int i = 0; i < ROWS / WARPS; ++i) {
            const int r = i * WARPS + warp;
            if (row0 + r < M) write_row<Aligned>(x + (row0 + r) * ld + first * COLUMNS, image + r * IMAGE_PITCH, columns);
        }
    }
};

}  // namespace spformat
