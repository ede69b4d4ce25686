// A row-major matrix as one run of elements that is cut into tiles of 16 KB, a block each, so that every shape fills the
// device alike: for kernels that find, count, keep or place nonzeros.
//
// A thread takes units of 16 bytes, neighbours in a warp side by side. The nonzeros of a tile are a bitmap in shared memory,
// `flat`; with the set bits before each of its words, `before`, every thread knows how many nonzeros precede its own.
#pragma once
#include "spformat/expand.cuh"
#include "spformat/prefix_sum.cuh"

namespace spformat {

constexpr int TILE_THREADS = 256, TILE_BYTES = 16384;

template <class T> struct Tile {
    static constexpr int WIDE = 16 / sizeof(T), SIZE = TILE_BYTES / sizeof(T), WORDS = SIZE / 32;
    static constexpr int UNITS = TILE_BYTES / 16 / TILE_THREADS;  // of a thread
};

// 16 bytes of values, as unsigned words of their width.
template <class T> struct Unit {
    u32 w[4];
    __device__ __forceinline__ T operator[](int i) const {
        if constexpr (sizeof(T) == 8) return u64(w[2 * i]) | u64(w[2 * i + 1]) << 32;
        else if constexpr (sizeof(T) == 4) return w[i];
        else return T(w[i * sizeof(T) / 4] >> (8 * (i * sizeof(T) % 4)));
    }
    // Sets element i, which is zero so far.
    __device__ __forceinline__ void put(int i, T value) {
        if constexpr (sizeof(T) == 8) w[2 * i] = u32(value), w[2 * i + 1] = u32(value >> 32);
        else if constexpr (sizeof(T) == 4) w[i] = value;
        else w[i * sizeof(T) / 4] |= u32(value) << (8 * (i * sizeof(T) % 4));
    }
};

// Elements at .. at+WIDE-1 of x[0 .. n), where x + at lies on 16 bytes; elements outside of the array read as 0. Once: the
// bytes are not needed again.
template <bool Once, class T> __device__ __forceinline__ Unit<T> load_unit(const T* __restrict__ x, i64 at, i64 n) {
    Unit<T> unit{};
    if (at >= 0 && at + Tile<T>::WIDE <= n) {
        const uint4* from = reinterpret_cast<const uint4*>(x + at);
        const uint4 v = Once ? __ldcs(from) : *from;
        unit.w[0] = v.x, unit.w[1] = v.y, unit.w[2] = v.z, unit.w[3] = v.w;
    } else {
#pragma unroll
        for (int i = 0; i < Tile<T>::WIDE; ++i)
            if (at + i >= 0 && at + i < n) unit.put(i, x[at + i]);
    }
    return unit;
}

// Bit i says whether element i is not zero; `live` masks the bits of a value that decide it.
template <class T> __device__ __forceinline__ u32 nonzeros(const Unit<T>& unit, T live) {
    u32 mask = 0;
    if constexpr (sizeof(T) == 1) {
        const u32 four = u32(live) * 0x01010101;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const u32 v = unit.w[i] & four, top = ((v & 0x7F7F7F7F) + 0x7F7F7F7F | v) & 0x80808080;
            mask |= (top >> 7) * 0x10204080 >> 28 << (4 * i);  // the product gathers bits 0, 8, 16 and 24 in the top four
        }
    } else if constexpr (sizeof(T) == 2) {
        const u32 two = u32(live) * 0x00010001;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const u32 v = unit.w[i] & two, top = ((v & 0x7FFF7FFF) + 0x7FFF7FFF | v) & 0x80008000;
            mask |= ((top >> 15 | top >> 30) & 3) << (2 * i);
        }
    } else {
#pragma unroll
        for (int i = 0; i < Tile<T>::WIDE; ++i) mask |= u32((unit[i] & live) != 0) << i;
    }
    return mask;
}

// Writes the mask of unit number `unit`, those of the lanes of a warp being neighbours, into the bitmap of the tile.
template <class T> __device__ __forceinline__ void put_mask(u32* flat, int unit, u32 mask) {
    if constexpr (sizeof(T) == 1) {
        reinterpret_cast<u16*>(flat)[unit] = u16(mask);
    } else if constexpr (sizeof(T) == 2) {
        reinterpret_cast<u8*>(flat)[unit] = u8(mask);
    } else {  // a byte has the masks of 2 or 4 lanes
        constexpr int LANES = 8 / Tile<T>::WIDE;
#pragma unroll
        for (int d = 1; d < LANES; d *= 2) mask |= __shfl_down_sync(~0u, mask, d) << (d * Tile<T>::WIDE);
        if (unit % LANES == 0) reinterpret_cast<u8*>(flat)[unit / LANES] = u8(mask);
    }
}

// Fills before[0 .. Words) and returns the set bits of all words. All threads of the block call it, after a barrier behind
// what wrote `flat`; it ends with a barrier. sums: shared memory for 33 sums.
template <int Words> __device__ __forceinline__ u32 bits_before_words(const u32* flat, u32* before, u32* sums) {
    constexpr int EACH = (Words + TILE_THREADS - 1) / TILE_THREADS;
    const int first = threadIdx.x * EACH;
    u32 mine = 0, total;
#pragma unroll
    for (int i = 0; i < EACH; ++i)
        if (first + i < Words) mine += __popc(flat[first + i]);
    u32 at = sum_before_thread<TILE_THREADS>(mine, sums, total);
#pragma unroll
    for (int i = 0; i < EACH; ++i)
        if (first + i < Words) before[first + i] = at, at += __popc(flat[first + i]);
    __syncthreads();
    return total;
}

// The set bits of a tile's bitmap before place p.
__device__ __forceinline__ u32 bits_before(const u32* flat, const u32* before, int p) {
    return before[p / 32] + __popc(flat[p / 32] & ((1u << p % 32) - 1));
}

// Copies elements start .. start+count-1 of data[0 .. n), which lies on 16 bytes, to image[h ..] and returns h, the elements
// between the last boundary and the first of them. All threads of the block call it; a barrier must follow. count <= Most, and
// the image has room for one unit more.
template <int Most, class T>
__device__ __forceinline__ int load_run(const T* __restrict__ data, i64 start, int count, i64 n, T* image) {
    constexpr int WIDE = Tile<T>::WIDE, EACH = Most / WIDE / TILE_THREADS;
    const int head = head_of(data + start), units = (head + count + WIDE - 1) / WIDE;
    uint4* to = reinterpret_cast<uint4*>(image);
    const auto loaded_unit = [&](int q) {
        const Unit<T> u = load_unit<true>(data, start - head + q * WIDE, n);
        return make_uint4(u.w[0], u.w[1], u.w[2], u.w[3]);
    };
    uint4 loaded[EACH];
#pragma unroll
    for (int j = 0; j < EACH; ++j)
        if (j * TILE_THREADS + int(threadIdx.x) < units) loaded[j] = loaded_unit(j * TILE_THREADS + threadIdx.x);
#pragma unroll
    for (int j = 0; j < EACH; ++j)
        if (j * TILE_THREADS + int(threadIdx.x) < units) to[j * TILE_THREADS + threadIdx.x] = loaded[j];
    if (units > EACH * TILE_THREADS && threadIdx.x == 0) to[EACH * TILE_THREADS] = loaded_unit(EACH * TILE_THREADS);
    return head;
}

// The row and column of places first .. first+Size of rows of `length` places, without a 64-bit division for each.
template <int Size> struct Rows {
    i64 row, column, length;
    __device__ __forceinline__ Rows(i64 first, i64 length) : row(first / length), column(first - row * length), length(length) {}
    __device__ __forceinline__ i64 operator()(int d, i64& at) const {
        const i64 c = column + d;
        const i64 r = length >= Size ? i64(c >= length) : i64(u32(c) / u32(length));
        at = c - r * length;
        return row + r;
    }
};

}  // namespace spformat
