// Which blocks of a grid a matrix stores, one bit each, and where a block stands among the stored ones.
//
//   bits    u32[n]      bit j % 32 of the word for (b, j / 32): block (b, j) is stored
//   starts  i64[n + 1]  blocks that are stored before those of a word; the last entry counts all
//
// Blocks are numbered block row by block row, which is their order in a BSR, and nothing is sorted. A map of Mb x Kb blocks has
// a word for each 32 of them; or, where most would be 0, only the words that are not: a second map says which these are.
#pragma once
#include "spformat/expand.cuh"
#include "spformat/last_block.cuh"
#include "spformat/prefix_sum.cuh"

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

// The first word of block row b: entry b of `rows`, or where that is null, each block row has as many words.
__device__ __forceinline__ i64 first_word(const i64* rows, i64 across, i64 b) { return rows ? rows[b] : b * across; }

// The index arrays of a map of Mb block rows. Those that are `wide` are int64.
//
//   indices  [nnzb]      block column of each block
//   indptr   [Mb + 1]    starts of the block rows; of a DBSR [nrb + 1], those of block rows with blocks
//   ids      [nrb]       DBSR: block rows with blocks
//   places   i64[Mb + 1] DBSR: block rows with blocks before each; BSR: null
//   rows     i64[Mb + 1] of a map without the words that are 0: the first word of each block row; else null
//   columns  i64[all]    of such a map: the place of each word in its block row; words behind the last are 0
//
// Threads number `thread` of `threads` take part, whole warps.
__device__ __forceinline__ void write_block_indices(
    i64 thread, i64 threads, const u32* __restrict__ bits, const i64* __restrict__ starts, i64 all, i64 Mb,
    const i64* __restrict__ rows, const i64* __restrict__ columns, i64 across, void* __restrict__ indices, int wide_indices,
    void* __restrict__ indptr, int wide_indptr, const i64* __restrict__ places, void* __restrict__ ids, int wide_ids) {
    const int lane = threadIdx.x % 32;
    for (i64 first = thread - lane; first < all; first += threads) {
        const i64 w = first + lane;
        const u32 mine = w < all ? bits[w] : 0;
        const i64 start = w < all ? starts[w] : 0, j0 = mine ? (columns ? columns[w] : w % across) * 32 : 0;
        for (u32 left = __ballot_sync(~0u, mine != 0); left; left &= left - 1) {
            const int from = __ffs(left) - 1;
            const u32 word = __shfl_sync(~0u, mine, from);
            const i64 at = __shfl_sync(~0u, start, from), j = __shfl_sync(~0u, j0, from) + lane;
            if (word >> lane & 1) store_index(indices, wide_indices, at + __popc(word & lanes_before()), j);
        }
    }
    for (i64 b = thread; b <= Mb; b += threads) {
        const i64 start = starts[first_word(rows, across, b)];
        if (!places) {
            store_index(indptr, wide_indptr, b, start);
        } else if (b == Mb || places[b] < places[b + 1]) {
            store_index(indptr, wide_indptr, places[b], start);
            if (b < Mb) store_index(ids, wide_ids, places[b], b);
        }
    }
}

// seen(w, words[w]) for words first .. end-1, of which the loads of eight are in flight together.
template <class F> __device__ __forceinline__ void each_word(const u32* words, int first, int end, F seen) {
    constexpr int BATCH = 8;
#pragma unroll 1
    for (int w = first; w < end; w += BATCH) {
        u32 word[BATCH];
#pragma unroll
        for (int j = 0; j < BATCH; ++j) word[j] = w + j < end ? *const_cast<const volatile u32*>(words + w + j) : 0;
#pragma unroll
        for (int j = 0; j < BATCH; ++j)
            if (w + j < end) seen(w + j, word[j]);
    }
}

// Numbers the blocks of a small map by the block of threads that finishes last, so that no launch of its own is needed: all threads
// of all blocks call it when they have set their bits.
//
//   marks     u32[n]     where the bits are set: zeros before the launch and after it; n <= FEW_WORDS, all words of Mb block rows
//   finished  u64        how many blocks have finished: 0 before the launch and after it
//   bits      u32[n]     becomes the bits; starts i64[n + 1] what is before each word
//   places    i64[Mb+1]  of a DBSR: block rows with blocks before each; else null
//   sizes     u64[2]     in host memory: stored blocks, and for a DBSR block rows with blocks
constexpr int FEW_WORDS = 8192;

template <int Threads>
__device__ __forceinline__ void number_by_last_block(u32* marks, u64* finished, i64 n, i64 Mb, u32* __restrict__ bits, i64* starts,
                                                     i64* __restrict__ places, u64* sizes) {
    __shared__ u32 sums[33];
    if (!is_last_block(finished)) return;
    // A thread takes neighbouring words, twice, so that it needs few registers: the kernel around this needs them all.
    const int each = static_cast<int>((n + Threads - 1) / Threads), first = threadIdx.x * each;
    const int end = static_cast<int>(first + each < n ? first + each : n);
    u32 mine = 0, total;
    each_word(marks, first, end, [&](int, u32 word) { mine += __popc(word); });
    u32 before = sum_before_thread<Threads>(mine, sums, total);
    each_word(marks, first, end, [&](int w, u32 word) {
        marks[w] = 0, bits[w] = word, starts[w] = before;
        before += __popc(word);
    });
    if (threadIdx.x == 0) {
        *finished = 0, starts[n] = total;
        *const_cast<volatile u64*>(sizes) = total;
    }
    if (!places) return;
    __syncthreads();  // starts are written, and sums are read
    const i64 across = n / Mb;
    const int rows = static_cast<int>((Mb + Threads - 1) / Threads), row0 = threadIdx.x * rows;
    u32 some = 0, all;
    for (int b = row0; b < row0 + rows && b < Mb; ++b) some += starts[(b + 1) * across] > starts[b * across];
    u32 at = sum_before_thread<Threads>(some, sums, all);
    for (int b = row0; b < row0 + rows && b < Mb; ++b) {
        places[b] = at;
        at += starts[(b + 1) * across] > starts[b * across];
    }
    if (threadIdx.x == 0) {
        places[Mb] = all;
        *const_cast<volatile u64*>(sizes + 1) = all;
    }
}

}  // namespace spformat
