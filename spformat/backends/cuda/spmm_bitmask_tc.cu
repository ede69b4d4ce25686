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
// come to shared memory with cp.async, STAGES - 1 steps ahead. Lane 4g+t then holds, for each of its rows g, g+8, .., the
// columns 2t, 2t+1 of every 8: it counts the set bits before them, reads two values from there, and a byte permutation puts
// each where it belongs: that is the A fragment of m16n8k16, no expanded tile exists. Warps run unsynchronised.
//
// Limits: K < 2^26 (positions of a row tile are 32-bit); any M, N, alignment of B, leading dimension.
#include "spformat/bitmask.cuh"
#include "spformat/cp_async.cuh"
#include "spformat/ldmatrix.cuh"
#include "spformat/mma.cuh"

using namespace spformat;

constexpr int STEP = 64;    // columns of A a warp takes at a time
constexpr int PITCH = 144;  // bytes of a row's values in shared memory: 64, and up to 7 before them to start on 16 bytes

// Shared memory of one warp, in bytes; spmm_bitmask_tc.py computes the same.
template <int NT, int MF, int STAGES> struct Layout {
    static constexpr int B = 16 * MF * PITCH;        // after the values
    static constexpr int ROWS = B + STEP * NT * 2;   // per row: the two halves of its bits, and where their values start
    static constexpr int STAGE = ROWS + 16 * MF * 16;
    static constexpr int WARP = STAGES * STAGE;
    static_assert(B % 128 == 0 && STAGE % 128 == 0, "the rows of B start on a row of banks");
};

__device__ __forceinline__ void store_value(u32 to, const void* from, bool inside) {
    const u16 x = inside ? *static_cast<const u16*>(from) : 0;
    asm volatile("st.shared.u16 [%0], %1;" ::"r"(to), "h"(x) : "memory");
}

// The 64 x NT piece of B at (k, n), which starts at `piece`, to shared memory, zero outside K x N. Lines run along N, or
// along K if BCOL; the 16-byte chunks of a line are swizzled. vector: lines start on 16 bytes.
template <class T, int NT, bool BCOL>
__device__ __forceinline__ void stage_b(u32 to, const T* piece, i64 k, i64 n, i64 K, i64 N, i64 ldb, bool vector, int lane) {
    constexpr int ALONG = BCOL ? STEP : NT, LINES = BCOL ? NT : STEP, PIECES = ALONG / 8, STRIDE = 32 / PIECES;
    const int line = lane / PIECES, chunk = lane % PIECES;
    const T* from = piece + line * ldb + chunk * 8;
    if (vector && k + STEP <= K && n + NT <= N) {
#pragma unroll
        for (int i = 0; i < LINES; i += STRIDE, from += STRIDE * ldb) cp_async_16(to + swizzled<ALONG * 2>(i + line, chunk), from);
    } else {
        const i64 lines = (BCOL ? N - n : K - k) - line, left = (BCOL ? K - k : N - n) - chunk * 8;
#pragma unroll 1
        for (int i = 0; i < LINES; i += STRIDE)
            for (int e = 0; e < 8; ++e)
                store_value(to + swizzled<ALONG * 2>(i + line, chunk) + 2 * e, from + i * ldb + e, i < lines && e < left);
    }
}

template <class T, class Out, class Ptr, int NT, int MF, int WARPS, int STAGES, bool BCOL>
__global__ void __launch_bounds__(32 * WARPS)
    spmm_bitmask_tc(const Ptr* __restrict__ indptr, const u8* __restrict__ bitmask, const T* __restrict__ data,
                    const u32* __restrict__ before, i64 M, i64 K, i64 slice, const T* __restrict__ B, Out* __restrict__ C, i64 N,
                    i64 ldb, i64 c_row, i64 c_col) {
    using L = Layout<NT, MF, STAGES>;
    static_assert(NT == 8 || NT == 16 || NT == 32 || NT == 64, "lines of B are a power of two, at most 128 bytes");
    constexpr int ROWS = 16 * MF, SETS = 2 * MF;  // a lane's rows: g, g+8, ..
    extern __shared__ __align__(128) unsigned char shared[];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    unsigned char* mine = shared + warp * L::WARP;

    const i64 row0 = static_cast<i64>(blockIdx.x) * ROWS, bytes = (K + 7) / 8;
    const i64 first = indptr[row0], last = indptr[min(M, row0 + ROWS)];
    const T* origin = data + (first & ~static_cast<i64>(7));  // starts on 16 bytes; positions count from here
    asm("" : "+l"(origin));  // one base, so that an address is one multiply-add
    const u32 shift = static_cast<u32>(first & 7);
    // Values of the tile from origin on, and those of them that may be read in pieces of 16 bytes: data may end in the last.
    const u32 total = static_cast<u32>(last - first) + shift, whole = last + 7 < indptr[M] ? total : total & ~7u;
    const bool mask_aligned = bytes % 8 == 0 && reinterpret_cast<u64>(bitmask) % 8 == 0;
    const bool b_vector = reinterpret_cast<u64>(B) % 16 == 0 && ldb % 8 == 0;
    const i64 k_begin = min(K, warp * slice), k_end = min(K, k_begin + slice);
    const int steps = static_cast<int>((k_end - k_begin + STEP - 1) / STEP);
    const i64 my_row = row0 + g;
    u32 below[4];  // bits of a 32-bit word before this lane's two columns of byte b
#pragma unroll
    for (int b = 0; b < 4; ++b) below[b] = (1u << (8 * b + 2 * t)) - 1;
    u32 keep = 0x6622, none = 0x3232;  // in registers: one logic instruction takes both
    asm("" : "+r"(keep), "+r"(none));

    for (i64 n0 = static_cast<i64>(blockIdx.y) * NT; n0 < N; n0 += static_cast<i64>(gridDim.y) * NT) {
        float acc[MF][NT / 8][4] = {};
        u32 at[SETS];  // each row's first value of the next step to copy; a row beyond M has no bits
#pragma unroll
        for (int s = 0; s < SETS; ++s) {
            const i64 row = my_row + 8 * s;
            at[s] = row < M ? static_cast<u32>(indptr[row] - first) + shift + before[row * WARPS + warp] : total;
        }
        // Bits of four steps at a time: lane t holds those of step t.
        u64 four[SETS], next_four[SETS];
        const u8* my_bits = bitmask + my_row * bytes + k_begin / 8 + 8 * t;
        auto load_bits = [&](u64 (&to)[SETS], int step) {
            const i64 byte = (k_begin + static_cast<i64>(step + t) * STEP) / 8;
#pragma unroll
            for (int s = 0; s < SETS; ++s) {
                to[s] = 0;
                if (step + t < steps && my_row + 8 * s < M)
                    to[s] = mask_word(my_bits + step * 8 + 8 * s * bytes, 0, bytes - byte, mask_aligned);
            }
        };
        const T* b_from = B + (BCOL ? n0 * ldb + k_begin : k_begin * ldb + n0);
        int copied = 0;
        auto copy_step = [&] {
            if (copied < steps) {
                const u32 to = shared_address(mine) + copied % STAGES * L::STAGE;
                if (copied && copied % 4 == 0) {
#pragma unroll
                    for (int s = 0; s < SETS; ++s) four[s] = next_four[s];
                    load_bits(next_four, copied + 4);
                }
#pragma unroll
                for (int s = 0; s < SETS; ++s) {
                    const u32 low = __shfl_sync(0xFFFFFFFFu, static_cast<u32>(four[s]), (lane & 28) | (copied % 4));
                    const u32 high = __shfl_sync(0xFFFFFFFFu, static_cast<u32>(four[s] >> 32), (lane & 28) | (copied % 4));
                    const u32 start = at[s] & ~7u, from = (at[s] & 7) * 2;
                    if (t == 0)
                        *reinterpret_cast<uint4*>(mine + copied % STAGES * L::STAGE + L::ROWS + (8 * s + g) * 16) =
                                make_uint4(low, high, from, from + 2 * __popc(low));
                    at[s] += __popc(low) + __popc(high);
                    const u32 row = to + (8 * s + g) * PITCH + t * 16, stop = min(at[s], whole);
                    const T* piece = origin + (start + 8 * t);
#pragma unroll
                    for (int p = 0; p < 9; p += 4)
                        if (start + 8 * (p + t) < stop) cp_async_16(row + p * 16, piece + 8 * p);
                }
                if (whole < total) {  // the piece that data ends in
#pragma unroll
                    for (int s = 0; s < SETS; ++s) {
                        if (t != 0 || at[s] <= whole) continue;
                        const uint4 bits = *reinterpret_cast<const uint4*>(mine + copied % STAGES * L::STAGE + L::ROWS + (8 * s + g) * 16);
                        const u32 row = to + (8 * s + g) * PITCH, last_piece = (at[s] - 1) & ~7u;
                        const u32 start = (at[s] - __popc(bits.x) - __popc(bits.y)) & ~7u;
                        if (at[s] > start)
                            for (u32 p = max(start, last_piece); p < at[s]; ++p) store_value(row + (p - start) * 2, origin + p, true);
                    }
                }
                stage_b<T, NT, BCOL>(to + L::B, b_from, k_begin + static_cast<i64>(copied) * STEP, n0, K, N, ldb, b_vector, lane);
                b_from += BCOL ? static_cast<i64>(STEP) : STEP * ldb;
            }
            ++copied;
            cp_async_commit();
        };
        load_bits(four, 0);
        load_bits(next_four, 4);
#pragma unroll
        for (int s = 0; s < STAGES - 1; ++s) copy_step();
        for (int step = 0; step < steps; ++step) {
            copy_step();
            cp_async_wait<STAGES - 1>();
            __syncwarp();

            const unsigned char* stage = mine + step % STAGES * L::STAGE;
            const u32 b_piece = shared_address(stage + L::B);
            const unsigned char* from[SETS][2];
            u32 word[SETS][2], pairs[SETS][2];
#pragma unroll
            for (int s = 0; s < SETS; ++s) {
                const uint4 bits = *reinterpret_cast<const uint4*>(stage + L::ROWS + (8 * s + g) * 16);
                word[s][0] = bits.x, word[s][1] = bits.y;
                from[s][0] = stage + (8 * s + g) * PITCH + bits.z, from[s][1] = stage + (8 * s + g) * PITCH + bits.w;
#pragma unroll
                for (int h = 0; h < 2; ++h) pairs[s][h] = __brev(word[s][h]) << (2 * t);  // a pair reads (second, first)
            }
#pragma unroll
            for (int kk = 0; kk < 4; ++kk) {  // 16 columns each
                u32 a[MF][4];
#pragma unroll
                for (int s = 0; s < SETS; ++s)
#pragma unroll
                    for (int h = 0; h < 2; ++h) {
                        const int byte = kk % 2 * 2 + h;
                        const u16* p = reinterpret_cast<const u16*>(from[s][kk / 2]) + __popc(word[s][kk / 2] & below[byte]);
                        const u32 one = p[0], two = p[1];
                        // Bytes 2, 3 of `one` and 6, 7 of `two` are zero. Columns set: none 3232, first 7610, second 1032,
                        // both 5410.
                        const u32 set = pairs[s][kk / 2] >> (30 - 8 * byte) & 3;
                        a[s / 2][s % 2 + 2 * h] = __byte_perm(one, two, (set * 0x2211 & keep) ^ none);
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
