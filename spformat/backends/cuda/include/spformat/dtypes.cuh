// Value types on the device: names, sums and conversions shared by every kernel. Compiles under NVRTC and nvcc.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include "spformat/integers.cuh"

namespace spformat {

template <class A, class B> struct same_type { static constexpr bool value = false; };
template <class A> struct same_type<A, A> { static constexpr bool value = true; };

template <class T> __device__ __forceinline__ T from_float(float x);
template <> __device__ __forceinline__ float from_float<float>(float x) { return x; }
template <> __device__ __forceinline__ __half from_float<__half>(float x) { return __float2half_rn(x); }
template <> __device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float x) { return __float2bfloat16_rn(x); }

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

// The type that products are summed in, the way there, and the way back.
template <class T> struct SumOf { using type = float; };
template <> struct SumOf<double> { using type = double; };
template <class T> using sum_t = typename SumOf<T>::type;

template <class T> __device__ __forceinline__ float widen(T x) { return to_float(x); }
__device__ __forceinline__ double widen(double x) { return x; }
template <class Out> __device__ __forceinline__ Out narrow(float x) { return from_float<Out>(x); }
template <class Out> __device__ __forceinline__ Out narrow(double x) { return static_cast<Out>(x); }

// Two floats as one 32-bit word of two T, the first in the low half.
template <class T> __device__ __forceinline__ u32 pack2(float low, float high);
template <> __device__ __forceinline__ u32 pack2<__half>(float low, float high) {
    u32 word;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
}
template <> __device__ __forceinline__ u32 pack2<__nv_bfloat16>(float low, float high) {
    u32 word;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
}

template <class I> __host__ __device__ constexpr I cdiv(I a, I b) { return (a + b - 1) / b; }

}  // namespace spformat
