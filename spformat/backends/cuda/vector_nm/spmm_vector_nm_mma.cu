// C[M,N] = A[M,K] @ B[K,N], A vector n:m (NM-SpMM), on the tensor cores; sm_80 and later.
//
//   shape    see vector_nm.cuh
//   data     T[W, Mp]           values, k-major: data[u, i] of row i
//   records  u32[row_tiles, k_tiles, record]
//   B        T, rows pitch_b bytes apart; pointer and pitch multiples of 16
//   C        Out, element (m, n) at m*step_m + n*step_n, one step is 1; or, splits > 1, as many of float: vector_nm_sums.cu
//
// Grid (row tiles * column tiles, 1, splits), row tiles fastest; block 32*WARPS_M*WARPS_N threads.
//   WM, WN   rows and columns of C that a warp computes; a block has WARPS_M * WARPS_N warps
//   STAGES   steps along K that are in shared memory at a time
//   PACKED   records are those of a packed matrix: only the columns of B that a tile needs are loaded (vector_nm.cuh)
//
// G = rows that share their columns, as far as a warp can use it: 8, 16, 32 or 64. Products: vector_nm_mma.cuh.
// Paper: NM-SpMM (IPDPS 2025), whose hierarchical blocking and col_info packing this follows.
#include "spformat/launch_order.cuh"
#include "spformat/vector_nm_mma.cuh"

namespace spformat::vector_nm {

template <class T, class Out, int G, int WM, int WN, int WARPS_M, int WARPS_N, int STAGES, bool PACKED>
__global__ void __launch_bounds__(32 * WARPS_M * WARPS_N, WM * WN > 2048 ? 1 : 16 / (WARPS_M * WARPS_N))
spmm_vector_nm_mma(const Shape s, const T* __restrict__ data, const u32* __restrict__ records, const T* __restrict__ B,
                   u32 pitch_b, Out* __restrict__ C, int N, i64 step_m, i64 step_n, i64 split_stride) {
    constexpr int BM = WM * WARPS_M, BN = WN * WARPS_N, THREADS = 32 * WARPS_M * WARPS_N;
    static_assert(G == 8 || G == 16 || G == 32 || G == 64, "G is the rows that share columns inside a warp's tile");
    static_assert(WM % G == 0 && WM % 16 == 0 && WN % 16 == 0, "a warp covers whole groups and whole instructions");
    static_assert(sizeof(T) == 2 || WN == 32 || WN % 64 == 0, "float fragments take 32 columns, or pairs of 32");
    extern __shared__ __align__(128) unsigned char shared[];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, wm = warp / WARPS_N, wn = warp % WARPS_N;
    const int row_tile = blockIdx.x % s.row_tiles, m0 = row_tile * BM, n0 = blockIdx.x / s.row_tiles * BN;
    const int first = blockIdx.z * s.k_per_split, last = min(first + s.k_per_split, s.k_tiles);
    using F = Fragments<T, G, WM, WN, BM * sizeof(T), BN * sizeof(T)>;

    wait_for_launch_before();
    float acc[WN / 16][WM / 8][4] = {};
    for_each_k_tile<T, BM, BN, THREADS, STAGES, 8, PACKED>(
        s, shared, data, records, B, pitch_b, N, row_tile, m0, n0, G, first, last, [&](u32 b_lines, u32 a_lines, u32 record) {
            constexpr int E = 16 / sizeof(T);
            F::multiply(s.slots, acc, b_lines, 128, a_lines, 128, record + 4 * (wm * (WM / G) * s.slots), wm * WM / E,
                        wn * WN / E, lane);
        });

    Out* strip = reinterpret_cast<Out*>(shared) + warp * F::ROWS * strip_pitch<Out, WN>;
    store_fragments<F, WN>(acc, Target<Out>{C + blockIdx.z * split_stride, step_m, step_n, s.M, N}, strip, m0 + wm * WM,
                           n0 + wn * WN, lane);
}

}  // namespace spformat::vector_nm
