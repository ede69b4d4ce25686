// C[M,N] = A[M,K] @ B[K,N], A 2:4 sparse (format two-four), by mma.sp m16n8k32 with float32 sums, operands by TMA. sm_90 up.
//
//   weights u64[Mp/16, Kp/64 * 144]  records of two_four_records.cu; Mp = pad(M, 32), Kp = pad(K, 64); box 144 x TM/16
//   b       T[K, N]         box 64 columns x 64 rows (BCol: T[N, K], 64 x 64), 128-byte swizzle
//   c       Out[M, N]       row i at c + i*ldc (CCol: column n at c + n*ldc); every element is written
//   Epilogue: C = alpha * A @ B + beta * C + bias (Out[M] or null) instead of A @ B; C is read only if beta is not 0
//
// Why not cp.async: mma.sp leaves no room beside it. Every other instruction costs about 0.8 clocks of the tensor cores, and the
// copies of a slab were half of a warp's instructions (docs/decisions/0007). Here a slab is three loads, one each by the first
// lane of three warps; the rest of the loop is products and ldmatrix.
//
// Grid: at most as many blocks as run at once; a block takes every gridDim.x-th TM x 128 tile, in groups of GROUP rows of tiles
// for L2 reuse, and its loads run on into the next tile while it stores. Fragments as in spmm_two_four.cu. A stage holds 64
// columns of A and 64 rows of B:
//
//   B       TN/64 parts of 64 lines of 128 bytes: line = row of B (BCol: column of B)
//   A       TM/16 records: a lane has its four registers in one load, and one ldmatrix.x4 hands a warp the metadata of 64 rows
//
// What lies outside the tensors arrives as zero.
#include "spformat/affine.cuh"
#include "spformat/ldmatrix.cuh"
#include "spformat/mma.cuh"
#include "spformat/staged_store.cuh"
#include "spformat/tma.cuh"
#include "spformat/two_four_stream.cuh"

using namespace spformat;

constexpr int DEPTH = 64;     // columns of A in a stage
constexpr int GROUP = 8;      // rows of tiles that are walked together
constexpr int RECORD = 1152;  // bytes
constexpr int LOADERS = 3;    // warps that load a part of each slab
constexpr int RING = 4;       // fragments of B in registers
constexpr int BARRIERS = 64;  // bytes
constexpr int AHEAD = 2;      // column tiles between the loads of fragments and their products

template <class T, class Out, int TM, int TN, int Stages, bool BCol, bool CCol, bool Epilogue>
__global__ void __launch_bounds__((TM / 64) * (TN / 64) * 32, 1)
spmm_two_four_sm90(const __grid_constant__ TensorMap weights, const __grid_constant__ TensorMap b, int M, int K, Out* c, int N, i64 ldc,
                   const Out* __restrict__ bias, float alpha, float beta) {
    constexpr int MT = 4, NT = 8, WARPS = (TM / 64) * (TN / 64), S = Stages;
    constexpr int STEPS = 2 * NT;      // a step multiplies all row tiles with 8 columns over 32 columns of A
    constexpr int TURN = NT + 2;       // the step from which on the next slab's fragments are loaded
    constexpr int B_PART = DEPTH * 128, A_AT = TN * 128, SLAB = A_AT + TM / 16 * RECORD;
    static_assert(TN == 128 && WARPS >= LOADERS, "warps 1 and 2 load half of B each");
    static_assert(SLAB % 1024 == 0, "the swizzle is a function of the address");
    static_assert(TURN + AHEAD <= STEPS && STEPS % RING == 0 && AHEAD < RING, "fragments of a slab are loaded from its stage");
    extern __shared__ __align__(1024) char shared[];  // the ring, its barriers, a scratch for each warp's part of C

    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int wm = warp % (TM / 64) * 64, wn = warp / (TM / 64);
    const int slabs = cdiv(K, DEPTH);
    const int tiles_m = cdiv(M, TM), tiles_n = cdiv(N, TN);
    const int tiles = tiles_m * tiles_n;  // C would not fit any memory before this overflows
    auto place = [&](int tile, int& row, int& col) {
        const int first = tile / (GROUP * tiles_n) * GROUP, at = tile % (GROUP * tiles_n);
        const int height = min(GROUP, tiles_m - first);
        row = (first + at % height) * TM;
        col = (at / height) * TN;
    };
    const u32 start = shared_address(shared), ring = (start + 1023) & ~1023u, full = ring + S * SLAB;

    // What this warp loads: 0 weights, 1 and 2 halves of B; and how far it got.
    const TensorMap* map = warp == 0 ? &weights : &b;
    const u32 load_to = warp == 0 ? A_AT : (warp - 1) * B_PART, load_bytes = warp == 0 ? SLAB - A_AT : B_PART;
    const int step_x = warp == 0 ? RECORD / 8 : BCol ? DEPTH : 0, step_y = warp >= 1 && !BCol ? DEPTH : 0;
    int load_tile = warp < LOADERS && lane == 0 ? blockIdx.x : tiles, load_slab = 0, x, y;
    auto load_from = [&]() {  // the first slab of load_tile
        int row, col;
        place(load_tile, row, col);
        col += (warp - 1) * 64;
        x = warp >= 1 && !BCol ? col : 0;
        y = warp == 0 ? row / 16 : BCol ? col : 0;
    };
    auto load = [&](int stage) {
        barrier::expect(full + stage * 8, load_bytes);
        tma::load_2d(ring + stage * SLAB + load_to, *map, full + stage * 8, x, y);
        x += step_x, y += step_y;
        if (++load_slab == slabs) load_slab = 0, load_tile += gridDim.x, load_from();
    };
    load_from();

    u32 a_frag[2][MT][4], b_frag[RING][4], e_frag[MT];
    // Offsets in a stage from which this lane loads; the rest is constant. Opaque, or the compiler computes them in every slab.
    u32 a_lane = A_AT + wm / 16 * RECORD + lane * 16, b_lane[BCol ? 2 : NT];
#pragma unroll
    for (int i = 0; i < (BCol ? 2 : NT); ++i)
        b_lane[i] = wn * B_PART + (BCol ? swizzled<128>(lane % 8, lane / 8 + i * 4) : swizzled<128>(lane, i));
    asm volatile("" : "+r"(a_lane));
#pragma unroll
    for (int i = 0; i < (BCol ? 2 : NT); ++i) asm volatile("" : "+r"(b_lane[i]));
    const u32 e_lane = A_AT + (wm / 16 + lane / 8) * RECORD + 1024 + lane % 8 * 16;
    auto load_a = [&](u32 base, int ks, int m) { shared_16(a_frag[ks][m], base + a_lane + m * RECORD + ks * 512); };
    auto load_b = [&](u32 base, int q) {  // column tile q % NT, rows 32 * (q / NT) ..+31
        if constexpr (BCol) ldmatrix_x4(b_frag[q % RING], base + b_lane[q / NT] + q % NT * 1024);
        else ldmatrix_x4_trans(b_frag[q % RING], base + b_lane[q % NT] + q / NT * 4096);
    };

    if (threadIdx.x == 0) {
#pragma unroll
        for (int i = 0; i < S; ++i) barrier::init(full + i * 8, LOADERS);
        barrier::fence_init();
    }
    __syncthreads();
    for (int i = 0; i < S - 1; ++i)
        if (load_tile < tiles) load(i);
    barrier::wait(full, 0);
    ldmatrix_x4(e_frag, ring + e_lane);
#pragma unroll
    for (int m = 0; m < MT; ++m) load_a(ring, 0, m);
#pragma unroll
    for (int q = 0; q < AHEAD; ++q) load_b(ring, q);

    int stage = 0, fill = S - 1;  // the stage that is read, and the one that is filled: that of the slab before
    u32 here = ring, phase = 0;
    char* scratch = shared + (ring - start) + S * SLAB + BARRIERS + warp * store_m16_scratch<Out, NT>;
    const bool c_vector = vector_aligned(c, ldc);
#pragma unroll 1
    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        const bool last_tile = tile + int(gridDim.x) >= tiles;
        float acc[MT][NT][4] = {};
#pragma unroll 1
        for (int slab = 0; slab < slabs; ++slab) {
            const bool wraps = stage == S - 1;
            const u32 next = wraps ? ring : here + SLAB;
            u32 e_now[MT];
#pragma unroll
            for (int m = 0; m < MT; ++m) e_now[m] = e_frag[m];
#pragma unroll
            for (int q = 0; q < STEPS; ++q) {
                const int ks = q / NT, n = q % NT;
                if (q == TURN) {
                    __syncthreads();  // no warp reads the slab before this one any more
                    if (load_tile < tiles) load(fill);
                    if (slab + 1 < slabs || !last_tile) barrier::wait(wraps ? full : full + (stage + 1) * 8, wraps ? phase ^ 1 : phase);
                }
                if (q + AHEAD < STEPS) load_b(here, q + AHEAD);
                else load_b(next, q + AHEAD - STEPS);
#pragma unroll
                for (int m = 0; m < MT; ++m) {
                    if (ks == 0 && m * NT / MT == n) load_a(here, 1, m);
                    if (TURN + m * (STEPS - TURN) / MT == q) load_a(next, 0, m);
                }
                if (q == TURN + 1) ldmatrix_x4(e_frag, next + e_lane);
                const u32(&w)[4] = b_frag[q % RING];
#pragma unroll
                for (int m = 0; m < MT; ++m) {
                    if (ks == 0) mma_sp_m16n8k32<T, 0>(acc[m][n], a_frag[0][m], w[0], w[1], w[2], w[3], e_now[m]);
                    else mma_sp_m16n8k32<T, 1>(acc[m][n], a_frag[1][m], w[0], w[1], w[2], w[3], e_now[m]);
                }
            }
            fill = stage;
            here = next;
            stage = wraps ? 0 : stage + 1;
            phase ^= wraps;
        }
        int row0, col0;
        place(tile, row0, col0);
#pragma unroll
        for (int m = 0; m < MT; ++m) {
            const int row = row0 + wm + m * 16, col = col0 + wn * 64;
            if constexpr (Epilogue)
                affine_m16<Out, CCol, NT>(&acc[m][0][0], c, ldc, row, col, M, N, bias_m16(bias, row, M), alpha, beta);
            store_m16<Out, CCol, NT>(&acc[m][0][0], scratch, c, ldc, row, col, M, N, c_vector);
        }
    }
}
