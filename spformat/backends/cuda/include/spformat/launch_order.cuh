// Launches that may overlap with the one before them on the stream (programmatic dependent launch). sm_90 and later; other
// architectures keep the order of the stream, and these functions do nothing there.
//
// Who is launched early (runtime/early.py) calls wait_for_launch_before in every thread, before it reads or writes anything that
// another launch may write or read. Until then it may set up shared memory and read arrays of A, which nobody writes.
#pragma once

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

}  // namespace spformat
