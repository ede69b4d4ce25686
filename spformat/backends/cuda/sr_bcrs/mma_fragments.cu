// SR-BCRS(t, g), any t and g, to fragments (include/spformat/mma_fragments.cuh), once per matrix.
//
//   indptr   Ptr[Mv+1]      first group of each row tile
//   indices  Index[G, g]    column of each vector, increasing in a tile; -1 (no vector) at its end
//   data     T[G, t, g]     element (r, s): row r of the tile, vector s
//
// panel_steps counts the steps of every panel and chunk, their running sum is `first`; panel_fill then writes the
// steps. One warp per panel and chunk, 8 warps a block.
#include "spformat/mma_fragments.cuh"

using namespace spformat;

constexpr int WORDS = DEPTH / 64;

// The set of columns that a panel uses in a chunk.
struct Columns {
    u64 word[WORDS] = {};
    __device__ int size() const {
        int n = 0;
#pragma unroll
        for (int w = 0; w < WORDS; ++w) n += __popcll(word[w]);
        return n;
    }
    // Place of column k: round i takes the i-th used column of each class modulo 8.
    __device__ int place(int k) const {
        const int own = k % 8;
        const u64 every8 = 0x0101010101010101ull;
        int round = 0;
#pragma unroll
        for (int w = 0; w < WORDS; ++w) {
            const u64 before = 64 * w + 63 < k ? ~0ull : 64 * w > k ? 0ull : (1ull << (k % 64)) - 1;
            round += __popcll(word[w] & (every8 << own) & before);
        }
        int place = 0;
        for (int c = 0; c < 8; ++c) {
            int n = 0;
#pragma unroll
            for (int w = 0; w < WORDS; ++w) n += __popcll(word[w] & (every8 << c));
            place += min(n, round) + (c < own && n > round);
        }
        return place;
    }
};

// First vector of the tile, of `count`, whose column is >= k; -1 (no vector) counts as beyond every column.
template <class Index> __device__ i64 first_at(const Index* indices, i64 count, i64 k) {
    i64 low = 0, high = count;
    while (low < high) {
        const i64 middle = (low + high) / 2;
        if (static_cast<u64>(static_cast<i64>(indices[middle])) < static_cast<u64>(k)) low = middle + 1;
        else high = middle;
    }
    return low;
}

// Columns used by panel p in the chunk that starts at k0; all lanes return the same set.
template <class Ptr, class Index>
__device__ Columns columns_of(const Ptr* indptr, const Index* indices, i64 tile0, i64 tile1, int g, i64 k0) {
    Columns set;
    for (i64 tile = tile0 + threadIdx.x % 32; tile <= tile1; tile += 32) {
        const i64 base = static_cast<i64>(indptr[tile]) * g, count = static_cast<i64>(indptr[tile + 1]) * g - base;
        for (i64 v = first_at(indices + base, count, k0); v < count; ++v) {
            const i64 k = static_cast<i64>(indices[base + v]) - k0;
            if (k < 0 || k >= DEPTH) break;
#pragma unroll
            for (int w = 0; w < WORDS; ++w)
                if (k / 64 == w) set.word[w] |= 1ull << (k % 64);
        }
    }
#pragma unroll
    for (int w = 0; w < WORDS; ++w)
        for (int lanes = 16; lanes; lanes /= 2) set.word[w] |= __shfl_xor_sync(0xFFFFFFFFu, set.word[w], lanes);
    return set;
}

// steps[p*Q + q] of every panel and chunk. One warp each.
template <class Ptr, class Index>
__global__ void panel_steps(const Ptr* __restrict__ indptr, const Index* __restrict__ indices, i64 M, int t, int g, int rows,
                            i64 P, i64 Q, u32* __restrict__ steps) {
    const i64 at = (static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x) / 32;
    if (at >= P * Q) return;
    const i64 row0 = at / Q * rows, row1 = min(M, row0 + rows) - 1;
    const Columns set = columns_of(indptr, indices, row0 / t, row1 / t, g, at % Q * DEPTH);
    if (threadIdx.x % 32 == 0) steps[at] = cdiv(set.size(), 16);
}

// Writes the steps, which are zero before. One warp per panel and chunk.
template <class T, class Ptr, class Index>
__global__ void panel_fill(const Ptr* __restrict__ indptr, const Index* __restrict__ indices, const T* __restrict__ data, i64 M,
                           int t, int g, int rows, i64 P, i64 Q, const u32* __restrict__ first, u8* __restrict__ steps) {
    const i64 at = (static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x) / 32;
    const int lane = threadIdx.x % 32, bytes = 16 + rows / 16 * 512;
    if (at >= P * Q) return;
    const i64 row0 = at / Q * rows, row1 = min(M, row0 + rows) - 1, k0 = at % Q * DEPTH;
    const Columns set = columns_of(indptr, indices, row0 / t, row1 / t, g, k0);
    u8* out = steps + static_cast<i64>(first[at]) * bytes;
    int lowest = 0;
#pragma unroll
    for (int w = WORDS - 1; w >= 0; --w)
        if (set.word[w]) lowest = 64 * w + __ffsll(set.word[w]) - 1;
    for (int place = set.size() + lane; place < cdiv(set.size(), 16) * 16; place += 32)
        out[place / 16 * bytes + place % 16] = static_cast<u8>(lowest);
    for (int k = lane; k < DEPTH; k += 32) {
        bool used = false;
#pragma unroll
        for (int w = 0; w < WORDS; ++w) used |= k / 64 == w && (set.word[w] >> (k % 64) & 1);
        if (used) out[set.place(k) / 16 * bytes + set.place(k) % 16] = static_cast<u8>(k);
    }
    for (i64 tile = row0 / t; tile <= row1 / t; ++tile) {
        const i64 group0 = indptr[tile], count = (static_cast<i64>(indptr[tile + 1]) - group0) * g;
        const Index* tile_indices = indices + group0 * g;
        for (i64 v = first_at(tile_indices, count, k0) + lane; v < count; v += 32) {
            const i64 k = static_cast<i64>(tile_indices[v]) - k0;
            if (k < 0 || k >= DEPTH) break;
            const int place = set.place(static_cast<int>(k)), kk = place % 16;
            const T* from = data + (group0 + v / g) * t * g + v % g;
            T* values = reinterpret_cast<T*>(out + place / 16 * bytes + 16);
            const i64 begin = max(row0, tile * t), end = min(row1, tile * t + t - 1);
            for (i64 row = begin; row <= end; ++row) {
                const int m = static_cast<int>(row - row0) / 16, r = static_cast<int>(row - row0) % 16;
                const int to_lane = r % 8 * 4 + kk % 8 / 2, reg = r / 8 + kk / 8 * 2;
                values[(m * 32 + to_lane) * 8 + reg * 2 + kk % 2] = from[(row - tile * t) * g];
            }
        }
    }
}
