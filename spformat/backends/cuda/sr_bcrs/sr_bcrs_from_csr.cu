// CSR as SR-BCRS: a first launch counts the columns that each row tile has, a second one writes the arrays. sm_80 and later.
// Launcher: sr_bcrs_from_csr.py.
//
//   indptr   Ptr[M+1]          items of each row
//   indices  Idx[nnz]          their columns, ascending in a row
//   values   T[nnz]            their values, unsigned words of the values' width; Float: -0 is a zero. Zeros are left out
//   counts   u32[Mv, parts]    counting: columns with a nonzero in a part (`width` columns) of a row tile; writing: in all
//                              parts before it
//   first    Start[Mv+1]       first group of each row tile (writing)
//   columns  Idx[G, g]         column of each vector, ascending in a tile, -1 after the last
//   data     T[G, t, g]        element (r, s): row r of the tile, vector s; all of it is written
//
// A block takes a part of a row tile. The columns of its items become bits of a window of 65536 columns in shared memory; the
// bits before a column are the number of its vector. A part that is wider is taken window by window, from one to the next that
// has items. If it has few items, they are sorted instead, because a window costs the same whatever is in it.
#include "spformat/expand.cuh"
#include "spformat/lower_bound.cuh"
#include "spformat/prefix_sum.cuh"

using namespace spformat;

constexpr int THREADS = 256, TALLEST = 256, WINDOW = 65536, WORDS = WINDOW / 32;
constexpr int SORTED = 2048, SORT_FROM = 32768;  // most items of a part that are sorted, fewest columns that it has
static_assert(TALLEST <= THREADS, "a thread takes a row of the tile");

template <class Idx> struct KeyOf { using type = u32; };
template <> struct KeyOf<i64> { using type = u64; };

// Zeros in to[0 .. count). All threads of the block call it.
template <class T> __device__ __forceinline__ void clear_run(T* to, i64 count) {
    constexpr int P = 16 / sizeof(T);
    const int head = head_of(to);
    const i64 end = head + count;
    T* base = to - head;
    for (i64 at = static_cast<i64>(threadIdx.x) * P; at < end; at += THREADS * P) {
        if (at >= head && at + P <= end) *reinterpret_cast<uint4*>(base + at) = make_uint4(0, 0, 0, 0);
        else
            for (i64 e = at; e < at + P; ++e)
                if (e >= head && e < end) base[e] = 0;
    }
}

// Zeros in vectors [from, to) of a tile, which are in one group. All threads of the block call it.
template <class T> __device__ __forceinline__ void clear_in_group(T* tile_data, int t, int g, u64 from, u64 to) {
    const int wide = static_cast<int>(to - from), s = static_cast<int>(from % g);
    T* group = tile_data + from / g * t * g;
    for (int i = threadIdx.x; i < wide * t; i += THREADS) group[i / wide * g + s + i % wide] = 0;
}

// Zeros in vectors [from, to) of a tile.
template <class T> __device__ __forceinline__ void clear_vectors(T* tile_data, int t, int g, u64 from, u64 to) {
    if (from >= to) return;
    const u64 n0 = (from + g - 1) / g, n1 = to / g;  // whole groups
    if (n0 > n1) return clear_in_group(tile_data, t, g, from, to);
    if (n0 < n1) clear_run(tile_data + n0 * t * g, static_cast<i64>((n1 - n0) * t * g));
    if (from < n0 * g) clear_in_group(tile_data, t, g, from, n0 * g);
    if (n1 * g < to) clear_in_group(tile_data, t, g, n1 * g, to);
}

// Sorts keys[0 .. size), size a power of two. All threads of the block call it; they meet at its end.
template <class Key> __device__ __forceinline__ void sort(Key* keys, int size) {
    for (int k = 2; k <= size; k *= 2)
        for (int j = k / 2; j; j /= 2) {
            for (int q = threadIdx.x; q < size / 2; q += THREADS) {
                const int a = q / j * 2 * j + q % j, b = a + j;
                const Key low = keys[a], high = keys[b];
                if ((low > high) == ((a & k) == 0)) keys[a] = high, keys[b] = low;
            }
            __syncthreads();
        }
}

// The items that a block takes: of row r of its tile, a run from starts[r] on; before_row[r] items in the rows before.
template <class T, bool Float, class Idx> struct Items {
    static constexpr T VALUE = static_cast<T>(static_cast<T>(~0ull) >> Float);
    const Idx* __restrict__ columns;
    const T* __restrict__ values;
    const i64 *starts, *before_row;

    // seen(item, row, column, value) for each of the first `count` items that is not zero. Threads take items in turn.
    template <class F> __device__ __forceinline__ void each(u64 count, F seen) const {
        int r = 0;
        for (u64 i = threadIdx.x; i < count; i += THREADS) {
            while (static_cast<u64>(before_row[r + 1]) <= i) ++r;
            const i64 at = starts[r] + static_cast<i64>(i - before_row[r]);
            const T value = values[at];
            const i64 column = columns[at];
            if (value & VALUE) seen(i, r, column, value);
        }
    }
};

template <class T, bool Float, class Ptr, class Idx, class Start, bool Write>
__global__ void __launch_bounds__(THREADS, Write ? 5 : 8)
sr_bcrs_from_csr(const Ptr* __restrict__ indptr, const Idx* __restrict__ indices, const T* __restrict__ values, i64 M, i64 K,
                 int t, int g, i64 parts, i64 width, u32* __restrict__ counts, const Start* __restrict__ first,
                 Idx* __restrict__ columns, T* __restrict__ data) {
    using Key = typename KeyOf<Idx>::type;
    constexpr Key NONE = ~static_cast<Key>(0);
    constexpr int EACH = WORDS / THREADS;  // words of the window, or sorted keys, that a thread sums up
    static_assert(SORTED <= WORDS, "a thread takes as many keys as words");
    __shared__ __align__(16) unsigned char room[WORDS * 8];
    __shared__ i64 starts[TALLEST], before_row[TALLEST + 1];  // the first item of each row, the items of the rows before it
    __shared__ u64 sums[33];
    __shared__ u64 nearest;
    u32 *bits = reinterpret_cast<u32*>(room), *before_word = bits + WORDS;
    Key* keys = reinterpret_cast<Key*>(room);

    const int me = threadIdx.x, warp = me / 32, lane = me % 32;
    const i64 tile = blockIdx.x / parts, part = blockIdx.x - tile * parts, row0 = tile * t;
    const int rows = static_cast<int>(M - row0 < t ? M - row0 : t);
    const i64 c0 = part * width, c1 = K - c0 < width ? K : c0 + width;
    i64 lo = 0, hi = 0;
    if (me < rows) {
        lo = indptr[row0 + me], hi = indptr[row0 + me + 1];
        if (parts > 1) lo = first_from(indices, lo, hi, c0), hi = first_from(indices, lo, hi, c1);
    }
    const Items<T, Float, Idx> run{indices, values, starts, before_row};
    u64 vectors = 0, items;  // the tile's vectors so far; items of `run`
    T* tile_data = data;
    Idx* tile_columns = columns;
    u64 padded = 0;
    if (Write) {
        vectors = counts[blockIdx.x];
        const i64 group = first[tile];
        tile_data += group * t * g, tile_columns += group * g;
        padded = (first[tile + 1] - group) * g;
    }
    const u64 vectors_before = vectors;

    // Makes items [lo, end) of each thread's row the items of `run`. All threads call it.
    auto take_items = [&](i64 end) {
        const u64 before = sum_before_thread<THREADS>(static_cast<u64>(end - lo), sums, items);
        if (me < rows) starts[me] = lo, before_row[me] = before;
        if (me == 0) before_row[rows] = items;
        __syncthreads();
    };
    auto put = [&](u64 vector, int r, T value) {
        const u32 n = static_cast<u32>(vector) / static_cast<u32>(g), s = static_cast<u32>(vector) - n * g;
        tile_data[(static_cast<i64>(n) * t + r) * g + s] = value;
    };

    take_items(hi);
    if (items <= SORTED && c1 - c0 > SORT_FROM) {
        int size = 1;
        while (size < static_cast<int>(items)) size *= 2;
        for (int i = me; i < size; i += THREADS) keys[i] = NONE;
        __syncthreads();
        run.each(items, [&](u64 i, int, i64 column, T) { keys[i] = static_cast<Key>(column); });
        __syncthreads();
        sort(keys, size);
        const int each = (size + THREADS - 1) / THREADS;
        Key mine[EACH];
        u32 distinct = 0;
#pragma unroll
        for (int e = 0; e < EACH; ++e) {
            const int i = me * each + e;
            mine[e] = e < each && i < size && (i == 0 || keys[i] != keys[i - 1]) ? keys[i] : NONE;
            distinct += mine[e] != NONE;
        }
        u64 all;
        u64 place = sum_before_thread<THREADS>(static_cast<u64>(distinct), sums, all);  // all have read their keys after it
        if (Write) {
#pragma unroll
            for (int e = 0; e < EACH; ++e)
                if (mine[e] != NONE) keys[place] = mine[e], tile_columns[vectors + place] = static_cast<Idx>(mine[e]), ++place;
            clear_vectors(tile_data, t, g, vectors, vectors + all);
            __syncthreads();
            run.each(items, [&](u64, int r, i64 column, T value) {
                int low = 0, high = static_cast<int>(all);
                while (low < high) {
                    const int middle = (low + high) / 2;
                    if (keys[middle] < static_cast<Key>(column)) low = middle + 1;
                    else high = middle;
                }
                put(vectors + low, r, value);
            });
        }
        vectors += all;
    } else {
        i64 w0 = c0;
        while (items) {
            i64 end = hi;
            if (c1 - c0 > WINDOW) {  // from the next column that any row has
                if (me == 0) nearest = ~0ull;
                __syncthreads();
                if (lo < hi) atomicMin(&nearest, static_cast<u64>(indices[lo]));
                __syncthreads();
                if (nearest == ~0ull) break;
                w0 = static_cast<i64>(nearest);
                end = first_from(indices, lo, hi, w0 + WINDOW);
                take_items(end);
            }
            const int words = static_cast<int>((c1 - w0 < WINDOW ? c1 - w0 : WINDOW) + 31) / 32;
            for (int i = me; i < words; i += THREADS) bits[i] = 0;
            __syncthreads();
            run.each(items, [&](u64, int, i64 column, T) {
                const u32 at = static_cast<u32>(column - w0);
                atomicOr(bits + at / 32, 1u << at % 32);
            });
            __syncthreads();
            const int each = (words + THREADS - 1) / THREADS, begin = me * each;
            u32 mine = 0;
            for (int i = begin; i < begin + each && i < words; ++i) mine += __popc(bits[i]);
            u64 all;
            u64 before = sum_before_thread<THREADS>(static_cast<u64>(mine), sums, all);
            if (Write) {
                for (int i = begin; i < begin + each && i < words; ++i) {
                    before_word[i] = static_cast<u32>(before);
                    before += __popc(bits[i]);
                }
                clear_vectors(tile_data, t, g, vectors, vectors + all);
                __syncthreads();
                for (int i0 = warp * 32; i0 < words; i0 += THREADS) {
                    const u32 own = i0 + lane < words ? bits[i0 + lane] : 0;
                    for (u32 left = __ballot_sync(~0u, own != 0); left; left &= left - 1) {
                        const int i = i0 + __ffs(left) - 1;
                        const u32 word = __shfl_sync(~0u, own, i - i0);
                        if (word >> lane & 1)
                            tile_columns[vectors + before_word[i] + __popc(word & ((1u << lane) - 1))] =
                                static_cast<Idx>(w0 + i * 32 + lane);
                    }
                }
                run.each(items, [&](u64, int r, i64 column, T value) {
                    const u32 at = static_cast<u32>(column - w0), word = bits[at / 32];
                    put(vectors + before_word[at / 32] + __popc(word & ((1u << at % 32) - 1)), r, value);
                });
            }
            vectors += all;
            if (c1 - c0 <= WINDOW) break;
            lo = end;
            __syncthreads();
        }
    }
    if (!Write) {
        if (me == 0) counts[blockIdx.x] = static_cast<u32>(vectors - vectors_before);
    } else if (part == parts - 1 && vectors < padded) {  // fewer than g slots after the last vector of the tile
        for (u64 i = vectors + me; i < padded; i += THREADS) tile_columns[i] = -1;
        clear_in_group(tile_data, t, g, vectors, padded);
    }
}
