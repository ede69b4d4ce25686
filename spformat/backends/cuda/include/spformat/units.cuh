// Units: the pieces of 16 bytes, from one 16-byte boundary to the next, of a line that may start anywhere.
#pragma once
#include "spformat/integers.cuh"

namespace spformat {

// Elements that lie between the last 16-byte boundary and `to`.
template <class T> __device__ __forceinline__ int head_of(const T* to) {
    return static_cast<int>(reinterpret_cast<u64>(to) % 16 / sizeof(T));
}

// The 16 bytes that start `bytes` (0 to 15) behind the start of low, high.
__device__ __forceinline__ uint4 shifted(const uint4& low, const uint4& high, u32 bytes) {
    u32 w[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
    if (bytes & 8)
#pragma unroll
        for (int i = 0; i < 6; ++i) w[i] = w[i + 2];
    if (bytes & 4)
#pragma unroll
        for (int i = 0; i < 5; ++i) w[i] = w[i + 1];
    const u32 bits = bytes % 4 * 8;
    return make_uint4(__funnelshift_r(w[0], w[1], bits), __funnelshift_r(w[1], w[2], bits),
                      __funnelshift_r(w[2], w[3], bits), __funnelshift_r(w[3], w[4], bits));
}

// Its first `bytes` bytes (0 to 16), and zeros.
__device__ __forceinline__ uint4 first_bytes(const uint4& x, int bytes) {
    auto first = [](u32 word, int n) { return n >= 4 ? word : n <= 0 ? 0 : word & (1u << 8 * n) - 1; };
    return make_uint4(first(x.x, bytes), first(x.y, bytes - 4), first(x.z, bytes - 8), first(x.w, bytes - 12));
}

}  // namespace spformat
