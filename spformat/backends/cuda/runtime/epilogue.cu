// C = alpha * product + beta * C + bias, after a kernel that only multiplies. sm_80 and later.
//
//   product  In[lines, along]    lines `pitch` apart; product and C are row-major, or both column-major
//   c        Out[lines, along]   lines `ldc` apart; read only where beta is not 0
//   bias     Out[M] or null      BiasAlong: one value for each place along a line (column-major C), else one a line
//
// A thread finishes eight neighbours at a time. Aligned: bases and pitches of product and C are multiples of 16 bytes.
// Sums are float32, float64 where either side is.
#include "spformat/dtypes.cuh"

using namespace spformat;

constexpr int EIGHT = 8;

template <class In, class Out> struct Sum { using type = float; };
template <class In> struct Sum<In, double> { using type = double; };
template <> struct Sum<double, float> { using type = double; };

template <class S> __device__ __forceinline__ S widened(double x) { return S(x); }
template <class S> __device__ __forceinline__ S widened(float x) { return S(x); }
template <class S> __device__ __forceinline__ S widened(__half x) { return S(__half2float(x)); }
template <class S> __device__ __forceinline__ S widened(__nv_bfloat16 x) { return S(__bfloat162float(x)); }
template <class Out, class S> __device__ __forceinline__ Out rounded(S x) { return from_float<Out>(float(x)); }
template <> __device__ __forceinline__ double rounded<double, double>(double x) { return x; }

// Eight neighbours in registers; whole 16-byte words where Aligned and all eight exist.
template <class T> struct Octet {
    static constexpr int WORDS = EIGHT * sizeof(T) / 16;
    union { uint4 word[WORDS]; T at[EIGHT]; };
    __device__ __forceinline__ Octet() {}
    template <bool Aligned> __device__ __forceinline__ void load(const T* from, int count) {
        if (Aligned && count == EIGHT) {
#pragma unroll
            for (int i = 0; i < WORDS; ++i) word[i] = reinterpret_cast<const uint4*>(from)[i];
            return;
        }
#pragma unroll
        for (int i = 0; i < EIGHT; ++i)
            if (i < count) at[i] = from[i];
    }
    template <bool Aligned> __device__ __forceinline__ void store(T* to, int count) const {
        if (Aligned && count == EIGHT) {
#pragma unroll
            for (int i = 0; i < WORDS; ++i) reinterpret_cast<uint4*>(to)[i] = word[i];
            return;
        }
#pragma unroll
        for (int i = 0; i < EIGHT; ++i)
            if (i < count) to[i] = at[i];
    }
};

template <class In, class Out, bool BiasAlong, bool Aligned>
__global__ void __launch_bounds__(256)
epilogue(const In* __restrict__ product, i64 pitch, Out* __restrict__ c, i64 ldc, i64 lines, i64 along,
         const Out* __restrict__ bias, double alpha, double beta) {
    using S = typename Sum<In, Out>::type;
    const i64 per_line = cdiv<i64>(along, EIGHT), all = lines * per_line;
    for (i64 id = i64(blockIdx.x) * blockDim.x + threadIdx.x; id < all; id += i64(gridDim.x) * blockDim.x) {
        const i64 line = id / per_line, at = id % per_line * EIGHT;
        const int count = along - at < EIGHT ? int(along - at) : EIGHT;
        Octet<In> p;
        Octet<Out> old, out;
        p.template load<Aligned>(product + line * pitch + at, count);
        if (beta != 0) old.template load<Aligned>(c + line * ldc + at, count);
#pragma unroll
        for (int i = 0; i < EIGHT; ++i) {
            if (i >= count) break;
            S sum = alpha != 0 ? S(alpha) * widened<S>(p.at[i]) : S(0);  // as BLAS: 0 * inf is not NaN
            if (beta != 0) sum += S(beta) * widened<S>(old.at[i]);
            if (bias) sum += widened<S>(bias[BiasAlong ? at + i : line]);
            out.at[i] = rounded<Out>(sum);
        }
        out.template store<Aligned>(c + line * ldc + at, count);
    }
}
