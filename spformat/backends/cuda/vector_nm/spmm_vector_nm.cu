// C[M,N] = A[M,K] @ B[K,N], A vector n:m (NM-SpMM), on the CUDA cores: any vector length, exact order of sums, no tensor
// cores.
//
//   shape, records   see vector_nm.cuh
//   data             T[W, Mp], k-major; the pitch a multiple of 16
//   B                T, rows pitch_b bytes apart; pointer and pitch multiples of 16
//   C                Out, element (m, n) at m*step_m + n*step_n, one step is 1; or, splits > 1, as many of Sum: vector_nm_sums.cu
//
// Grid (row tiles * column tiles, 1, splits), row tiles fastest; block 32*WARPS_M*WARPS_N threads.
// Blocking as in NM-SpMM: a warp covers 32 rows x 64 columns, a thread 8 rows x 8 columns. TR = rows of a thread
// that share their columns (1, 2, 4, 8): a thread reads B once per TR rows. shape.group_rows is a multiple of TR.
// Sums are Sum (float, or double for double), in ascending k.
#include "spformat/launch_order.cuh"
#include "spformat/vector_nm_cuda_cores.cuh"

namespace spformat::vector_nm {

// What a thread copies of every k tile. Whole chunks of whole rows need no predicate: staged rows past K and columns past N,
// which nothing reads or stores, are copies of others, and the host fills lists of rows up to a multiple of 4.
template <class T, int BM, int BN, int THREADS, bool PACKED> struct Copies {
    static constexpr int E = 16 / sizeof(T), LINE_B = BN * sizeof(T), LINE_A = BM * sizeof(T);
    static constexpr int CHUNKS_B = BN / E, CHUNKS_A = BM / E, PASS_B = 4 * (THREADS / CHUNKS_B), PASS_A = THREADS / CHUNKS_A;
    static_assert(THREADS % CHUNKS_A == 0 && THREADS % CHUNKS_B == 0, "every thread keeps its chunk of the line");

    u64 from_b, from_a;  // this thread's chunk of row 0 of B, of its first row of data
    u32 pitch_b, width;  // width: bytes of the chunk that are there
    u32 to_b, to_a;      // where they go in a stage
    bool whole;

    __device__ __forceinline__ Copies(const Shape& s, const T* data, const T* B, u32 pitch, int N, int m0, int n0) : pitch_b(pitch) {
        const int n = n0 + threadIdx.x % CHUNKS_B * E, left = N - n;
        whole = left >= E || (left <= 0 && N >= E);
        width = min(max(left, 0), E) * static_cast<int>(sizeof(T));
        from_b = reinterpret_cast<u64>(left > 0 ? B + n : B);
        to_b = threadIdx.x / CHUNKS_B * 4 * LINE_B + threadIdx.x % CHUNKS_B * 16;
        const u32 chunk = threadIdx.x % CHUNKS_A * 16, at = m0 * static_cast<u32>(sizeof(T)) + chunk;
        from_a = reinterpret_cast<u64>(data) + (at < s.data_pitch ? at : 0) + threadIdx.x / CHUNKS_A * static_cast<u64>(s.data_pitch);
        to_a = (s.staged + 1) * LINE_B + threadIdx.x / CHUNKS_A * LINE_A + chunk;
    }

    // Starts the copies of k tile kt into `stage`; `rows`: shared address of its list of rows.
    __device__ __forceinline__ void start(const Shape& s, u32 stage, u32 rows, int kt) const {
        u32 to = stage + to_b;
        const int first = kt * s.tile_cols, last_row = s.K - 1;
#pragma unroll 1
        for (int r = threadIdx.x / CHUNKS_B * 4; r < s.staged; r += PASS_B, to += PASS_B * LINE_B) {
            u32 k[4];
            if constexpr (PACKED) {
                asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                             : "=r"(k[0]), "=r"(k[1]), "=r"(k[2]), "=r"(k[3]) : "r"(rows + 4 * r) : "memory");
                if (k[0] == NO_ROW) break;
            } else {
#pragma unroll
                for (int j = 0; j < 4; ++j) k[j] = min(first + r + j, last_row);
            }
            if (whole) {
#pragma unroll
                for (int j = 0; j < 4; ++j)
                    cp_async_16(to + j * LINE_B, reinterpret_cast<const void*>(from_b + static_cast<u64>(k[j]) * pitch_b));
            } else {
#pragma unroll
                for (int j = 0; j < 4; ++j)
                    cp_async_16(to + j * LINE_B, reinterpret_cast<const void*>(from_b + static_cast<u64>(k[j]) * pitch_b), width);
            }
        }
        const int vector = kt * s.tile_kept, slot = threadIdx.x / CHUNKS_A;
        const u64 step = static_cast<u64>(PASS_A) * s.data_pitch;
        u64 from = from_a + static_cast<u64>(static_cast<u32>(vector)) * s.data_pitch;
        to = stage + to_a;
        if (vector + s.tile_kept <= s.W) {
#pragma unroll 4
            for (int r = slot; r < s.tile_kept; r += PASS_A, to += PASS_A * LINE_A, from += step)
                cp_async_16(to, reinterpret_cast<const void*>(from));
        } else {  // the last k tile: what is past the last vector is zero
#pragma unroll 1
            for (int r = slot; r < s.tile_kept; r += PASS_A, to += PASS_A * LINE_A, from += step)
                cp_async_16(to, reinterpret_cast<const void*>(vector + r < s.W ? from : from_a), vector + r < s.W ? 16 : 0);
        }
    }
};

template <class T, class Sum, class Out, int TR, int WARPS_M, int WARPS_N, int STAGES, bool PACKED>
__global__ void __launch_bounds__(32 * WARPS_M * WARPS_N, sizeof(Sum) == 8 || TR < 4 ? 1 : 16 / (WARPS_M * WARPS_N))
spmm_vector_nm(const Shape s, const T* __restrict__ data, const u32* __restrict__ records,
               const T* __restrict__ B, u32 pitch_b, Out* __restrict__ C, int N, i64 step_m, i64 step_n, i64 split_stride) {
    constexpr int QUADS = 2, COLS = 4 * QUADS;  // of a thread
    constexpr int BM = 32 * WARPS_M, BN = 32 * QUADS * WARPS_N, THREADS = 32 * WARPS_M * WARPS_N, LINE_A = BM * sizeof(T);
    static_assert(TR == 1 || TR == 2 || TR == 4 || TR == 8, "a thread's 8 rows are whole runs of TR rows");
    extern __shared__ __align__(128) unsigned char shared[];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int row_tile = blockIdx.x % s.row_tiles, m0 = row_tile * BM, n0 = blockIdx.x / s.row_tiles * BN;
    const int first = blockIdx.z * s.k_per_split, last = min(first + s.k_per_split, s.k_tiles);
    const int m = warp / WARPS_N * 32 + lane / 8 * 8, n = warp % WARPS_N * (32 * QUADS) + lane % 8 * 4;  // and n + 32, ..
    const u32 base = shared_address(shared);

    u32 own_slots = m / s.group_rows * s.slots * 4;  // bytes before those of this thread in a record, if its rows share them
    asm volatile("" : "+r"(own_slots));  // the compiler would divide again in every k tile
    wait_for_launch_before();
    Sum acc[8][COLS] = {};
    const Copies<T, BM, BN, THREADS, PACKED> copies(s, data, B, pitch_b, N, m0, n0);
    for_each_k_tile_by<T, BM, BN, THREADS, STAGES>(
        s, shared, records, row_tile, s.group_rows, first, last,
        [&](u32 stage, u32 rows, int kt) { copies.start(s, stage, rows, kt); },
        [&](u32 b_lines, u32 a_lines, u32 record) {
            const u32 b = b_lines + n * static_cast<u32>(sizeof(T)), a = a_lines + m * static_cast<u32>(sizeof(T));
            if constexpr (TR == 8) {
                multiply_k_tile<T, Sum, QUADS, LINE_A>(acc, record + own_slots, a, b, s.slots);
            } else {
                u32 slots[8 / TR];
#pragma unroll
                for (int i = 0; i < 8 / TR; ++i) slots[i] = record + (m + i * TR) / s.group_rows * s.slots * 4;
#pragma unroll 4
                for (int k = 0; k < s.slots; ++k) {
                    Sum av[8], bv[COLS];
                    load_four(av, a + k * LINE_A, T());
                    load_four(av + 4, a + k * LINE_A + 4 * sizeof(T), T());
#pragma unroll
                    for (int i = 0; i < 8; ++i) {
                        if (i % TR == 0) {
                            const u32 at = b + load_shared_word(slots[i / TR] + 4 * k);
#pragma unroll
                            for (int h = 0; h < QUADS; ++h) load_four(bv + 4 * h, at + h * 32 * sizeof(T), T());
                        }
#pragma unroll
                        for (int j = 0; j < COLS; ++j) acc[i][j] += av[i] * bv[j];
                    }
                }
            }
        });

    store_sums<QUADS>(acc, C + blockIdx.z * split_stride, s.M, N, m0 + m, n0 + n, step_m, step_n);
}

}  // namespace spformat::vector_nm
