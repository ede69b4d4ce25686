// The product of two tiles in shared memory by a block of threads, with float32 sums in registers. sm_80 and later.
#pragma once
#include "spformat/dtypes.cuh"
#include "spformat/ldmatrix.cuh"
#include "spformat/mma.cuh"

namespace spformat {

// Values between lines of shared memory: an odd number of 16-byte units for A, and of 32-bit words modulo 32 for B.
template <class T, int Width> __host__ __device__ constexpr int pitch() { return Width + 16 / int(sizeof(T)); }

// The sums of a block for a tile BM x BN: fragments of mma (16-bit values), or 4 columns of BM / TY rows of each thread.
template <class T, int BM, int BN, int WM> struct Sums {
    static constexpr bool tensor = sizeof(T) == 2;
    static constexpr int MI = BM / WM / 16, NI = BN / 32, TX = BN / 4, TY = 128 * WM / TX, RM = BM / TY;
    static_assert(tensor ? BM % (16 * WM) == 0 : BM % TY == 0, "every thread has the same rows of the tile");
    static_assert(BN == 64 || BN == 128, "a warp has 16 or 32 columns of the tile");
    float x[tensor ? MI : RM][tensor ? NI : 1][4] = {};

    // += a [BM, KC] @ b [KC, BN]
    template <int KC> __device__ __forceinline__ void multiply(const T* a, const T* b) {
        constexpr int PitchA = pitch<T, KC>(), PitchB = pitch<T, BN>();
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        if constexpr (tensor) {
            const u32 a_base = shared_address(a + (warp / 4 * (BM / WM) + lane % 16) * PitchA + lane / 16 * 8);
            const u32 b_base = shared_address(b + lane % 16 * PitchB + warp % 4 * (BN / 4) + lane / 16 * 8);
#pragma unroll
            for (int k = 0; k < KC; k += 16) {
                u32 fragment[MI][4];
#pragma unroll
                for (int m = 0; m < MI; ++m) ldmatrix_x4(fragment[m], a_base + (m * 16 * PitchA + k) * sizeof(T));
#pragma unroll
                for (int n = 0; n < NI; n += 2) {
                    u32 w[4];
                    ldmatrix_x4_trans(w, b_base + (k * PitchB + n * 8) * sizeof(T));
#pragma unroll
                    for (int m = 0; m < MI; ++m) {
                        mma_m16n8k16<T>(x[m][n], fragment[m], w[0], w[1]);
                        mma_m16n8k16<T>(x[m][n + 1], fragment[m], w[2], w[3]);
                    }
                }
            }
        } else {
            const int tx = threadIdx.x % TX, ty = threadIdx.x / TX;
#pragma unroll 4
            for (int k = 0; k < KC; k += 4) {
                float4 w[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) w[i] = *reinterpret_cast<const float4*>(b + (k + i) * PitchB + tx * 4);
#pragma unroll
                for (int r = 0; r < RM; ++r) {
                    const float4 v = *reinterpret_cast<const float4*>(a + (ty + r * TY) * PitchA + k);
                    const float line[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        x[r][0][0] += line[i] * w[i].x, x[r][0][1] += line[i] * w[i].y;
                        x[r][0][2] += line[i] * w[i].z, x[r][0][3] += line[i] * w[i].w;
                    }
                }
            }
        }
    }

    // f(row, column, x) for the sums x[0 .. Side - 1] side by side in a row of the tile, for all that this thread has.
    static constexpr int Side = tensor ? 2 : 4;
    template <class F> __device__ __forceinline__ void each(F f) const {
        if constexpr (tensor) {
            const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
            const int row = warp / 4 * (BM / WM) + lane / 4, column = warp % 4 * (BN / 4) + lane % 4 * 2;
#pragma unroll
            for (int m = 0; m < MI; ++m)
#pragma unroll
                for (int n = 0; n < NI; ++n)
#pragma unroll
                    for (int h = 0; h < 2; ++h) f(row + m * 16 + h * 8, column + n * 8, x[m][n] + 2 * h);
        } else {
#pragma unroll
            for (int r = 0; r < RM; ++r) f(static_cast<int>(threadIdx.x / TX) + r * TY, static_cast<int>(threadIdx.x % TX) * 4, x[r][0]);
        }
    }

    // To tile [BM, Pitch].
    template <int Pitch> __device__ __forceinline__ void put(float* tile) const {
        each([&](int row, int column, const float* sums) {
            float* const to = tile + row * Pitch + column;
            if constexpr (tensor)
                *reinterpret_cast<float2*>(to) = make_float2(sums[0], sums[1]);
            else
                *reinterpret_cast<float4*>(to) = make_float4(sums[0], sums[1], sums[2], sums[3]);
        });
    }
};

}  // namespace spformat
