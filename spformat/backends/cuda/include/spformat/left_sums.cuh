// Sums that some thread blocks leave for others of the same launch: every sum is its own flag.
//
// 0.0 in memory says that nothing was left. A sum of zero is left as -0.0, which adds the same. Who takes a sum leaves 0.0, so
// the memory is zeros before a launch and after it. No fence is needed, as nothing else is read because of what was seen: a
// __threadfence() waits for all loads in flight and empties the L1 cache of the multiprocessor.
#pragma once
#include "spformat/gather.cuh"

namespace spformat {

// Words of 1, 2 and 4 sums, as they are in L2 now.
__device__ __forceinline__ unsigned seen(const unsigned* p) {
    unsigned x;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(p) : "memory");
    return x;
}
__device__ __forceinline__ uint2 seen(const uint2* p) {
    uint2 x;
    asm volatile("ld.relaxed.gpu.global.v2.u32 {%0, %1}, [%2];" : "=r"(x.x), "=r"(x.y) : "l"(p) : "memory");
    return x;
}
__device__ __forceinline__ uint4 seen(const uint4* p) {
    uint4 x;
    asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "l"(p) : "memory");
    return x;
}
__device__ __forceinline__ bool all_there(unsigned x) { return x; }
__device__ __forceinline__ bool all_there(uint2 x) { return x.x && x.y; }
__device__ __forceinline__ bool all_there(uint4 x) { return x.x && x.y && x.z && x.w; }

__device__ __forceinline__ unsigned as_left(float x) {
    const unsigned bits = __float_as_uint(x);
    return bits ? bits : 0x80000000u;
}
__device__ __forceinline__ void leave(float* to, float x) {
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(to), "r"(as_left(x)) : "memory");
}
__device__ __forceinline__ void leave(float* to, float x, float y) {
    asm volatile("st.relaxed.gpu.global.v2.u32 [%0], {%1, %2};" ::"l"(to), "r"(as_left(x)), "r"(as_left(y)) : "memory");
}
__device__ __forceinline__ void leave(float* to, float x, float y, float z, float w) {
    asm volatile("st.relaxed.gpu.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(as_left(x)), "r"(as_left(y)), "r"(as_left(z)), "r"(as_left(w)) : "memory");
}

// The sum at p, once it is there.
__device__ __forceinline__ float take(float* p) {
    unsigned x;
    do x = seen(reinterpret_cast<const unsigned*>(p));
    while (!x);
    *p = 0;
    return __uint_as_float(x);
}

// sum += a row that was left, once it is there. `first`: the first column of this lane, one of those of a slot, which all call it;
// `width`: columns from there to the end. The sums stay until clear_row, which no lane may call before all have added.
template <int LANES, int TILES, int VEC>
__device__ __forceinline__ void add_left_row(float (&sum)[TILES][VEC], const float* first, int width, int lane) {
    using W = word_t<4 * VEC < 16 ? 4 * VEC : 16>;
    constexpr int WORDS = 4 * VEC / sizeof(W), PER_WORD = VEC / WORDS;
    // One sector is asked for until it is there, not one for each lane.
    while (!seen(reinterpret_cast<const unsigned*>(first - lane * VEC))) {
    }
    // Beyond the last column stands the first one, whose sum nobody needs.
    const auto at = [&](int t, int i) {
        return reinterpret_cast<const W*>(width > t * LANES * VEC ? first + t * LANES * VEC : first - lane * VEC) + i;
    };
    W words[TILES][WORDS];
#pragma unroll
    for (int t = 0; t < TILES; ++t)
#pragma unroll
        for (int i = 0; i < WORDS; ++i) words[t][i] = seen(at(t, i));
#pragma unroll
    for (int t = 0; t < TILES; ++t)
#pragma unroll
        for (int i = 0; i < WORDS; ++i)
            while (!all_there(words[t][i])) words[t][i] = seen(at(t, i));
#pragma unroll
    for (int t = 0; t < TILES; ++t)
#pragma unroll
        for (int v = 0; v < VEC; ++v) sum[t][v] += reinterpret_cast<const float*>(&words[t][v / PER_WORD])[v % PER_WORD];
}
template <int LANES, int TILES, int VEC> __device__ __forceinline__ void clear_row(float* first, int width) {
    using W = word_t<4 * VEC < 16 ? 4 * VEC : 16>;
#pragma unroll
    for (int t = 0; t < TILES; ++t)
        if (width > t * LANES * VEC)
#pragma unroll
            for (int i = 0; i < VEC; i += sizeof(W) / 4) *reinterpret_cast<W*>(first + t * LANES * VEC + i) = W{};
}

}  // namespace spformat
