// Launches that may overlap with the one before them on the stream (programmatic dependent launch). sm_90 and later; other
// architectures keep the order of the stream, and these functions do nothing there.
//
// Who is launched early (runtime/early.py) calls wait_for_launch_before in every thread, before it reads or writes anything that
// another launch may write or read. Until then it may set up shared memory, read tables that were finished when the plan was
// made, and bring values of A to L2. It must not read these values: a launch before this one may have written them (refill).
#pragma once
#include "spformat/dtypes.cuh"

namespace spformat {

// Until all launches before this one are over and what they wrote can be read.
__device__ __forceinline__ void wait_for_launch_before() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The next launch may begin, if it is an early one, once every block of this one has called this or has ended.
__device__ __forceinline__ void let_next_launch_begin() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Bring `bytes` from `from` on to L2, both multiples of 16. Nothing is read: what is loaded later is what memory then holds.
__device__ __forceinline__ void bring_to_l2(const void* from, u32 bytes) {
#if __CUDA_ARCH__ >= 900
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
#endif
}

}  // namespace spformat
