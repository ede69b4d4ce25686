// Sums over the lanes of a warp and the threads of a block, for kernels that compute where each of them writes.
#pragma once
#include "spformat/integers.cuh"

namespace spformat {

// The sum of x over the lanes before this one. All lanes of the warp call it.
template <class I> __device__ __forceinline__ I sum_before_lane(I x) {
    I sum = x;
    for (int d = 1; d < 32; d *= 2) {
        const I other = __shfl_up_sync(0xFFFFFFFF, sum, d);
        if (int(threadIdx.x % 32) >= d) sum += other;
    }
    return sum - x;
}

// The sum of x over the lanes of the warp. All of them call it.
template <class I> __device__ __forceinline__ I sum_of_warp(I x) {
    for (int d = 16; d; d /= 2) x += __shfl_xor_sync(0xFFFFFFFF, x, d);
    return x;
}

// The sum of x over the threads before this one; total: over all Threads of the block, a multiple of 32 up to 1024. All
// threads call it, with shared memory for 33 sums that nobody else uses between this call and the next barrier.
template <int Threads, class I> __device__ __forceinline__ I sum_before_thread(I x, I* shared, I& total) {
    constexpr int WARPS = Threads / 32;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const I before = sum_before_lane(x);
    if (lane == 31) shared[warp] = before + x;
    __syncthreads();
    if (warp == 0) {
        const I of_warp = lane < WARPS ? shared[lane] : I(0);
        const I start = sum_before_lane(of_warp);
        if (lane < WARPS) shared[lane] = start;
        if (lane == 31) shared[32] = start + of_warp;
    }
    __syncthreads();
    total = shared[32];
    return shared[warp] + before;
}

}  // namespace spformat
