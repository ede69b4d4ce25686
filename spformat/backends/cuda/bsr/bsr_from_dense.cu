// Dense matrices to the blocks of BSR and DBSR: x is read once to see which blocks hold a nonzero, and those blocks once more.
// sm_80 and later. Launcher: bsr_from_dense.py.
//
//   x             T[M, K]          values as unsigned words; `live` masks the bits that decide whether one is zero
//   bits, starts  a block map      block_map.cuh; bits are zeros before mark_blocks, which sets them
//   data          T[nnzb, R, C]    the stored blocks: -0 becomes +0, places outside of the matrix are +0
//
// W: bytes that a thread loads at once; rows of x start at multiples of it, and to copy blocks also the columns of blocks do.
#include "spformat/block_map.cuh"

using namespace spformat;

constexpr int THREADS = 256, UNIT = 16, MOST = 64;  // UNIT: bytes of a row that a lane marks; MOST: words that a copier takes

template <int W> struct Packed;
template <> struct Packed<1> { using type = u8; };
template <> struct Packed<2> { using type = u16; };
template <> struct Packed<4> { using type = u32; };
template <> struct Packed<8> { using type = uint2; };
template <> struct Packed<16> { using type = uint4; };

template <class T, int N> struct alignas(N * sizeof(T)) Piece { T v[N]; };

// The piece at p, which is not read again.
template <class P, class T> __device__ __forceinline__ P load_piece(const T* p) {
    using Raw = typename Packed<sizeof(P)>::type;
    const Raw raw = __ldcs(reinterpret_cast<const Raw*>(p));
    return reinterpret_cast<const P&>(raw);
}

// Sets the bits of blocks with a nonzero. A warp takes a strip of `height` rows of a block row and UNIT * across bytes of
// them: `across` lanes side by side, 32 / across rows at a time. Where a block row has fewer rows than that, `together` is
// 32 / across, and each of these groups of lanes takes a block row of its own; else it is 1.
template <class T, int W>
__device__ __forceinline__ void mark_strip(const T* __restrict__ x, i64 M, i64 K, int R, int C, u64 mask, u32* __restrict__ bits,
                                           i64 words, int across, int together, int height, i64 strips, i64 segments, i64 task) {
    constexpr int N = W / sizeof(T), PIECES = UNIT / W, WIDE = UNIT / sizeof(T), DEPTH = W == UNIT ? 8 : W >= 4 ? 4 : 2;
    const T live = static_cast<T>(mask);
    const int lane = threadIdx.x % 32, side = lane % across, group = lane / across, down = 32 / across;
    const i64 segment = task % segments, above = task / segments, strip = above % strips;
    const i64 b = above / strips * together + (together > 1 ? group : 0);
    const int step = together > 1 ? 1 : down;
    i64 end = (b + 1) * R < M ? (b + 1) * R : M;
    if (b * R + (strip + 1) * height < end) end = b * R + (strip + 1) * height;
    const i64 row = b * R + strip * height + (together > 1 ? 0 : group);
    // The pieces of a lane lie `across` pieces apart, so that neighbouring lanes read neighbouring bytes.
    const i64 column = segment * across * WIDE + side * N;
    // All rows are united into one, in words as wide as possible; which values they are is asked only then.
    using Word = typename Packed<W < 4 ? W : 4>::type;
    constexpr int IN_PIECE = W / sizeof(Word);
    Piece<Word, IN_PIECE> any[PIECES] = {};
    const T* from = x + row * K + column;
#pragma unroll 1
    for (i64 r = row; r < end; r += DEPTH * step, from += DEPTH * step * K) {
        Piece<Word, IN_PIECE> pieces[DEPTH][PIECES] = {};
#pragma unroll
        for (int d = 0; d < DEPTH; ++d)
#pragma unroll
            for (int p = 0; p < PIECES; ++p)
                if (r + d * step < end && column + p * across * N < K)
                    pieces[d][p] = load_piece<Piece<Word, IN_PIECE>>(from + d * step * K + p * across * N);
#pragma unroll
        for (int d = 0; d < DEPTH; ++d)
#pragma unroll
            for (int p = 0; p < PIECES; ++p)
#pragma unroll
                for (int e = 0; e < IN_PIECE; ++e) any[p].v[e] |= pieces[d][p].v[e];
    }
    // Groups of lanes with the same block row put together what they saw.
    if (together == 1)
        for (int d = across; d < 32; d *= 2)
#pragma unroll
            for (int p = 0; p < PIECES; ++p)
#pragma unroll
                for (int e = 0; e < IN_PIECE; ++e)
                    any[p].v[e] |= static_cast<Word>(__shfl_xor_sync(~0u, any[p].v[e], d));
    const Divisor width(C);
#pragma unroll
    for (int p = 0; p < PIECES; ++p) {
        const i64 first = column + p * across * N, j0 = width.of(first);
        const i64 w = b * words + j0 / 32;  // of the whole piece: a word is 32 * C columns, and these are whole pieces
        int j = static_cast<int>(j0 % 32), left = C - static_cast<int>(first - j0 * C);  // left: columns up to the next block
        u32 word = 0;
        const Piece<T, N> seen = reinterpret_cast<const Piece<T, N>&>(any[p]);
#pragma unroll
        for (int e = 0; e < N; ++e) {
            if ((seen.v[e] & live) && (together > 1 || group == 0)) word |= 1u << j;
            if (--left == 0) ++j, left = C;
        }
        // Lanes ascend with their words, so that those with the same word are neighbours: the first of them sets it.
#pragma unroll
        for (int d = 1; d < 32; d *= 2) {
            const i64 other = __shfl_down_sync(~0u, w, d);
            const u32 theirs = __shfl_down_sync(~0u, word, d);
            if (lane + d < 32 && other == w) word |= theirs;
        }
        const i64 before = __shfl_up_sync(~0u, w, 1);
        if (word && (lane == 0 || before != w)) set_bits(bits, w, word);
    }
}

// `finished` and the last five parameters are null, or those of number_by_last_block: then `bits` are its marks.
template <class T, int W>
__global__ void __launch_bounds__(THREADS)
mark_blocks(const T* __restrict__ x, i64 M, i64 K, int R, int C, u64 mask, u32* bits, i64 words, int across, int together, int height,
            i64 strips, i64 segments, i64 tasks, u64* finished, i64 Mb, u32* numbered, i64* starts, i64* places, u64* sizes) {
    const i64 task = (i64(blockIdx.x) * THREADS + threadIdx.x) / 32;
    if (task < tasks) mark_strip<T, W>(x, M, K, R, C, mask, bits, words, across, together, height, strips, segments, task);
    if (finished) number_by_last_block<THREADS>(bits, finished, Mb * words, Mb, numbered, starts, places, sizes);
}

// Copies the stored blocks. A block of threads takes `span` words of the map and a strip of `height` rows of their blocks. Behind
// the `copies` blocks of threads that do so are others, which write the index arrays: the last parameters are those of
// write_block_indices.
template <class T, int W>
__global__ void __launch_bounds__(THREADS)
copy_blocks(const T* __restrict__ x, i64 M, i64 K, int R, int C, u64 mask, const u32* __restrict__ bits,
            const i64* __restrict__ starts, i64 words, i64 all, int span, int height, int strips, T* __restrict__ data, int copies,
            i64 Mb, void* __restrict__ indices, int wide_indices, void* __restrict__ indptr, int wide_indptr,
            const i64* __restrict__ places, void* __restrict__ ids, int wide_ids) {
    if (blockIdx.x >= copies) {
        write_block_indices(i64(blockIdx.x - copies) * THREADS + threadIdx.x, i64(gridDim.x - copies) * THREADS, bits, starts, all, Mb,
                            nullptr, nullptr, words, indices, wide_indices, indptr, wide_indptr, places, ids, wide_ids);
        return;
    }
    constexpr int N = W / sizeof(T), DEPTH = 4;
    __shared__ u16 listed[MOST * 32];  // of each stored block: 32 * its word, counted from the first, + its bit
    const T live = static_cast<T>(mask);
    const i64 tile = blockIdx.x / strips, w0 = tile * span;
    const int r0 = static_cast<int>(blockIdx.x - tile * strips) * height, rows = R - r0 < height ? R - r0 : height;
    const int taken = static_cast<int>(all - w0 < span ? all - w0 : span), lane = threadIdx.x % 32;
    const i64 first = starts[w0];
    for (int i = threadIdx.x / 32; i < taken; i += THREADS / 32) {
        const u32 word = bits[w0 + i];
        if (word >> lane & 1) listed[starts[w0 + i] - first + __popc(word & lanes_before())] = static_cast<u16>(i * 32 + lane);
    }
    __syncthreads();
    const int count = static_cast<int>(starts[w0 + taken] - first);
    const i64 b0 = w0 / words, wide0 = w0 - b0 * words;
    const u32 across = C / N, per_block = rows * across, total = count * per_block;
    const Divisor blocks(per_block), lines(across);
    T* to = data + (first * R + r0) * C;
#pragma unroll 1
    for (u32 q0 = threadIdx.x; q0 < total; q0 += DEPTH * THREADS) {
        Piece<T, N> pieces[DEPTH] = {};
        i64 at[DEPTH];
#pragma unroll
        for (int d = 0; d < DEPTH; ++d) {
            const u32 q = q0 + d * THREADS;
            at[d] = -1;
            if (q < total) {
                const u32 i = blocks.quotient(q), inside = q - i * per_block, r = lines.quotient(inside);
                const u32 c = (inside - r * across) * N, place = listed[i];
                i64 b = b0, w = wide0 + place / 32;
                if (w >= words) b += w / words, w %= words;
                const i64 row = b * R + r0 + r, column = (w * 32 + place % 32) * C + c;
                at[d] = (i64(i) * R + r) * C + c;
                if (row < M && column < K) pieces[d] = load_piece<Piece<T, N>>(x + row * K + column);
            }
        }
#pragma unroll
        for (int d = 0; d < DEPTH; ++d) {
            if (at[d] < 0) continue;
#pragma unroll
            for (int e = 0; e < N; ++e)
                if (!(pieces[d].v[e] & live)) pieces[d].v[e] = 0;
            *reinterpret_cast<Piece<T, N>*>(to + at[d]) = pieces[d];
        }
    }
}
