// Weights in the order of registers (two_four_records.cu), read once and straight from L2, or from a copy in shared memory.
// sm_80 and later.
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

// The same from shared memory: 32 lanes read consecutive addresses, without bank conflicts.
__device__ __forceinline__ uint4 shared_16(u32 address) {
    uint4 x;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "r"(address) : "memory");
    return x;
}
__device__ __forceinline__ u32 shared_4(u32 address) {
    u32 x;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(address) : "memory");
    return x;
}
__device__ __forceinline__ void shared_16(u32 (&r)[4], u32 address) {
    const uint4 x = shared_16(address);
    r[0] = x.x, r[1] = x.y, r[2] = x.z, r[3] = x.w;
}

}  // namespace spformat
