// What a CUDA source sees in place of the CUDA compiler's own declarations: a block runs on the CPU, its threads are fibers
// of one thread of the operating system. For x86-64 Linux and g++ -std=c++17.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>
#include <vector_types.h>
#include <vector_functions.h>
#include <cuda_fp16.h>
#include <cuda_bf16.h>

#undef __shared__
#undef __launch_bounds__
#undef __cluster_dims__
#undef __maxnreg__
#undef __grid_constant__
#undef __global__
#undef __device__
#undef __host__
#undef __constant__
#undef __forceinline__
#undef __noinline__
#undef __align__
#define __global__
#define __device__
#define __host__
#define __constant__
#define __shared__ static
#define __grid_constant__
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __align__(n) __attribute__((aligned(n)))
#define __CUDACC_RTC__ 1
#define EMU_CPU 1
#ifndef __CUDA_ARCH__
#define __CUDA_ARCH__ 900
#endif

#include "fibers.h"
#include "launch.h"
#include "shared.h"
#include "asynchronous.h"
#include "copy_engine.h"
#include "warpgroups.h"
#include "copies.h"
#include "barriers.h"
#include "matrices.h"
#include "intrinsics.h"
