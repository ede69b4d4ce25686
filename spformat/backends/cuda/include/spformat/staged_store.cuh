// Accumulators to C through shared memory: global stores are 16 bytes wide, and whole 128-byte lines where the lines of C are
// aligned. sm_80 and later.
#pragma once
#include "spformat/dtypes.cuh"
#include "spformat/ldmatrix.cuh"
#include "spformat/units.cuh"

namespace spformat {

// Bytes of `scratch` that store_m16 needs per warp, 16-byte aligned.
template <class Out, int NT> constexpr int store_m16_scratch = 16 * NT * 8 * int(sizeof(Out));

// One warp stores 16 rows x 8*NT columns of C, first element (row, col); what lies outside M x N is left alone.
//   acc[4j + r] of lane 4g+t = C[row + g + 8*(r/2)][col + 8j + 2t + r%2] (the D fragments of mma and wgmma)
//   ColMajor: C[i][j] at c[i + j*ldc], else c[i*ldc + j]
//   vector: c and ldc allow 16-byte stores
template <class Out, bool ColMajor, int NT>
__device__ __forceinline__ void store_m16(const float* acc, char* scratch, Out* __restrict__ c, i64 ldc, int row, int col,
                                          int M, int N, bool vector) {
    constexpr int line = (ColMajor ? 16 : NT * 8) * int(sizeof(Out));  // bytes of C that are contiguous here
    constexpr int lines = ColMajor ? NT * 8 : 16;
    constexpr int per_chunk = 16 / int(sizeof(Out));
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;

    __syncwarp();
#pragma unroll
    for (int j = 0; j < NT; ++j)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const float x0 = acc[4 * j + 2 * h], x1 = acc[4 * j + 2 * h + 1];
            const int i = g + 8 * h, n = 8 * j + 2 * t;
            if constexpr (ColMajor) {
                const int at = i * int(sizeof(Out));
                *reinterpret_cast<Out*>(scratch + swizzled<line>(n, at / 16) + at % 16) = from_float<Out>(x0);
                *reinterpret_cast<Out*>(scratch + swizzled<line>(n + 1, at / 16) + at % 16) = from_float<Out>(x1);
            } else {
                const int at = n * int(sizeof(Out));
                char* to = scratch + swizzled<line>(i, at / 16) + at % 16;
                if constexpr (sizeof(Out) == 2) *reinterpret_cast<u32*>(to) = pack2<Out>(x0, x1);
                else *reinterpret_cast<float2*>(to) = make_float2(x0, x1);
            }
        }
    __syncwarp();
    const int along0 = ColMajor ? row : col, across0 = ColMajor ? col : row;
    const int along_end = ColMajor ? M : N, across_end = ColMajor ? N : M;
    if (!vector) {
        // Lines start anywhere: units of 16 bytes from the first boundary on, shifted out of two chunks, then both ends.
        constexpr int units = line / 16, size = int(sizeof(Out));
        const int whole = min(line / size, along_end - along0), there = min(lines, across_end - across0);
        Out* const first = c + i64(across0) * ldc + along0;
        auto before_units = [&](int l) {  // elements of line l before its first 16-byte boundary
            return static_cast<int>((16 - reinterpret_cast<u64>(first + l * ldc) % 16) % 16) / size;
        };
#pragma unroll 2
        for (int k = lane; k < lines * units; k += 32) {
            const int l = k / units, at = before_units(l) + k % units * per_chunk, chunk = at * size / 16;
            if (l >= there || at + per_chunk > whole) continue;
            const uint4 low = *reinterpret_cast<const uint4*>(scratch + swizzled<line>(l, chunk));
            const uint4 high = *reinterpret_cast<const uint4*>(scratch + swizzled<line>(l, min(chunk + 1, units - 1)));
            *reinterpret_cast<uint4*>(first + l * ldc + at) = shifted(low, high, at * size % 16);
        }
        const int ends = whole % per_chunk ? 2 * per_chunk : per_chunk;  // elements outside units, at most; a power of two
#pragma unroll 2
        for (int k = lane; k < lines * ends; k += 32) {
            const int l = ends == per_chunk ? k / per_chunk : k / (2 * per_chunk), e = k & (ends - 1), head = before_units(l);
            const int at = e < head ? e : e + max(0, whole - head) / per_chunk * per_chunk;
            if (l < there && at < whole)
                first[l * ldc + at] = *reinterpret_cast<const Out*>(scratch + swizzled<line>(l, at * size / 16) + at * size % 16);
        }
        return;
    }
#pragma unroll
    for (int k = lane; k < lines * (line / 16); k += 32) {
        const int across = across0 + k / (line / 16), along = along0 + (k % (line / 16)) * per_chunk;
        if (across >= across_end || along >= along_end) continue;
        const char* const chunk = scratch + swizzled<line>(k / (line / 16), k % (line / 16));
        Out* to = c + i64(across) * ldc + along;
        if (along + per_chunk <= along_end) {
            *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(chunk);
        } else {
            const Out* from = reinterpret_cast<const Out*>(chunk);
            for (int e = 0; e < per_chunk && along + e < along_end; ++e) to[e] = from[e];
        }
    }
}

// The same for any multiple of 16 columns, Columns: a line of C of 128 bytes at a time, then what is left. `first` is called
// before each such panel is stored, with its sums and its first column: first(Panel<width>, acc, col).
template <int Width> struct Panel {
    static constexpr int WIDTH = Width;
};
template <class Out, bool ColMajor, int Columns, class First>
__device__ __forceinline__ void store_panels(float* acc, char* scratch, Out* c, i64 ldc, int row, int col, int M, int N, bool vector,
                                             First first) {
    constexpr int MOST = 128 / int(sizeof(Out)), WIDTH = Columns >= MOST ? MOST : Columns >= 32 ? 32 : 16;
    first(Panel<WIDTH>{}, acc, col);
    store_m16<Out, ColMajor, WIDTH / 8>(acc, scratch, c, ldc, row, col, M, N, vector);
    if constexpr (Columns > WIDTH)
        store_panels<Out, ColMajor, Columns - WIDTH>(acc + WIDTH / 2, scratch, c, ldc, row, col + WIDTH, M, N, vector, first);
}
struct Unchanged {
    template <class Any> __device__ __forceinline__ void operator()(Any, float*, int) const {}
};

// True if a matrix with this start and leading dimension (elements) can be read and written 16 bytes at a time.
template <class T> __device__ __forceinline__ bool vector_aligned(const T* p, i64 ld) {
    return (reinterpret_cast<u64>(p) % 16) == 0 && (ld * i64(sizeof(T))) % 16 == 0;
}

}  // namespace spformat
