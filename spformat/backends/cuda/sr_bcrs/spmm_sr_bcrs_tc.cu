// C[M,N] = A[M,K] @ B[K,N], A in SR-BCRS(t, g) with 16-bit values, on tensor cores: m16n8k16, float32 sums. sm_80 and later.
//
//   first, pieces  A in slots (include/spformat/mma_fragments.cuh)
//   B  T: B[k][n] at k*ldb + n (BCOL: k + n*ldb)      C  Out: C[i][n] at i*c_row + n*c_col
//
// A block sums WM panels x WN*NF*8 columns of C. A chunk of B is brought to shared memory once for all panels of the block,
// and with it their records (cp.async, STAGES deep); a step then takes its 16 lines of B and its slots from there with
// ldmatrix, so that zeros of A cost neither tensor-core time nor shared-memory reads. WK warps share a panel step by step; their sums are added in the order of the
// warps: the same bits every run. Grid: x = cdiv(P, WM), y walks tiles of columns.
//
// Layout after Magicube (Li et al., SC'22) and SparseTIR (Ye et al., ASPLOS'23).
#include "spformat/cp_async.cuh"
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

// The record of a panel to shared memory, by THREADS threads of which this is number `thread`.
template <int THREADS> __device__ __forceinline__ void stage_record(u32 to, const u8* from, u32 pieces, int thread) {
#pragma unroll 2
    for (u32 i = thread; i < pieces; i += THREADS) cp_async_16(to + 16 * i, from + 16 * i);
}

template <class T, class Out, int WM, int WN, int WK, int NF, int STAGES, bool BCOL>
__global__ void __launch_bounds__(32 * WM * WN * WK)
    spmm_sr_bcrs_tc(const u32* __restrict__ first, const u8* __restrict__ pieces, i64 M, i64 K, const T* __restrict__ B,
                    Out* __restrict__ C, i64 N, i64 ldb, i64 c_row, i64 c_col) {
    static_assert(NF % 2 == 0, "ldmatrix brings two groups of 8 columns of B");
    static_assert(STAGES >= 2, "a chunk is loaded while another is used");
    constexpr int THREADS = 32 * WM * WN * WK, BN = WN * NF * 8, PITCH = BN + 8;
    constexpr int SLAB = DEPTH * PITCH * 2, STAGE = SLAB + WM * MOST_BYTES;
    extern __shared__ __align__(16) unsigned char shared[];
    __shared__ uint4 zeros;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int wk = warp % WK, wn = warp / WK % WN, wm = warp / (WK * WN);
    const i64 P = cdiv<i64>(M, PANEL_ROWS), Q = cdiv<i64>(K, DEPTH), panel = static_cast<i64>(blockIdx.x) * WM + wm;
    const bool vector = reinterpret_cast<u64>(B) % 16 == 0 && ldb % 8 == 0;
    const Slots slots{first, pieces, Q};
    const u32* mine = first + (panel < P ? panel * Q : 0);
    const u32 base = shared_address(shared), nothing = shared_address(&zeros);
    if (threadIdx.x == 0) zeros = make_uint4(0, 0, 0, 0);

    for (i64 n0 = static_cast<i64>(blockIdx.y) * BN; n0 < N; n0 += static_cast<i64>(gridDim.y) * BN) {
        float acc[MF][NF][4] = {};
        // Where the record lies that is staged next, and where it ends; of the chunk that is multiplied next, the steps.
        u32 at = panel < P && Q ? mine[0] : 0, end = panel < P && Q ? mine[1] : 0;
        auto stage_chunk = [&](i64 q, int slot) {
            if (q < Q) {
                const u32 following = panel < P && q + 1 < Q ? mine[q + 2] : end;
                stage<T, BN, THREADS, BCOL>(reinterpret_cast<T*>(shared + slot * STAGE), B, q * DEPTH, n0, K, N, ldb, vector);
                if (panel < P)
                    stage_record<THREADS / WM>(base + slot * STAGE + SLAB + wm * MOST_BYTES, slots.record(at), pieces_between(at, end),
                                               threadIdx.x % (THREADS / WM));
                at = end, end = following;
            }
            cp_async_commit();
        };
#pragma unroll
        for (int s = 0; s < STAGES - 1; ++s) stage_chunk(s, s);
        int slot = 0;
        u32 next = panel < P && Q ? mine[0] : 0;
        for (i64 q = 0; q < Q; ++q) {
            const int count = steps_of(next);
            if (panel < P && q + 1 < Q) next = mine[q + 1];
            cp_async_wait<STAGES - 2>();
            __syncthreads();
            stage_chunk(q + STAGES - 1, slot == 0 ? STAGES - 1 : slot - 1);
            const u32 record = base + slot * STAGE + SLAB + wm * MOST_BYTES;
            const u32 slab = base + slot * STAGE + (wn * NF * 8 + lane / 16 * 8) * 2;
            for (int s = wk; s < count; s += WK) {
                u32 line, words[MF], a[MF][4], b[NF / 2][4];
                asm volatile("ld.shared.u8 %0, [%1];" : "=r"(line) : "r"(record + s * HEADER + lane % 16) : "memory");
                load_words(words, record + s * HEADER, lane);
                load_fragments(a, words, record, nothing, lane);
                line = slab + line * (PITCH * 2);
#pragma unroll
                for (int j = 0; j < NF / 2; ++j) ldmatrix_x4_trans(b[j], line + j * 32);
#pragma unroll
                for (int m = 0; m < MF; ++m)
#pragma unroll
                    for (int j = 0; j < NF; ++j) mma_m16n8k16<T>(acc[m][j], a[m], b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
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
            store_panel(acc, slots, panel * PANEL_ROWS, n0 + wn * NF * 8, M, N, B, BCOL ? 1 : ldb, BCOL ? ldb : 1, C, c_row, c_col);
    }
}
