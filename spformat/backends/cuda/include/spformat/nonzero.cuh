// Which elements of a dense array are nonzero, 16 bytes at a time. Elements are unsigned words of their width; Float: their
// highest bit is a sign, and a word that has no other bit is -0, a zero. (Everything else is nonzero, NaN too.)
#pragma once
#include "spformat/integers.cuh"

namespace spformat {

// Bit i: element i of the 16 / sizeof(T) elements in w is nonzero.
template <class T, bool Float> __device__ __forceinline__ u32 nonzero_bits(uint4 w) {
    const u32 words[4] = {w.x, w.y, w.z, w.w};
    u32 nonzero = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const u32 v = words[i];
        if (sizeof(T) == 1) {  // a byte's highest bit after the addition: any of the seven bits below it was set
            u32 high = (v & 0x7F7F7F7F) + 0x7F7F7F7F;
            if (!Float) high |= v;
            nonzero |= ((high >> 7 & 0x01010101) * 0x10204080 >> 28) << (4 * i);
        } else if (sizeof(T) == 2) {
            u32 high = (v & 0x7FFF7FFF) + 0x7FFF7FFF;
            if (!Float) high |= v;
            nonzero |= ((high >> 15 & 1) | (high >> 30 & 2)) << (2 * i);
        } else if (sizeof(T) == 4) {
            nonzero |= ((Float ? v & 0x7FFFFFFF : v) != 0) << i;
        } else if (i % 2) {
            nonzero |= ((words[i - 1] | (Float ? v & 0x7FFFFFFF : v)) != 0) << (i / 2);
        }
    }
    return nonzero;
}

// Unit number `unit` of an array x[0 .. n): 16 bytes that start on 16 bytes. Unit 0 starts `head` elements before x, as
// head_of(x) in units.cuh has it. Elements outside of the array are zeros, and are not read.
template <class T> __device__ __forceinline__ uint4 load_unit(const T* __restrict__ x, int head, i64 n, i64 unit) {
    constexpr int P = 16 / sizeof(T);
    const i64 at = unit * P - head;
    if (at >= 0 && at + P <= n) return *reinterpret_cast<const uint4*>(x + at);
    u64 words[2] = {0, 0};
#pragma unroll
    for (int e = 0; e < P; ++e)
        if (at + e >= 0 && at + e < n) words[e * sizeof(T) / 8] |= static_cast<u64>(x[at + e]) << (e * sizeof(T) % 8 * 8);
    return make_uint4(u32(words[0]), u32(words[0] >> 32), u32(words[1]), u32(words[1] >> 32));
}

// Element e of a unit. e must be known when the kernel is compiled.
template <class T> __device__ __forceinline__ T element_of(uint4 w, int e) {
    const u32 words[4] = {w.x, w.y, w.z, w.w};
    if (sizeof(T) == 8) return static_cast<T>(words[2 * e % 4] | static_cast<u64>(words[(2 * e + 1) % 4]) << 32);
    const int at = e * static_cast<int>(sizeof(T));
    return static_cast<T>(words[at / 4] >> (at % 4 * 8));
}

}  // namespace spformat
