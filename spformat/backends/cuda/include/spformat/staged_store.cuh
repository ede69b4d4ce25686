// Accumulators to C through shared memory: global stores are 16 bytes wide, and whole 128-byte lines where the lines of C are
// aligned. sm_80 and later.
#pragma once
#include "spformat/dtypes.cuh"
#include "spformat/ldmatrix.cuh"
#include "spformat/units.cuh"

namespace spformat {

// Bytes of `scratch` that store_m16 needs per warp, 16-byte aligned.
template <class Out, int NT> constexpr int store_m16_scratch = 16 * NT * 8 * int(sizeof(Out));

// Elements of C below which rows of 16-bit values that start anywhere are written value by value, with `Single`: a small C leaves so
// with fewer instructions, which a kernel waits for when it runs them for the first time; of a large one L2 would get eight
// times the stores.
constexpr i64 SINGLE = 1 << 18;

// Lines of C that start anywhere, out of shared memory, by `threads` threads: units of 16 bytes from the first boundary on, shifted
// out of two chunks, then both ends.
//   chunk(l, i)   where 16 bytes, the i-th of line l, lie; lines have Length elements, `there` of them exist, and `whole` elements of
//                 each
//   first   the first element of line 0 in C; lines are ldc elements apart there
template <class Out, int Length, class Chunk>
__device__ __forceinline__ void store_lines(Chunk chunk, Out* __restrict__ first, i64 ldc, int there, int whole, int thread, int threads) {
    constexpr int size = int(sizeof(Out)), of_unit = 16 / size, units = Length / of_unit;
    auto before_units = [&](int l) {  // elements of line l before its first 16-byte boundary
        return static_cast<int>((16 - reinterpret_cast<u64>(first + l * ldc) % 16) % 16) / size;
    };
#pragma unroll 2
    for (int k = thread; k < there * units; k += threads) {
        const int l = k / units, at = before_units(l) + k % units * of_unit, i = at / of_unit;
        if (at + of_unit > whole) continue;
        const uint4 low = *reinterpret_cast<const uint4*>(chunk(l, i));
        const uint4 high = *reinterpret_cast<const uint4*>(chunk(l, min(i + 1, units - 1)));
        *reinterpret_cast<uint4*>(first + l * ldc + at) = shifted(low, high, at * size % 16);
    }
    const int ends = whole % of_unit ? 2 * of_unit : of_unit;  // elements outside of units, at most; a power of two
#pragma unroll 2
    for (int k = thread; k < there * ends; k += threads) {
        const int l = ends == of_unit ? k / of_unit : k / (2 * of_unit), e = k & (ends - 1), head = before_units(l);
        const int at = e < head ? e : e + max(0, whole - head) / of_unit * of_unit;
        if (at < whole) first[l * ldc + at] = reinterpret_cast<const Out*>(chunk(l, at / of_unit))[at % of_unit];
    }
}

// One warp stores 16 rows x 8*NT columns of C, first element (row, col); what lies outside M x N is left alone.
//   acc[4j + r] of lane 4g+t = C[row + g + 8*(r/2)][col + 8j + 2t + r%2] (the D fragments of mma and wgmma)
//   ColMajor: C[i][j] at c[i + j*ldc], else c[i*ldc + j]
//   vector: c and ldc allow 16-byte stores
template <class Out, bool ColMajor, int NT, bool Single = false>
__device__ __forceinline__ void store_m16(const float* acc, char* scratch, Out* __restrict__ c, i64 ldc, int row, int col,
                                          int M, int N, bool vector) {
    constexpr int line = (ColMajor ? 16 : NT * 8) * int(sizeof(Out));  // bytes of C that are contiguous here
    constexpr int lines = ColMajor ? NT * 8 : 16;
    constexpr int per_chunk = 16 / int(sizeof(Out));
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;

    if constexpr (Single && !ColMajor && sizeof(Out) == 2) {
        if (!vector && i64(M) * N < SINGLE) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const int i = row + g + 8 * h;
                Out* const to = c + i * ldc + col + 2 * t;
                const int left = i < M ? N - col - 2 * t : 0;  // columns of C from `to` on
#pragma unroll
                for (int j = 0; j < NT; ++j) {
                    if (8 * j < left) to[8 * j] = from_float<Out>(acc[4 * j + 2 * h]);
                    if (8 * j + 1 < left) to[8 * j + 1] = from_float<Out>(acc[4 * j + 2 * h + 1]);
                }
            }
            return;
        }
    }
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
        constexpr int length = line / int(sizeof(Out));
        const int there = min(lines, across_end - across0), whole = min(length, along_end - along0);
        auto chunk = [&](int l, int i) { return scratch + swizzled<line>(l, i); };
        return store_lines<Out, length>(chunk, c + i64(across0) * ldc + along0, ldc, there, whole, lane, 32);
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

// The same for any multiple of 16 columns of a row-major C whose rows start anywhere. Eight rows at a time, or as many as find room,
// leave together in lines of up to 512 bytes: at both ends of a line lie sectors of 32 bytes of which others write a part, and these
// are what such stores cost. A line is turned in shared memory so that its units of 16 bytes lie there as in C: column n of line l at
// place (spread(l) + a + n) % WIDTH, of which a is how far behind a 16-byte boundary of C the line begins, and spread(l) another
// multiple of E for each line, against bank conflicts.
// scratch: Room bytes, 16-byte aligned.
constexpr int ROWS_SCRATCH = 2048;
// Of lanes (up to 32) or of bytes (from 65 on): the least power of two that is at least N.
template <int N> constexpr int power_of_two_from = N <= 8 ? 8 : N <= 16 ? 16 : N <= 32 ? 32 : N <= 128 ? 128 : N <= 256 ? 256 : 512;
template <class Out, int Columns, int Room = ROWS_SCRATCH>
__device__ __forceinline__ void store_rows(const float* acc, char* scratch, Out* __restrict__ c, i64 ldc, int row, int col, int M, int N) {
    constexpr int size = int(sizeof(Out)), E = 16 / size;
    constexpr int WIDTH = Columns * size <= 512 ? Columns : (Columns / 2 + 15) / 16 * 16;  // of a line
    constexpr int PITCH = power_of_two_from<WIDTH * size>, FIT = Room / PITCH, ROWS = FIT < 8 ? FIT : 8;
    constexpr int UNITS = WIDTH / E, LANES = power_of_two_from<UNITS>;  // of a line; lanes that store one
    static_assert(WIDTH * size <= 512 && ROWS > 0, "a line fits");
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int whole = min(WIDTH, N - col), ends = whole % E ? 2 * E : E;  // elements of a line; those outside of whole units, at most
    auto turned = [&](int place) { return place < WIDTH ? place : place - WIDTH; };
    auto spread = [&](int l) { return E * 7 < WIDTH ? E * l : E * l % WIDTH; };
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll 1
        for (int begin = 0; begin < 8; begin += ROWS) {
            Out* const first = c + i64(row + 8 * h + begin) * ldc + col;
            const int there = min(ROWS, M - row - 8 * h - begin);
            const u32 start = static_cast<u32>(reinterpret_cast<u64>(first) / size), pitch = static_cast<u32>(ldc);
            auto behind = [&](int l) { return static_cast<int>((start + l * pitch) % E); };
            __syncwarp();
            if (ROWS == 8 || g / ROWS == begin / ROWS) {
                const int l = g % ROWS, at = spread(l) + behind(l) + 2 * t;
                Out* const line = reinterpret_cast<Out*>(scratch + l * PITCH);
#pragma unroll
                for (int j = 0; j < WIDTH / 8; ++j) {
                    const bool over = 8 * j + E * ROWS + 6 >= WIDTH;  // perhaps
                    const int place = at + 8 * j;
                    line[over ? turned(place) : place] = from_float<Out>(acc[4 * j + 2 * h]);
                    line[over ? turned(place + 1) : place + 1] = from_float<Out>(acc[4 * j + 2 * h + 1]);
                }
            }
            __syncwarp();
#pragma unroll
            for (int l0 = 0; l0 < ROWS; l0 += 32 / LANES) {
                const int l = l0 + lane / LANES, unit = lane % LANES, n = E * unit - behind(l);
                if (l < there && unit < UNITS && n >= 0 && n + E <= whole)
                    *reinterpret_cast<uint4*>(first + l * ldc + n) =
                        *reinterpret_cast<const uint4*>(scratch + l * PITCH + turned(E * unit + spread(l)) * size);
            }
#pragma unroll 2
            for (int k = lane; k < there * ends; k += 32) {
                const int l = ends == E ? k / E : k / (2 * E), e = k & (ends - 1), a = behind(l), head = (E - a) % E;
                const int n = e < head ? e : e + max(0, whole - head) / E * E;
                if (n < whole) first[l * ldc + n] = reinterpret_cast<const Out*>(scratch + l * PITCH)[turned(spread(l) + a + n)];
            }
        }
    }
    if constexpr (Columns > WIDTH)
        store_rows<Out, Columns - WIDTH, Room>(acc + WIDTH / 2, scratch, c, ldc, row, col + WIDTH, M, N);
}

// The same for any multiple of 16 columns, Columns: a line of C of 128 bytes at a time, then what is left. `first` is called
// before each such panel is stored, with its sums and its first column: first(Panel<width>, acc, col).
template <int Width> struct Panel {
    static constexpr int WIDTH = Width;
};
template <class Out, int Columns>
constexpr int panel_columns = Columns >= 128 / int(sizeof(Out)) ? 128 / int(sizeof(Out)) : Columns >= 32 ? 32 : 16;
template <class Out, int Columns, class First> __device__ __forceinline__ void before_panels(float* acc, int col, First first) {
    constexpr int WIDTH = panel_columns<Out, Columns>;
    first(Panel<WIDTH>{}, acc, col);
    if constexpr (Columns > WIDTH) before_panels<Out, Columns - WIDTH>(acc + WIDTH / 2, col + WIDTH, first);
}
template <class Out, bool ColMajor, int Columns, int Room = ROWS_SCRATCH, class First>
__device__ __forceinline__ void store_panels(float* acc, char* scratch, Out* c, i64 ldc, int row, int col, int M, int N, bool vector,
                                             First first) {
    constexpr int WIDTH = panel_columns<Out, Columns>;
    if constexpr (!ColMajor && Columns > WIDTH) {
        if (!vector) {
            before_panels<Out, Columns>(acc, col, first);
            return store_rows<Out, Columns, Room>(acc, scratch, c, ldc, row, col, M, N);
        }
    }
    first(Panel<WIDTH>{}, acc, col);
    store_m16<Out, ColMajor, WIDTH / 8>(acc, scratch, c, ldc, row, col, M, N, vector);
    if constexpr (Columns > WIDTH)
        store_panels<Out, ColMajor, Columns - WIDTH, Room>(acc + WIDTH / 2, scratch, c, ldc, row, col + WIDTH, M, N, vector, first);
}
struct Unchanged {
    template <class Any> __device__ __forceinline__ void operator()(Any, float*, int) const {}
};

// True if a matrix with this start and leading dimension (elements) can be read and written 16 bytes at a time.
template <class T> __device__ __forceinline__ bool vector_aligned(const T* p, i64 ld) {
    return (reinterpret_cast<u64>(p) % 16) == 0 && (ld * i64(sizeof(T))) % 16 == 0;
}

}  // namespace spformat
