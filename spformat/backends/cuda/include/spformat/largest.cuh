// Which values of an array are the `count` largest by magnitude, once masks/magnitude_mask.cu has found the smallest of them.
//
// Of the values that equal the smallest one only the first few stay, in row-major order. So that no mask is written, a kernel that
// needs them adds up two numbers over its tiles: how many values are larger, and how many equal the smallest. A value of the
// second kind stays if fewer than `ties` of its kind are before it.
#pragma once
#include "spformat/magnitudes.cuh"

namespace spformat {

// What the selection of a key knows; all zeros before its first launch.
struct Selection {
    u64 prefix;     // the digits of the wanted key that are known; in the end the smallest key that stays
    u64 remaining;  // its place among the keys that start with them, the largest being 1; in the end how many of its equals stay
    u64 equal;      // how many keys start with them
    u64 finished;   // blocks that have added their counts
    u64 started;    // tiles of the mask that have an owner
    u64 unused[3];
};

// Two counts of less than 2^31 as one number that can be added up.
struct Kept {
    static constexpr int SHIFT = 31;
    u32 larger, equal;
    __device__ __forceinline__ static u64 packed(u32 larger, u32 equal) { return u64(equal) << SHIFT | larger; }
    __device__ __forceinline__ explicit Kept(u64 both) : larger(both & ((1u << SHIFT) - 1)), equal(u32(both >> SHIFT)) {}
};

// Bit i: element i of the 16 / sizeof(T) elements in w has a magnitude above `bound`; T are bits of floats.
template <class T> __device__ __forceinline__ u32 above(uint4 w, key_t<T> bound) {
    const u32 words[4] = {w.x, w.y, w.z, w.w};
    u32 bits = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const u32 v = words[i];
        if constexpr (sizeof(T) == 1) {  // a byte's highest bit after the addition says that its other bits exceed the bound
            const u32 high = (v & 0x7F7F7F7F) + (0x7F - u32(bound)) * 0x01010101;
            bits |= ((high >> 7 & 0x01010101) * 0x10204080 >> 28) << (4 * i);
        } else if constexpr (sizeof(T) == 2) {
            const u32 high = (v & 0x7FFF7FFF) + (0x7FFF - u32(bound)) * 0x00010001;
            bits |= ((high >> 15 & 1) | (high >> 30 & 2)) << (2 * i);
        } else if constexpr (sizeof(T) == 4) {
            bits |= u32((v & 0x7FFFFFFF) > bound) << i;
        } else if (i % 2) {
            bits |= u32((words[i - 1] | u64(v & 0x7FFFFFFF) << 32) > bound) << (i / 2);
        }
    }
    return bits;
}

// The first `most` set bits of a mask; none if `most` is below 1.
__device__ __forceinline__ u32 first_bits(u32 mask, i64 most) {
    if (most <= 0) return 0;
    while (__popc(mask) > most) mask &= ~(1u << (31 - __clz(mask)));
    return mask;
}

// The rule by which values stay. Zeros are none of them: they are not stored.
template <class T> struct Largest {
    key_t<T> low, high;  // magnitudes from low to high equal the smallest one that stays: more than one if these are NaN
    i64 ties;            // how many of them stay
    bool integers;       // int8
    __device__ __forceinline__ Largest(const Keys& keys, const Selection* s) : integers(sizeof(T) == 1 && keys.integers) {
        low = static_cast<key_t<T>>(s->prefix);
        high = !integers && low == static_cast<key_t<T>>(keys.nan) ? static_cast<key_t<T>>(keys.live) : low;
        ties = low ? static_cast<i64>(s->remaining) : 0;
    }
    // The masks of a unit: elements that are larger, and those that equal the smallest.
    __device__ __forceinline__ void masks(uint4 w, u32& larger, u32& equal) const {
        if (sizeof(T) == 1 && integers) {
            const u32 words[4] = {w.x, w.y, w.z, w.w};
            larger = equal = 0;
#pragma unroll
            for (int i = 0; i < 16; ++i) {
                const u32 byte = words[i / 4] >> (8 * (i % 4)) & 255, key = byte < 128 ? byte : 256 - byte;
                larger |= u32(key > low) << i;
                equal |= u32(key == low) << i;
            }
            if (!low) equal = 0;
            return;
        }
        larger = above<T>(w, high);
        equal = low ? above<T>(w, low - 1) ^ larger : 0;
    }
    // The place of a value among all that stay, as `before` counts those before it.
    __device__ __forceinline__ i64 start(const Kept& before) const {
        return i64(before.larger) + (ties < i64(before.equal) ? ties : i64(before.equal));
    }
};

}  // namespace spformat
