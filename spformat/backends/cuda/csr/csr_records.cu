// A CSR with 16-bit values as records (include/spformat/csr_records.cuh), and back. sm_80 and later. One warp a record.
//
//   indptr Ptr[M+1], indices Idx[nnz], data u16[nnz]    the arrays of the format, columns ascending in a row
//   counts u32[M, steps]     items of a row in columns 64*step .. 64*step+63
//   firsts Ptr[M * steps]    the sums of all counts before each
#include "spformat/csr_records.cuh"
#include "spformat/lower_bound.cuh"

using namespace spformat;
using namespace spformat::csr_records;

// Of lanes 0 .. 15: where the items of row `row` + lane in columns 64*step .. 64*step+63 start, and how many they are; no items of
// lanes 16 .. 31.
template <class Ptr, class Idx>
__device__ __forceinline__ i64 items_of_row(const Ptr* __restrict__ indptr, const Idx* __restrict__ indices, i64 row, i64 step,
                                            i64 M, u32& items) {
    const int lane = threadIdx.x % 32;
    row += lane % 16;
    i64 at = 0;
    if (row < M) at = first_from(indices, indptr[row], indptr[row + 1], COLUMNS * step + lane / 16 * COLUMNS);
    const i64 end = __shfl_xor_sync(~0u, at, 16);
    items = lane < 16 ? static_cast<u32>(end - at) : 0;
    return at;
}

// sizes[record]: its 16-byte pieces.
template <class Ptr, class Idx>
__global__ void csr_record_sizes(const Ptr* __restrict__ indptr, const Idx* __restrict__ indices, u32* __restrict__ sizes, i64 M,
                                 i64 steps, i64 records) {
    const i64 record = (static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x) / 32;
    if (record >= records) return;
    u32 pieces = 1;
    for (int part = 0; part < PARTS; ++part) {
        u32 mine;
        items_of_row(indptr, indices, record / steps * ROWS + part * 16, record % steps, M, mine);
        pieces += (__reduce_add_sync(~0u, mine) + 3) / 4;
    }
    if (threadIdx.x % 32 == 0) sizes[record] = pieces;
}

template <class Ptr, class Idx>
__global__ void csr_records_of(const Ptr* __restrict__ indptr, const Idx* __restrict__ indices, const u16* __restrict__ data,
                               const u32* __restrict__ starts, u8* __restrict__ out, i64 M, i64 steps, i64 records) {
    const i64 record = (static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x) / 32;
    if (record >= records) return;
    const int lane = threadIdx.x % 32;
    const i64 step = record % steps;
    u8* const whole = out + static_cast<u64>(starts[record]) * 16;
    u32 piece = 1, header = 0;  // of lane i: where part i starts
    for (int part = 0; part < PARTS; ++part) {
        if (lane == part) header = piece;
        u32* const to = reinterpret_cast<u32*>(whole + 16 * piece);
        u32 mine, before = 0, last = 0;
        const i64 at = items_of_row(indptr, indices, record / steps * ROWS + part * 16, step, M, mine);
        for (int row = 0; row < 16; ++row) {
            const i64 from = __shfl_sync(~0u, at, row);
            const u32 items = __shfl_sync(~0u, mine, row);
            for (u32 i = lane; i < items; i += 32) {
                const int column = static_cast<int>(indices[from + i] - COLUMNS * step);
                last = place_of(row, column) | static_cast<u32>(data[from + i]) << 16;
                to[before + i] = last;
            }
            if (items) last = __shfl_sync(~0u, last, (items - 1) % 32);
            before += items;
        }
        if (lane < (4 - before % 4) % 4) to[before + lane] = last;
        piece += (before + 3) / 4;
    }
    if (lane == PARTS) header = piece;
    if (lane < 8) reinterpret_cast<u16*>(whole)[lane] = static_cast<u16>(header);
}

// Items of each row in each record.
extern "C" __global__ void counts_of_records(const u8* __restrict__ in, const u32* __restrict__ starts, u32* __restrict__ counts,
                                             i64 M, i64 steps, i64 records) {
    const i64 record = (static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x) / 32;
    if (record >= records) return;
    const int lane = threadIdx.x % 32;
    for (int number = 0; number < PARTS; ++number) {
        const Part part(in + static_cast<u64>(starts[record]) * 16, number);
        u32 mine = 0;  // of row `lane`
        for (u32 from = 0; from < part.count; from += 32) {
            const int row = from + lane < part.count ? row_of(part.items[from + lane]) : -1;
#pragma unroll
            for (int r = 0; r < 16; ++r) {
                const u32 those = __ballot_sync(~0u, row == r);
                if (lane == r) mine += __popc(those);
            }
        }
        const i64 row = record / steps * ROWS + number * 16 + lane;
        if (lane < 16 && row < M) counts[row * steps + record % steps] = mine;
    }
}

template <class Ptr, class Idx>
__global__ void items_of_records(const u8* __restrict__ in, const u32* __restrict__ starts, const u32* __restrict__ counts,
                                 const Ptr* __restrict__ firsts, Idx* __restrict__ indices, u16* __restrict__ data, i64 M,
                                 i64 steps, i64 records) {
    const i64 record = (static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x) / 32;
    if (record >= records) return;
    const int lane = threadIdx.x % 32;
    const i64 row0 = record / steps * ROWS, step = record % steps;
    const u32* items = nullptr;
    for (int r = 0; r < ROWS && row0 + r < M; ++r) {
        if (r % 16 == 0) items = Part(in + static_cast<u64>(starts[record]) * 16, r / 16).items;
        const i64 of_row = (row0 + r) * steps + step;
        const u32 count = counts[of_row];
        const i64 first = firsts[of_row];
        for (u32 i = lane; i < count; i += 32) {
            indices[first + i] = static_cast<Idx>(COLUMNS * step + column_of(items[i]));
            data[first + i] = static_cast<u16>(items[i] >> 16);
        }
        items += count;
    }
}
