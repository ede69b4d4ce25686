// C[M,N] = A[M,K] @ B[K,N], A 2:4 sparse (format two-four), by mma.sp m16n8k32 with float32 sums. sm_80 and later.
//
//   weights  u32x4[Mp/16 * Kp/64, 72]  records of two_four_records.cu; Mp = pad(M, 32), Kp = pad(K, 64)
//   b        T[K, N]        row k at b + k*ldb (BCol: column n at b + n*ldb)
//   c        Out[M, N]      row i at c + i*ldc (CCol: column n at c + n*ldc); every element is written
//   Aligned: b and ldb allow 16-byte copies; without it B comes element by element
//   Epilogue: C = alpha * A @ B + beta * C + bias (Out[M] or null) instead of A @ B; C is read only if beta is not 0
//
// Grid: one block per TM x TN tile of C, WM x WN of it per warp; tiles go in groups of GROUP rows of tiles for L2 reuse.
// A slab of 64 columns of A and 64 rows of B is one pipeline stage in shared memory:
//
//   A       the values of TM/16 records, 1024 bytes each: a lane has its four registers in one load
//   B       64 lines of TN values (BCol: TN lines of 64 values), swizzled
//   meta    TM/16 tiles of 8 x 16 bytes, the metadata of the records;
//           one ldmatrix.x4 hands a warp the words of 64 rows x 64 columns, lanes t = 0, 1 those of columns 0..31 (selector
//           0), lanes t = 2, 3 those of columns 32..63 (selector 1)
//
// Rows at or beyond Mp repeat the last stored row (never stored to C); rows of B at or beyond K read as zero.
// Limits: M, N, K < 2^31 and Kp < 2^24 (a tile is addressed with offsets of 32 bits in units of 16 bytes). mma.sp: PTX ISA, "mma.sp"; the two-level
// staging follows the usual multi-stage cp.async GEMM.
#include "spformat/affine.cuh"
#include "spformat/cp_async.cuh"
#include "spformat/staged_store.cuh"
#include "spformat/ldmatrix.cuh"
#include "spformat/mma.cuh"
#include "spformat/two_four_stream.cuh"

using namespace spformat;

constexpr int DEPTH = 64;  // columns of A in a stage
constexpr int RECORD = 72;  // units of 16 bytes: 64 of values, 8 of metadata
constexpr int GROUP = 8;   // rows of tiles that are walked together

template <int TM, int TN> struct Stage {
    static constexpr int a = 0, b = TM * DEPTH, meta = b + TN * DEPTH * 2, bytes = meta + TM * 8;
};

template <class T, class Out, int TM, int TN, int WM, int WN, int Stages, bool BCol, bool CCol, bool Aligned, bool Epilogue>
__global__ void __launch_bounds__((TM / WM) * (TN / WN) * 32, 1)
spmm_two_four(const uint4* __restrict__ weights, int M, int K, const T* __restrict__ b, Out* c, int N,
              i64 ldb, i64 ldc, const Out* __restrict__ bias, float alpha, float beta) {
    constexpr int MT = WM / 16, NT = WN / 8, THREADS = (TM / WM) * (TN / WN) * 32, S = Stages;
    constexpr int STEPS = NT / 2;  // a step multiplies all MT row tiles with two 8-column tiles over 32 columns of A
    static_assert(MT == 2 || MT % 4 == 0, "metadata comes by ldmatrix of 2 or 4 row tiles");
    static_assert(WN == 16 || WN == 32 || WN == 64, "the swizzle of B is stepped by exclusive or");
    static_assert((TM * 4) % THREADS == 0 && (TN * 8) % THREADS == 0, "every thread copies the same number of chunks");
    static_assert(S >= 2, "copies must run ahead of the product");
    extern __shared__ __align__(128) char shared[];
    using Layout = Stage<TM, TN>;

    const int tid = threadIdx.x, lane = tid % 32, warp = tid / 32;
    const int wm = (warp % (TM / WM)) * WM, wn = (warp / (TM / WM)) * WN;
    const int Mp = cdiv(M, 32) * 32, slabs = cdiv(K, DEPTH);
    int row0, col0;
    {
        const int tiles_m = cdiv(M, TM), tiles_n = cdiv(N, TN);
        const i64 per_group = i64(GROUP) * tiles_n;
        const int first = int(blockIdx.x / per_group) * GROUP, at = int(blockIdx.x % per_group);
        const int height = min(GROUP, tiles_m - first);
        row0 = (first + at % height) * TM;
        col0 = (at / height) * TN;
    }

    // What this thread copies in every slab: A_CHUNKS chunks of A, B_CHUNKS of B, their lines a fixed step apart so that the
    // swizzle is the same, and one of meta. A_STEP: tiles of 16 rows between two chunks of A.
    constexpr int A_CHUNKS = TM * 4 / THREADS, B_CHUNKS = TN * 8 / THREADS, META = TM / 2;
    constexpr int B_LINE = BCol ? DEPTH * 2 : TN * 2;  // bytes
    constexpr int A_STEP = THREADS / 64, B_STEP = THREADS / (B_LINE / 16);
    static_assert(THREADS % 64 == 0 && B_STEP % 8 == 0, "chunks of A are whole tiles apart, and lines of B keep the swizzle");
    const u32 a_to = Layout::a + tid * 16;
    const uint4* a_from = weights + i64(row0 / 16) * slabs * RECORD + tid % 64;  // advances by slabs, as the next two
    const int last = Mp / 16 - 1 - row0 / 16;
    u32 a_offset[A_CHUNKS];
#pragma unroll
    for (int i = 0; i < A_CHUNKS; ++i) a_offset[i] = u32(min(tid / 64 + i * A_STEP, last)) * u32(slabs) * RECORD;

    const uint4* meta_from = weights;
    if (tid < META) meta_from += (row0 / 16 + min(tid / 8, last)) * i64(slabs) * RECORD + 64 + tid % 8;

    const int b_across = tid / (B_LINE / 16), b_along = tid % (B_LINE / 16) * 8;
    const u32 b_to = Layout::b + swizzled<B_LINE>(b_across, b_along / 8);
    const T* b_from = b + (BCol ? i64(col0 + b_across) * ldb + b_along : i64(b_across) * ldb + col0 + b_along);
    const i64 b_step = i64(B_STEP) * ldb, b_slab = BCol ? i64(DEPTH) : i64(DEPTH) * ldb;
    int k_left = K;
    const int n_left = N - col0;

    auto copy_a = [&](bool wanted, int i, u32 base) {
        cp_async_16_if(wanted, base + a_to + i * (THREADS * 16), a_from + a_offset[i]);
    };
    auto copy_meta = [&](bool wanted, u32 base) {
        cp_async_16_if(wanted && tid < META, base + Layout::meta + tid * 16, meta_from);
    };
    auto copy_b = [&](bool wanted, int i, u32 base) {
        const int along_left = min(max((BCol ? k_left : n_left) - b_along, 0), 8);
        const int left = b_across + i * B_STEP < (BCol ? n_left : k_left) ? along_left : 0;
        const T* from = b_from + i * b_step;
        const u32 to = base + b_to + i * (B_STEP * B_LINE);
        if constexpr (Aligned) {
            cp_async_16_if(wanted, to, from, left * 2);
        } else if (wanted) {
            copy_singly_16(to, from, left);
        }
    };
    auto advance = [&]() {
        a_from += RECORD, meta_from += RECORD, b_from += b_slab, k_left -= DEPTH;
    };

    // Fragments: the next step's are loaded while the current step multiplies.
    u32 a_frag[2][MT][4], b_frag[2][2][4], e_frag[MT];
    const u32 a_lane = Layout::a + wm * 64 + lane * 16;
    const u32 b_lane = Layout::b + (BCol ? swizzled<128>(wn + lane % 8, lane / 8) : swizzled<TN * 2>(lane, wn / 8));
    const u32 e_lane = Layout::meta + wm * 8 + lane * 16;
    auto load_a = [&](u32 base, int ks) {
#pragma unroll
        for (int m = 0; m < MT; ++m) shared_16(a_frag[ks][m], base + a_lane + m * 1024 + ks * 512);
    };
    auto load_b = [&](u32 base, int ks, int step) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            const int nt = step * 2 + j;
            if constexpr (BCol) ldmatrix_x4(b_frag[step % 2][j], base + ((b_lane + nt * 1024) ^ (ks * 64)));
            else ldmatrix_x4_trans(b_frag[step % 2][j], base + ((b_lane + ks * (32 * TN * 2)) ^ (nt * 16)));
        }
    };
    auto load_e = [&](u32 base) {
        if constexpr (MT == 2) {
            u32 e[2];
            ldmatrix_x2(e, base + Layout::meta + wm * 8 + (lane % 16) * 16);
            e_frag[0] = e[0], e_frag[1] = e[1];
        } else {
#pragma unroll
            for (int m = 0; m < MT; m += 4) {
                u32 e[4];
                ldmatrix_x4(e, base + e_lane + m * 128);
#pragma unroll
                for (int i = 0; i < 4; ++i) e_frag[m + i] = e[i];
            }
        }
    };

    float acc[MT][NT][4] = {};

    const u32 ring = shared_address(shared);
#pragma unroll
    for (int slab = 0; slab < S - 1; ++slab) {
        const u32 base = ring + slab * Layout::bytes;
        copy_meta(slab < slabs, base);
#pragma unroll
        for (int i = 0; i < A_CHUNKS; ++i) copy_a(slab < slabs, i, base);
#pragma unroll
        for (int i = 0; i < B_CHUNKS; ++i) copy_b(slab < slabs, i, base);
        advance();
        cp_async_commit();
    }
    cp_async_wait<S - 2>();
    __syncthreads();
    if (slabs > 0) {
        load_e(ring);
        load_a(ring, 0);
        load_b(ring, 0, 0);
    }
    static_assert(STEPS % 2 == 0 || STEPS == 1, "b_frag alternates by step");
    u32 here = ring, fill = ring + (S - 1) * Layout::bytes;  // the stage that is read, and the one that is filled
    constexpr u32 ring_bytes = S * Layout::bytes;
#pragma unroll 1
    for (int slab = 0; slab < slabs; ++slab) {
        const u32 next = here + Layout::bytes == ring + ring_bytes ? ring : here + Layout::bytes;
        const bool more = slab + S - 1 < slabs;
        u32 e_now[MT];
#pragma unroll
        for (int m = 0; m < MT; ++m) e_now[m] = e_frag[m];
#pragma unroll
        for (int q = 0; q < 2 * STEPS; ++q) {
            const int ks = q / STEPS, step = q % STEPS;
            u32 b_now[2][4];
#pragma unroll
            for (int j = 0; j < 2; ++j)
#pragma unroll
                for (int r = 0; r < 4; ++r) b_now[j][r] = b_frag[step % 2][j][r];
            // A share of the copies of a later slab.
            if (q == 0) copy_meta(more, fill);
#pragma unroll
            for (int i = 0; i < A_CHUNKS; ++i)
                if (i * 2 * STEPS / A_CHUNKS == q) copy_a(more, i, fill);
#pragma unroll
            for (int i = 0; i < B_CHUNKS; ++i)
                if (i * 2 * STEPS / B_CHUNKS == q) copy_b(more, i, fill);
            if (q == 2 * STEPS - 1) {  // all fragments of this stage are in registers: on to the next
                advance();
                cp_async_commit();
                cp_async_wait<S - 2>();
                __syncthreads();
                load_b(next, 0, 0);
                load_e(next);
                load_a(next, 0);
            } else {
                load_b(here, (q + 1) / STEPS, (q + 1) % STEPS);
                if (q == 0) load_a(here, 1);
            }
#pragma unroll
            for (int m = 0; m < MT; ++m)
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    float(&d)[4] = acc[m][step * 2 + j];
                    const u32(&w)[4] = b_now[j];
                    if (ks == 0) mma_sp_m16n8k32<T, 0>(d, a_frag[0][m], w[0], w[1], w[2], w[3], e_now[m]);
                    else mma_sp_m16n8k32<T, 1>(d, a_frag[1][m], w[0], w[1], w[2], w[3], e_now[m]);
                }
        }
        here = next;
        fill = fill + Layout::bytes == ring + ring_bytes ? ring : fill + Layout::bytes;
    }
    cp_async_wait<0>();
    __syncthreads();  // the pipeline's shared memory becomes the epilogue's

    char* scratch = shared + warp * store_m16_scratch<Out, NT>;
    const bool c_vector = vector_aligned(c, ldc);
#pragma unroll
    for (int m = 0; m < MT; ++m) {
        if constexpr (Epilogue)
            affine_m16<Out, CCol, NT>(&acc[m][0][0], c, ldc, row0 + wm + m * 16, col0 + wn, M, N,
                                      bias_m16(bias, row0 + wm + m * 16, M), alpha, beta);
        store_m16<Out, CCol, NT>(&acc[m][0][0], scratch, c, ldc, row0 + wm + m * 16, col0 + wn, M, N, c_vector);
    }
}
