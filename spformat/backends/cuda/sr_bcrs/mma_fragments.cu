// SR-BCRS(t, g), any t and g, in slots (include/spformat/mma_fragments.cuh), once per matrix, and back.
//
//   indptr   Ptr[Mv+1]      first group of each row tile
//   indices  Index[G, g]    column of each vector, increasing in a tile; -1 (no vector) at its end
//   data     u16[G, t, g]   element (r, s): row r of the tile, vector s
//
// panel_pieces measures the record of every panel and chunk; their running sums are `first`, and panel_fill then writes the
// records. tile_vectors counts the columns that every tile uses in every chunk, tile_fill then writes indices and data. One warp
// per panel (tile) and chunk, WARPS a block.
#include "spformat/mma_fragments.cuh"

using namespace spformat;

constexpr int WORDS = DEPTH / 64, WARPS = 8;

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

// Zeros in `count` words of a warp; all lanes call it.
__device__ __forceinline__ void clear(u32* words, int count) {
    for (int i = threadIdx.x % 32; i < count; i += 32) words[i] = 0;
    __syncwarp();
}

// The vectors of rows row0 .. row1 of SR-BCRS in the chunk that starts at k0: each(tile, values, k) for a vector, shared by the
// lanes; values is its first row, rows are g elements apart.
template <class Ptr, class Index, class Each>
__device__ __forceinline__ void each_vector(const Ptr* indptr, const Index* indices, const u16* data, i64 row0, i64 row1, int t, int g,
                                            i64 k0, Each each) {
    for (i64 tile = row0 / t; tile <= row1 / t; ++tile) {
        const i64 group0 = indptr[tile], count = (static_cast<i64>(indptr[tile + 1]) - group0) * g;
        const Index* columns = indices + group0 * g;
        for (i64 v = first_at(columns, count, k0) + threadIdx.x % 32; v < count; v += 32) {
            const i64 k = static_cast<i64>(columns[v]) - k0;
            if (k < 0 || k >= DEPTH) break;
            each(tile, data + (group0 + v / g) * t * g + v % g, static_cast<int>(k));
        }
    }
}

// Bit k % 32 of used[eight][k / 32]: the panel from row0 has a value in rows 8*eight .. 8*eight+7 of column k of the chunk.
template <class Ptr, class Index>
__device__ Columns slots_of(u32 (*used)[DEPTH / 32], const Ptr* indptr, const Index* indices, const u16* data, i64 row0, i64 row1, int t,
                            int g, i64 k0) {
    clear(&used[0][0], PANEL_ROWS / 8 * (DEPTH / 32));
    each_vector(indptr, indices, data, row0, row1, t, g, k0, [&](i64 tile, const u16* values, int k) {
        const i64 begin = max(row0, tile * t), end = min(row1, tile * t + t - 1);
        for (i64 row = begin; row <= end; ++row)
            if (values[(row - tile * t) * g] & 0x7FFF) atomicOr(&used[(row - row0) / 8][k / 32], 1u << (k % 32));
    });
    __syncwarp();
    Columns set;
#pragma unroll
    for (int w = 0; w < WORDS; ++w)
        for (int eight = 0; eight < PANEL_ROWS / 8; ++eight)
            set.word[w] |= used[eight][2 * w] | static_cast<u64>(used[eight][2 * w + 1]) << 32;
    return set;
}

// pieces[p*Q + q] of the record of every panel and chunk, and its steps in bits 28 .. 31. One warp each.
template <class Ptr, class Index>
__global__ void panel_pieces(const Ptr* __restrict__ indptr, const Index* __restrict__ indices, const u16* __restrict__ data, i64 M,
                             int t, int g, i64 P, i64 Q, u32* __restrict__ pieces) {
    __shared__ u32 used[WARPS][PANEL_ROWS / 8][DEPTH / 32];
    const i64 at = (static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x) / 32;
    if (at >= P * Q) return;
    u32(*mine)[DEPTH / 32] = used[threadIdx.x / 32];
    const i64 row0 = at / Q * PANEL_ROWS, row1 = min(M, row0 + PANEL_ROWS) - 1;
    const Columns set = slots_of(mine, indptr, indices, data, row0, row1, t, g, at % Q * DEPTH);
    u32 slots = 0;
    for (int i = 0; i < PANEL_ROWS / 8 * (DEPTH / 32); ++i) slots += __popc(mine[i / (DEPTH / 32)][i % (DEPTH / 32)]);
    const u32 steps = cdiv(set.size(), 16);
    if (threadIdx.x % 32 == 0) pieces[at] = steps * (HEADER / 16) + slots | steps << 28;
}

// Writes the records. The pieces are zero before. One warp per panel and chunk.
template <class Ptr, class Index>
__global__ void panel_fill(const Ptr* __restrict__ indptr, const Index* __restrict__ indices, const u16* __restrict__ data, i64 M,
                           int t, int g, i64 P, i64 Q, const u32* __restrict__ first, u8* __restrict__ pieces) {
    __shared__ u32 used[WARPS][PANEL_ROWS / 8][DEPTH / 32];
    __shared__ u32 words[WARPS][MOST_STEPS][PANEL_ROWS / 8];
    __shared__ u8 places[WARPS][DEPTH];
    const i64 at = (static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x) / 32;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    if (at >= P * Q) return;
    const i64 row0 = at / Q * PANEL_ROWS, row1 = min(M, row0 + PANEL_ROWS) - 1, k0 = at % Q * DEPTH;
    const Columns set = slots_of(used[warp], indptr, indices, data, row0, row1, t, g, k0);
    clear(&words[warp][0][0], MOST_STEPS * (PANEL_ROWS / 8));
    const int steps = cdiv(set.size(), 16);
    u8* out = pieces + bytes_before(first[at]);
    int lowest = 0;
#pragma unroll
    for (int w = WORDS - 1; w >= 0; --w)
        if (set.word[w]) lowest = 64 * w + __ffsll(set.word[w]) - 1;
    for (int place = set.size() + lane; place < steps * 16; place += 32)
        out[place / 16 * HEADER + place % 16] = static_cast<u8>(lowest);
    for (int k = lane; k < DEPTH; k += 32) {
        bool any = false;
#pragma unroll
        for (int w = 0; w < WORDS; ++w) any |= k / 64 == w && (set.word[w] >> (k % 64) & 1);
        if (!any) continue;
        const int place = set.place(k);
        out[place / 16 * HEADER + place % 16] = static_cast<u8>(k);
        places[warp][k] = static_cast<u8>(place);
        for (int eight = 0; eight < PANEL_ROWS / 8; ++eight)
            if (used[warp][eight][k / 32] >> (k % 32) & 1) atomicOr(&words[warp][place / 16][eight], 1u << (place % 16));
    }
    __syncwarp();
    if (lane == 0) {
        u32 piece = steps * (HEADER / 16);
        for (int eight = 0; eight < PANEL_ROWS / 8; ++eight)
            for (int step = 0; step < steps; ++step) {
                u32& word = words[warp][step][eight];
                const u32 slots = __popc(word);
                word |= piece << 16, piece += slots;
            }
    }
    __syncwarp();
    for (int i = lane; i < steps * (PANEL_ROWS / 8); i += 32)
        reinterpret_cast<u32*>(out + i / 4 * HEADER + 16)[word_of(i % 4)] = words[warp][i / 4][i % 4];
    each_vector(indptr, indices, data, row0, row1, t, g, k0, [&](i64 tile, const u16* values, int k) {
        const i64 begin = max(row0, tile * t), end = min(row1, tile * t + t - 1);
        for (i64 row = begin; row <= end; ++row) {
            const u16 value = values[(row - tile * t) * g];
            if (!(value & 0x7FFF)) continue;
            const int r = static_cast<int>(row - row0), place = places[warp][k];
            const u32 word = words[warp][place / 16][r / 8];
            const u32 slot = (word >> 16) + __popc(word & ((1u << (place % 16)) - 1));
            reinterpret_cast<u16*>(out + slot * 16)[r % 8] = value;
        }
    });
}

// The values of rows row0 .. row1 in chunk q, from slots: each(row, k, value) for one that is not zero, shared by the lanes.
template <class Each> __device__ __forceinline__ void each_value(const Slots& a, i64 row0, i64 row1, i64 q, Each each) {
    const int lane = threadIdx.x % 32;
    for (i64 panel = row0 / PANEL_ROWS; panel <= row1 / PANEL_ROWS; ++panel) {
        const u32 first = a.first[panel * a.Q + q];
        const u8* record = a.record(first);
        for (int i = lane; i < steps_of(first) * 64; i += 32) {  // a step has four times 16 places
            const u8* header = record + i / 64 * HEADER;
            const int eight = i / 16 % 4, place = i % 16;
            const u32 word = reinterpret_cast<const u32*>(header + 16)[word_of(eight)];
            if (!(word >> place & 1)) continue;
            const u16* slot = reinterpret_cast<const u16*>(record) + ((word >> 16) + __popc(word & ((1u << place) - 1))) * 8;
            const i64 row = panel * PANEL_ROWS + eight * 8;
            for (int r = 0; r < 8; ++r)
                if (row + r >= row0 && row + r <= row1 && slot[r]) each(row + r, static_cast<int>(header[place]), slot[r]);
        }
    }
}

// The columns of a chunk that a tile uses, in used.
__device__ __forceinline__ void columns_of_tile(u32* used, const Slots& a, i64 row0, i64 row1, i64 q) {
    clear(used, DEPTH / 32);
    each_value(a, row0, row1, q, [&](i64, int k, u16) { atomicOr(&used[k / 32], 1u << (k % 32)); });
    __syncwarp();
}

// vectors[tile*Q + q] of every tile of t rows and chunk. One warp each.
extern "C" __global__ void tile_vectors(const u32* __restrict__ first, const u8* __restrict__ pieces, i64 M, int t, i64 tiles, i64 Q,
                                        u32* __restrict__ vectors) {
    __shared__ u32 used[WARPS][DEPTH / 32];
    const i64 at = (static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x) / 32;
    if (at >= tiles * Q) return;
    u32* mine = used[threadIdx.x / 32];
    const i64 row0 = at / Q * t;
    columns_of_tile(mine, Slots{first, pieces, Q}, row0, min(M, row0 + t) - 1, at % Q);
    u32 count = 0;
    for (int i = 0; i < DEPTH / 32; ++i) count += __popc(mine[i]);
    if (threadIdx.x % 32 == 0) vectors[at] = count;
}

// Writes indices, which are -1 before, and data, which are zero. before: sums of `vectors` before each tile and chunk.
template <class Ptr, class Index>
__global__ void tile_fill(const u32* __restrict__ first, const u8* __restrict__ pieces, i64 M, int t, int g, i64 tiles, i64 Q,
                          const i64* __restrict__ before, const Ptr* __restrict__ indptr, Index* __restrict__ indices,
                          u16* __restrict__ data) {
    __shared__ u32 used[WARPS][DEPTH / 32];
    const i64 at = (static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x) / 32;
    if (at >= tiles * Q) return;
    u32* mine = used[threadIdx.x / 32];
    const Slots a{first, pieces, Q};
    const i64 tile = at / Q, q = at % Q, row0 = tile * t, row1 = min(M, row0 + t) - 1;
    columns_of_tile(mine, a, row0, row1, q);
    const i64 slot0 = static_cast<i64>(indptr[tile]) * g + before[at] - before[tile * Q];
    auto slot_of = [&](int k) {
        int rank = __popc(mine[k / 32] & ((1u << (k % 32)) - 1));
        for (int w = 0; w < k / 32; ++w) rank += __popc(mine[w]);
        return slot0 + rank;
    };
    for (int k = threadIdx.x % 32; k < DEPTH; k += 32)
        if (mine[k / 32] >> (k % 32) & 1) indices[slot_of(k)] = static_cast<Index>(q * DEPTH + k);
    each_value(a, row0, row1, q, [&](i64 row, int k, u16 value) {
        const i64 slot = slot_of(k);
        data[(slot / g * t + (row - row0)) * g + slot % g] = value;
    });
}
