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

// A block's sums to C, through `shared`, which nobody reads any more. All threads call it.
//   acc       of this warp: fragments of mma m16n8, MT below each other, NT beside each other
//   partials  f32[tiles, Splits, rows * columns], counters  u32[tiles], zero: only without Cluster and with Splits > 1
//   Epilogue  false: alpha = 1, beta = 0, no bias
template <class Out, int MT, int NT, int Warps, int Splits, bool Cluster, bool CCol, bool Epilogue>
__device__ __forceinline__ void add_up(const float (&acc)[MT][NT][4], char* shared, const Result<Out>& result, float* partials,
                                       u32* counters) {
    constexpr int THREADS = Warps * 32, ROWS = 16 * MT, COLS = NT * 8, SUMS = ROWS * COLS;
    const int tid = threadIdx.x, warp = tid / 32, g = tid % 32 / 4, t = tid % 4, split = blockIdx.y, row0 = blockIdx.x * ROWS;
    // A warp's sums, in the order of C: [ROWS][COLS], or [COLS][ROWS] for CCol.
    float* sums = reinterpret_cast<float*>(shared);
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int n = 0; n < NT; ++n)
#pragma unroll
            for (int r = 0; r < 4; ++r) {
                const int row = m * 16 + g + 8 * (r / 2), col = n * 8 + 2 * t + r % 2;
                sums[warp * SUMS + (CCol ? col * ROWS + row : row * COLS + col)] = acc[m][n][r];
            }
    __syncthreads();
    auto block_sum = [&](int at) {
        float sum = sums[at];
#pragma unroll
        for (int w = 1; w < Warps; ++w) sum += sums[w * SUMS + at];
        return sum;
    };
    auto store = [&](int at, float sum) {
        const int row = row0 + (CCol ? at % ROWS : at / COLS), col = CCol ? at / ROWS : at % COLS;
        if (row >= result.M || col >= result.N) return;
        Out* const to = result.c + (CCol ? i64(col) * result.ldc + row : i64(row) * result.ldc + col);
        if constexpr (Epilogue) {
            sum = result.alpha != 0 ? result.alpha * sum : 0.0f;  // as BLAS: infinities of A and B do not come into C
            if (result.bias) sum += to_float(result.bias[row]);
            if (result.beta != 0) sum += result.beta * to_float(*to);
        }
        *to = from_float<Out>(sum);
    };
    if constexpr (Splits == 1) {
        for (int at = tid; at < SUMS; at += THREADS) store(at, block_sum(at));
        return;
    }
    // The block's sums: each in the place of the first warp's, which nobody else reads.
    float* own = Cluster ? sums : partials + (i64(blockIdx.x) * Splits + split) * SUMS;
    for (int at = tid; at < SUMS; at += THREADS) own[at] = block_sum(at);
    int at = tid, stop = SUMS;
    if constexpr (Cluster) {
#if __CUDA_ARCH__ >= 900
        asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
        at += split * SUMS / Splits;
        stop = (split + 1) * SUMS / Splits;
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
        float sum = 0.0f;
#pragma unroll
        for (int s = 0; s < Splits; ++s) {
            float part = 0.0f;
            if constexpr (Cluster) {
#if __CUDA_ARCH__ >= 900
                u32 remote;
                asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(shared_address(own + at)), "r"(s));
                asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(part) : "r"(remote) : "memory");
#endif
            } else {
                part = __ldcg(partials + (i64(blockIdx.x) * Splits + s) * SUMS + at);
            }
            sum = s == 0 ? part : sum + part;
        }
        store(at, sum);
    }
#if __CUDA_ARCH__ >= 900
    if constexpr (Cluster)  // peers may still be reading this block's sums
        asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

}  // namespace spformat::tokens
