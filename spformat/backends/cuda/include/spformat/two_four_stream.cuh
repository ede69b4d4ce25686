// Weights in the order of registers (two_four_records.cu), read once and straight from L2. sm_80 and later.
#pragma once
#include "spformat/integers.cuh"

namespace spformat {

// 16 and 4 bytes; `policy`: what L2 does with the line (cp_async.cuh).
__device__ __forceinline__ uint4 stream_16(const u32* p, u64 policy) {
    uint4 x;
    asm volatile("ld.global.nc.L1::no_allocate.L2::cache_hint.v4.u32 {%0,%1,%2,%3}, [%4], %5;"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "l"(p), "l"(policy));
    return x;
}
__device__ __forceinline__ u32 stream_4(const u32* p, u64 policy) {
    u32 x;
    asm volatile("ld.global.nc.L1::no_allocate.L2::cache_hint.u32 %0, [%1], %2;" : "=r"(x) : "l"(p), "l"(policy));
    return x;
}

}  // namespace spformat
