// The order of values by magnitude, and their magnitudes in float64: the bits that arrays/magnitudes.py computes.
#pragma once
#include "spformat/integers.cuh"

namespace spformat {

// Unsigned integers in which keys of a value of sizeof(T) bytes are computed.
template <int Bytes> struct KeyOf { using type = u32; };
template <> struct KeyOf<8> { using type = u64; };
template <class T> using key_t = typename KeyOf<sizeof(T)>::type;

// What turns the bits of a value into its key; masks.Keys on the host. By value.
struct Keys {
    u64 live;      // all bits but the sign
    u64 nan;       // the key of every NaN
    u64 finite;    // the largest key of a finite value
    int integers;  // int8: the key is the magnitude
    int unused;
    // magnitude_keys of one value.
    template <class T> __device__ __forceinline__ key_t<T> of(T raw) const {
        if (sizeof(T) == 1 && integers) return raw < 128 ? raw : 256 - raw;
        const key_t<T> key = raw & static_cast<key_t<T>>(live), most = static_cast<key_t<T>>(nan);
        return key < most ? key : most;
    }
    template <class T> __device__ __forceinline__ bool is_finite(key_t<T> key) const { return key <= static_cast<key_t<T>>(finite); }
};

enum ValueKind { Float64, Float32, Float16, BFloat16, Float8E4M3, Float8E5M2, Int8 };

// The value of a float of fewer bits without its sign, in float64, exactly: integers only, because CuPy compiles with -ftz,
// under which a conversion from float32 loses subnormal numbers. Every key from `infinite` on is infinite or NaN.
template <int Fraction, int Bias> __device__ __forceinline__ double widened(u32 key, u32 infinite) {
    constexpr u32 NORMAL = 1u << Fraction;
    if (key - NORMAL < infinite - NORMAL)
        return __longlong_as_double((static_cast<u64>(key) << (52 - Fraction)) + (static_cast<u64>(1023 - Bias) << 52));
    constexpr u64 SMALLEST = static_cast<u64>(1023 + 1 - Bias - Fraction) << 52;  // the smallest subnormal number
    if (key < NORMAL) return static_cast<double>(static_cast<int>(key)) * __longlong_as_double(SMALLEST);
    return __longlong_as_double(key == infinite ? 0x7FF0000000000000ll : 0x7FF8000000000000ll);
}

// |x| in float64, exactly.
template <ValueKind Kind, class T> __device__ __forceinline__ double magnitude(T raw) {
    if constexpr (Kind == Float64) return __longlong_as_double(raw & 0x7FFFFFFFFFFFFFFFull);
    else if constexpr (Kind == Float32) return widened<23, 127>(raw & 0x7FFFFFFFu, 0x7F800000u);
    else if constexpr (Kind == Float16) return widened<10, 15>(raw & 0x7FFFu, 0x7C00u);
    else if constexpr (Kind == BFloat16) return widened<7, 127>(raw & 0x7FFFu, 0x7F80u);
    else if constexpr (Kind == Float8E5M2) return widened<2, 15>(raw & 0x7Fu, 0x7Cu);
    else if constexpr (Kind == Float8E4M3)  // 0x7F is NaN; there is no infinity
        return (raw & 0x7Fu) == 0x7Fu ? __longlong_as_double(0x7FF8000000000000ll) : widened<3, 7>(raw & 0x7Fu, 0x7Fu);
    else return static_cast<double>(raw < 128 ? static_cast<int>(raw) : 256 - static_cast<int>(raw));
}

}  // namespace spformat
