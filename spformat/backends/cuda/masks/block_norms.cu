// Norms of blocks of R x C values, and masks of whole blocks. sm_80 and later.
//
//   x       T[M, K]     row-major
//   norms   f64[Mb, Kb]   Mb = cdiv(M, R), Kb = cdiv(K, C)
//   odd     u64         in host memory: how many values are not finite is added
//   keep    u8[Mb, Kb]  mask  u8[M, K]
//
// The bits of preprocess/masks.py: the terms of a column of a block are added row by row, then the sums of its columns,
// column by column, in float64 and without fusing. A block of threads takes whole blocks of one block row side by side and
// adds their columns, neighbouring threads neighbouring columns; then one thread a block adds the sums of columns.
#include "spformat/magnitudes.cuh"
#include "spformat/prefix_sum.cuh"

namespace spformat::masks {

constexpr int THREADS = 256, COLUMNS = 2048;  // columns of a strip at most

// The largest key of a finite value of x, infinity and NaN counted as one.
__global__ void __launch_bounds__(THREADS)
largest_finite_key(const u64* __restrict__ x, i64 n, Keys keys, u64* largest) {
    u64 most = 0;
    for (i64 i = i64(blockIdx.x) * THREADS + threadIdx.x; i < n; i += i64(gridDim.x) * THREADS) {
        const u64 key = keys.of(x[i]) < keys.finite ? keys.of(x[i]) : keys.finite;
        most = key > most ? key : most;
    }
    for (int d = 16; d; d /= 2) {
        const u64 other = __shfl_xor_sync(0xFFFFFFFF, most, d);
        most = other > most ? other : most;
    }
    if (threadIdx.x % 32 == 0 && most > *const_cast<volatile u64*>(largest)) atomicMax(largest, most);
}

// square_scale of arrays/magnitudes.py: the power of two 2^min(1000, -exponent), which may be a subnormal number.
__device__ __forceinline__ double square_scale(u64 largest) {
    if (!largest) return 1;
    const int exponent = 1022 - static_cast<int>(largest >> 52), e = (exponent < 1000 ? exponent : 1000) + 1023;
    return __longlong_as_double(e > 0 ? static_cast<u64>(e) << 52 : 1ull << (51 + e));
}

// The sums of columns of a strip start at these places, a block a line of an odd length, so that threads that add up
// neighbouring blocks meet different banks.
__device__ __forceinline__ int column_place(int c, int C, int line) { return c / C * line + c % C; }

// squares: l2 norms, otherwise l1. wide: columns of a strip, a multiple of C up to COLUMNS. Piece: values of a load;
// wide and K are multiples of it. largest: for float64, the largest finite key.
template <ValueKind Kind, class T, int Piece>
__global__ void __launch_bounds__(THREADS)
block_norms(const T* __restrict__ x, i64 M, i64 K, int R, int C, int squares, int wide, i64 strips, i64 Kb, Keys keys,
            const u64* largest, double* __restrict__ norms, u64* odd) {
    struct alignas(Piece * sizeof(T)) Values { T v[Piece]; };
    __shared__ double sums[2 * COLUMNS];
    const u32 across = static_cast<u32>(strips);
    const i64 strip = blockIdx.x % across, block_row = blockIdx.x / across, c0 = strip * wide, r0 = block_row * R;
    const int rows = static_cast<int>(M - r0 < R ? M - r0 : R), cols = static_cast<int>(K - c0 < wide ? K - c0 : wide);
    const int line = C | 1;
    const double scale = Kind == Float64 ? square_scale(*largest) : 1;
    u32 strange = 0;
    for (int c = threadIdx.x * Piece; c < cols; c += THREADS * Piece) {
        double sum[Piece];
#pragma unroll
        for (int e = 0; e < Piece; ++e) sum[e] = 0;
        const T* from = x + r0 * K + c0 + c;
#pragma unroll 4
        for (int r = 0; r < rows; ++r) {
            const Values values = *reinterpret_cast<const Values*>(from + r * K);
#pragma unroll
            for (int e = 0; e < Piece; ++e) {
                double size = magnitude<Kind>(values.v[e]);
                if (Kind == Float64) size = __dmul_rn(size, scale);
                sum[e] = __dadd_rn(sum[e], squares ? __dmul_rn(size, size) : size);
                strange += !keys.template is_finite<T>(keys.of(values.v[e]));
            }
        }
#pragma unroll
        for (int e = 0; e < Piece; ++e) sums[column_place(c + e, C, line)] = sum[e];
    }
    __syncthreads();
    for (int b = threadIdx.x; b * C < cols; b += THREADS) {
        const double* column = sums + b * line;
        double sum = 0;
        const int count = cols - b * C < C ? cols - b * C : C;
#pragma unroll 8
        for (int c = 0; c < count; ++c) sum = __dadd_rn(sum, column[c]);
        norms[block_row * Kb + c0 / C + b] = sum;
    }
    const u64 total = sum_of_warp<u64>(strange);
    if (odd && total && threadIdx.x % 32 == 0) atomicAdd(odd, total);
}

// mask[i, j] = keep[i / R, j / C]. A thread takes Piece neighbouring columns of up to `rows` rows of one block row; K is a
// multiple of Piece, or Piece is 1. parts: pieces of a block row.
template <int Piece>
__global__ void __launch_bounds__(THREADS)
mask_of_blocks(const u8* __restrict__ keep, i64 M, i64 K, int R, int C, i64 Kb, int rows, int parts, i64 strips,
               u8* __restrict__ mask) {
    struct alignas(Piece) Flags { u8 v[Piece]; };
    const i64 strip = blockIdx.x % strips, part = blockIdx.x / strips;
    const i64 block_row = part / parts, c = (strip * THREADS + threadIdx.x) * Piece;
    const i64 first = block_row * R + part % parts * rows, end = first + rows;
    const i64 block_end = (block_row + 1) * R, last = end < block_end ? end : block_end, stop = last < M ? last : M;
    if (c >= K) return;
    Flags flags;
    i64 block = c / C;
    int left = static_cast<int>((block + 1) * C - c);  // columns of this block that are still to come
#pragma unroll
    for (int e = 0; e < Piece; ++e) {
        flags.v[e] = keep[block_row * Kb + block];
        if (--left == 0 && e + 1 < Piece && c + e + 1 < K) ++block, left = C;
    }
#pragma unroll 4
    for (i64 r = first; r < stop; ++r) *reinterpret_cast<Flags*>(mask + r * K + c) = flags;
}

}  // namespace spformat::masks
