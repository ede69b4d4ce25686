// C[M,N] = A[M,K] @ B[K,N], A with 16-bit values as one bit per element and the nonzeros in row order; tensor cores, few
// columns of B (weight-bound). sm_80 and later.
//
//   indptr   Ptr[M+1]            first value of each row
//   bitmask  u8[M, cdiv(K,8)]    bit b of byte y is column 8y+b
//   data     T[nnz]              values in row-major order; starts on 16 bytes
//   before   u32[M, WARPS]       values of a row that lie before column w*slice (bitmask_slices.cu)
//   B        T: B[k][n] at k*ldb + n (BCOL: k + n*ldb)      C  Out: C[i][n] at i*c_row + n*c_col
//
// Grid: x = tiles of 16*MF rows, y walks tiles of NT columns. Block: WARPS warps; warp w sums the columns
// w*slice .. (w+1)*slice of A (slice: a multiple of 64), then the block adds the partial sums in the order of the warps:
// the same bits every run. A step of a warp is 64 columns: the values of each row (contiguous, at most 64) and 64 rows of B
// come to shared memory with cp.async, one step ahead. Lane 4g+t then holds, for each of its rows g, g+8, .., the columns
// 2t, 2t+1 of every 8: it counts the set bits before them, reads two values from there, and a byte permutation puts each
// where it belongs: that is the A fragment of m16n8k16, no expanded tile exists. Warps run unsynchronised.
//
// Limits: K < 2^26 (positions of a row tile are 32-bit); any M, N, alignment of B, leading dimension.
#include "spformat/bitmask.cuh"
#include "spformat/cp_async.cuh"
#include "spformat/ldmatrix.cuh"
#include "spformat/mma.cuh"

using namespace spformat;

constexpr int STEP = 64;    // columns of A a warp takes at a time
constexpr int PITCH = 144;  // bytes of a row's values in shared memory: 64, and up to 7 before them to start on 16 bytes
constexpr int AHEAD = 512;  // bytes of a row's values that L2 is asked for ahead of the copies

// Shared memory of one warp, in bytes; spmm_bitmask_tc.py computes the same.
template <int NT, int MF> struct Layout {
    static constexpr int VALUES = 16 * MF * PITCH;
    static constexpr int B = STEP * NT * 2;
    static constexpr int STAGE = VALUES + B;
    static constexpr int WARP = 2 * STAGE;
    static_assert(VALUES % 128 == 0, "the rows of B start on a row of banks");
};

__device__ __forceinline__ void store_value(u32 to, const void* from, bool inside) {
    const u16 x = inside ? *static_cast<const u16*>(from) : 0;
    asm volatile("st.shared.u16 [%0], %1;" ::"r"(to), "h"(x) : "memory");
}

// The 64 x NT piece of B at (k, n) to shared memory, zero outside K x N. Lines run along N, or along K if BCOL; the 16-byte
// chunks of a line are swizzled. vector: lines start on 16 bytes.
template <class T, int NT, bool BCOL>
__device__ __forceinline__ void stage_b(u32 to, const T* B, i64 k, i64 n, i64 K, i64 N, i64 ldb, bool vector, int lane) {
    constexpr int ALONG = BCOL ? STEP : NT, LINES = BCOL ? NT : STEP, PIECES = ALONG / 8, STRIDE = 32 / PIECES;
    const int line = lane / PIECES, chunk = lane % PIECES;
    const T* from = B + ((BCOL ? n : k) + line) * ldb + (BCOL ? k : n) + chunk * 8;
    if (vector && k + STEP <= K && n + NT <= N) {
#pragma unroll
        for (int i = 0; i < LINES; i += STRIDE) cp_async_16(to + swizzled<ALONG * 2>(i + line, chunk), from + i * ldb);
    } else {
        const i64 lines = (BCOL ? N - n : K - k) - line, left = (BCOL ? K - k : N - n) - chunk * 8;
#pragma unroll 1
        for (int i = 0; i < LINES; i += STRIDE)
            for (int e = 0; e < 8; ++e)
                store_value(to + swizzled<ALONG * 2>(i + line, chunk) + 2 * e, from + i * ldb + e, i < lines && e < left);
    }
}

template <class T, class Out, class Ptr, int NT, int MF, int WARPS, bool BCOL>
__global__ void __launch_bounds__(32 * WARPS)
    spmm_bitmask_tc(const Ptr* __restrict__ indptr, const u8* __restrict__ bitmask, const T* __restrict__ data,
                    const u32* __restrict__ before, i64 M, i64 K, i64 slice, const T* __restrict__ B, Out* __restrict__ C, i64 N,
                    i64 ldb, i64 c_row, i64 c_col) {
    using L = Layout<NT, MF>;
    static_assert(NT == 8 || NT == 16 || NT == 32 || NT == 64, "lines of B are a power of two, at most 128 bytes");
    constexpr int ROWS = 16 * MF, SETS = 2 * MF;  // a lane's rows: g, g+8, ..
    extern __shared__ __align__(128) unsigned char shared[];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    unsigned char* mine = shared + warp * L::WARP;

    const i64 row0 = static_cast<i64>(blockIdx.x) * ROWS, bytes = (K + 7) / 8;
    const i64 first = indptr[row0];
    const T* origin = data + (first & ~static_cast<i64>(7));  // starts on 16 bytes; positions count from here
    const bool mask_aligned = bytes % 8 == 0 && reinterpret_cast<u64>(bitmask) % 8 == 0;
    const bool b_vector = reinterpret_cast<u64>(B) % 16 == 0 && ldb % 8 == 0;
    const i64 k_begin = min(K, warp * slice), k_end = min(K, k_begin + slice);

    const bool first_columns = blockIdx.y == 0;
    const i64 my_row = row0 + g;
    const u8* my_bits = bitmask + my_row * bytes;
    const u32 shift = static_cast<u32>(first & 7);
    // Values of the tile from origin on, and those of them that may be read in pieces of 16 bytes: data may end in the last.
    const u32 total = static_cast<u32>(indptr[min(M, row0 + ROWS)] - first) + shift;
    const u32 whole = indptr[min(M, row0 + ROWS)] + 7 < indptr[M] ? total : total & ~7u;
    asm("" : "+l"(origin));  // one base, so that an address is one multiply-add
    u32 below[4];  // bits of a 32-bit word before this lane's two columns of byte b
#pragma unroll
    for (int b = 0; b < 4; ++b) below[b] = (1u << (8 * b + 2 * t)) - 1;

    for (i64 n0 = static_cast<i64>(blockIdx.y) * NT; n0 < N; n0 += static_cast<i64>(gridDim.y) * NT) {
        float acc[MF][NT / 8][4] = {};
        u32 at[SETS];  // each row's first value of the step at hand; a row beyond M has no bits
        u64 mask[SETS], next[SETS];
#pragma unroll
        for (int s = 0; s < SETS; ++s) {
            const i64 row = my_row + 8 * s;
            at[s] = row < M ? static_cast<u32>(indptr[row] - first) + shift + before[row * WARPS + warp] : total;
        }
        if (first_columns)
#pragma unroll
            for (int s = 0; s < SETS; ++s)  // a lane asks for lines t, t+4, ..
#pragma unroll
                for (u32 line = 0; line < AHEAD / 128; line += 4)
                    if (at[s] + 64 * (line + t) < total) prefetch_line(origin + at[s] + 64 * (line + t));
        auto load_masks = [&](u64 (&to)[SETS], i64 k) {
            const u8* from = my_bits + k / 8;
#pragma unroll
            for (int s = 0; s < SETS; ++s) {
                to[s] = 0;
                if (k < k_end && my_row + 8 * s < M) to[s] = mask_word(from + 8 * s * bytes, 0, bytes - k / 8, mask_aligned);
            }
        };
        // Values of step k to stage `buffer`: each row's, from the last 16-byte boundary on.
        auto stage = [&](int buffer, i64 k, const u32 (&from)[SETS], const u64 (&masks)[SETS]) {
            const u32 to = shared_address(mine + buffer * L::STAGE);
#pragma unroll
            for (int s = 0; s < SETS; ++s) {
                const u32 start = from[s] & ~7u, stop = from[s] + __popcll(masks[s]);
                const u32 row = to + (8 * s + g) * PITCH + t * 16;
#pragma unroll
                for (int piece = 0; piece < 9; piece += 4) {
                    const u32 p = start + (piece + t) * 8;
                    if (p < min(stop, whole)) cp_async_16(row + piece * 16, origin + p);
                }
                if (total > whole && t == 0)  // the piece that data ends in
                    for (u32 p = max(start, whole); p < stop; ++p) store_value(row + (p - start) * 2, origin + p, true);
            }
            stage_b<T, NT, BCOL>(to + L::VALUES, B, k, n0, K, N, ldb, b_vector, lane);
        };
        load_masks(mask, k_begin);
        load_masks(next, k_begin + STEP);
        if (k_begin < k_end) stage(0, k_begin, at, mask);
        cp_async_commit();
        int buffer = 0;
        for (i64 k = k_begin; k < k_end; k += STEP, buffer ^= 1) {
            u32 after[SETS];
            u64 later[SETS];
#pragma unroll
            for (int s = 0; s < SETS; ++s) after[s] = at[s] + __popcll(mask[s]);
            load_masks(later, k + 2 * STEP);
            if (k + STEP < k_end) stage(buffer ^ 1, k + STEP, after, next);
            cp_async_commit();
            if (first_columns && t == 0)
#pragma unroll
                for (int s = 0; s < SETS; ++s)
                    if (after[s] + AHEAD / 2 < total) prefetch_line(origin + after[s] + AHEAD / 2);
            cp_async_wait<1>();
            __syncwarp();

            const unsigned char* values = mine + buffer * L::STAGE;
            const u32 b_piece = shared_address(values + L::VALUES);
            const unsigned char* row[SETS];
            u32 word[SETS], pairs[SETS];
#pragma unroll
            for (int kk = 0; kk < 4; ++kk) {  // 16 columns each
                u32 a[MF][4];
#pragma unroll
                for (int s = 0; s < SETS; ++s) {
                    if (kk % 2 == 0) {  // the next 32 columns; their bits reversed, so that a pair reads (second, first)
                        row[s] = values + (8 * s + g) * PITCH + (at[s] & 7) * 2;
                        if (kk == 2) row[s] += __popc(static_cast<u32>(mask[s])) * 2;
                        word[s] = static_cast<u32>(mask[s] >> (16 * kk));
                        pairs[s] = __brev(word[s]) << (2 * t);
                    }
#pragma unroll
                    for (int h = 0; h < 2; ++h) {
                        const int byte = kk % 2 * 2 + h;
                        const u16* from = reinterpret_cast<const u16*>(row[s]) + __popc(word[s] & below[byte]);
                        const u32 one = from[0], two = from[1];
                        // Bytes 2, 3 of `one` and 6, 7 of `two` are zero. Columns set: none 3232, first 7610, second 1032,
                        // both 5410.
                        const u32 set = pairs[s] >> (30 - 8 * byte) & 3;
                        a[s / 2][s % 2 + 2 * h] = __byte_perm(one, two, (set * 0x2211 & 0x6622) ^ 0x3232);
                    }
                }
                u32 b[NT / 8][2];
                if constexpr (NT == 8) {
                    if constexpr (BCOL) ldmatrix_x2(b[0], b_piece + swizzled<STEP * 2>(lane % 8, kk * 2 + lane / 8 % 2));
                    else ldmatrix_x2_trans(b[0], b_piece + swizzled<NT * 2>(kk * 16 + lane % 16, 0));
                } else {
#pragma unroll
                    for (int j = 0; j < NT / 8; j += 2) {
                        u32 two[4];
                        if constexpr (BCOL)
                            ldmatrix_x4(two, b_piece + swizzled<STEP * 2>(8 * j + lane / 16 * 8 + lane % 8, kk * 2 + lane / 8 % 2));
                        else
                            ldmatrix_x4_trans(two, b_piece + swizzled<NT * 2>(kk * 16 + lane % 16, j + lane / 16));
                        b[j][0] = two[0], b[j][1] = two[1], b[j + 1][0] = two[2], b[j + 1][1] = two[3];
                    }
                }
#pragma unroll
                for (int m = 0; m < MF; ++m)
#pragma unroll
                    for (int j = 0; j < NT / 8; ++j) mma_m16n8k16<T>(acc[m][j], a[m], b[j][0], b[j][1]);
            }
            __syncwarp();
#pragma unroll
            for (int s = 0; s < SETS; ++s) at[s] = after[s], mask[s] = next[s], next[s] = later[s];
        }

        // Partial sums [warp][row][n] take the place of the stages.
        cp_async_wait<0>();
        __syncthreads();
        float* sums = reinterpret_cast<float*>(shared);
#pragma unroll
        for (int m = 0; m < MF; ++m)
#pragma unroll
            for (int j = 0; j < NT / 8; ++j)
#pragma unroll
                for (int h = 0; h < 2; ++h)
                    *reinterpret_cast<float2*>(sums + (warp * ROWS + 16 * m + 8 * h + g) * NT + 8 * j + 2 * t) =
                            make_float2(acc[m][j][2 * h], acc[m][j][2 * h + 1]);
        __syncthreads();
        store_sums<T, Out, Ptr, ROWS, NT, WARPS>(sums, indptr, bitmask, data, bytes, row0, n0, M, N, B, BCOL ? 1 : ldb,
                                                 BCOL ? ldb : 1, C, c_row, c_col);
        __syncthreads();
    }
}
