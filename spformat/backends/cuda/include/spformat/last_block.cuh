// The block of a grid that finishes last goes on with what all of them have written: no launch of its own.
#pragma once
#include "spformat/integers.cuh"

namespace spformat {

// Whether this block is the last of the grid that calls it; it sees all that the others have written before. All threads of all
// blocks call it once. finished: how many blocks have, 0 before the launch; the caller leaves 0 there.
__device__ __forceinline__ bool is_last_block(u64* finished) {
    __shared__ bool last;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) last = atomicAdd(finished, 1ull) == gridDim.x - 1;
    __syncthreads();
    if (!last) return false;
    __threadfence();
    return true;
}

}  // namespace spformat
