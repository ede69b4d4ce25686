// C[M,N] = A[M,K] @ B[K,N], A vector n:m (NM-SpMM), in exact float32 on the CUDA cores of Hopper and later: the sums of
// spmm_vector_nm.cu, bit by bit, but the copy engine brings the operands.
//
//   a_map            float data[W, Mp], k-major; boxes of a k tile's kept vectors x a tile's rows
//   shape, table     see vector_nm.cuh: records of k tiles of whole windows, not packed
//   b_map            float B[K, N]; boxes of a k tile's columns of A x a tile's columns
//   C                Out, element (m, n) at m*step_m + n*step_n, one step is 1; or, splits > 1, as many of float: vector_nm_sums.cu
//
// Grid (row tiles * column tiles, 1, splits), row tiles fastest; block 32*WARPS_M*WARPS_N threads.
// A and B come as one box each, with all rows of B of a k tile: the best tiles are faster so than with only the rows that they
// need (decision 0045). A k tile so costs a warp few instructions beside its products, and no warp waits for another one in it:
// it is multiplied when its barrier says that it arrived, and whichever warp is the last to be through with a stage starts the
// boxes that follow there.
#include "spformat/tma.cuh"
#include "spformat/vector_nm_cuda_cores.cuh"

namespace spformat::vector_nm {

// Shared memory: STAGES x (B lines, zero line, A lines), then 2 * STAGES records, STAGES barriers that say that a stage is full,
// STAGES barriers that say that all threads have read it, STAGES counters of warps that have.
template <int WARPS_M, int WARPS_N, int QUADS, int STAGES> struct Ring {
    static constexpr int BM = 32 * WARPS_M, BN = 32 * QUADS * WARPS_N, WARPS = WARPS_M * WARPS_N, LINE_A = BM * 4, LINE_B = BN * 4;

    u32 base, a_lines, stage_bytes, records, record_bytes, barriers;
    __device__ __forceinline__ Ring(const Shape& s, u32 shared)
        : base(shared), a_lines((s.staged + 1) * LINE_B), stage_bytes(a_lines + s.slots * LINE_A),
          records(shared + STAGES * stage_bytes), record_bytes(s.record * 4), barriers(records + 2 * STAGES * record_bytes) {}

    // The boxes of k tile kt, which is number `turn` of this block, and of the record STAGES k tiles later; one thread.
    // `last`: the k tile behind the block's last one. What a box has beyond A or B arrives as zeros.
    __device__ __forceinline__ void start(const Shape& s, const TensorMap& a_map, const u32* table, const TensorMap& b_map,
                                          int row_tile, int n0, u32 turn, int kt, int last) const {
        const u32 full = barriers + turn % STAGES * 8, to = base + turn % STAGES * stage_bytes;
        const bool ahead = kt + STAGES < last;
        barrier::expect(full, s.tile_cols * LINE_B + s.tile_kept * LINE_A + (ahead ? record_bytes : 0));
        tma::load_2d(to, b_map, full, n0, kt * s.tile_cols);
        tma::load_2d(to + a_lines, a_map, full, row_tile * BM, kt * s.tile_kept);
        if (ahead)
            tma::load_bulk(records + (turn + STAGES) % (2 * STAGES) * record_bytes,
                           table + (static_cast<i64>(row_tile) * s.k_tiles + kt + STAGES) * s.record, record_bytes, full);
    }
};

// A multiprocessor has registers for the sums and two sets of operands of 32 / QUADS warps.
template <class Out, int WARPS_M, int WARPS_N, int QUADS, int STAGES>
__global__ void __launch_bounds__(32 * WARPS_M * WARPS_N, 32 / QUADS / (WARPS_M * WARPS_N))
spmm_vector_nm_sm90(const __grid_constant__ TensorMap a_map, const Shape s, const u32* __restrict__ table,
                    const __grid_constant__ TensorMap b_map, Out* __restrict__ C, int N, i64 step_m, i64 step_n,
                    i64 split_stride) {
    using R = Ring<WARPS_M, WARPS_N, QUADS, STAGES>;
    constexpr int THREADS = 32 * R::WARPS;
    extern __shared__ __align__(128) unsigned char shared[];
    const R ring(s, shared_address(shared));
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int row_tile = blockIdx.x % s.row_tiles, n0 = blockIdx.x / s.row_tiles * R::BN;
    const int first = blockIdx.z * s.k_per_split, last = min(first + s.k_per_split, s.k_tiles);
    const int m = warp / WARPS_N * 32 + lane / 8 * 8, n = warp % WARPS_N * (32 * QUADS) + lane % 8 * 4;  // and n + 32, ..
    const u32 empty = ring.barriers + STAGES * 8;
    u32* counters = reinterpret_cast<u32*>(shared + (empty - ring.base) + STAGES * 8);

    // Written once, read where a slot is empty: the zero row of B and the lines of A past tile_kept.
    for (int st = 0; st < STAGES; ++st) {
        u32* zero = reinterpret_cast<u32*>(shared + st * ring.stage_bytes + s.staged * R::LINE_B);
        for (int i = threadIdx.x; i < R::LINE_B / 4; i += THREADS) zero[i] = 0;
        zero = reinterpret_cast<u32*>(shared + st * ring.stage_bytes + ring.a_lines + s.tile_kept * R::LINE_A);
        for (int i = threadIdx.x; i < (s.slots - s.tile_kept) * (R::LINE_A / 4); i += THREADS) zero[i] = 0;
    }
    // The first STAGES records are fetched alone; later ones come with the k tile STAGES before theirs.
    for (int t = 0; t < STAGES && first + t < last; ++t) {
        const u32* from = table + (static_cast<i64>(row_tile) * s.k_tiles + first + t) * s.record;
        for (int i = threadIdx.x; i < s.record; i += THREADS)
            *reinterpret_cast<u32*>(shared + (ring.records - ring.base) + t * ring.record_bytes + i * 4) = from[i];
    }
    if (threadIdx.x < STAGES) {
        barrier::init(ring.barriers + threadIdx.x * 8, 1);
        barrier::init(empty + threadIdx.x * 8, THREADS);
        barrier::fence_init();
        counters[threadIdx.x] = 0;
    }
    __syncthreads();
    if (threadIdx.x == 0)
        for (int t = 0; t < STAGES && first + t < last; ++t)
            ring.start(s, a_map, table, b_map, row_tile, n0, t, first + t, last);

    u32 own_slots = m / s.group_rows * s.slots * 4;  // bytes before those of this thread in a record
    asm volatile("" : "+r"(own_slots));              // the compiler would divide again in every k tile
    float acc[8][4 * QUADS] = {};
#pragma unroll 1
    for (int turn = 0; first + turn < last; ++turn) {
        const u32 at = static_cast<u32>(turn) % STAGES, stage = ring.base + at * ring.stage_bytes;
        barrier::wait(ring.barriers + at * 8, static_cast<u32>(turn) / STAGES % 2);
        const u32 slots = ring.records + static_cast<u32>(turn) % (2 * STAGES) * ring.record_bytes + own_slots;
        const u32 a = stage + ring.a_lines + m * 4, b = stage + n * 4;
        multiply_k_tile<float, float, QUADS, R::LINE_A>(acc, slots, a, b, s.slots);
        if (first + turn + STAGES < last) {
            barrier::arrive(empty + at * 8);  // every lane for its own reads
            __syncwarp();
            if (lane == 0 && atomicAdd(counters + at, 1) % R::WARPS == R::WARPS - 1) {  // the last warp: nobody waits here
                barrier::wait(empty + at * 8, static_cast<u32>(turn) / STAGES % 2);
                ring.start(s, a_map, table, b_map, row_tile, n0, turn + STAGES, first + turn + STAGES, last);
            }
        }
    }
    store_sums<QUADS>(acc, C + blockIdx.z * split_stride, s.M, N, row_tile * R::BM + m, n0 + n, step_m, step_n);
}

}  // namespace spformat::vector_nm
