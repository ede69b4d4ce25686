// C[M,N] = A[M,K] @ B[K,N], A in BSR or DBSR with 16-bit values and blocks of R x C (multiples of 16), few columns of B;
// tensor cores, f32 sums. sm_80 and later.
//
//   row_ids, indptr, indices, data, listed, out, M, K, N, ldc    as in spmm_bsr.cu
//   B        T: element (k, n) at k*k_step + n*n_step
//
// Bytes of A decide the time. A lane takes E = 8 (4 where C is no multiple of 32) neighbours of a line of A with one load,
// straight from memory to registers. They are fragments of m16n8k16 if the columns of a step of 4*E are numbered so that
// lane t of a quad has columns E*t .. E*t+E-1: a product does not depend on the order of k, and B is read in the same order.
//
// Grid: x = list entries * R/(16*MT) strips of 16*MT rows, then, Listed, one for each ZeroRows block rows that are not
// listed; y = tiles of 8*NT columns (strided). Warps of a block take the steps of a block row in turn and add up their sums
// in the order of the warps: the same bits every run.
//
//   BWide    k_step is 1, and the address and n_step allow loads of E values
//   U        steps of a warp that are loaded together
#include "spformat/epilogue.cuh"
#include "spformat/mma.cuh"

using namespace spformat;

template <int E> struct Line;  // E neighbours of 16 bits
template <> struct Line<8> {
    u32 word[4];
    __device__ __forceinline__ void stream(const void* from) {
        const uint4 x = __ldcs(static_cast<const uint4*>(from));
        word[0] = x.x, word[1] = x.y, word[2] = x.z, word[3] = x.w;
    }
    __device__ __forceinline__ void load(const void* from) {
        const uint4 x = __ldg(static_cast<const uint4*>(from));
        word[0] = x.x, word[1] = x.y, word[2] = x.z, word[3] = x.w;
    }
};
template <> struct Line<4> {
    u32 word[2];
    __device__ __forceinline__ void stream(const void* from) {
        const uint2 x = __ldcs(static_cast<const uint2*>(from));
        word[0] = x.x, word[1] = x.y;
    }
    __device__ __forceinline__ void load(const void* from) {
        const uint2 x = __ldg(static_cast<const uint2*>(from));
        word[0] = x.x, word[1] = x.y;
    }
};

template <class T, class Out, class Row, class Pointer, class Index, int R, int C, int MT, int NT, int WARPS, int U, int ZeroRows,
          bool BWide, bool CCol, bool Listed>
__global__ void __launch_bounds__(32 * WARPS)
    spmm_bsr_tokens(const Row* __restrict__ row_ids, const Pointer* __restrict__ indptr, const Index* __restrict__ indices,
                    const T* __restrict__ data, i64 M, i64 K, i64 listed, const T* __restrict__ B, Out* __restrict__ out, i64 N,
                    i64 k_step, i64 n_step, i64 ldc) {
    constexpr int ROWS = 16 * MT, COLS = 8 * NT, STRIPS = R / ROWS, E = C % 32 == 0 ? 8 : 4, STEP = 4 * E;
    constexpr int PER_BLOCK = C / STEP;  // steps
    static_assert(R % ROWS == 0 && C % STEP == 0, "blocks are whole strips and whole steps");
    __shared__ float sums[WARPS][ROWS * COLS];
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
        float acc[MT][NT][4] = {};
        for (i64 s = warp; s < steps; s += WARPS * U) {
            Line<E> x[U][MT][2];
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
#pragma unroll
                for (int j = 0; j < NT; ++j) {
                    Line<E> b = {};
                    const i64 n = n0 + 8 * j + g, left = n < N ? K - k[u] : 0;
                    const T* const from = B + k[u] * k_step + n * n_step;
                    if (BWide && left >= E) {
                        b.load(from);
                    } else if (left > 0) {
#pragma unroll
                        for (int e = 0; e < E; ++e)
                            if (e < left) b.word[e / 2] |= static_cast<u32>(reinterpret_cast<const u16*>(from)[e * k_step]) << (e % 2 * 16);
                    }
#pragma unroll
                    for (int q = 0; q < E / 4; ++q)
#pragma unroll
                        for (int m = 0; m < MT; ++m) {
                            const u32 fragment[4] = {x[u][m][0].word[2 * q], x[u][m][1].word[2 * q], x[u][m][0].word[2 * q + 1],
                                                     x[u][m][1].word[2 * q + 1]};
                            mma_m16n8k16<T>(acc[m][j], fragment, b.word[2 * q], b.word[2 * q + 1]);
                        }
                }
            }
        }
#pragma unroll
        for (int m = 0; m < MT; ++m)
#pragma unroll
            for (int j = 0; j < NT; ++j)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int row = 16 * m + g + 8 * (i / 2), n = 8 * j + 2 * t + i % 2;
                    sums[warp][CCol ? n * ROWS + row : row * COLS + n] = acc[m][j][i];
                }
        __syncthreads();
        for (int i = tid; i < ROWS * COLS; i += 32 * WARPS) {
            float sum = sums[0][i];
#pragma unroll
            for (int w = 1; w < WARPS; ++w) sum += sums[w][i];
            const i64 row = block_row * R + row0 + (CCol ? i % ROWS : i / COLS), n = n0 + (CCol ? i / ROWS : i % COLS);
            if (row < M && n < N) out[CCol ? row + n * ldc : row * ldc + n] = from_float<Out>(sum);
        }
        __syncthreads();  // the next column tile reuses the sums
    }
}
