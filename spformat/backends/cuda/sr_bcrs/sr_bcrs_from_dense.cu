// A dense array as SR-BCRS: which columns of each row tile have a nonzero, the list of these columns, their values.
// sm_80 and later. Launcher: sr_bcrs_from_dense.py.
//
//   x        T[M, K]            row-major, as unsigned words of the values' width; Float: -0 is a zero
//   bitmap   u32[Mv, pieces*32] bit c % 32 of word c / 32 of a row tile: column c has a nonzero in one of the t rows;
//                               words that start behind column K are not written
//   counts   u32[Mv, pieces]    marking: columns with a nonzero in each piece of 1024 columns; listing: in all pieces
//                               before it
//   first    Ptr[Mv+1]          first group of each row tile
//   indices  Idx[G, g]          column of each vector, ascending in a tile, -1 after the last
//   tiles    u32[G]             row tile of each group
//   data     T[G, t, g]         element (r, s): row r of the tile, vector s; +0 for zeros, behind row M and under -1
//
// Marking and gathering read x, each once. Gathering goes through the groups backwards: the last rows, which marking
// has read last, may still be in L2.
#include "spformat/expand.cuh"
#include "spformat/nonzero.cuh"
#include "spformat/tile_pieces.cuh"

using namespace spformat;

constexpr int THREADS = 256, WARPS = THREADS / 32, PIECE = 1024, IN_FLIGHT = 8, IMAGE = 16 * 1024;  // IMAGE: bytes

// A warp marks a piece of a row tile. Wide: rows are whole 16-byte units, and a lane takes a unit; otherwise an element.
template <class T, bool Float, bool Wide>
__device__ __forceinline__ void mark_piece(const T* __restrict__ x, i64 M, i64 K, int t, i64 tiles, i64 pieces,
                                           u32* __restrict__ bitmap, u32* __restrict__ counts) {
    constexpr int UNIT = 16 / sizeof(T), P = Wide ? UNIT : 1;
    const int lane = threadIdx.x % 32;
    const i64 job = blockIdx.x * static_cast<i64>(WARPS) + threadIdx.x / 32, tile = job / pieces;
    if (tile >= tiles) return;
    const i64 c0 = (job - tile * pieces) * PIECE + lane * P, left = K - (job - tile * pieces) * PIECE;
    const int rows = static_cast<int>(M - tile * t < t ? M - tile * t : t);
    const int steps = (static_cast<int>(left < PIECE ? left : PIECE) + 32 * P - 1) / (32 * P), all = steps * rows;
    const T* line = x + tile * t * K;
    u32* words = bitmap + job * (PIECE / 32);
    int row = 0, step = 0, seen_rows = 0, seen_steps = 0;  // the next load, the next unit to be looked at
    uint4 any = make_uint4(0, 0, 0, 0);                    // the bits that one of these rows has; of an element: in x, y
    u32 vectors = 0;
    for (int at = 0; at < all; at += IN_FLIGHT) {
        uint4 unit[IN_FLIGHT];
#pragma unroll
        for (int u = 0; u < IN_FLIGHT; ++u) {
            unit[u] = make_uint4(0, 0, 0, 0);
            if (at + u < all) {
                const i64 c = c0 + step * (32 * P);
                if (c < K) {
                    if (Wide) {
                        unit[u] = *reinterpret_cast<const uint4*>(line + row * K + c);
                    } else {
                        const u64 value = line[row * K + c];
                        unit[u].x = static_cast<u32>(value), unit[u].y = static_cast<u32>(value >> 32);
                    }
                }
                if (++row == rows) row = 0, ++step;
            }
        }
#pragma unroll
        for (int u = 0; u < IN_FLIGHT; ++u) {
            if (at + u >= all) break;
            any.x |= unit[u].x, any.y |= unit[u].y, any.z |= unit[u].z, any.w |= unit[u].w;
            if (++seen_rows < rows) continue;
            u32 bits = nonzero_bits<T, Float>(any);
            if (Wide) {
                constexpr int LANES = 32 / UNIT;  // lanes that share a word
                vectors += __popc(bits);
                bits <<= lane % LANES * UNIT;
#pragma unroll
                for (int d = 1; d < LANES; d *= 2) bits |= __shfl_xor_sync(~0u, bits, d);
                if (lane % LANES == 0) words[seen_steps * UNIT + lane / LANES] = bits;
            } else {
                bits = __ballot_sync(~0u, (bits & 1) != 0);
                vectors += bits >> lane & 1;
                if (lane == 0) words[seen_steps] = bits;
            }
            any = make_uint4(0, 0, 0, 0);
            seen_rows = 0, ++seen_steps;
        }
    }
    vectors = sum_of_warp(vectors);
    if (lane == 0) counts[job] = vectors;
}

// finished: null, or with the last parameters those of starts_by_last_block.
template <class T, bool Float, bool Wide>
__global__ void __launch_bounds__(THREADS)
mark_vectors(const T* __restrict__ x, i64 M, i64 K, int t, i64 tiles, i64 pieces, u32* __restrict__ bitmap, u32* counts,
             u64* finished, int g, int* starts, u64* total) {
    mark_piece<T, Float, Wide>(x, M, K, t, tiles, pieces, bitmap, counts);
    if (finished) starts_by_last_block<THREADS>(counts, tiles, pieces, g, starts, finished, total);
}

// A warp lists the columns of a piece of a row tile. That of the last piece pads the list; that of the first writes `tiles`.
template <class Ptr, class Idx>
__global__ void __launch_bounds__(THREADS)
list_vectors(const u32* __restrict__ bitmap, const u32* __restrict__ counts, const Ptr* __restrict__ first, i64 K, int g,
             i64 n_tiles, i64 pieces, Idx* __restrict__ indices, u32* __restrict__ tiles) {
    const int lane = threadIdx.x % 32;
    const i64 job = blockIdx.x * static_cast<i64>(WARPS) + threadIdx.x / 32, tile = job / pieces;
    if (tile >= n_tiles) return;
    const i64 piece = job - tile * pieces, group = first[tile], end = first[tile + 1], c0 = piece * PIECE;
    const u32 mine = c0 + lane * 32 < K ? bitmap[job * (PIECE / 32) + lane] : 0;
    Idx* to = indices + group * g + counts[job];
    for (u32 left = __ballot_sync(~0u, mine != 0); left; left &= left - 1) {
        const int w = __ffs(left) - 1;
        const u32 word = __shfl_sync(~0u, mine, w);
        if (word >> lane & 1) to[__popc(word & ((1u << lane) - 1))] = static_cast<Idx>(c0 + w * 32 + lane);
        to += __popc(word);
    }
    if (piece == 0)
        for (i64 n = group + lane; n < end; n += 32) tiles[n] = static_cast<u32>(tile);
    if (piece == pieces - 1)
        for (Idx* pad = to + lane; pad < indices + end * g; pad += 32) *pad = -1;
}

// A block writes all rows of `groups` groups, or `rows` rows of one group. That is one run of data, of which an image is put
// together in shared memory. Neighbouring lanes take neighbouring vectors: what they read of a row of x lies close together.
template <class T, bool Float, class Idx>
__global__ void __launch_bounds__(THREADS)
gather_vectors(const T* __restrict__ x, i64 M, i64 K, const Idx* __restrict__ indices, const u32* __restrict__ tiles, i64 G,
               int t, int g, int groups, int rows, int row_parts, T* __restrict__ data) {
    constexpr T VALUE = static_cast<T>(static_cast<T>(~0ull) >> Float);
    constexpr int P = 16 / sizeof(T);
    __shared__ __align__(16) unsigned char room[IMAGE + 16];
    const i64 block = gridDim.x - 1 - blockIdx.x, n0 = block / row_parts * groups;
    const int r0 = static_cast<int>(block % row_parts) * rows, here = static_cast<int>(G - n0 < groups ? G - n0 : groups);
    const int high = t - r0 < rows ? t - r0 : rows, vectors = here * g, count = vectors * high;
    T* to = data + (n0 * t + r0) * g;
    const int head = head_of(to);
    T* image = reinterpret_cast<T*>(room);
    const int pieces = (high + IN_FLIGHT - 1) / IN_FLIGHT;
    for (int i = threadIdx.x; i < vectors * pieces; i += THREADS) {
        const int piece = static_cast<u32>(i) / static_cast<u32>(vectors), v = i - piece * vectors;
        const int n = static_cast<u32>(v) / static_cast<u32>(g), s = v - n * g, r = piece * IN_FLIGHT;
        const i64 column = indices[n0 * g + v], row = static_cast<i64>(tiles[n0 + n]) * t + r0 + r;
        const i64 exist = column < 0 ? 0 : M - row;
        const T* from = x + row * K + column;
        T value[IN_FLIGHT];
#pragma unroll
        for (int u = 0; u < IN_FLIGHT; ++u) value[u] = u < exist && r + u < high ? from[u * K] : T(0);
        T* line = image + head + (n * high + r) * g + s;
#pragma unroll
        for (int u = 0; u < IN_FLIGHT; ++u)
            if (r + u < high) line[u * g] = (value[u] & VALUE) ? value[u] : T(0);
    }
    __syncthreads();
    for (int q = threadIdx.x; q * P < head + count; q += THREADS) store_unit(to, image, head, count, q);
}
