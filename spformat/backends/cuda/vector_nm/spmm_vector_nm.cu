// C[M,N] = A[M,K] @ B[K,N], A vector n:m (NM-SpMM), on the CUDA cores: any vector length, exact order of sums, no tensor
// cores. Also the small kernel that adds up parts of K: sum_splits.
//
//   shape, records   see vector_nm.cuh
//   data             T[W, Mp], k-major; the pitch a multiple of 16
//   B                T, rows pitch_b bytes apart; pointer and pitch multiples of 16
//   C                Out, element (m, n) at m*step_m + n*step_n, one step is 1; or, splits > 1, Sum[splits, M, N]
//
// Grid (row tiles * column tiles, 1, splits), row tiles fastest; block 32*WARPS_M*WARPS_N threads.
// Blocking as in NM-SpMM: a warp covers 32 rows x 64 columns, a thread 8 rows x 8 columns. TR = rows of a thread that share
// their columns (1, 2, 4, 8): a thread reads B once per TR rows. shape.group_rows is a multiple of TR.
// Sums are Sum (float, or double for double), in ascending k.
#include "spformat/vector_nm.cuh"

namespace spformat::vector_nm {

template <class T> struct alignas(4 * sizeof(T)) Four {
    T v[4];
};
template <class Out, class Sum> __device__ __forceinline__ Out rounded(Sum x) {
    if constexpr (same_type<Out, Sum>::value) return x;
    else return from_float<Out>(x);
}
template <class Sum, class T> __device__ __forceinline__ Sum widened(T x) {
    if constexpr (same_type<T, Sum>::value) return x;
    else return to_float(x);
}

template <class T, class Sum, class Out, int TR, int WARPS_M, int WARPS_N, int STAGES, bool PACKED>
__global__ void __launch_bounds__(32 * WARPS_M * WARPS_N, sizeof(Sum) == 8 || TR < 4 ? 1 : 16 / (WARPS_M * WARPS_N))
spmm_vector_nm(const Shape s, const T* __restrict__ data, const u32* __restrict__ records,
               const T* __restrict__ B, u32 pitch_b, Out* __restrict__ C, int N, i64 step_m, i64 step_n, i64 split_stride) {
    constexpr int BM = 32 * WARPS_M, BN = 64 * WARPS_N, THREADS = 32 * WARPS_M * WARPS_N;
    static_assert(TR == 1 || TR == 2 || TR == 4 || TR == 8, "a thread's 8 rows are whole runs of TR rows");
    extern __shared__ __align__(128) unsigned char shared[];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int row_tile = blockIdx.x % s.row_tiles, m0 = row_tile * BM, n0 = blockIdx.x / s.row_tiles * BN;
    const int first = blockIdx.z * s.k_per_split, last = min(first + s.k_per_split, s.k_tiles);
    const int m = warp / WARPS_N * 32 + lane / 8 * 8, n = warp % WARPS_N * 64 + lane % 8 * 4;  // and n + 32
    const u32 base = shared_address(shared);

    Sum acc[8][8] = {};
    for_each_k_tile<T, BM, BN, THREADS, STAGES, 0, PACKED>(
        s, shared, data, records, B, pitch_b, N, row_tile, m0, n0, s.group_rows, first, last,
        [&](u32 b_lines, u32 a_lines, u32 record) {
            const unsigned char* b = shared + (b_lines - base) + n * sizeof(T);
            const T* a = reinterpret_cast<const T*>(shared + (a_lines - base)) + m;
            const u32* slots[8 / TR];  // byte offsets of staged rows
#pragma unroll
            for (int i = 0; i < 8 / TR; ++i)
                slots[i] = reinterpret_cast<const u32*>(shared + (record - base)) + (m + i * TR) / s.group_rows * s.slots;
#pragma unroll 1
            for (int k = 0; k < s.slots; k += 4) {
                uint4 four;
                if constexpr (TR == 8) four = *reinterpret_cast<const uint4*>(slots[0] + k);
#pragma unroll
                for (int q = 0; q < 4; ++q) {
                    const Four<T> a0 = *reinterpret_cast<const Four<T>*>(a + (k + q) * BM);
                    const Four<T> a1 = *reinterpret_cast<const Four<T>*>(a + (k + q) * BM + 4);
                    Sum av[8], bv[8];
#pragma unroll
                    for (int i = 0; i < 4; ++i) av[i] = widened<Sum>(a0.v[i]), av[4 + i] = widened<Sum>(a1.v[i]);
#pragma unroll
                    for (int i = 0; i < 8; ++i) {
                        if (i % TR == 0) {
                            u32 at;
                            if constexpr (TR == 8) at = q == 0 ? four.x : q == 1 ? four.y : q == 2 ? four.z : four.w;
                            else at = slots[i / TR][k + q];
                            const Four<T> b0 = *reinterpret_cast<const Four<T>*>(b + at);
                            const Four<T> b1 = *reinterpret_cast<const Four<T>*>(b + at + 32 * sizeof(T));
#pragma unroll
                            for (int j = 0; j < 4; ++j) bv[j] = widened<Sum>(b0.v[j]), bv[4 + j] = widened<Sum>(b1.v[j]);
                        }
#pragma unroll
                        for (int j = 0; j < 8; ++j) acc[i][j] += av[i] * bv[j];
                    }
                }
            }
        });

    C += blockIdx.z * split_stride;
    constexpr int E = 16 / sizeof(Out) < 4 ? 16 / sizeof(Out) : 4;
    const bool wide = step_n == 1 && step_m % 4 == 0 && reinterpret_cast<u64>(C) % (4 * sizeof(Out)) == 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        if (m0 + m + i >= s.M) break;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int column = n0 + n + 32 * h;
            Out* out = C + (m0 + m + i) * step_m + column * step_n;
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

// C[m, n] = parts[0] + parts[1] + .. in this order. Grid any; block 256 threads. parts: Sum[splits, M, N].
template <class Sum, class Out>
__global__ void __launch_bounds__(256) sum_splits(const Sum* __restrict__ parts, Out* __restrict__ C, int splits, int M, int N,
                                                  i64 step_m, i64 step_n) {
    const i64 size = static_cast<i64>(M) * N;
    const i64 stride = static_cast<i64>(gridDim.x) * 256;
    for (i64 i = blockIdx.x * 256 + threadIdx.x; i < size; i += stride) {
        // Neighbouring threads write neighbouring elements of C.
        const i64 m = step_n == 1 ? i / N : i % M, n = step_n == 1 ? i % N : i / M;
        Sum sum = parts[m * N + n];
        for (int p = 1; p < splits; ++p) sum += parts[p * size + m * N + n];
        C[m * step_m + n * step_n] = rounded<Out>(sum);
    }
}

}  // namespace spformat::vector_nm
