// The items of a CSR in the order of the transpose: sorted by column, and by row inside a column. sm_80 and later.
// Launcher: csr_transpose.py.
//
//   columns  Column[items]          of the items, in the order of the pass before
//   rows     Row[items]             likewise; First: instead indptr Ptr[M+1] says where each row starts
//   data     T[items]               values, as unsigned words of the same width
//   counts   u32[2^bits, tiles]     items of each tile with each digit
//   starts   Start[2^bits, tiles]   where they go: the sums of all counts before
//
// A radix sort, lowest digit first: each pass sorts by `bits` bits of the column from bit `shift` on and leaves equal ones in
// their order. Items come in the order of rows, so rows ascend inside a column in the end. A block takes a tile of consecutive
// items. Each warp ranks its items among those with the same digit by ballots, in their order; then the tile is sorted in
// shared memory, so that neighbouring threads store items of one digit side by side.
#include "spformat/expand.cuh"
#include "spformat/prefix_sum.cuh"

using namespace spformat;

constexpr int THREADS = 512, WARPS = THREADS / 32, EACH = 8, TILE = THREADS * EACH, DIGITS = 256;

template <class Column> __device__ __forceinline__ int digit_of(Column column, int shift, int bits) {
    return static_cast<int>(column >> shift) & ((1 << bits) - 1);
}

template <class Column>
__global__ void __launch_bounds__(THREADS)
count_digits(const Column* __restrict__ columns, i64 items, int shift, int bits, u32* __restrict__ counts) {
    __shared__ u32 sums[DIGITS];
    for (int d = threadIdx.x; d < DIGITS; d += THREADS) sums[d] = 0;
    __syncthreads();
    const i64 first = static_cast<i64>(blockIdx.x) * TILE + threadIdx.x;
#pragma unroll
    for (int e = 0; e < EACH; ++e)
        if (first + e * THREADS < items) atomicAdd(sums + digit_of(columns[first + e * THREADS], shift, bits), 1u);
    __syncthreads();
    for (int d = threadIdx.x; d < 1 << bits; d += THREADS) counts[static_cast<i64>(d) * gridDim.x + blockIdx.x] = sums[d];
}

// The row of item p, which is one of first .. last.
template <class Ptr> __device__ __forceinline__ i64 row_of(const Ptr* __restrict__ indptr, i64 p, i64 first, i64 last) {
    while (first < last) {
        const i64 middle = first + (last - first + 1) / 2;
        if (indptr[middle] <= p)
            first = middle;
        else
            last = middle - 1;
    }
    return first;
}

template <class T, class Column, class Row, class Ptr, class Start, bool First>
__global__ void __launch_bounds__(THREADS)
place_items(const Column* __restrict__ columns, const Row* __restrict__ rows, const Ptr* __restrict__ indptr, i64 M,
            const T* __restrict__ data, i64 items, int shift, int bits, const Start* __restrict__ starts,
            Column* __restrict__ columns_out, Row* __restrict__ rows_out, T* __restrict__ data_out) {
    __shared__ __align__(16) u64 stage[TILE];   // the tile's columns, rows or values, sorted by digit
    __shared__ u16 before[WARPS][DIGITS];       // items with a digit in a warp; then where they start in the sorted tile
    __shared__ i64 ahead[DIGITS];               // from a place in the sorted tile to the place in the result
    __shared__ i64 row_bounds[2];               // rows of the first and of the last item of the tile
    __shared__ int sums[33];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const i64 tile = blockIdx.x, start = tile * TILE, first = start + warp * (32 * EACH) + lane;
    const int count = static_cast<int>(items - start < TILE ? items - start : TILE);
    for (int i = threadIdx.x; i < WARPS * DIGITS; i += THREADS) before[i / DIGITS][i % DIGITS] = 0;
    if (First && warp < 2) {
        const i64 p = warp == 0 ? start : start + count - 1;
        const i64 next = warp_lower_bound(0, M + 1, [&](i64 i) { return indptr[i] <= p; });
        if (lane == 0) row_bounds[warp] = next - 1;
    }
    Column column[EACH];
#pragma unroll
    for (int e = 0; e < EACH; ++e) column[e] = first + e * 32 < items ? columns[first + e * 32] : 0;
    __syncthreads();

    int place[EACH];  // at first among the items of the warp with the same digit
#pragma unroll
    for (int e = 0; e < EACH; ++e) {
        const bool exists = first + e * 32 < items;
        const int digit = digit_of(column[e], shift, bits);
        unsigned same = __ballot_sync(~0u, exists);
        for (int b = 0; b < bits; ++b) {
            const unsigned ones = __ballot_sync(~0u, digit >> b & 1);
            same &= digit >> b & 1 ? ones : ~ones;
        }
        const int rank = __popc(same & ((1u << lane) - 1)), already = before[warp][digit];
        place[e] = already + rank;
        __syncwarp();
        if (exists && rank == 0) before[warp][digit] = static_cast<u16>(already + __popc(same));
        __syncwarp();
    }
    __syncthreads();
    const int d = threadIdx.x;
    int of_digit = 0;
    if (d < DIGITS)
        for (int w = 0; w < WARPS; ++w) of_digit += before[w][d];
    int all;
    int to = sum_before_thread<THREADS>(of_digit, sums, all);
    if (d < 1 << bits) ahead[d] = static_cast<i64>(starts[d * static_cast<i64>(gridDim.x) + tile]) - to;
    if (d < DIGITS)
        for (int w = 0; w < WARPS; ++w) {
            const int of_warp = before[w][d];
            before[w][d] = static_cast<u16>(to);
            to += of_warp;
        }
    __syncthreads();

    Column* staged = reinterpret_cast<Column*>(stage);
#pragma unroll
    for (int e = 0; e < EACH; ++e)
        if (first + e * 32 < items) {
            place[e] += before[warp][digit_of(column[e], shift, bits)];
            staged[place[e]] = column[e];
        }
    __syncthreads();
    i64 out[EACH];
#pragma unroll
    for (int e = 0; e < EACH; ++e) {
        const int i = e * THREADS + threadIdx.x;
        if (i < count) {
            out[e] = ahead[digit_of(staged[i], shift, bits)] + i;
            columns_out[out[e]] = staged[i];
        }
    }
    __syncthreads();
    Row* staged_rows = reinterpret_cast<Row*>(stage);
#pragma unroll
    for (int e = 0; e < EACH; ++e) {
        const i64 p = first + e * 32;
        if (p < items)
            staged_rows[place[e]] = First ? static_cast<Row>(row_of(indptr, p, row_bounds[0], row_bounds[1])) : rows[p];
    }
    __syncthreads();
#pragma unroll
    for (int e = 0; e < EACH; ++e) {
        const int i = e * THREADS + threadIdx.x;
        if (i < count) rows_out[out[e]] = staged_rows[i];
    }
    __syncthreads();
    T* staged_data = reinterpret_cast<T*>(stage);
#pragma unroll
    for (int e = 0; e < EACH; ++e)
        if (first + e * 32 < items) staged_data[place[e]] = data[first + e * 32];
    __syncthreads();
#pragma unroll
    for (int e = 0; e < EACH; ++e) {
        const int i = e * THREADS + threadIdx.x;
        if (i < count) data_out[out[e]] = staged_data[i];
    }
}

// indptr[k]: items whose column is below k, for k = 0 .. K. columns ascend.
template <class Column, class Ptr>
__global__ void __launch_bounds__(THREADS)
column_starts(const Column* __restrict__ columns, i64 items, i64 K, Ptr* __restrict__ indptr) {
    const i64 k = static_cast<i64>(blockIdx.x) * THREADS + threadIdx.x;
    if (k > K) return;
    i64 low = 0, high = items;
    while (low < high) {
        const i64 middle = low + (high - low) / 2;
        if (columns[middle] < k)
            low = middle + 1;
        else
            high = middle;
    }
    indptr[k] = static_cast<Ptr>(low);
}
