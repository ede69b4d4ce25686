// B of few columns, straight from memory to the fragments of tensor cores: what lane 4g+t of a warp multiplies is its E
// neighbours of a line of A and the same E rows of B, for the columns that group g has. sm_80 and later.
//
//   SINGLE   element by element
//   ALONG_K  E values of a column; the distance between rows is 1, address and distance of columns are multiples of E values
//   ALONG_N  min(NT, 16 bytes) values of a row; the distance between columns is 1, address and distance of rows are multiples of that
#pragma once
#include "spformat/dtypes.cuh"

namespace spformat {

enum { SINGLE, ALONG_K, ALONG_N };

template <int Words> struct Line;  // neighbours, as words
template <> struct Line<4> {
    u32 word[4];
    __device__ __forceinline__ void stream(const void* from) {
        const uint4 x = __ldcs(static_cast<const uint4*>(from));
        word[0] = x.x, word[1] = x.y, word[2] = x.z, word[3] = x.w;
    }
    __device__ __forceinline__ void load(const void* from) {
        const uint4 x = __ldg(static_cast<const uint4*>(from));
        word[0] = x.x, word[1] = x.y, word[2] = x.z, word[3] = x.w;
    }
};
template <> struct Line<2> {
    u32 word[2];
    __device__ __forceinline__ void stream(const void* from) {
        const uint2 x = __ldcs(static_cast<const uint2*>(from));
        word[0] = x.x, word[1] = x.y;
    }
    __device__ __forceinline__ void load(const void* from) {
        const uint2 x = __ldg(static_cast<const uint2*>(from));
        word[0] = x.x, word[1] = x.y;
    }
};
template <> struct Line<1> {
    u32 word[1];
    __device__ __forceinline__ void load(const void* from) { word[0] = __ldg(static_cast<const u32*>(from)); }
};

template <int Size> struct ElementBits { using type = u16; };
template <> struct ElementBits<4> { using type = u32; };

// The bits of an element as number e of a line.
template <int Size, int Words> __device__ __forceinline__ void put(Line<Words>& line, int e, u32 bits) {
    if constexpr (Size == 2) line.word[e / 2] |= bits << (e % 2 * 16);
    else line.word[e] = bits;
}

// The column that lane group g (or, of a result, column g of a fragment) has in fragment j of a tile.
template <int Way, int NT> __device__ __forceinline__ int column_of(int g, int j) {
    return Way == ALONG_N ? g * NT + j : 8 * j + g;
}

// Rows k .. k+E-1 of B for fragment j (Way != ALONG_N) of columns from n0 on. 0 where there is no element.
template <class T, int Way, int NT, int E, int Words>
__device__ __forceinline__ void load_fragment(Line<Words>& b, const T* B, i64 k, i64 K, i64 n0, i64 N, i64 k_step, i64 n_step, int j) {
    b = {};
    const i64 n = n0 + column_of<Way, NT>(threadIdx.x % 32 / 4, j), left = n < N ? K - k : 0;
    const T* const from = B + k * k_step + n * n_step;
    if (Way == ALONG_K && left >= E) {
        b.load(from);
    } else if (left > 0) {
#pragma unroll
        for (int e = 0; e < E; ++e)
            if (e < left) put<sizeof(T)>(b, e, reinterpret_cast<const typename ElementBits<sizeof(T)>::type*>(from)[e * k_step]);
    }
}

// The same for all fragments of a tile, from NT neighbours in each row (ALONG_N).
template <class T, int NT, int E, int Words>
__device__ __forceinline__ void load_rows(Line<Words> (&b)[NT], const T* B, i64 k, i64 K, i64 n0, i64 N, i64 k_step) {
    constexpr int EACH = NT * sizeof(T) > 16 ? 16 / sizeof(T) : NT;  // elements of a load
    const i64 n = n0 + threadIdx.x % 32 / 4 * NT;
    const int rows = k < K ? (K - k < E ? static_cast<int>(K - k) : E) : 0;
#pragma unroll
    for (int j = 0; j < NT; ++j) b[j] = {};
#pragma unroll
    for (int e = 0; e < E; ++e)
#pragma unroll
        for (int j = 0; j < NT; j += EACH) {
            const T* const from = B + (k + e) * k_step + n + j;
            typename ElementBits<sizeof(T)>::type bits[EACH] = {};
            if (e < rows && n + j + EACH <= N) {
                Line<EACH * sizeof(T) / 4> line;
                line.load(from);
                memcpy(bits, line.word, sizeof(bits));
            } else if (e < rows && n + j < N) {  // not by lanes without columns: the others would wait for them
#pragma unroll
                for (int i = 0; i < EACH; ++i)
                    if (n + j + i < N) bits[i] = reinterpret_cast<const typename ElementBits<sizeof(T)>::type*>(from)[i];
            }
#pragma unroll
            for (int i = 0; i < EACH; ++i) put<sizeof(T)>(b[j + i], e, bits[i]);
        }
}

}  // namespace spformat
