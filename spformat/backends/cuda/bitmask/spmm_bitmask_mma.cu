// C[M,N] = A[M,K] @ B[K,N], A as one bit per element and the nonzeros in row order; float32, tens of columns of B. Each product as
// three TF32 products on tensor cores, f32 sums. sm_80 and later.
//
//   indptr   Ptr[M+1]               first value of each row
//   bitmask  u8[M, cdiv(K,8)]       bit b of byte y is column 8y+b
//   data     float[nnz]             values in row-major order
//   before   u32[M, SLICES]         values of a row that lie before column s*slice (bitmask_slices.cu)
//   B        B[k][n] at k*b_k + n*b_n      C  C[i][n] at i*c_row + n*c_col
//
// Grid: x = tiles of 16*MF*PARTS rows, y walks tiles of 8*NI columns. Block: SLICES * PARTS warps; each has 16*MF rows and the
// columns s*slice .. (s+1)*slice of A (slice: a multiple of 64). A step of a warp is 64 columns, of which lane l owns 2l and 2l+1:
// for each row it counts the set bits before its columns and copies its values to their place in a dense tile of shared memory,
// zeros included, by asynchronous copies of 4 bytes. While the copies of a step are under way, the step before is multiplied. A
// warp uses its own memory only, so that warps run unsynchronised; the sums of the slices are added at the end, in their order:
// the same bits every run.
//
// Tile: 64 floats a row, in units of 16 bytes; odd rows have units u and u^4 exchanged. So the 8 lanes that read 16 bytes at once
// (4 of a row, 2 rows) meet all banks. Columns are numbered as in spmm_bsr_tokens.cu: a lane of a quad has four neighbours.
//
// A sum that is not finite is computed again over the stored elements, which also covers what infinities do to the small products.
//
//   Way      how a lane loads B (few_columns.cuh)
//   Resident  blocks that run on a multiprocessor at a time (__launch_bounds__)
//   Limits   K < 2^26 (positions of a row tile are 32-bit); any M, N, alignment, leading dimension.
#include "spformat/bitmask_steps.cuh"
#include "spformat/cp_async.cuh"
#include "spformat/few_columns.cuh"
#include "spformat/launch_order.cuh"
#include "spformat/ldmatrix.cuh"
#include "spformat/mma.cuh"

using namespace spformat;

// x as a TF32 number and the rest. Without a case for infinities and NaN: whatever comes of them, `low` is NaN.
__device__ __forceinline__ void split(u32 x, u32& high, u32& low) {
    high = (x + 0x1000u) & 0xffffe000u;
    low = __float_as_uint(__uint_as_float(x) - __uint_as_float(high));
}

template <class Ptr, int MF, int NI, int PARTS, int SLICES, int Resident, int Way>
__global__ void __launch_bounds__(32 * PARTS * SLICES, Resident)
    spmm_bitmask_mma(const Ptr* __restrict__ indptr, const u8* __restrict__ bitmask, const float* __restrict__ data,
                     const u32* __restrict__ before, i64 M, i64 K, i64 slice, const float* __restrict__ B, float* __restrict__ C,
                     i64 N, i64 b_k, i64 b_n, i64 c_row, i64 c_col) {
    constexpr int R = 16 * MF, ROWS = R * PARTS, NT = 8 * NI, TILE = R * MASK_STEP;  // TILE: floats
    static_assert(MF == 1 || MF == 2, "a lane looks after one row: 16 or 32 rows a warp");
    extern __shared__ __align__(16) float tiles[];             // per warp: two tiles; later the sums
    __shared__ uint2 table[PARTS * SLICES][2][2 * R];          // of a step: for each row and half, bits and where its values start
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, part = warp % PARTS, s = warp / PARTS, g = lane / 4, t = lane % 4;
    const float* const mine = tiles + warp * 2 * TILE;

    wait_for_launch_before();
    const i64 row0 = static_cast<i64>(blockIdx.x) * ROWS;
    RowSteps<float> row_steps(indptr, bitmask, data, before, M, K, slice, row0, row0 + part * R + lane % R, lane < R, s, SLICES);
    const i64 k_begin = row_steps.k, k_end = row_steps.k_end;
    const u32 start = row_steps.at;
    const float* const values = row_steps.values;
    // This lane's two columns of a step, as masks on the half of the 64 bits that holds them, and their place in even and odd rows.
    const u32 bit0 = 1u << (2 * lane % 32), bit1 = 2 * bit0, below = bit0 - 1;
    const u32 even = shared_address(mine + 2 * lane), odd = shared_address(mine + 2 * (lane ^ 8));

    for (i64 n0 = static_cast<i64>(blockIdx.y) * NT; n0 < N; n0 += static_cast<i64>(gridDim.y) * NT) {
        float high[MF][NI][4] = {}, low[MF][NI][4] = {};
        auto expand = [&](int buffer) {
            uint2* const rows = table[warp][buffer];
            row_steps.template publish<R>(rows);
            __syncwarp();  // of two tables and tiles, so that no lane writes what others still read
#pragma unroll
            for (int r = 0; r < R; ++r) {
                const uint2 row = rows[2 * r + lane / 16];
                const float* const from = values + (row.y + __popc(row.x & below));
                const u32 to = (r % 2 ? odd : even) + (buffer * TILE + r * MASK_STEP) * 4;
                const bool first = row.x & bit0, second = row.x & bit1;
                cp_async_4(to, from, first ? 4 : 0);
                cp_async_4(to + 4, from + first, second ? 4 : 0);
            }
        };
        Line<4> b[NI];
        auto load = [&](i64 k) {
            if constexpr (Way == ALONG_N) {
                load_rows<float, NI, 4>(b, B, k + 4 * t, K, n0, N, b_k);
            } else {
#pragma unroll
                for (int j = 0; j < NI; ++j) load_fragment<float, Way, NI, 4>(b[j], B, k + 4 * t, K, n0, N, b_k, b_n, j);
            }
        };

        row_steps.restart(k_begin, start);
        if (k_begin < k_end) {
            load(k_begin);
            expand(0);
        }
        cp_async_commit();
        int buffer = 0;
        for (i64 k = k_begin; k < k_end; k += MASK_STEP, buffer ^= 1) {
            if (k + MASK_STEP < k_end) expand(buffer ^ 1);
            cp_async_commit();
            cp_async_wait<1>();
            __syncwarp();
            const float* const tile = mine + buffer * TILE;
#pragma unroll
            for (int q = 0; q < MASK_STEP / 16; ++q) {
                Line<4> now[NI];
#pragma unroll
                for (int j = 0; j < NI; ++j) now[j] = b[j];
                load(k + 16 * (q + 1));  // behind the slice, too: B is read within K x N only
                u32 a[MF][2][4], a_low[MF][2][4];
#pragma unroll
                for (int m = 0; m < MF; ++m)
#pragma unroll
                    for (int h = 0; h < 2; ++h) {
                        const int row = 16 * m + 8 * h + g, unit = (4 * q + t) ^ (row % 2 * 4);
                        const uint4 x = *reinterpret_cast<const uint4*>(tile + row * MASK_STEP + 4 * unit);
                        const u32 word[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
                        for (int i = 0; i < 4; ++i) split(word[i], a[m][i / 2][h + i % 2 * 2], a_low[m][i / 2][h + i % 2 * 2]);
                    }
#pragma unroll
                for (int j = 0; j < NI; ++j)
#pragma unroll
                    for (int e = 0; e < 2; ++e) {
                        u32 b_high[2], b_low[2];
#pragma unroll
                        for (int i = 0; i < 2; ++i) split(now[j].word[2 * e + i], b_high[i], b_low[i]);
#pragma unroll
                        for (int m = 0; m < MF; ++m) {
                            mma_m16n8k8_tf32(low[m][j], a_low[m][e], b_high[0], b_high[1]);
                            mma_m16n8k8_tf32(low[m][j], a[m][e], b_low[0], b_low[1]);
                            mma_m16n8k8_tf32(high[m][j], a[m][e], b_high[0], b_high[1]);
                        }
                    }
            }
        }

        __syncthreads();  // the sums take the place of the tiles
#pragma unroll
        for (int m = 0; m < MF; ++m)
#pragma unroll
            for (int j = 0; j < NI; ++j)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int row = part * R + 16 * m + g + 8 * (i / 2), n = column_of<Way, NI>(2 * t + i % 2, j);
                    tiles[(s * ROWS + row) * NT + n] = high[m][j][i] + low[m][j][i];
                }
        __syncthreads();
        store_sums<float, float, ROWS, NT, SLICES>(tiles, row0, n0, M, N, C, c_row, c_col, [&](i64 row, i64 n) {
            return stored_only<float, Ptr>(indptr, bitmask, data, row, row_steps.bytes, B + n * b_n, b_k);
        });
        __syncthreads();
    }
}
