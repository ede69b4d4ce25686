// Few columns of C, K cut twice: the warps of a block take parts of a range of K, blocks take ranges. How their sums come to C.
// sm_80 and later.
//
// Grid: (tiles of 16*MT rows, Splits ranges of K). With Cluster the Splits blocks of a tile are one cluster and add up through
// distributed shared memory; else the block that finishes last adds them. All sums are added in a fixed order, so the same
// input gives the same bits.
#pragma once
#include "spformat/dtypes.cuh"
#include "spformat/ldmatrix.cuh"

#if __CUDA_ARCH__ >= 900
#define CLUSTER_OF(n) __cluster_dims__(1, n, 1)
#else
#define CLUSTER_OF(n)
#endif

namespace spformat::tokens {

// C = alpha * sums + bias + beta * C: rows ldc apart (CCol: columns), N <= 8*NT.
template <class Out> struct Result {
    Out* c;
    i64 ldc;
    int M, N;
    const Out* bias;  // of M rows, or null
    float alpha, beta;
};

__device__ __forceinline__ void add(float4& sum, float4 x) { sum.x += x.x, sum.y += x.y, sum.z += x.z, sum.w += x.w; }

// A block's sums to C, through `shared`, which nobody reads any more. All threads call it.
//   acc       of this warp: fragments of mma m16n8, MT below each other, NT beside each other
//   partials  f32[tiles, Splits, rows * columns], counters  u32[tiles], zero: only without Cluster and with Splits > 1
//   Epilogue  false: alpha = 1, beta = 0, no bias
// Sums wait as they lie in registers, four of a lane in 16 bytes: no two lanes meet in a bank.
template <class Out, int MT, int NT, int Warps, int Splits, bool Cluster, bool CCol, bool Epilogue>
__device__ __forceinline__ void add_up(const float (&acc)[MT][NT][4], char* shared, const Result<Out>& result, float* partials,
                                       u32* counters) {
    constexpr int THREADS = Warps * 32, ROWS = 16 * MT, FOURS = MT * NT * 32;  // fours of a warp
    const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32, split = blockIdx.y, row0 = blockIdx.x * ROWS;
    float4* const sums = reinterpret_cast<float4*>(shared);
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int n = 0; n < NT; ++n) {
            const float* const x = acc[m][n];
            sums[warp * FOURS + (m * NT + n) * 32 + lane] = make_float4(x[0], x[1], x[2], x[3]);
        }
    __syncthreads();
    auto block_sum = [&](int at) {
        float4 sum = sums[at];
#pragma unroll
        for (int w = 1; w < Warps; ++w) add(sum, sums[w * FOURS + at]);
        return sum;
    };
    auto store_one = [&](int row, int col, float sum) {
        if (row >= result.M || col >= result.N) return;
        Out* const to = result.c + (CCol ? i64(col) * result.ldc + row : i64(row) * result.ldc + col);
        if constexpr (Epilogue) {
            sum = result.alpha != 0 ? result.alpha * sum : 0.0f;  // as BLAS: infinities of A and B do not come into C
            if (result.bias) sum += to_float(result.bias[row]);
            if (result.beta != 0) sum += result.beta * to_float(*to);
        }
        *to = from_float<Out>(sum);
    };
    auto store = [&](int at, float4 sum) {
        const int fragment = at / 32, of = at % 32, row = row0 + fragment / NT * 16 + of / 4, col = fragment % NT * 8 + of % 4 * 2;
        store_one(row, col, sum.x), store_one(row, col + 1, sum.y);
        store_one(row + 8, col, sum.z), store_one(row + 8, col + 1, sum.w);
    };
    if constexpr (Splits == 1) {
        for (int at = tid; at < FOURS; at += THREADS) store(at, block_sum(at));
        return;
    }
    // The block's sums: each in the place of the first warp's, which nobody else reads.
    float4* const all = reinterpret_cast<float4*>(partials) + i64(blockIdx.x) * Splits * FOURS;
    float4* const own = Cluster ? sums : all + split * FOURS;
    for (int at = tid; at < FOURS; at += THREADS) own[at] = block_sum(at);
    int at = tid, stop = FOURS;
    if constexpr (Cluster) {
#if __CUDA_ARCH__ >= 900
        asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
        at += split * FOURS / Splits;
        stop = (split + 1) * FOURS / Splits;
    } else {
        __threadfence();
        __syncthreads();
        __shared__ bool last;
        if (tid == 0) last = atomicAdd(counters + blockIdx.x, 1) == Splits - 1;
        __syncthreads();
        if (!last) return;
        __threadfence();
        if (tid == 0) counters[blockIdx.x] = 0;  // ready for the next launch
    }
    for (; at < stop; at += THREADS) {
        float4 sum = {};
#pragma unroll
        for (int s = 0; s < Splits; ++s) {
            float4 part = {};
            if constexpr (Cluster) {
#if __CUDA_ARCH__ >= 900
                u32 remote;
                asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(shared_address(own + at)), "r"(s));
                asm volatile("ld.shared::cluster.v4.f32 {%0,%1,%2,%3}, [%4];"
                             : "=f"(part.x), "=f"(part.y), "=f"(part.z), "=f"(part.w) : "r"(remote) : "memory");
#endif
            } else {
                part = __ldcg(all + s * FOURS + at);
            }
            if (s == 0) sum = part;
            else add(sum, part);
        }
        store(at, sum);
    }
#if __CUDA_ARCH__ >= 900
    if constexpr (Cluster)  // peers may still be reading this block's sums
        asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

}  // namespace spformat::tokens
