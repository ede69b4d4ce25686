// alpha, beta and bias on accumulators, before they are rounded to C. sm_80 and later.
#pragma once
#include "spformat/dtypes.cuh"

namespace spformat {

// alpha * acc + beta * C + bias for 16 rows x 8*NT columns of a warp, first element (row, col), as store_m16 takes them:
//   acc[4j + r] of lane 4g+t = C[row + g + 8*(r/2)][col + 8j + 2t + r%2]
// bias: [M] or null. C is read only where beta is not 0, and only inside M x N.
template <class Out, bool ColMajor, int NT>
__device__ __forceinline__ void affine_m16(float* acc, const Out* c, i64 ldc, int row, int col, int M, int N,
                                           const Out* __restrict__ bias, float alpha, float beta) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const int i = row + g + 8 * h;
        const float added = bias && i < M ? to_float(bias[i]) : 0.0f;
#pragma unroll
        for (int j = 0; j < NT; ++j)
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                float& x = acc[4 * j + 2 * h + e];
                const int n = col + 8 * j + 2 * t + e;
                x = alpha * x + added;
                if (beta != 0 && i < M && n < N) x += beta * to_float(c[ColMajor ? i + n * ldc : i * ldc + n]);
            }
    }
}

}  // namespace spformat
