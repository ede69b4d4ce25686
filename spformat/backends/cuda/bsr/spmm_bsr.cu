// C[M,N] = A[M,K] @ B[K,N], A in BSR or DBSR with blocks of R x C, tensor cores, f32 sums. sm_80 and later.
//
//   row_ids  Row[listed]        block row of each list entry (Listed: DBSR); null for BSR, where listed = cdiv(M, R)
//   indptr   Pointer[listed+1]  first block of each listed block row
//   indices  Index[nnzb]        block column
//   data     T[nnzb, R, C]      blocks, each row-major, zero outside the shape
//   B        T[K, N]            element (k, n) at k*ldb + n, or, BCol, at k + n*ldb
//   out      Out[M, N]          element (i, n) at i*ldc + n, or, CCol, at i + n*ldc; every element is written
//
// A block row is a dense R x (blocks*C) matrix whose columns name rows of B: its blocks are laid end to end along k and
// cut into chunks of KC, so any block size fills the k axis of the tensor cores. A chunk of A and the rows of B it names travel through
// a ring of Stages shared-memory buffers (cp.async). Lines in shared memory are an odd number of 16-byte units apart, which keeps
// ldmatrix and the copies free of bank conflicts for every tile width, powers of two or not.
//
// Grid: x = list entries * cdiv(R, BM) row tiles, then, Listed, one for each ZeroRows block rows that are not listed,
// which writes their zeros; y = column tiles (strided). Block: 32*WM*WN threads; warp w computes
// rows BM/WM * (w % WM) .., columns BN/WN * (w / WM) .. of the tile.
//
//   T      __nv_bfloat16, __half (mma m16n8k16) or float (each product as three TF32 products)
//   Out    T or float
//   Resident  blocks per SM the registers must leave room for
//   R, C   block height and width, 1 .. 1024;  BM, BN, KC  tile rows, columns, depth
//   WideA  data and C allow 16-byte copies of A;  WideB  B, ldb (and, BCol, C) allow 16-byte copies of B
//   Limits K < 2^31 - 2048; R, C, N, M otherwise free.
#include "spformat/cp_async.cuh"
#include "spformat/epilogue.cuh"
#include "spformat/launch_order.cuh"
#include "spformat/ldmatrix.cuh"
#include "spformat/mma.cuh"

using namespace spformat;

namespace {

// Sums of one warp, MI x NI tiles of 16x8. For float the small cross products are summed apart: `low` is dropped
// where `high` is not finite, so that infinities come out as IEEE arithmetic has them (0 * inf in a cross product is NaN).
template <class T, int MI, int NI> struct Sums {
    float high[MI][NI][4] = {};
};
template <int MI, int NI> struct Sums<float, MI, NI> {
    float high[MI][NI][4] = {}, low[MI][NI][4] = {};

    __device__ __forceinline__ void join() {
#pragma unroll
        for (int m = 0; m < MI; ++m)
#pragma unroll
            for (int n = 0; n < NI; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    if (fabsf(high[m][n][i]) < __int_as_float(0x7f800000)) high[m][n][i] += low[m][n][i];
    }
};

// Elements between lines of shared memory.
template <class T, int Width, bool KContiguous> __host__ __device__ constexpr int pitch() {
    // float fragments are read as single words: 4 (k-contiguous) or 8 more words spread a warp over all banks.
    return Width + (sizeof(T) == 2 || !KContiguous ? 8 : 4);
}

template <class T, int KC, int MI, int NI, int PitchA, int PitchB, bool BCol>
__device__ __forceinline__ void multiply(const T* a_tile, const T* b_tile, Sums<T, MI, NI>& sums) {
    const int lane = threadIdx.x % 32;
    if constexpr (sizeof(T) == 2) {
        const u32 a_base = shared_address(a_tile + lane % 16 * PitchA + lane / 16 * 8);
        const u32 b_base = shared_address(BCol ? b_tile + (lane % 8 + lane / 16 * 8) * PitchB + lane / 8 % 2 * 8
                                               : b_tile + lane % 16 * PitchB + lane / 16 * 8);
#pragma unroll
        for (int k = 0; k < KC; k += 16) {
            u32 a[MI][4];
#pragma unroll
            for (int m = 0; m < MI; ++m) ldmatrix_x4(a[m], a_base + (m * 16 * PitchA + k) * sizeof(T));
#pragma unroll
            for (int n = 0; n < NI; n += 2) {
                u32 b[4];
                if constexpr (BCol) ldmatrix_x4(b, b_base + (n * 8 * PitchB + k) * sizeof(T));
                else ldmatrix_x4_trans(b, b_base + (k * PitchB + n * 8) * sizeof(T));
#pragma unroll
                for (int m = 0; m < MI; ++m) {
                    mma_m16n8k16<T>(sums.high[m][n], a[m], b[0], b[1]);
                    mma_m16n8k16<T>(sums.high[m][n + 1], a[m], b[2], b[3]);
                }
            }
        }
    } else {
        const int g = lane / 4, t = lane % 4;
#pragma unroll
        for (int k = 0; k < KC; k += 8) {
            u32 a[MI][4], a_low[MI][4];
#pragma unroll
            for (int m = 0; m < MI; ++m)
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    split_tf32(a_tile[(m * 16 + g + i % 2 * 8) * PitchA + k + t + i / 2 * 4], a[m][i], a_low[m][i]);
#pragma unroll
            for (int n = 0; n < NI; ++n) {
                u32 b[2], b_low[2];
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const int row = k + t + i * 4, column = n * 8 + g;
                    split_tf32(b_tile[BCol ? column * PitchB + row : row * PitchB + column], b[i], b_low[i]);
                }
#pragma unroll
                for (int m = 0; m < MI; ++m) {
                    mma_m16n8k8_tf32(sums.low[m][n], a_low[m], b[0], b[1]);
                    mma_m16n8k8_tf32(sums.low[m][n], a[m], b_low[0], b_low[1]);
                    mma_m16n8k8_tf32(sums.high[m][n], a[m], b[0], b[1]);
                }
            }
        }
    }
}

}  // namespace

template <class T, class Out, class Row, class Pointer, class Index, int R, int C, int BM, int BN, int WM, int WN, int KC,
          int Stages, int Resident, int ZeroRows, bool WideA, bool WideB, bool BCol, bool CCol, bool Listed>
__global__ void __launch_bounds__(32 * WM * WN, Resident)
    spmm_bsr(const Row* __restrict__ row_ids, const Pointer* __restrict__ indptr, const Index* __restrict__ indices,
             const T* __restrict__ data, i64 M, i64 K, i64 listed, const T* __restrict__ B, Out* __restrict__ out, i64 N,
             i64 ldb, i64 ldc) {
    constexpr int Threads = 32 * WM * WN, Vector = 16 / sizeof(T), RowTiles = cdiv(R, BM);
    constexpr int MI = BM / WM / 16, NI = BN / WN / 8;
    constexpr int PitchA = pitch<T, KC, true>(), PitchB = pitch<T, BCol ? KC : BN, BCol>();
    constexpr int SizeA = BM * PitchA, SizeB = (BCol ? BN : KC) * PitchB;
    static_assert(BM % (16 * WM) == 0 && BN % (16 * WN) == 0, "a warp owns whole 16-row and 16-column pieces of the tile");
    static_assert(KC % 16 == 0 && Stages >= 2, "a chunk is whole k steps, and one is loaded while another is used");
    static_assert(!WideA || C % Vector == 0, "16-byte copies of A need block rows of whole 16-byte units");
    static_assert(!(WideB && BCol) || C % Vector == 0, "16-byte copies along k may not leave a block");
    static_assert(Threads % (BN / Vector) == 0 && Threads % (KC / Vector) == 0, "threads divide evenly over a line");
    extern __shared__ __align__(16) char shared[];
    T* const ring = reinterpret_cast<T*>(shared);
    const int tid = threadIdx.x, warp = tid / 32;

    wait_for_launch_before();
    const i64 entry = blockIdx.x / RowTiles;
    if (Listed && entry >= listed) {  // past the list: this block only writes zeros
        for (i64 n0 = static_cast<i64>(blockIdx.y) * BN; n0 < N; n0 += static_cast<i64>(gridDim.y) * BN)
            zero_unlisted<Out, CCol, R>(row_ids, listed, (blockIdx.x - listed * RowTiles) * ZeroRows, ZeroRows, M, out, ldc,
                                        n0, N - n0 < BN ? N - n0 : BN, tid, Threads);
        return;
    }

    const int row0 = static_cast<int>(blockIdx.x % RowTiles) * BM;  // first row of this tile inside the block row
    const i64 block_row = Listed ? static_cast<i64>(row_ids[entry]) : entry;
    const i64 begin = indptr[entry];
    const u32 depth = static_cast<u32>(indptr[entry + 1] - begin) * C;  // k extent of the block row
    const u32 chunks = cdiv<u32>(depth, KC);
    const int rows_of_b = static_cast<int>(K);
    const T* const a_rows = data + (begin * R + row0) * C;
    const Index* const columns = indices + begin;

    for (i64 n0 = static_cast<i64>(blockIdx.y) * BN; n0 < N; n0 += static_cast<i64>(gridDim.y) * BN) {
        const int n_left = N - n0 < BN ? static_cast<int>(N - n0) : BN;
        const T* const b_tile = B + (BCol ? n0 * ldb : n0);

        // Row of B for position k of the block row; K and more where there is none to load.
        auto b_row = [&](u32 k) -> int {
            return k < depth ? static_cast<int>(columns[k / C]) * C + static_cast<int>(k % C) : rows_of_b;
        };
        // Where this thread copies: 16-byte unit number `along` of lines first, first + Step, .. of each operand.
        constexpr int LineA = KC / Vector, StepA = Threads / LineA, CopiesA = cdiv(BM * KC, Vector * Threads);
        constexpr int LineB = (BCol ? KC : BN) / Vector, StepB = Threads / LineB;
        constexpr int CopiesB = WideB ? KC * BN / Vector / Threads : 1;
        static_assert(!WideB || KC * BN % (Vector * Threads) == 0, "whole copies per thread");
        const int first_a = tid / LineA, along_a = tid % LineA * Vector;
        const int first_b = tid / LineB, along_b = tid % LineB * Vector;
        const u32 to_a = shared_address(ring + first_a * PitchA + along_a);
        const u32 to_b = shared_address(ring + SizeA + first_b * PitchB + along_b);
        const int n_valid = BCol ? 0 : (n_left - along_b < 0 ? 0 : n_left - along_b < Vector ? n_left - along_b : Vector);
        // Rows of B of the next chunk, read one chunk ahead: their latency would stall every copy. A chunk that cannot
        // leave a block (OneBlock) names consecutive rows, one along k (BCol) a single one per thread.
        constexpr bool OneBlock = C % KC == 0;
        constexpr int Ahead = BCol || OneBlock ? 1 : CopiesB;
        int ahead[Ahead];
        auto look_ahead = [&](u32 chunk) {
#pragma unroll
            for (int i = 0; i < Ahead; ++i)
                ahead[i] = b_row(chunk * KC + (BCol ? along_b : OneBlock ? 0 : first_b + i * StepB));
        };
        auto load = [&](u32 chunk, int stage) {
            const u32 offset = stage * (SizeA + SizeB) * sizeof(T);
            if constexpr (WideA) {
                const u32 k = chunk * KC + along_a;
                const T* const from = a_rows + (static_cast<i64>(k / C) * R + first_a) * C + k % C;
#pragma unroll
                for (int i = 0; i < CopiesA; ++i) {
                    const int row = first_a + i * StepA;
                    const bool real = (OneBlock || k < depth) && (R % BM == 0 || row0 + row < R);
                    if (BM % StepA == 0 || row < BM)
                        cp_async_16(to_a + offset + i * StepA * PitchA * sizeof(T), from + i * StepA * C, real ? 16 : 0);
                }
            } else {
                T* const a_to = ring + stage * (SizeA + SizeB);
#pragma unroll 4
                for (int i = tid; i < BM * KC; i += Threads) {
                    const u32 row = i / KC, at = i % KC, k = chunk * KC + at;
                    const bool real = k < depth && (R % BM == 0 || row0 + row < R);
                    a_to[row * PitchA + at] =
                        real ? a_rows[(static_cast<i64>(k / C) * R + row) * C + k % C] : from_float<T>(0.0f);
                }
            }
            if constexpr (WideB) {
                int valid = n_valid;
                const T* from = b_tile + along_b;
                if constexpr (BCol) {
                    const int left = rows_of_b - ahead[0];
                    valid = left < 0 ? 0 : left < Vector ? left : Vector;
                    from = b_tile + first_b * ldb + ahead[0];
                } else if constexpr (OneBlock) {
                    from += (ahead[0] + first_b) * ldb;
                }
#pragma unroll
                for (int i = 0; i < CopiesB; ++i) {
                    const int line = first_b + i * StepB;
                    const bool real = BCol ? line < n_left : ahead[i % Ahead] + (OneBlock ? line : 0) < rows_of_b;
                    const T* const source = BCol || OneBlock ? from + i * StepB * ldb : from + ahead[i % Ahead] * ldb;
                    cp_async_16(to_b + offset + i * StepB * PitchB * sizeof(T), source, real ? valid * sizeof(T) : 0);
                }
                look_ahead(chunk + 1);
            } else {
                T* const b_to = ring + stage * (SizeA + SizeB) + SizeA;
#pragma unroll 4
                for (int i = tid; i < KC * BN; i += Threads) {
                    const u32 at = BCol ? i % KC : i / BN, n = BCol ? i / KC : i % BN;
                    const int row = n < n_left ? b_row(chunk * KC + at) : rows_of_b;
                    T* const to = b_to + (BCol ? n * PitchB + at : at * PitchB + n);
                    const T* const from = b_tile + (BCol ? n * ldb + row : row * ldb + n);
                    if constexpr (sizeof(T) == 4) cp_async_4(shared_address(to), from, row < rows_of_b ? 4 : 0);
                    else *to = row < rows_of_b ? *from : from_float<T>(0.0f);
                }
            }
        };

        Sums<T, MI, NI> sums;
        if (WideB && chunks) look_ahead(0);
#pragma unroll 1
        for (int s = 0; s < Stages - 1; ++s) {
            if (s < chunks) load(s, s);
            cp_async_commit();
        }
        const int warp_row = warp % WM * (BM / WM), warp_column = warp / WM * (BN / WN);
        int stage = 0;
        for (u32 chunk = 0; chunk < chunks; ++chunk) {
            cp_async_wait<Stages - 2>();
            __syncthreads();  // chunk has landed, and everyone is done with the buffer that is loaded next
            if (chunk + Stages - 1 < chunks) load(chunk + Stages - 1, stage == 0 ? Stages - 1 : stage - 1);
            cp_async_commit();
            const T* const a_tile = ring + stage * (SizeA + SizeB);
            multiply<T, KC, MI, NI, PitchA, PitchB, BCol>(
                a_tile + warp_row * PitchA, a_tile + SizeA + (BCol ? warp_column * PitchB : warp_column), sums);
            stage = stage == Stages - 1 ? 0 : stage + 1;
        }
        if constexpr (sizeof(T) == 4) sums.join();

        const i64 top = block_row * R + row0;
        i64 rows = R - row0 < BM ? R - row0 : BM;
        if (M - top < rows) rows = M - top;
#pragma unroll
        for (int m = 0; m < MI; ++m)
#pragma unroll
            for (int n = 0; n < NI; n += 2) {
                const int i = warp_row + m * 16, j = warp_column + n * 8;
                Out* const to = out + (CCol ? top + i + (n0 + j) * ldc : (top + i) * ldc + n0 + j);
                store_16x16<Out, CCol>(to, ldc, rows - i, n_left - j, sums.high[m][n], sums.high[m][n + 1]);
            }
        __syncthreads();  // the next column tile reuses the ring
    }
}
