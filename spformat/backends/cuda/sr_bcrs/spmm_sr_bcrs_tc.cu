// C[M,N] = A[M,K] @ B[K,N], A in SR-BCRS(t, g) with 16-bit values, on tensor cores: m16n8k16, float32 sums. sm_80 and later.
//
//   first, steps           A as fragments for panels of 16*MF rows (include/spformat/mma_fragments.cuh)
//   indptr, indices, data  A as it is stored, for sums that are not finite
//   B  T: B[k][n] at k*ldb + n (BCOL: k + n*ldb)      C  Out: C[i][n] at i*c_row + n*c_col
//
// A block sums WM panels x WN*NF*8 columns of C. A chunk of B is brought to shared memory once for all panels of the block
// (cp.async, STAGES deep); a step then takes its 16 lines from there with ldmatrix, so that zeros of A cost neither
// tensor-core time nor shared-memory reads. WK warps share a panel step by step; their sums are added in the order of the
// warps: the same bits every run. Grid: x = cdiv(P, WM), y walks tiles of columns.
//
// Layout after Magicube (Li et al., SC'22) and SparseTIR (Ye et al., ASPLOS'23).
#include "spformat/cp_async.cuh"
#include "spformat/ldmatrix.cuh"
#include "spformat/mma_fragments.cuh"

using namespace spformat;

// Rows k0 .. k0+DEPTH-1 of B, columns n0 .. n0+BN-1, to shared memory as [DEPTH][BN + 8]; zero for columns >= N. Rows >= K
// are left as they are: no step names them.
template <class T, int BN, int THREADS, bool BCOL>
__device__ __forceinline__ void stage(T* to, const T* __restrict__ B, i64 k0, i64 n0, i64 K, i64 N, i64 ldb, bool vector) {
    constexpr int PITCH = BN + 8;
    if constexpr (BCOL) {
        for (int p = threadIdx.x; p < BN * (DEPTH / 8); p += THREADS) {
            const int n = p % BN, k = p / BN * 8;
            if (k0 + k >= K) continue;
            alignas(16) T value[8] = {};
            if (n0 + n < N) {
                const T* from = B + (n0 + n) * ldb + k0 + k;
                if (vector && k0 + k + 8 <= K) {
                    *reinterpret_cast<uint4*>(value) = *reinterpret_cast<const uint4*>(from);
                } else {
#pragma unroll
                    for (int e = 0; e < 8; ++e)
                        if (k0 + k + e < K) value[e] = from[e];
                }
            }
#pragma unroll
            for (int e = 0; e < 8; ++e) to[(k + e) * PITCH + n] = value[e];
        }
    } else {
#pragma unroll 4
        for (int p = threadIdx.x; p < DEPTH * (BN / 8); p += THREADS) {
            const int k = p / (BN / 8), n = p % (BN / 8) * 8;
            if (k0 + k >= K) continue;
            const i64 left = N - n0 - n;
            const int valid = left <= 0 ? 0 : left < 8 ? static_cast<int>(left) : 8;
            const T* from = B + (valid ? (k0 + k) * ldb + n0 + n : 0);
            if (vector) {
                cp_async_16(shared_address(to + k * PITCH + n), from, valid * 2);
            } else {
                alignas(16) T value[8] = {};
#pragma unroll
                for (int e = 0; e < 8; ++e)
                    if (e < valid) value[e] = from[e];
                *reinterpret_cast<uint4*>(to + k * PITCH + n) = *reinterpret_cast<const uint4*>(value);
            }
        }
    }
}

// What a warp needs of A for one step.
template <int MF> struct Step {
    uint4 a[MF];
    int line;
    __device__ __forceinline__ void load(const u8* steps, u32 step, int lane) {
        const u8* from = steps + static_cast<i64>(step) * STEP_BYTES<MF>;
        line = __ldg(from + lane % 16);
#pragma unroll
        for (int m = 0; m < MF; ++m) a[m] = __ldg(reinterpret_cast<const uint4*>(from + 16) + m * 32 + lane);
    }
};

template <class T, class Out, class Ptr, class Index, int MF, int WM, int WN, int WK, int NF, int STAGES, bool BCOL>
__global__ void __launch_bounds__(32 * WM * WN * WK)
    spmm_sr_bcrs_tc(const u32* __restrict__ first, const u8* __restrict__ steps,
                    const Ptr* __restrict__ indptr, const Index* __restrict__ indices, const T* __restrict__ data, int t, int g,
                    i64 M, i64 K, const T* __restrict__ B, Out* __restrict__ C, i64 N, i64 ldb, i64 c_row, i64 c_col) {
    static_assert(NF % 2 == 0, "ldmatrix brings two groups of 8 columns of B");
    static_assert(STAGES >= 2, "a chunk is loaded while another is used");
    constexpr int THREADS = 32 * WM * WN * WK, BN = WN * NF * 8, PITCH = BN + 8;
    constexpr int SLAB = DEPTH * PITCH;
    extern __shared__ __align__(16) unsigned char shared[];
    T* slabs = reinterpret_cast<T*>(shared);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int wk = warp % WK, wn = warp / WK % WN, wm = warp / (WK * WN);
    const i64 P = cdiv<i64>(M, 16 * MF), Q = cdiv<i64>(K, DEPTH), panel = static_cast<i64>(blockIdx.x) * WM + wm;
    const bool vector = reinterpret_cast<u64>(B) % 16 == 0 && ldb % 8 == 0;
    const u32* ends = first + (panel < P ? panel * Q + 1 : 0);

    for (i64 n0 = static_cast<i64>(blockIdx.y) * BN; n0 < N; n0 += static_cast<i64>(gridDim.y) * BN) {
        float acc[MF][NF][4] = {};
#pragma unroll
        for (int s = 0; s < STAGES - 1; ++s) {
            if (s < Q) stage<T, BN, THREADS, BCOL>(slabs + s * SLAB, B, static_cast<i64>(s) * DEPTH, n0, K, N, ldb, vector);
            cp_async_commit();
        }
        u32 step = panel < P ? first[panel * Q] + wk : 0;
        Step<MF> now, next;
        now.load(steps, step, lane);
        next.load(steps, step + WK, lane);
        int slot = 0;
        for (i64 q = 0; q < Q; ++q) {
            const u32 end = panel < P ? ends[q] : 0;
            cp_async_wait<STAGES - 2>();
            __syncthreads();
            if (q + STAGES - 1 < Q) {
                const int free = slot == 0 ? STAGES - 1 : slot - 1;
                stage<T, BN, THREADS, BCOL>(slabs + free * SLAB, B, (q + STAGES - 1) * DEPTH, n0, K, N, ldb, vector);
            }
            cp_async_commit();
            const u32 slab = shared_address(slabs + slot * SLAB + wn * NF * 8 + lane / 16 * 8);
            for (; step < end; step += WK) {
                Step<MF> later;  // the arrays end with room for these reads
                later.load(steps, step + 2 * WK, lane);
                const u32 line = slab + now.line * (PITCH * 2);
                u32 b[NF / 2][4];
#pragma unroll
                for (int j = 0; j < NF / 2; ++j) ldmatrix_x4_trans(b[j], line + j * 32);
#pragma unroll
                for (int m = 0; m < MF; ++m) {
                    const u32 a[4] = {now.a[m].x, now.a[m].y, now.a[m].z, now.a[m].w};
#pragma unroll
                    for (int j = 0; j < NF; ++j) mma_m16n8k16<T>(acc[m][j], a, b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
                }
                now = next;
                next = later;
            }
            slot = slot + 1 == STAGES ? 0 : slot + 1;
        }
        cp_async_wait<0>();
        __syncthreads();

        if constexpr (WK > 1) {  // the sums of warp 1, 2, .. onto those of warp 0, through shared memory
            constexpr int ACC = MF * NF * 4;
            float* sums = reinterpret_cast<float*>(shared) + (warp / WK) * WK * ACC * 32;
#pragma unroll
            for (int i = 0; i < ACC; ++i) sums[(wk * ACC + i) * 32 + lane] = acc[i / (NF * 4)][i / 4 % NF][i % 4];
            __syncthreads();
            if (wk == 0)
#pragma unroll
                for (int i = 0; i < ACC; ++i)
#pragma unroll
                    for (int w = 1; w < WK; ++w) acc[i / (NF * 4)][i / 4 % NF][i % 4] += sums[(w * ACC + i) * 32 + lane];
            __syncthreads();
        }
        if (wk == 0 && panel < P)
            store_panel(acc, Vectors<T, Ptr, Index>{indptr, indices, data, t, g}, panel * MF * 16, n0 + wn * NF * 8, M, N, B,
                        BCOL ? 1 : ldb, BCOL ? ldb : 1, C, c_row, c_col);
    }
}
