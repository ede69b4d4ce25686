// C[M,N] = A[M,K] @ B[K,N], A in BSR or DBSR with values of 16 bits or float and blocks of R x C (multiples of 16), few
// columns of B; tensor cores, f32 sums. sm_80 and later.
//
//   row_ids, indptr, indices, data, listed, out, M, K, N, ldc    as in spmm_bsr.cu
//   B        T: element (k, n) at k*k_step + n*n_step
//
// Bytes of A decide the time. A lane takes E neighbours of a line of A with one load of 16 bytes (8 where blocks are 16 wide
// and values have 16 bits), straight from memory to registers. They are fragments of m16n8k16 (float: m16n8k8) if the columns of a
// step of 4*E are numbered so that lane t of a quad has columns E*t .. E*t+E-1: a product does not depend on the order of k, and B
// is read in the same order. float multiplies as spmm_bsr.cu does: three TF32 products, the small ones summed apart.
//
// Grid: x = list entries * R/(16*MT) strips of 16*MT rows, then, Listed, one for each ZeroRows block rows that are not
// listed; y = tiles of 8*NT columns (strided). Warps of a block take the steps of a block row in turn and add up their sums
// in the order of the warps: the same bits every run.
//
//   Way      how a lane loads B (few_columns.cuh): SINGLE; ALONG_K, where k_step is 1; ALONG_N, where n_step is 1
//   U        steps of a warp that are loaded together
#include "spformat/epilogue.cuh"
#include "spformat/few_columns.cuh"
#include "spformat/mma.cuh"

using namespace spformat;

// Sums of one warp, MT x NT fragments of 16x8.
template <class T, int MT, int NT> struct Sums {
    float high[MT][NT][4] = {};

    template <int Words> __device__ __forceinline__ void multiply(const Line<Words> (&x)[MT][2], const Line<Words>& b, int j) {
#pragma unroll
        for (int q = 0; q < Words / 2; ++q)
#pragma unroll
            for (int m = 0; m < MT; ++m) {
                const u32 a[4] = {x[m][0].word[2 * q], x[m][1].word[2 * q], x[m][0].word[2 * q + 1], x[m][1].word[2 * q + 1]};
                mma_m16n8k16<T>(high[m][j], a, b.word[2 * q], b.word[2 * q + 1]);
            }
    }
    __device__ __forceinline__ float sum(int m, int j, int i) const { return high[m][j][i]; }
};
template <int MT, int NT> struct Sums<float, MT, NT> {
    float high[MT][NT][4] = {}, low[MT][NT][4] = {};

    __device__ __forceinline__ void multiply(const Line<4> (&x)[MT][2], const Line<4>& b, int j) {
#pragma unroll
        for (int q = 0; q < 2; ++q) {
            u32 b_high[2], b_low[2];
#pragma unroll
            for (int i = 0; i < 2; ++i) split_tf32(__uint_as_float(b.word[2 * q + i]), b_high[i], b_low[i]);
#pragma unroll
            for (int m = 0; m < MT; ++m) {
                u32 a[4], a_low[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) split_tf32(__uint_as_float(x[m][i % 2].word[2 * q + i / 2]), a[i], a_low[i]);
                mma_m16n8k8_tf32(low[m][j], a_low, b_high[0], b_high[1]);
                mma_m16n8k8_tf32(low[m][j], a, b_low[0], b_low[1]);
                mma_m16n8k8_tf32(high[m][j], a, b_high[0], b_high[1]);
            }
        }
    }
    // Where `high` is not finite, `low` is dropped: 0 * inf among the small products is NaN.
    __device__ __forceinline__ float sum(int m, int j, int i) const {
        const float x = high[m][j][i];
        return fabsf(x) < __int_as_float(0x7f800000) ? x + low[m][j][i] : x;
    }
};

template <class T, class Out, class Row, class Pointer, class Index, int R, int C, int MT, int NT, int WARPS, int U, int ZeroRows,
          int Way, bool CCol, bool Listed>
__global__ void __launch_bounds__(32 * WARPS)
    spmm_bsr_tokens(const Row* __restrict__ row_ids, const Pointer* __restrict__ indptr, const Index* __restrict__ indices,
                    const T* __restrict__ data, i64 M, i64 K, i64 listed, const T* __restrict__ B, Out* __restrict__ out, i64 N,
                    i64 k_step, i64 n_step, i64 ldc) {
    constexpr int ROWS = 16 * MT, COLS = 8 * NT, STRIPS = R / ROWS, E = sizeof(T) == 2 && C % 32 == 0 ? 8 : 4, STEP = 4 * E;
    constexpr int PER_BLOCK = C / STEP;  // steps
    constexpr int WORDS = E * sizeof(T) / 4;
    static_assert(R % ROWS == 0 && C % STEP == 0, "blocks are whole strips and whole steps");
    constexpr int FOURS = MT * NT * 32;
    __shared__ float4 sums[WARPS][FOURS];
    const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32, g = lane / 4, t = lane % 4;

    const i64 entry = blockIdx.x / STRIPS;
    if (Listed && entry >= listed) {  // past the list: this block only writes zeros
        for (i64 n0 = static_cast<i64>(blockIdx.y) * COLS; n0 < N; n0 += static_cast<i64>(gridDim.y) * COLS)
            zero_unlisted<Out, CCol, R>(row_ids, listed, (blockIdx.x - listed * STRIPS) * ZeroRows, ZeroRows, M, out, ldc, n0,
                                        N - n0 < COLS ? N - n0 : COLS, tid, 32 * WARPS);
        return;
    }
    const i64 block_row = Listed ? static_cast<i64>(row_ids[entry]) : entry;
    const int row0 = static_cast<int>(blockIdx.x % STRIPS) * ROWS;  // first row of this strip inside the block row
    const i64 begin = indptr[entry];
    const i64 steps = (static_cast<i64>(indptr[entry + 1]) - begin) * PER_BLOCK;
    const T* const a = data + (begin * R + row0 + g) * C + E * t;
    const Index* const columns = indices + begin;

    for (i64 n0 = static_cast<i64>(blockIdx.y) * COLS; n0 < N; n0 += static_cast<i64>(gridDim.y) * COLS) {
        Sums<T, MT, NT> acc;
        for (i64 s = warp; s < steps; s += WARPS * U) {
            Line<WORDS> x[U][MT][2];
            i64 k[U];  // first column of A that this lane takes; K where there is no step
#pragma unroll
            for (int u = 0; u < U; ++u) {
                const i64 step = s + u * WARPS, block = step / PER_BLOCK;
                const int along = static_cast<int>(step % PER_BLOCK) * STEP;
                const bool real = u == 0 || step < steps;
                k[u] = real ? static_cast<i64>(columns[block]) * C + along + E * t : K;
#pragma unroll
                for (int m = 0; m < MT; ++m)
#pragma unroll
                    for (int h = 0; h < 2; ++h) {
                        x[u][m][h] = {};
                        if (real) x[u][m][h].stream(a + (block * R + 16 * m + 8 * h) * C + along);
                    }
            }
#pragma unroll
            for (int u = 0; u < U; ++u) {
                if constexpr (Way == ALONG_N) {
                    Line<WORDS> b[NT];
                    load_rows<T, NT, E>(b, B, k[u], K, n0, N, k_step);
#pragma unroll
                    for (int j = 0; j < NT; ++j) acc.multiply(x[u], b[j], j);
                } else {
#pragma unroll
                    for (int j = 0; j < NT; ++j) {
                        Line<WORDS> b;
                        load_fragment<T, Way, NT, E>(b, B, k[u], K, n0, N, k_step, n_step, j);
                        acc.multiply(x[u], b, j);
                    }
                }
            }
        }
        // Sums of the warps, as they lie in registers: no two lanes meet in a bank.
#pragma unroll
        for (int m = 0; m < MT; ++m)
#pragma unroll
            for (int j = 0; j < NT; ++j)
                sums[warp][(m * NT + j) * 32 + lane] =
                        make_float4(acc.sum(m, j, 0), acc.sum(m, j, 1), acc.sum(m, j, 2), acc.sum(m, j, 3));
        __syncthreads();
        for (int at = tid; at < FOURS; at += 32 * WARPS) {
            float4 sum = sums[0][at];
#pragma unroll
            for (int w = 1; w < WARPS; ++w) {
                const float4 x = sums[w][at];
                sum.x += x.x, sum.y += x.y, sum.z += x.z, sum.w += x.w;
            }
            const float four[4] = {sum.x, sum.y, sum.z, sum.w};
            const int fragment = at / 32, of = at % 32;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const i64 row = block_row * R + row0 + fragment / NT * 16 + of / 4 + 8 * (i / 2);
                const i64 n = n0 + column_of<Way, NT>(of % 4 * 2 + i % 2, fragment % NT);
                if (row < M && n < N) out[CCol ? row + n * ldc : row * ldc + n] = from_float<Out>(four[i]);
            }
        }
        __syncthreads();  // the next column tile reuses the sums
    }
}
