// A piece of a dense array, a few KB without regard to rows, as values and columns of a CSR; one warp takes it.
//
// Its nonzeros are put side by side in shared memory, with their places in the piece, and then stored in 16-byte units; the
// columns follow from the places. The warp whose piece contains the first element of a row writes that row's entry of indptr.
#pragma once
#include "spformat/expand_rows.cuh"
#include "spformat/nonzero.cuh"
#include "spformat/prefix_sum.cuh"

namespace spformat {

template <class T> constexpr int PER_UNIT = 16 / sizeof(T);
template <class T> constexpr int STEPS = sizeof(T) == 1 ? 4 : 8;  // units of a lane, one for every 32 units of the piece
template <class T> constexpr int PIECE = STEPS<T> * 32 * PER_UNIT<T>;

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

// The piece x[piece * PIECE ..], counted from the 16-byte boundary at or before x, whose units a lane has loaded: unit[s] is number
// 32 * s + lane. bits_of(s): which elements of unit[s] are stored. `items` of them are, and `at` are stored before the piece.
// Narrow: K < PIECE. reciprocal = ceil(2^32 / K), with which places are divided by K then: (v * reciprocal) >> 32 is exact for
// v * K < 2^32.
template <bool Narrow, class T, class Ptr, class Idx, class Bits>
__device__ __forceinline__ void store_piece(
    const uint4 (&unit)[STEPS<T>], Bits bits_of, i64 piece, i64 pieces, int head, i64 M, i64 K, i64 at, int items,
    Packed<T>& packed, Ptr* __restrict__ indptr, Idx* __restrict__ indices, T* __restrict__ data, i64 reciprocal) {
    constexpr int P = PER_UNIT<T>, N = STEPS<T>, SIZE = PIECE<T>, C = 16 / sizeof(Idx);
    const int lane = threadIdx.x % 32;
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

    T* values = packed.values;
    u16* places = packed.places + Packed<T>::EXTRA;
    const int values_head = head_of(data + at), columns_head = head_of(indices + at);
    int done = values_head;
#pragma unroll
    for (int s = 0; s < N; s += 2) {  // two steps share a prefix sum: 16 bits hold the 512 elements of a step
        const u32 bits[2] = {bits_of(s), bits_of(s + 1)};
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

}  // namespace spformat
