// Asynchronous copies global -> shared, sm_80 and later.
#pragma once
#include "spformat/dtypes.cuh"

namespace spformat {

// How long L2 keeps what a load brings. Data that is read once should be evicted first, so that it does not replace other data.
__device__ __forceinline__ u64 evict_normal() {
    u64 policy;
    asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}
__device__ __forceinline__ u64 evict_first() {
    u64 policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

// 16 bytes, both addresses aligned to 16; bytes beyond `valid` (0 .. 16) are written as zero and not read from global.
__device__ __forceinline__ void cp_async_16(u32 shared, const void* global, u32 valid) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(valid) : "memory");
}
__device__ __forceinline__ void cp_async_16(u32 shared, const void* global) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(shared), "l"(global) : "memory");
}
// The same under an L2 policy. ptxas 13.0 may encode it wrongly where the shared address is a sum with a number that all lanes
// share (an illegal instruction when it runs): see copy_record in spmm_bitmask_tc.cu.
__device__ __forceinline__ void cp_async_16_policy(u32 shared, const void* global, u64 policy) {
    asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "l"(policy)
                 : "memory");
}
// The same where `wanted`, else nothing: a predicated instruction, so that unrolled code stays one basic block.
__device__ __forceinline__ void cp_async_16_if(bool wanted, u32 shared, const void* global, u32 valid) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %3, 0;\n@p cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;\n}" ::"r"(
                         shared),
                 "l"(global), "r"(valid), "r"(int(wanted)) : "memory");
}
__device__ __forceinline__ void cp_async_16_if(bool wanted, u32 shared, const void* global) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %2, 0;\n@p cp.async.cg.shared.global.L2::128B [%0], [%1], 16;\n}" ::"r"(shared),
                 "l"(global), "r"(int(wanted)) : "memory");
}
// 4 bytes, both addresses aligned to 4; `valid` as above (0 .. 4).
__device__ __forceinline__ void cp_async_4(u32 shared, const void* global, u32 valid) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared), "l"(global), "r"(valid) : "memory");
}

// The same bytes by ordinary loads of `items` single 16-bit items (0 .. 8), from any address; zeros behind them.
__device__ __forceinline__ void copy_singly_16(u32 shared, const void* global, int items) {
    u32 word[4] = {0, 0, 0, 0};
#pragma unroll
    for (int e = 0; e < 8; ++e)
        if (e < items) word[e / 2] |= u32(static_cast<const u16*>(global)[e]) << (16 * (e % 2));
    asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};" ::"r"(shared), "r"(word[0]), "r"(word[1]), "r"(word[2]), "r"(word[3])
                 : "memory");
}

__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Wait until at most Pending of this thread's latest groups are still in flight.
template <int Pending> __device__ __forceinline__ void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory");
}

}  // namespace spformat
