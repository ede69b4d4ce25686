// Which blocks of a grid a matrix stores, one bit each, and where a block stands among the stored ones.
//
//   bits    u32[n]      bit j % 32 of the word for (b, j / 32): block (b, j) is stored
//   starts  i64[n + 1]  blocks that are stored before those of a word; the last entry counts all
//
// Blocks are numbered block row by block row, which is their order in a BSR, and nothing is sorted. A map of Mb x Kb blocks has
// a word for each 32 of them; or, where most would be 0, only the words that are not: a second map says which these are.
#pragma once
#include "spformat/expand.cuh"

namespace spformat {

// Quotients by the same number, 1 to 2^31. A hardware division takes many times as long as a multiplication.
struct Divisor {
    u32 by, inverse;
    __device__ __forceinline__ explicit Divisor(int d) : by(d), inverse(d == 1 ? ~0u : u32((u64(1) << 32) / u32(d))) {}
    __device__ __forceinline__ u32 quotient(u32 n) const {
        const u32 q = __umulhi(n, inverse);  // the quotient, or one less
        return n - q * by >= by ? q + 1 : q;
    }
    __device__ __forceinline__ i64 of(i64 n) const { return n >> 32 ? n / by : i64(quotient(u32(n))); }
};

// Lanes of a warp before this one, as a mask.
__device__ __forceinline__ u32 lanes_before() { return (1u << (threadIdx.x % 32)) - 1; }

// Sets bits of words[w]. Most of them are set already when many items of a block say so: a read is cheaper than an atomic.
__device__ __forceinline__ void set_bits(u32* words, i64 w, u32 bits) {
    if ((*const_cast<volatile u32*>(words + w) & bits) != bits) atomicOr(words + w, bits);
}

// The number of block j, which is stored, and whose bit is in word w.
__device__ __forceinline__ i64 number_of(const u32* bits, const i64* starts, i64 w, i64 j) {
    return starts[w] + __popc(bits[w] & ((1u << (j % 32)) - 1));
}

// Where the words of a map are.
struct Words {
    const u32* bits;  // the map of the words that there are, with its starts; null: there are all
    const i64* starts;
    i64 across;  // words of a block row, of that map if there is one
    __device__ __forceinline__ i64 of(i64 b, i64 j) const {
        return bits ? number_of(bits, starts, b * across + j / 1024, j / 32) : b * across + j / 32;
    }
};

// The segment of item i: the first s in [lo, hi] with i < ends[s], where hi is known to be one.
template <class P> __device__ __forceinline__ i64 segment_of(const P* __restrict__ ends, i64 i, i64 lo, i64 hi) {
    while (lo < hi) {
        const i64 middle = lo + (hi - lo) / 2;
        if (ends[middle] <= i)
            lo = middle + 1;
        else
            hi = middle;
    }
    return lo;
}

// `value` as item i of an index array of int32, or int64 where that is `wide`.
__device__ __forceinline__ void store_index(void* to, bool wide, i64 i, i64 value) {
    if (wide)
        static_cast<i64*>(to)[i] = value;
    else
        static_cast<int*>(to)[i] = static_cast<int>(value);
}

}  // namespace spformat
