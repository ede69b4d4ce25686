// A dense array as CSR, in two passes: count the nonzeros before each piece, then store them.
// sm_80 and later. Launcher: csr_from_dense.py.
//
//   x        T[M, K]           row-major, as unsigned words of the width of its values; M*K > 0
//   starts   i64[pieces+1]     nonzeros before each piece, and in all
//   sums     u64[2 + blocks]   zeros before the launch and after it, see look_back.cuh
//   total    u64               in host memory, becomes the number of nonzeros
//   indptr   Ptr[M+1]          nonzeros before each row, and in all
//   indices  Idx[nnz]          their columns
//   data     T[nnz]            their values
//   totals   u64[2]            zeros before the launch; nonzeros, and elements that are -0
//
// The array is cut into pieces of PIECE elements without regard to its rows, so that every shape keeps all warps equally busy
// and every 16-byte unit is loaded whole, whatever K is. A warp takes a piece. Its nonzeros are put side by side in shared
// memory, with their places in the piece, and then stored in 16-byte units; the columns follow from the places. The warp whose
// piece contains the first element of a row writes that row's entry of indptr.
#include "spformat/expand_rows.cuh"
#include "spformat/look_back.cuh"
#include "spformat/nonzero.cuh"

using namespace spformat;

constexpr int COUNT_WARPS = 8, FILL_WARPS = 4, TOTAL_THREADS = 256;  // warps and threads of a block

template <class T> constexpr int PER_UNIT = 16 / sizeof(T);
template <class T> constexpr int STEPS = sizeof(T) == 1 ? 4 : 8;  // units of a lane, one for every 32 units of the piece
template <class T> constexpr int PIECE = STEPS<T> * 32 * PER_UNIT<T>;

template <class T, bool Float>
__global__ void __launch_bounds__(COUNT_WARPS * 32)
count_pieces(const T* __restrict__ x, i64 n, i64 pieces, i64* __restrict__ starts, u64* sums, u64* total) {
    __shared__ u64 shared_tile;
    __shared__ u32 counts[COUNT_WARPS];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, head = head_of(x);
    const i64 tile = taken_tile(sums, shared_tile), piece = tile * COUNT_WARPS + warp;
    uint4 unit[STEPS<T>];  // of a piece behind the last one: zeros
#pragma unroll
    for (int s = 0; s < STEPS<T>; ++s) unit[s] = load_unit(x, head, n, (piece * STEPS<T> + s) * 32 + lane);
    u32 count = 0;
#pragma unroll
    for (int s = 0; s < STEPS<T>; ++s) count += __popc(nonzero_bits<T, Float>(unit[s]));
    count = __reduce_add_sync(~0u, count);
    if (lane == 0) counts[warp] = count;
    __syncthreads();
    if (warp == 0) {
        const u64 mine = lane < COUNT_WARPS ? counts[lane] : 0, of_warps = sum_before_lane(mine);
        const u64 start = sum_before(__shfl_sync(~0u, of_warps + mine, 31), tile, sums, total) + of_warps;
        if (lane < COUNT_WARPS && tile * COUNT_WARPS + lane < pieces) {
            starts[tile * COUNT_WARPS + lane] = static_cast<i64>(start);
            if (tile * COUNT_WARPS + lane == pieces - 1) starts[pieces] = static_cast<i64>(start + mine);
        }
    }
    leave_tile(sums, shared_tile);
}

// Counts over the whole array, for `inspect`: any number of blocks.
template <class T, bool Float>
__global__ void __launch_bounds__(TOTAL_THREADS)
count_all(const T* __restrict__ x, i64 n, u64* totals) {
    __shared__ u64 sums[2];
    if (threadIdx.x < 2) sums[threadIdx.x] = 0;
    __syncthreads();
    constexpr int BATCH = 4;  // loads of a thread that are in flight together
    const int head = head_of(x);
    const i64 threads = static_cast<i64>(gridDim.x) * TOTAL_THREADS, units = (head + n + PER_UNIT<T> - 1) / PER_UNIT<T>;
    i64 nonzeros = 0, negative = 0;
    for (i64 q = static_cast<i64>(blockIdx.x) * TOTAL_THREADS + threadIdx.x; q < units; q += threads * BATCH) {
        uint4 unit[BATCH];
#pragma unroll
        for (int b = 0; b < BATCH; ++b) unit[b] = load_unit(x, head, n, q + b * threads);
#pragma unroll
        for (int b = 0; b < BATCH; ++b) {
            const u32 some = nonzero_bits<T, Float>(unit[b]);
            nonzeros += __popc(some);
            if (Float) negative += __popc(nonzero_bits<T, false>(unit[b]) ^ some);
        }
    }
    nonzeros = sum_of_warp(nonzeros), negative = sum_of_warp(negative);
    if (threadIdx.x % 32 == 0) atomicAdd(&sums[0], static_cast<u64>(nonzeros)), atomicAdd(&sums[1], static_cast<u64>(negative));
    __syncthreads();
    if (threadIdx.x < 2 && sums[threadIdx.x]) atomicAdd(totals + threadIdx.x, sums[threadIdx.x]);
}

// Row and column of element f of a matrix with K columns. f may be below 0.
__device__ __forceinline__ void split(i64 f, i64 K, i64& row, i64& column) {
    row = (f | K) >> 32 == 0 ? static_cast<i64>(u32(f) / u32(K)) : f / K;
    column = f - row * K;
    if (column < 0) --row, column += K;
}

// Unit q of the image of `count` elements that start at `to`, stored once and not read soon; elements outside are left alone.
template <class T> __device__ __forceinline__ void stream_unit(T* to, const T* image, int head, int count, int q) {
    constexpr int P = 16 / sizeof(T);
    if (q * P >= head && (q + 1) * P <= head + count)
        __stcs(reinterpret_cast<uint4*>(to - head) + q, reinterpret_cast<const uint4*>(image)[q]);
    else
        store_unit(to, image, head, count, q);
}

// The nonzeros of a piece: values at the places in their 16-byte units that they will have in `data`, and beside each its place
// in the piece.
template <class T> struct Packed {
    static constexpr int EXTRA = 4;  // elements of a unit of columns: the first and the last unit reach beyond the piece
    alignas(16) T values[PIECE<T> + PER_UNIT<T>];
    alignas(16) u16 places[EXTRA + PIECE<T> + PER_UNIT<T> + EXTRA];
};

// Narrow: K < PIECE. reciprocal = ceil(2^32 / K), with which places are divided by K then: (v * reciprocal) >> 32 is exact for
// v * K < 2^32.
template <class T, bool Float, class Ptr, class Idx, bool Narrow>
__global__ void __launch_bounds__(FILL_WARPS * 32)
fill_pieces(const T* __restrict__ x, i64 M, i64 K, i64 pieces, const i64* __restrict__ starts, Ptr* __restrict__ indptr,
            Idx* __restrict__ indices, T* __restrict__ data, i64 reciprocal) {
    constexpr int P = PER_UNIT<T>, N = STEPS<T>, SIZE = PIECE<T>, C = 16 / sizeof(Idx);
    __shared__ Packed<T> packed[FILL_WARPS];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, head = head_of(x);
    // The last pieces first: the count, which ran before this, has left them in L2.
    const i64 piece = pieces - 1 - (static_cast<i64>(blockIdx.x) * FILL_WARPS + warp);
    if (piece < 0) return;
    uint4 unit[N];
#pragma unroll
    for (int s = 0; s < N; ++s) unit[s] = load_unit(x, head, M * K, (piece * N + s) * 32 + lane);
    const i64 at = starts[piece];
    const int items = static_cast<int>(starts[piece + 1] - at);
    if (piece == pieces - 1 && lane == 0) indptr[M] = static_cast<Ptr>(at + items);
    i64 row, column;
    split(piece * SIZE - head, K, row, column);
    auto starts_row = [&](i64 number, int before) {
        if (number >= 0 && number < M) indptr[number] = static_cast<Ptr>(at + before);
    };
    // The first row that starts in this piece, and where; all of them if Narrow.
    const i64 to_next = column ? K - column : 0, next_row = row + (column != 0);
    const int next = to_next < SIZE ? static_cast<int>(to_next) : SIZE;
    auto rows_before = [&](u32 v) { return static_cast<u32>(v * static_cast<u64>(reciprocal) >> 32); };

    T* values = packed[warp].values;
    u16* places = packed[warp].places + Packed<T>::EXTRA;
    const int values_head = head_of(data + at), columns_head = head_of(indices + at);
    int done = values_head;
#pragma unroll
    for (int s = 0; s < N; s += 2) {  // two steps share a prefix sum: 16 bits hold the 512 elements of a step
        const u32 bits[2] = {nonzero_bits<T, Float>(unit[s]), nonzero_bits<T, Float>(unit[s + 1])};
        const u32 count = __popc(bits[0]) | __popc(bits[1]) << 16;
        const u32 before = sum_before_lane(count), sums = __shfl_sync(~0u, before + count, 31);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int first = ((s + h) * 32 + lane) * P;  // place of the unit's first element in the piece
            int to = done + static_cast<int>(before >> (16 * h) & 0xFFFF);
            const int stored = to - values_head;
            if (Narrow) {
                const u32 v = static_cast<u32>(column) + first, rows = rows_before(v), rest = v - rows * static_cast<u32>(K);
                i64 number = row + rows + (rest != 0);
                for (int e = rest ? static_cast<int>(K - rest) : 0; e < P; e += static_cast<int>(K), ++number)
                    starts_row(number, stored + __popc(bits[h] & ((1u << e) - 1)));
            } else if (next >= first && next < first + P) {
                starts_row(next_row, stored + __popc(bits[h] & ((1u << (next - first)) - 1)));
            }
#pragma unroll
            for (int e = 0; e < P; ++e)
                if (bits[h] >> e & 1) {
                    values[to] = element_of<T>(unit[s + h], e);
                    places[to] = static_cast<u16>(first + e);
                    ++to;
                }
            done += static_cast<int>(sums >> (16 * h) & 0xFFFF);
        }
    }
    __syncwarp();
    for (int q = lane; q * P < values_head + items; q += 32) stream_unit(data + at, values, values_head, items, q);
    // Columns are below 2K here, and 2K may be above what a signed index holds.
    using Column = typename Unsigned<sizeof(Idx)>::type;
    const u16* placed = places + values_head - columns_head;  // as if they were packed for the units of indices
    for (int q = lane; q * C < columns_head + items; q += 32) {
        __align__(16) Idx columns[C];
#pragma unroll
        for (int e = 0; e < C; ++e) {
            const u16 place = placed[q * C + e];
            if (Narrow) {
                const u32 v = static_cast<u32>(column) + place;
                columns[e] = static_cast<Idx>(v - rows_before(v) * static_cast<u32>(K));
            } else {
                const Column c = static_cast<Column>(column) + place;
                columns[e] = static_cast<Idx>(c >= static_cast<Column>(K) ? c - static_cast<Column>(K) : c);
            }
        }
        Idx* base = indices + at - columns_head + q * C;
        if (q * C >= columns_head && (q + 1) * C <= columns_head + items) {
            __stcs(reinterpret_cast<uint4*>(base), *reinterpret_cast<const uint4*>(columns));
        } else {
#pragma unroll
            for (int e = 0; e < C; ++e)
                if (q * C + e >= columns_head && q * C + e < columns_head + items) base[e] = columns[e];
        }
    }
}
