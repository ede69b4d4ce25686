// C[M,N] = A[M,K] @ B[K,N], A vector n:m (NM-SpMM), in exact float32 on the CUDA cores of Hopper and later: the sums of
// spmm_vector_nm.cu, bit by bit, but the copy engine brings the operands.
//
//   shape, records   see vector_nm.cuh; always records of tiles of whole windows, or packed ones
//   data             float[W, Mp], k-major; the pitch a multiple of 16 bytes
//   B                float, rows pitch_b bytes apart; pointer and pitch multiples of 16; N a multiple of 4
//   C                Out, element (m, n) at m*step_m + n*step_n, one step is 1; or, splits > 1, float[splits, M, N]
//
// Grid (row tiles * column tiles, 1, splits), row tiles fastest; block 32*WARPS_M*WARPS_N threads.
// Every row of B and every line of A is one bulk copy, so that a k tile costs a warp few instructions beside its products: with
// cp.async they were 7 % (16:32) to 28 % (4:32) of all. No warp waits for another one: whichever is the last to be through with
// a stage starts the copies of the k tile that follows there, and a k tile is multiplied when its barrier says that it arrived.
#include "spformat/tma.cuh"
#include "spformat/vector_nm_cuda_cores.cuh"

namespace spformat::vector_nm {

// Shared memory: STAGES x (B lines, zero line, A lines), then 2 * STAGES records, STAGES barriers, STAGES counters.
template <int WARPS_M, int WARPS_N, int QUADS, int STAGES, bool PACKED> struct Ring {
    static constexpr int BM = 32 * WARPS_M, BN = 32 * QUADS * WARPS_N, WARPS = WARPS_M * WARPS_N, LINE_A = BM * 4, LINE_B = BN * 4;

    u32 base, a_lines, stage_bytes, records, record_bytes, barriers;
    __device__ __forceinline__ Ring(const Shape& s, u32 shared)
        : base(shared), a_lines((s.staged + 1) * LINE_B), stage_bytes(a_lines + s.slots * LINE_A),
          records(shared + STAGES * stage_bytes), record_bytes(s.record * 4), barriers(records + 2 * STAGES * record_bytes) {}

    // The copies of k tile kt, which is number `turn` of this block, and of the record STAGES k tiles later; one warp.
    // `last`: the k tile behind the block's last one.
    __device__ __forceinline__ void start(const Shape& s, const float* data, const u32* table, const float* B, u32 pitch_b,
                                          int N, int row_tile, int n0, u32 turn, int kt, int last) const {
        const int lane = threadIdx.x % 32, m0 = row_tile * BM;
        const u32 full = barriers + turn % STAGES * 8, to = base + turn % STAGES * stage_bytes;
        const u32 rows = records + turn % (2 * STAGES) * record_bytes + BM / s.group_rows * s.slots * 4;
        const u32 width_b = min(BN, N - n0) * 4, width_a = min(static_cast<u32>(LINE_A), s.data_pitch - m0 * 4);
        const int vector = kt * s.tile_kept, lines = min(s.tile_kept, s.W - vector);
        const bool ahead = kt + STAGES < last;
        int there = min(s.staged, max(0, s.K - kt * s.tile_cols));  // rows of B; none where the file pads K to whole tiles
        if constexpr (PACKED) {
            there = 0;
            for (int r = lane; r - lane < s.staged; r += 32)
                there += __popc(__ballot_sync(0xFFFFFFFF, r < s.staged && load_shared_word(rows + 4 * r) != NO_ROW));
        }
        // Lines of A that the last k tile has not: what was there might be infinite, and is multiplied by zero.
        for (int i = lines * LINE_A + lane * 16; i < s.tile_kept * LINE_A; i += 512)
            asm volatile("st.shared.v4.u32 [%0], {%1,%1,%1,%1};" ::"r"(to + a_lines + i), "r"(0) : "memory");
        __syncwarp();
        if (lane == 0) barrier::expect(full, there * width_b + lines * width_a + (ahead ? record_bytes : 0));
        __syncwarp();
        const u64 from_b = reinterpret_cast<u64>(B + n0);
        for (int r = lane; r < there; r += 32) {
            const u32 k = PACKED ? load_shared_word(rows + 4 * r) : kt * s.tile_cols + r;
            tma::load_bulk(to + r * LINE_B, reinterpret_cast<const void*>(from_b + static_cast<u64>(k) * pitch_b), width_b, full);
        }
        const u64 from_a = reinterpret_cast<u64>(data + m0) + static_cast<u64>(vector) * s.data_pitch;
        for (int r = lane; r < lines; r += 32)
            tma::load_bulk(to + a_lines + r * LINE_A,
                           reinterpret_cast<const void*>(from_a + static_cast<u64>(r) * s.data_pitch), width_a, full);
        if (ahead && lane == 0)
            tma::load_bulk(records + (turn + STAGES) % (2 * STAGES) * record_bytes,
                           table + (static_cast<i64>(row_tile) * s.k_tiles + kt + STAGES) * s.record, record_bytes, full);
    }
};

template <class Out, int WARPS_M, int WARPS_N, int QUADS, int STAGES, bool PACKED>
__global__ void __launch_bounds__(32 * WARPS_M * WARPS_N, 32 / QUADS < WARPS_M * WARPS_N ? 1 : 32 / QUADS / (WARPS_M * WARPS_N))
spmm_vector_nm_sm90(const Shape s, const float* __restrict__ data, const u32* __restrict__ table,
                    const float* __restrict__ B, u32 pitch_b, Out* __restrict__ C, int N, i64 step_m, i64 step_n, i64 split_stride) {
    using R = Ring<WARPS_M, WARPS_N, QUADS, STAGES, PACKED>;
    constexpr int THREADS = 32 * R::WARPS;
    extern __shared__ __align__(128) unsigned char shared[];
    const R ring(s, shared_address(shared));
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int row_tile = blockIdx.x % s.row_tiles, n0 = blockIdx.x / s.row_tiles * R::BN;
    const int first = blockIdx.z * s.k_per_split, last = min(first + s.k_per_split, s.k_tiles);
    const int m = warp / WARPS_N * 32 + lane / 8 * 8, n = warp % WARPS_N * (32 * QUADS) + lane % 8 * 4;  // and n + 32, ..
    u32* counters = reinterpret_cast<u32*>(shared + (ring.barriers - ring.base) + STAGES * 8);

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
        barrier::fence_init();
        counters[threadIdx.x] = 0;
    }
    __syncthreads();
    if (warp == 0)
        for (int t = 0; t < STAGES && first + t < last; ++t)
            ring.start(s, data, table, B, pitch_b, N, row_tile, n0, t, first + t, last);

    u32 own_slots = m / s.group_rows * s.slots * 4;  // bytes before those of this thread in a record
    asm volatile("" : "+r"(own_slots));              // the compiler would divide again in every k tile
    float acc[8][4 * QUADS] = {};
#pragma unroll 1
    for (int turn = 0; first + turn < last; ++turn) {
        const u32 at = static_cast<u32>(turn) % STAGES, stage = ring.base + at * ring.stage_bytes;
        barrier::wait(ring.barriers + at * 8, static_cast<u32>(turn) / STAGES % 2);
        multiply_k_tile<float, float, QUADS, R::LINE_A>(
            acc, ring.records + static_cast<u32>(turn) % (2 * STAGES) * ring.record_bytes + own_slots,
            stage + ring.a_lines + m * 4, stage + n * 4, s.slots);
        if (first + turn + STAGES < last) {
            __syncwarp();
            u32 through = 0;
            if (lane == 0) {
                __threadfence_block();  // the reads of this warp come before ..
                through = atomicAdd(counters + at, 1);
                __threadfence_block();  // .. and the copies after those of every warp
            }
            through = __shfl_sync(0xFFFFFFFF, through, 0);
            if (through % R::WARPS == R::WARPS - 1)
                ring.start(s, data, table, B, pitch_b, N, row_tile, n0, turn + STAGES, first + turn + STAGES, last);
        }
    }
    store_sums<QUADS>(acc, C + blockIdx.z * split_stride, s.M, N, row_tile * R::BM + m, n0 + n, step_m, step_n);
}

}  // namespace spformat::vector_nm
