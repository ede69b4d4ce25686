// What the CUDA-core kernels of vector n:m share: the operands of a thread, its products of a k tile, and the store of its sums.
// A warp covers 32 rows x 32 * QUADS columns of C, a thread 8 rows x 4 * QUADS columns.
#pragma once
#include "spformat/vector_nm.cuh"

namespace spformat::vector_nm {

template <class Out, class Sum> __device__ __forceinline__ Out rounded(Sum x) {
    if constexpr (same_type<Out, Sum>::value) return x;
    else return from_float<Out>(x);
}
template <class Sum, class T> __device__ __forceinline__ Sum widened(T x) {
    if constexpr (same_type<T, Sum>::value) return x;
    else return to_float(x);
}

// 16 and 8 bytes of shared memory; in the order of the program, which the compiler would otherwise turn back into loads just
// before their use.
__device__ __forceinline__ uint4 load_words(u32 address) {
    uint4 x;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "r"(address) : "memory");
    return x;
}
__device__ __forceinline__ uint2 load_two_words(u32 address) {
    uint2 x;
    asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(x.x), "=r"(x.y) : "r"(address) : "memory");
    return x;
}

// Four values of type T from shared memory as Sum.
template <class Sum, class T> __device__ __forceinline__ void load_four(Sum* to, u32 address, T) {
    if constexpr (sizeof(T) == 2) {
        const uint2 words = load_two_words(address);
#pragma unroll
        for (int i = 0; i < 4; ++i) to[i] = widened<Sum>(reinterpret_cast<const T*>(&words)[i]);
    } else {
#pragma unroll
        for (int i = 0; i < 4; i += 16 / sizeof(T)) {
            const uint4 words = load_words(address + i * sizeof(T));
#pragma unroll
            for (int j = 0; j < static_cast<int>(16 / sizeof(T)); ++j)
                to[i + j] = widened<Sum>(reinterpret_cast<const T*>(&words)[j]);
        }
    }
}

// What a thread multiplies of one slot: 8 values of A and 4 * QUADS of B.
template <class T, class Sum, int QUADS> struct Operands {
    Sum a[8], b[4 * QUADS];
    __device__ __forceinline__ void load(u32 line, u32 row) {
        load_four(a, line, T());
        load_four(a + 4, line + 4 * sizeof(T), T());
#pragma unroll
        for (int h = 0; h < QUADS; ++h) load_four(b + 4 * h, row + h * 32 * sizeof(T), T());
    }
    // Row by row, columns to and fro: of the orders that were timed the fastest (decision 0045).
    __device__ __forceinline__ void multiply(Sum (&acc)[8][4 * QUADS]) const {
#pragma unroll
        for (int r = 0; r < 8; ++r)
#pragma unroll
            for (int j = 0; j < 4 * QUADS; ++j) {
                const int c = r % 2 ? 4 * QUADS - 1 - j : j;
                acc[r][c] += a[r] * b[c];
            }
    }
};

// A k tile of a thread whose 8 rows share their columns. `slots`: shared address of the byte offsets of its staged rows, `a` and
// `b`: of its values in line 0 of A and in staged row 0. LINE_A: bytes of a line of A; count: slots, a multiple of 4.
//
// Two sets of operands: one is loaded while the other is multiplied. The byte offsets of four staged rows are read four slots
// ahead. Behind the last slot the first ones are read again, and not used.
template <class T, class Sum, int QUADS, int LINE_A>
__device__ __forceinline__ void multiply_k_tile(Sum (&acc)[8][4 * QUADS], u32 slots, u32 a, u32 b, int count) {
    Operands<T, Sum, QUADS> sets[2];
    uint4 now = load_words(slots);
    sets[0].load(a, b + now.x);
#pragma unroll 1
    for (int k = 0; k < count; k += 4) {
        const int following = k + 4 < count ? k + 4 : 0;
        const uint4 next = load_words(slots + following * 4);
        const u32 line = a + k * LINE_A;
        sets[1].load(line + LINE_A, b + now.y);
        sets[0].multiply(acc);
        sets[0].load(line + 2 * LINE_A, b + now.z);
        sets[1].multiply(acc);
        sets[1].load(line + 3 * LINE_A, b + now.w);
        sets[0].multiply(acc);
        sets[0].load(a + following * LINE_A, b + next.x);
        sets[1].multiply(acc);
        now = next;
    }
}

// Writes the sums of a thread whose first element is (m, n); its columns are n .. n + 3, n + 32 .., as many as are there.
template <int QUADS, class Out, class Sum>
__device__ __forceinline__ void store_sums(const Sum (&acc)[8][4 * QUADS], Out* C, int M, int N, int m, int n, i64 step_m, i64 step_n) {
    constexpr int E = 16 / sizeof(Out) < 4 ? 16 / sizeof(Out) : 4;
    const bool wide = step_n == 1 && step_m % 4 == 0 && reinterpret_cast<u64>(C) % (4 * sizeof(Out)) == 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        if (m + i >= M) break;
#pragma unroll
        for (int h = 0; h < QUADS; ++h) {
            const int column = n + 32 * h;
            Out* out = C + (m + i) * step_m + column * step_n;
            if (wide && column + 4 <= N) {
                struct alignas(E * sizeof(Out)) Part { Out v[E]; };
#pragma unroll
                for (int q = 0; q < 4 / E; ++q) {
                    Part part;
#pragma unroll
                    for (int e = 0; e < E; ++e) part.v[e] = rounded<Out>(acc[i][4 * h + q * E + e]);
                    reinterpret_cast<Part*>(out)[q] = part;
                }
            } else {
#pragma unroll
                for (int e = 0; e < 4; ++e)
                    if (column + e < N) out[e * step_n] = rounded<Out>(acc[i][4 * h + e]);
            }
        }
    }
}

}  // namespace spformat::vector_nm
