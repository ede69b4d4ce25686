// alpha, beta and bias on accumulators, before they are rounded to C. sm_80 and later.
#pragma once
#include "spformat/dtypes.cuh"

namespace spformat {

// The bias of the two rows that a lane of affine_m16 holds; 0 without one, and beyond M.
template <class Out> __device__ __forceinline__ float2 bias_m16(const Out* __restrict__ bias, int row, int M) {
    const int i = row + threadIdx.x % 32 / 4;
    return make_float2(bias && i < M ? to_float(bias[i]) : 0.0f, bias && i + 8 < M ? to_float(bias[i + 8]) : 0.0f);
}

// alpha * acc + beta * C + bias for 16 rows x 8*NT columns of a warp, first element (row, col), as store_m16 takes them:
//   acc[4j + r] of lane 4g+t = C[row + g + 8*(r/2)][col + 8j + 2t + r%2]
// added: bias_m16 of these rows. C is read only where beta is not 0, and only inside M x N. One branch for all: this is
// straight code that runs once a tile, and fetching it costs more than the arithmetic.
template <class Out, bool ColMajor, int NT>
__device__ __forceinline__ void affine_m16(float* acc, const Out* c, i64 ldc, int row, int col, int M, int N, float2 added,
                                           float alpha, float beta) {
#pragma unroll
    for (int i = 0; i < 4 * NT; ++i)  // as BLAS: with alpha = 0, infinities of A and B do not come into C
        acc[i] = (alpha != 0 ? alpha * acc[i] : 0.0f) + (i % 4 < 2 ? added.x : added.y);
    if (beta == 0) return;
    const int i = row + threadIdx.x % 32 / 4, n = col + threadIdx.x % 4 * 2;
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
        for (int j = 0; j < NT; ++j)
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const i64 at_row = i + 8 * h, at_col = n + 8 * j + e;
                if (at_row < M && at_col < N)
                    acc[4 * j + 2 * h + e] += beta * to_float(c[ColMajor ? at_row + at_col * ldc : at_row * ldc + at_col]);
            }
}

}  // namespace spformat
