// The items of a CSR in the order of the transpose, without a sort: where it has many columns and not few items in them.
// sm_80 and later. Launcher: csr_transpose_tiles.py.
//
//   indptr   Ptr[M+1], columns Column[items], data T[items]: the CSR; columns ascend in a row. Values are unsigned words
//   bits     u32[4*tiles, K]     bit r of word [p, c]: row 32p + r has an item in column c.  tiles = ceil(M/128)
//   bounds   i64[chunks, M]      the first item of a row in a chunk of `width` columns or after it
//   starts   i64[tiles, K]       where the items of a column in 128 rows go
//
// An element knows its place among those of its column by the bits of the rows before, so that no order of threads matters.
// mark_items writes the bits of 128 rows and `width` columns, add_columns adds them up down the columns, and place_items puts the
// items of such a tile together in shared memory, column by column, and writes runs.
#include "spformat/look_back.cuh"
#include "spformat/lower_bound.cuh"

using namespace spformat;

constexpr int THREADS = 512, WARPS = THREADS / 32, ROWS = 128, WORDS = ROWS / 32, EACH = ROWS / WARPS;
constexpr int GROUP = 16;  // threads that write the run of a column

// first_from where items are spread evenly over K columns: a guess, and a search around it.
template <class Column> __device__ __forceinline__ i64
first_near(const Column* __restrict__ columns, i64 begin, i64 end, i64 bound, i64 K) {
    constexpr i64 NEAR = 64;
    const i64 guess = begin + static_cast<i64>(static_cast<float>(end - begin) * static_cast<float>(bound) / static_cast<float>(K));
    const i64 low = guess - NEAR, high = guess + NEAR;
    const bool after = low > begin && low < end && columns[low] < bound, before = high > begin && high < end && columns[high] >= bound;
    return first_from(columns, after ? low + 1 : begin, before ? high : end, bound);
}

// A block takes the 128 rows and the chunk of columns of its number.
struct Tile {
    i64 number, row, chunk, column;  // of the 128 rows; first row; of the columns; first column
    int wide;                        // columns
    __device__ __forceinline__ Tile(i64 K, int width, int chunks) :
        number(blockIdx.x / chunks), row(number * ROWS), chunk(blockIdx.x % chunks), column(chunk * width),
        wide(static_cast<int>(K - column < width ? K - column : width)) {}
};

template <class Column, class Ptr>
__global__ void __launch_bounds__(THREADS)
mark_items(const Ptr* __restrict__ indptr, const Column* __restrict__ columns, i64 M, i64 K, int width, int chunks,
           u32* __restrict__ bits, i64* __restrict__ bounds) {
    __shared__ u32 words[WORDS][THREADS];
    __shared__ i64 from[ROWS], to[ROWS];
    const Tile tile(K, width, chunks);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int w = 0; w < WORDS; ++w) words[w][threadIdx.x] = 0;
    if (threadIdx.x < 2 * ROWS) {
        const int r = threadIdx.x % ROWS;
        const bool last = threadIdx.x >= ROWS;
        const i64 row = tile.row + r, bound = tile.column + (last ? tile.wide : 0);
        i64 at = 0;
        if (row < M) {
            const i64 begin = indptr[row], end = indptr[row + 1];
            at = bound == 0 ? begin : bound == K ? end : first_near(columns, begin, end, bound, K);
            if (!last) bounds[tile.chunk * M + row] = at;
        }
        (last ? to : from)[r] = at;
    }
    __syncthreads();
    const int first = warp * EACH;
    i64 longest = 0;
#pragma unroll
    for (int e = 0; e < EACH; ++e) longest = max(longest, to[first + e] - from[first + e]);
    for (i64 i = lane; i - lane < longest; i += 32) {
        u32 at[EACH];
#pragma unroll
        for (int e = 0; e < EACH; ++e) {
            const i64 item = from[first + e] + i;
            at[e] = item < to[first + e] ? static_cast<u32>(columns[item] - tile.column) : ~0u;
        }
#pragma unroll
        for (int e = 0; e < EACH; ++e)
            if (at[e] < tile.wide) atomicOr(&words[first / 32][at[e]], 1u << ((first + e) % 32));
    }
    __syncthreads();
    if (threadIdx.x < tile.wide) {
#pragma unroll
        for (int w = 0; w < WORDS; ++w) bits[(tile.number * WORDS + w) * K + tile.column + threadIdx.x] = words[w][threadIdx.x];
    }
}

__device__ __forceinline__ int items_of(const u32* __restrict__ bits, i64 tile, i64 K, i64 column) {
    int sum = 0;
#pragma unroll
    for (int w = 0; w < WORDS; ++w) sum += __popc(bits[(tile * WORDS + w) * K + column]);
    return sum;
}

// indptr_out Pointer[K+1] and starts. A block takes 32 columns, each of its warps an equal part of the tiles.
template <class Pointer>
__global__ void __launch_bounds__(THREADS)
add_columns(const u32* __restrict__ bits, i64 tiles, i64 K, Pointer* __restrict__ indptr_out, i64* __restrict__ starts, u64* sums) {
    __shared__ u32 of_warp[WARPS][32];
    __shared__ u64 taken;
    __shared__ i64 start[32];
    const i64 block = taken_tile(sums, taken);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const i64 column = block * 32 + lane, share = (tiles + WARPS - 1) / WARPS, first = warp * share;
    const i64 last = first + share < tiles ? first + share : tiles;
    u32 own = 0;
    if (column < K)
#pragma unroll 4
        for (i64 t = first; t < last; ++t) own += items_of(bits, t, K, column);
    of_warp[warp][lane] = own;
    __syncthreads();
    if (warp == 0) {
        u64 all = 0;
        for (int w = 0; w < WARPS; ++w) {
            const u32 here = of_warp[w][lane];
            of_warp[w][lane] = static_cast<u32>(all);
            all += here;
        }
        const u64 ahead = sum_before_lane(all), of_block = __shfl_sync(~0u, ahead + all, 31);
        const u64 begin = sum_before(of_block, block, sums, nullptr) + ahead;
        start[lane] = static_cast<i64>(begin);
        if (column < K) indptr_out[column] = static_cast<Pointer>(begin);
        if (column == K - 1) indptr_out[K] = static_cast<Pointer>(begin + all);
    }
    __syncthreads();
    i64 at = start[lane] + of_warp[warp][lane];
    if (column < K)
#pragma unroll 4
        for (i64 t = first; t < last; ++t) {
            starts[t * K + column] = at;
            at += items_of(bits, t, K, column);
        }
    leave_tile(sums, taken);
}

// Items that the stage of a block holds.
template <class T> constexpr int CAPACITY = 32768 / (sizeof(T) > 2 ? sizeof(T) : 2);

// Places that a column of n items takes there: an odd number of 4-byte words, so that columns of one length lie in different banks.
template <class T> __device__ __forceinline__ int places_of(int n) {
    constexpr int UNIT = sizeof(T) < 4 ? 4 / sizeof(T) : 1;
    return ((n + UNIT - 1) / UNIT | 1) * UNIT;
}

template <class T, class Column, class Ptr>
__global__ void __launch_bounds__(THREADS, 2)
place_items(const Ptr* __restrict__ indptr, const Column* __restrict__ columns, const T* __restrict__ data, i64 M, i64 K,
            int width, int chunks, const u32* __restrict__ bits, const i64* __restrict__ bounds, const i64* __restrict__ starts,
            int* __restrict__ rows_out, T* __restrict__ data_out) {
    extern __shared__ __align__(16) unsigned char shared[];
    T* stage = reinterpret_cast<T*>(shared);          // the values of some columns, one column after the other
    u8* stage_rows = shared + CAPACITY<T> * sizeof(T);  // and their rows in the tile
    uint2* words = reinterpret_cast<uint2*>(stage_rows + CAPACITY<T>);  // [WORDS][width]: bits, and the place of the first
    i64* ahead = reinterpret_cast<i64*>(words + WORDS * width);        // [width]: starts
    __shared__ int begin[THREADS + 1], sums[33];        // [width+1]: the place of the first item of a column
    __shared__ i64 from[ROWS], to[ROWS];                // items of a row that are still to be placed
    const Tile tile(K, width, chunks);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, first = warp * EACH, mine = threadIdx.x;
    if (mine < ROWS) {
        const i64 row = tile.row + mine;
        from[mine] = row < M ? bounds[tile.chunk * M + row] : 0;
        to[mine] = row >= M ? 0 : tile.chunk + 1 < chunks ? bounds[(tile.chunk + 1) * M + row] : static_cast<i64>(indptr[row + 1]);
    }
    u32 word[WORDS] = {};
    int items = 0;
    if (mine < tile.wide) {
        ahead[mine] = starts[tile.number * K + tile.column + mine];
#pragma unroll
        for (int w = 0; w < WORDS; ++w) {
            word[w] = bits[(tile.number * WORDS + w) * K + tile.column + mine];
            items += __popc(word[w]);
        }
    }
    int all;
    int place = sum_before_thread<THREADS>(mine < tile.wide ? places_of<T>(items) : 0, sums, all);
    begin[mine] = place;
    if (mine == 0) begin[THREADS] = all;
    if (mine < tile.wide) {
#pragma unroll
        for (int w = 0; w < WORDS; ++w) {
            words[w * width + mine] = make_uint2(word[w], place);
            place += __popc(word[w]);
        }
    }
    __syncthreads();

    for (int low = 0, high; low < tile.wide; low = high) {  // as many columns at a time as the stage holds
        const int base = begin[low];
        high = tile.wide;
        if (all - base > CAPACITY<T>) {
            int none = tile.wide;  // begin[high] fits, begin[none] does not
            high = low + 1;
            while (none - high > 1) {
                const int middle = (high + none) / 2;
                (begin[middle] - base <= CAPACITY<T> ? high : none) = middle;
            }
        }
        i64 longest = 0;
        int placed[EACH] = {};
#pragma unroll
        for (int e = 0; e < EACH; ++e) longest = max(longest, to[first + e] - from[first + e]);
        bool more = true;
        for (i64 i = lane; more && i - lane < longest; i += 32) {
            u32 at[EACH];
            T value[EACH];
#pragma unroll
            for (int e = 0; e < EACH; ++e) {
                const i64 item = from[first + e] + i;
                at[e] = ~0u;
                value[e] = 0;
                if (item < to[first + e]) {
                    at[e] = static_cast<u32>(columns[item] - tile.column);
                    value[e] = data[item];
                }
            }
#pragma unroll
            for (int e = 0; e < EACH; ++e)
                if (at[e] < high) {
                    const uint2 of = words[first / 32 * width + at[e]];
                    const u32 p = of.y - base + __popc(of.x & ((1u << (first + e) % 32) - 1));
                    if (p < CAPACITY<T>) {
                        stage[p] = value[e];
                        stage_rows[p] = static_cast<u8>(first + e);
                    }
                }
            if (high == tile.wide) continue;
            more = false;
#pragma unroll
            for (int e = 0; e < EACH; ++e) {
                const int taken = __popc(__ballot_sync(~0u, at[e] < high));
                placed[e] += taken;
                more |= taken == 32;
            }
        }
        __syncthreads();
        if (lane == 0)
#pragma unroll
            for (int e = 0; e < EACH; ++e) from[first + e] += placed[e];
        for (int c = low + mine / GROUP; c < high; c += THREADS / GROUP) {
            const uint2 of = words[(WORDS - 1) * width + c];
            const int begins = begin[c], count = of.y + __popc(of.x) - begins;
            const i64 to_item = ahead[c];
            for (int i = mine % GROUP; i < count; i += GROUP) {
                rows_out[to_item + i] = static_cast<int>(tile.row) + stage_rows[begins - base + i];
                data_out[to_item + i] = stage[begins - base + i];
            }
        }
        __syncthreads();
    }
}
