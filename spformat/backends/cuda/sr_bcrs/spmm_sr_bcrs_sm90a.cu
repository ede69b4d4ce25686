// C[M,N] = A[M,K] @ B[K,N], A in SR-BCRS(t, g) with 16-bit values, on Hopper: TMA, mbarriers, clusters, m16n8k16.
//
//   first, pieces          A in slots (include/spformat/mma_fragments.cuh)
//   B  T: B[k][n] at k*b_row + n*b_col                C  Out: C[i][n] at i*c_row + n*c_col
//   b_map                  B as a tensor map: boxes of DEPTH/CLUSTER rows x one line, swizzled over the line
//
// A block sums WM panels x WN*NF*8 columns of C. Its consumer warps share chunks of B in shared memory and take the lines a
// step needs with ldmatrix, so that zeros of A cost neither tensor-core time nor shared-memory reads; WK warps share a panel
// step by step, and their sums are added in the order of the warps: the same bits every run.
// Behind them one warp keeps STAGES chunks in flight: the record of each panel (one bulk copy) and the boxes of B.
// The blocks of a cluster work on different panels and the same columns: each loads 1/CLUSTER of the lines of B and sends
// them to all.
// TMA = false is for a B that tensor maps do not describe (column-major, or not in 16-byte pieces): four producer warps move
// it through registers; CLUSTER is then 1.
//
// Grid: x = cdiv(P, WM) rounded up to whole clusters, y walks tiles of columns. Block: consumers, then producers.
//
// Layout after Magicube (Li et al., SC'22) and SparseTIR (Ye et al., ASPLOS'23).
#include "spformat/mma_fragments.cuh"
#include "spformat/tma.cuh"

using namespace spformat;

// Shared memory of a block, in bytes from its first multiple of 1024.
template <int WM, int WN, int WK, int NF, int STAGES> struct Layout {
    static constexpr int COLS = WN * NF * 8;
    static constexpr int LINE_COLS = COLS < 64 ? COLS : 64;
    static constexpr int LINE = LINE_COLS * 2;                     // a line of a box; 16-byte chunks are swizzled inside it
    static constexpr int BOX = DEPTH * LINE;
    static constexpr int A = COLS / LINE_COLS * BOX;               // boxes of B, then the record of each panel
    static constexpr int PANEL = MOST_BYTES;
    static constexpr int STAGE = (A + WM * PANEL + 1023) / 1024 * 1024;
    static constexpr int SUMS = STAGES * STAGE;                    // [WM*WN*WK][MF*NF*4][32] floats where WK > 1
    static constexpr int FULL = SUMS + (WK > 1 ? WM * WN * WK * MF * NF * 512 : 0);
    static constexpr int EMPTY = FULL + STAGES * 8;
    static constexpr int ZEROS = EMPTY + STAGES * 8;               // 16 bytes of zeros
    static constexpr int COUNTS = ZEROS + 16;                      // u32[STAGES][WM]: steps of each panel
    static_assert(ZEROS % 16 == 0, "ldmatrix reads 16 bytes");
    static_assert(COLS % LINE_COLS == 0 && (LINE == 128 || LINE == 64), "columns come in lines of 64 or 128 bytes");
    static_assert((NF & (NF - 1)) == 0, "a warp's strip is a power of two of chunks: part of a line, or whole lines");
};

// Operands of one step in the registers of a warp.
template <int NF> struct Step {
    u32 a[MF][4];
    u32 b[NF / 2][4];
};

template <class T, class Out, int WM, int WN, int WK, int NF, int STAGES, int CLUSTER, bool TMA>
__global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(32 * (WM * WN * WK + (TMA ? 1 : 4)))
    spmm_sr_bcrs_sm90a(const u32* __restrict__ first, const u8* __restrict__ pieces, i64 M, i64 K,
                       const __grid_constant__ TensorMap b_map, const T* __restrict__ B, Out* __restrict__ C, i64 N, i64 b_row,
                       i64 b_col, i64 c_row, i64 c_col) {
    using L = Layout<WM, WN, WK, NF, STAGES>;
    static_assert(NF % 2 == 0, "ldmatrix brings two groups of 8 columns of B");
    static_assert(WM <= 32, "a lane of the producer looks after one panel");
    static_assert(TMA || CLUSTER == 1, "only TMA reaches other blocks");
    static_assert(DEPTH % CLUSTER == 0 && DEPTH / CLUSTER % 8 == 0, "a block's share of a box is whole swizzle patterns");
    constexpr int CONSUMERS = WM * WN * WK, COPIERS = TMA ? 0 : 128;
    extern __shared__ unsigned char dynamic[];
    unsigned char* shared = dynamic + (-shared_address(dynamic) & 1023);
    const u32 base = shared_address(shared);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const i64 P = cdiv<i64>(M, PANEL_ROWS), Q = cdiv<i64>(K, DEPTH), panel0 = static_cast<i64>(blockIdx.x) * WM;

    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; ++s) {
            barrier::init(base + L::FULL + 8 * s, 1 + COPIERS);
            barrier::init(base + L::EMPTY + 8 * s, CLUSTER * CONSUMERS);
        }
        *reinterpret_cast<uint4*>(shared + L::ZEROS) = make_uint4(0, 0, 0, 0);
        barrier::fence_init();
    }
    if constexpr (CLUSTER > 1) cluster::sync();
    else __syncthreads();

    const Slots slots{first, pieces, Q};
    int slot = 0;
    u32 phase = 0;
    auto advance = [&] {
        if (++slot == STAGES) slot = 0, phase ^= 1;
    };

    if (warp >= CONSUMERS) {
        const bool leads = warp == CONSUMERS;  // copies of A are the first producer warp's
        const i64 panel = panel0 + lane;
        const bool live = leads && lane < WM && panel < P && Q > 0;
        const u32 rank = CLUSTER > 1 ? cluster::rank() : 0;
        for (i64 n0 = static_cast<i64>(blockIdx.y) * L::COLS; n0 < N; n0 += static_cast<i64>(gridDim.y) * L::COLS) {
            u32 at = live ? first[panel * Q] : 0, next = live ? first[panel * Q + 1] : 0;
            for (i64 q = 0; q < Q; ++q, advance()) {
                const u32 bytes = pieces_between(at, next) * 16, record = at, count = steps_of(at);
                at = next;
                if (live && q + 1 < Q) next = first[panel * Q + q + 2];
                const u32 full = base + L::FULL + 8 * slot, stage = base + slot * L::STAGE;
                barrier::wait_cluster(base + L::EMPTY + 8 * slot, phase ^ 1);
                if (leads) {
                    if (lane < WM) *reinterpret_cast<u32*>(shared + L::COUNTS + (slot * WM + lane) * 4) = count;
                    const u32 all = __reduce_add_sync(0xFFFFFFFFu, bytes) + (TMA ? L::A : 0);
                    __syncwarp();
                    if (lane == 0) barrier::expect(full, all);
                    __syncwarp();
                    if constexpr (TMA) {
                        constexpr int ROWS = DEPTH / CLUSTER;
                        if (lane < L::A / L::BOX) {
                            const u32 to = stage + lane * L::BOX + rank * ROWS * L::LINE;
                            const int x = static_cast<int>(n0) + lane * L::LINE_COLS, y = static_cast<int>(q * DEPTH + rank * ROWS);
                            if constexpr (CLUSTER > 1) tma::load_2d_multicast(to, b_map, full, x, y, (1 << CLUSTER) - 1);
                            else tma::load_2d(to, b_map, full, x, y);
                        }
                    }
                    if (bytes) tma::load_bulk(stage + L::A + lane * L::PANEL, slots.record(record), bytes, full);
                }
                if constexpr (!TMA) {  // lanes along columns; 8 rows at a time, so that a column-major B is read in whole sectors
                    const int thread = threadIdx.x - 32 * CONSUMERS;
                    const i64 k0 = q * DEPTH;
                    const bool vector = b_row == 1 && b_col % 8 == 0 && reinterpret_cast<u64>(B) % 16 == 0;
                    for (int p = thread; p < L::COLS * (DEPTH / 8); p += COPIERS) {
                        const int c = p % L::COLS, k = p / L::COLS * 8;
                        const T* from = B + (k0 + k) * b_row + (n0 + c) * b_col;
                        alignas(16) T value[8] = {};
                        if (vector && n0 + c < N && k0 + k + 8 <= K) {
                            *reinterpret_cast<uint4*>(value) = *reinterpret_cast<const uint4*>(from);
                        } else {
#pragma unroll
                            for (int e = 0; e < 8; ++e)
                                if (n0 + c < N && k0 + k + e < K) value[e] = from[e * b_row];
                        }
                        unsigned char* to = shared + slot * L::STAGE + c / L::LINE_COLS * L::BOX + c % 8 * 2;
#pragma unroll
                        for (int e = 0; e < 8; ++e)
                            *reinterpret_cast<T*>(to + swizzled<L::LINE>(k + e, c % L::LINE_COLS / 8)) = value[e];
                    }
                    barrier::arrive(full);
                }
            }
        }
    } else {
        const int wk = warp % WK, wn = warp / WK % WN, wm = warp / (WK * WN);
        for (i64 n0 = static_cast<i64>(blockIdx.y) * L::COLS; n0 < N; n0 += static_cast<i64>(gridDim.y) * L::COLS) {
            float acc[MF][NF][4] = {};
            for (i64 q = 0; q < Q; ++q, advance()) {
                barrier::wait(base + L::FULL + 8 * slot, phase);
                const int count = *reinterpret_cast<const int*>(shared + L::COUNTS + (slot * WM + wm) * 4);
                const u32 boxes = base + slot * L::STAGE + wn * NF * 16 / L::LINE * L::BOX;  // the first of this warp's
                const u32 mine = base + slot * L::STAGE + L::A + wm * L::PANEL;
                // Of a step, fetched a step before it is used: the line of B for this lane's ldmatrix address, and the words.
                u32 line = 0, words[MF] = {};
                auto fetch = [&](int s) {
                    if (s >= count) return;
                    asm volatile("ld.shared.u8 %0, [%1];" : "=r"(line) : "r"(mine + s * HEADER + lane % 16) : "memory");
                    load_words(words, mine + s * HEADER, lane);
                };
                auto load = [&](Step<NF>& to, int s) {
                    load_fragments(to.a, words, mine, base + L::ZEROS, lane);
                    // The strip starts on a power of two of chunks: neighbours in a line differ by an exclusive or.
                    const u32 at = boxes + swizzled<L::LINE>(line, wn * NF % (L::LINE / 16) + lane / 16);
#pragma unroll
                    for (int j = 0; j < NF / 2; ++j)
                        ldmatrix_x4_trans(to.b[j], (at ^ (j * 32 % L::LINE)) + j * 32 / L::LINE * L::BOX);
                    fetch(s + WK);
                };
                auto multiply = [&](const Step<NF>& x) {
#pragma unroll
                    for (int m = 0; m < MF; ++m)
#pragma unroll
                        for (int j = 0; j < NF; ++j)
                            mma_m16n8k16<T>(acc[m][j], x.a[m], x.b[j / 2][j % 2 * 2], x.b[j / 2][j % 2 * 2 + 1]);
                };
                Step<NF> even, odd;
                fetch(wk);
                if (wk < count) load(even, wk);
                for (int s = wk; s < count; s += 2 * WK) {
                    if (s + WK < count) load(odd, s + WK);
                    multiply(even);
                    if (s + WK >= count) break;
                    if (s + 2 * WK < count) load(even, s + 2 * WK);
                    multiply(odd);
                }
                __syncwarp();
                if constexpr (CLUSTER > 1) {
                    if (lane < CLUSTER) barrier::arrive_remote(base + L::EMPTY + 8 * slot, lane);
                } else {
                    if (lane == 0) barrier::arrive(base + L::EMPTY + 8 * slot);
                }
            }
            if constexpr (WK > 1) {  // the sums of warp 1, 2, .. onto those of warp 0
                constexpr int ACC = MF * NF * 4;
                float* sums = reinterpret_cast<float*>(shared + L::SUMS) + (warp - wk) * ACC * 32;
#pragma unroll
                for (int i = 0; i < ACC; ++i) sums[(wk * ACC + i) * 32 + lane] = acc[i / (NF * 4)][i / 4 % NF][i % 4];
                named_barrier(1, 32 * CONSUMERS);
                if (wk == 0)
#pragma unroll
                    for (int i = 0; i < ACC; ++i)
#pragma unroll
                        for (int w = 1; w < WK; ++w) acc[i / (NF * 4)][i / 4 % NF][i % 4] += sums[(w * ACC + i) * 32 + lane];
                named_barrier(1, 32 * CONSUMERS);
            }
            if (wk == 0 && panel0 + wm < P)
                store_panel(acc, slots, (panel0 + wm) * PANEL_ROWS, n0 + wn * NF * 8, M, N, B, b_row, b_col, C, c_row, c_col);
        }
    }
    // A block may not leave while another still writes to it or arrives at its barriers.
    if constexpr (CLUSTER > 1) {
        __syncwarp();
        cluster::sync();
    }
}
