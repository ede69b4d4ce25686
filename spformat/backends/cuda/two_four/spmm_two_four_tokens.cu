// C[M,N] = alpha * A[M,K] @ B[K,N] + bias + beta * C for few columns (N <= 64), A 2:4 sparse (format two-four): reads the
// weights once. sm_80 and later.
//
//   weights   u32[Mp/16 * Kp/64 + SPARE, 288]  records of two_four_records.cu; Mp = pad(M, 32), Kp = pad(K, 64)
//   b         T[K, N]         row k at b + k*ldb (BCol: column n at b + n*ldb)
//   c         Out[M, N]       row i at c + i*ldc (CCol: column n at c + n*ldc); every element is written
//   partials  f32[tiles, Splits, ROWS*NT*8], counters  u32[tiles], zero: only without Cluster and with Splits > 1
//   bias      Out[M], or null
//
// Grid: (tiles of ROWS = 16*MT rows, Splits ranges of K); N <= 8*NT. The warps of a block take every Warps-th slab of 64
// columns of its range, each with a ring of Slots slabs of its own, weights and B, by cp.async: no warp waits for another
// before the sums are added, and most of what a block reads is under way from the start. Weights are marked evict-first: L2
// then replaces weights that were read already, not lines that would first have to be written to memory.
// How the sums come to C: token_sums.cuh.
//
//   Blocks    blocks that run on a multiprocessor at a time (__launch_bounds__)
//   Cluster   the Splits blocks of a tile are one cluster
//   Epilogue  false: alpha = 1, beta = 0, no bias
#include "spformat/cp_async.cuh"
#include "spformat/launch_order.cuh"
#include "spformat/ldmatrix.cuh"
#include "spformat/mma.cuh"
#include "spformat/staged_store.cuh"
#include "spformat/token_sums.cuh"

using namespace spformat;

constexpr int DEPTH = 64;     // columns of A in a slab
constexpr int RECORD = 1152;  // bytes of 16 rows of a slab

template <class T, class Out, int MT, int NT, int Warps, int Slots, int Blocks, int Splits, bool Cluster, bool BCol, bool CCol,
          bool Epilogue>
__global__ void CLUSTER_OF(Cluster ? Splits : 1) __launch_bounds__(Warps * 32, Blocks)
spmm_two_four_tokens(const char* __restrict__ weights, int M, int K, const T* __restrict__ b, Out* c, int N,
                     i64 ldb, i64 ldc, float* partials, u32* counters, const Out* __restrict__ bias, float alpha, float beta) {
    static_assert(BCol ? NT >= 1 && NT <= 8 : NT == 1 || NT == 2 || NT == 4 || NT == 8, "a line of a row-major slab is a power of two");
    constexpr int ROWS = 16 * MT, COLS = NT * 8, SUMS = ROWS * COLS;
    constexpr int WEIGHTS = MT * RECORD, SLOT = WEIGHTS + DEPTH * COLS * 2;  // bytes
    static_assert(SUMS * 4 <= Slots * SLOT, "the sums reuse the ring");
    extern __shared__ __align__(128) char shared[];

    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int Mp = cdiv(M, 32) * 32, slabs = cdiv(K, DEPTH), split = blockIdx.y;
    const int begin = int(i64(slabs) * split / Splits) + warp, end = int(i64(slabs) * (split + 1) / Splits);
    const int row0 = blockIdx.x * ROWS, steps = begin < end ? cdiv(end - begin, Warps) : 0;
    const u32 ring = shared_address(shared) + warp * (Slots * SLOT);
    const bool b_vector = vector_aligned(b, ldb);
    const u64 policy = evict_first();

    constexpr int CHUNKS = cdiv(WEIGHTS, 512);  // of 16 bytes that a lane copies
    const char* from[CHUNKS];
#pragma unroll
    for (int i = 0; i < CHUNKS; ++i) {
        const int at = i * 512 + lane * 16, tile = min(row0 / 16 + at / RECORD, Mp / 16 - 1);  // beyond Mp: never written to C
        from[i] = weights + (i64(tile) * slabs + begin) * RECORD + at % RECORD;
    }
    let_next_launch_begin();
    wait_for_launch_before();

    // B: this lane's first chunk of a slab, at row (BCol: column) `across` and offset `along` there; the next ones follow LINES
    // rows (columns) apart.
    constexpr int LINE = BCol ? DEPTH * 2 : NT * 16;  // bytes
    constexpr int PER_LINE = LINE / 16, LINES = 32 / PER_LINE;
    const int across = lane / PER_LINE, chunk = lane % PER_LINE, along = chunk * 8;
    const T* from_b = b + (BCol ? i64(across) * ldb + begin * DEPTH + along : i64(begin * DEPTH + across) * ldb + along);

    auto copy = [&](int step) {
        const u32 to = ring + step % Slots * SLOT;
#pragma unroll
        for (int i = 0; i < CHUNKS; ++i)
            if (i * 512 + 512 <= WEIGHTS || i * 512 + lane * 16 < WEIGHTS)
                cp_async_16_policy(to + i * 512 + lane * 16, from[i] + i64(step) * (Warps * RECORD), policy);
        const int k0 = (begin + step * Warps) * DEPTH;
        const T* slab_b = from_b + i64(step) * (Warps * DEPTH) * (BCol ? 1 : ldb);
#pragma unroll
        for (int i = 0; i < DEPTH * NT / 32; ++i) {
            const int line = across + i * LINES, k = k0 + (BCol ? along : line), n = BCol ? line : along;
            const int left = (k < K && n < N) ? min(BCol ? K - k : N - n, 8) : 0;
            const T* chunk_from = left ? slab_b + i64(i) * LINES * ldb : b;
            const u32 chunk_to = to + WEIGHTS + swizzled<LINE>(line, chunk);
            if (b_vector) cp_async_16(chunk_to, chunk_from, left * 2);
            else copy_singly_16(chunk_to, chunk_from, left);
        }
    };

    const u32 b_lane = BCol ? swizzled<LINE>(lane % 8, lane / 8) : swizzled<LINE>(lane, 0);

    float acc[MT][NT][4];
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int n = 0; n < NT; ++n)
#pragma unroll
            for (int r = 0; r < 4; ++r) acc[m][n][r] = 0.0f;

#pragma unroll 1
    for (int step = 0; step < Slots; ++step) {
        if (step < steps) copy(step);
        cp_async_commit();
    }
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
        cp_async_wait<Slots - 1>();
        __syncwarp();
        const u32 slot = ring + step % Slots * SLOT, slab_b = slot + WEIGHTS;
        const char* records = shared + (slot - shared_address(shared));
        uint4 kept[MT][2];
        u32 e[MT];
#pragma unroll
        for (int m = 0; m < MT; ++m) {
            kept[m][0] = reinterpret_cast<const uint4*>(records + m * RECORD)[lane];
            kept[m][1] = reinterpret_cast<const uint4*>(records + m * RECORD)[lane + 32];
            e[m] = reinterpret_cast<const u32*>(records + m * RECORD + 1024)[lane];
        }
#pragma unroll
        for (int n = 0; n < NT; ++n) {
            u32 w[2][4];
#pragma unroll
            for (int p = 0; p < 2; ++p) {
                if constexpr (BCol) ldmatrix_x4(w[p], slab_b + n * 1024 + (b_lane ^ (p * 64)));
                else ldmatrix_x4_trans(w[p], slab_b + p * (32 * NT * 16) + (b_lane ^ (n * 16)));
            }
#pragma unroll
            for (int m = 0; m < MT; ++m) {
                const uint4 x = kept[m][0], y = kept[m][1];
                const u32 first[4] = {x.x, x.y, x.z, x.w}, second[4] = {y.x, y.y, y.z, y.w};
                mma_sp_m16n8k32<T, 0>(acc[m][n], first, w[0][0], w[0][1], w[0][2], w[0][3], e[m]);
                mma_sp_m16n8k32<T, 1>(acc[m][n], second, w[1][0], w[1][1], w[1][2], w[1][3], e[m]);
            }
        }
        __syncwarp();
        if (step + Slots < steps) copy(step + Slots);
        cp_async_commit();
    }
    cp_async_wait<0>();
    __syncthreads();

    const tokens::Result<Out> result{c, ldc, M, N, bias, alpha, beta};
    tokens::add_up<Out, MT, NT, Warps, Splits, Cluster, CCol, Epilogue>(acc, shared, result, partials, counters);
}
