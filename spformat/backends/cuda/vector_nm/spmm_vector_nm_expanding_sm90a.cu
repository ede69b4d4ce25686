// C[M,N] = A[M,K] @ B[K,N], A vector n:m (NM-SpMM) with vectors of a multiple of 8 rows and m <= 64, on Hopper's wgmma.
//
//   a_map    TMA map of data T[W, pitch], boxes of 64 rows x the kept columns of a k tile, 128-byte swizzle
//   lines    u8[k_tiles, groups, 16, 4]   which line of a k tile's data holds column 16*s + j, at [..][j][s]; NONE: not kept
//   data, indices   A as it is stored, for sums that are not finite
//   b_map    TMA map of B: rows of N, boxes of min(BN, 64) x 64 k; BCol: columns of K, boxes of 64 k x BN
//   B        T: element (k, n) at k*b_k + n*b_n, the memory of b_map, for sums that are not finite
//   c_map    used when by_copies (16-bit C): TMA map of C, rows of N, boxes of STRIP x 16; CCol: columns of M, boxes of
//            16 x STRIP. STRIP: min(BN, 64), with Parts 16
//   C        Out: rows ldc apart (CCol: columns)
//
// B is not gathered: A becomes dense on its way to the registers. A lane of ldmatrix.trans names 16 bytes, eight rows of one
// kept column, and the lane of a column that is not kept names 16 bytes of zeros. So wgmma multiplies a dense tile, B comes by
// TMA in either layout, and each group of 8 rows may keep other columns. A k tile is as many whole windows as 64 columns hold;
// behind them the tile of A is zero. A zero times an infinite value of B is NaN, which does not belong into C: sums that are
// not finite are computed again over the stored elements.
//
// Grid: x = row tiles * column tiles * Parts, row tiles faster than column tiles. Parts blocks, a cluster, multiply a tile of C,
// each a part of K; then each adds up every Parts-th strip of 16 x 16 sums, in the order of the parts, through shared memory.
// Block: WG warpgroups that multiply 64 rows x BN columns each, and one warp that loads, STAGES k tiles ahead; in wide tiles it has a
// warpgroup of its own, which hands its registers over to the others.
#include "spformat/expanding.cuh"
#include "spformat/launch_order.cuh"
#include "spformat/vector_nm.cuh"

namespace spformat::vector_nm {

using namespace expanding;

struct Expanding {  // ctypes counterpart: spmm_vector_nm_expanding_sm90a.Expanding
    int M, K;
    int groups, length;  // row groups, and rows of one
    int n, m;
    int tile_windows;  // windows of a k tile
    int k_tiles, k_per_part, row_tiles;
    i64 pitch;  // elements between rows of data
};

constexpr u32 NONE = 64;  // no line: the column is not kept

// One element of C over the stored elements, in order. b: column n of B, its elements b_k apart.
template <class T>
__device__ __forceinline__ float stored_only(const Expanding& s, const T* data, const u8* indices, const T* b, i64 b_k, int row) {
    float sum = 0;
    const i64 windows = (s.K + s.m - 1) / s.m;
    for (i64 u = 0; u < windows * s.n; ++u) {
        const i64 k = u / s.n * s.m + indices[u * s.groups + row / s.length];
        if (k < s.K) sum += to_float(data[u * s.pitch + row]) * to_float(b[k * b_k]);
    }
    return sum;
}

template <class T, class Out, int WG, int BN, int STAGES, int Parts, int Resident, bool BCol, bool CCol>
__global__ void __cluster_dims__(Parts, 1, 1) __launch_bounds__(threads<WG, BN>, Resident)
spmm_vector_nm_expanding_sm90a(const __grid_constant__ TensorMap a_map, const __grid_constant__ Expanding s,
                               const u8* __restrict__ lines, const T* __restrict__ data, const u8* __restrict__ indices,
                               const __grid_constant__ TensorMap b_map, const T* __restrict__ B, i64 b_k, i64 b_n,
                               const __grid_constant__ TensorMap c_map, int by_copies, Out* C, int N, i64 ldc) {
    static_assert(sizeof(T) == 2, "16-bit values");
    constexpr int ROWS = 64 * WG;
    constexpr int A_BLOCK = DEPTH * 128, A_BYTES = WG * A_BLOCK;     // a warpgroup's 64 rows of up to DEPTH kept columns
    constexpr int B_BYTES = tile_bytes<BN, BCol>, WORDS = A_BYTES + B_BYTES;
    constexpr int STAGE = WORDS + ROWS / 8 * DEPTH;                  // one byte for each column and group of 8 rows
    static_assert(STAGE % 1024 == 0 && A_BYTES % 1024 == 0, "swizzle patterns start on 1024 bytes");
    static_assert(way_out<WG, BN, Parts> <= STAGES * STAGE, "what comes after the products fits into the stages");
    extern __shared__ __align__(1024) unsigned char shared[];
    const u32 base = shared_address(shared), zero = base + STAGES * STAGE, full = zero + 16, empty = full + 8 * STAGES;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int tile = blockIdx.x / Parts, part = blockIdx.x % Parts;
    const int m0 = tile % s.row_tiles * ROWS, n0 = tile / s.row_tiles * BN;
    const int first = min(part * s.k_per_part, s.k_tiles), last = min(first + s.k_per_part, s.k_tiles);
    const int group0 = m0 / s.length;  // of the tile's first row

    if (threadIdx.x == 0) *reinterpret_cast<uint4*>(shared + (zero - base)) = uint4{};
    if (warp == 4 * WG && lane == 0) {
        for (int i = 0; i < STAGES; ++i) barrier::init(full + 8 * i, 1), barrier::init(empty + 8 * i, 128 * WG);
        barrier::fence_init();
    }
    wait_for_launch_before();
    let_next_launch_begin();
    // The warp that loads goes on at once, the others when the barriers are there. A low number, because all named barriers up to
    // the highest count as used by a block, and blocks share a multiprocessor.
    constexpr int READY = 2;
    if (warp >= 4 * WG) named_arrive(READY, threads<WG, BN>);
    else named_barrier(READY, threads<WG, BN>);

    hand_registers_over<WG, BN>();
    if (warp >= 4 * WG) {
        if (warp == 4 * WG && lane == 0) {
            const u64 policy = evict_first();
            const u32 kept = s.tile_windows * s.n, words = (min(m0 + ROWS, s.M) - 1) / s.length - group0 + 1;
            for (int k = first; k < last; ++k) {
                const u32 number = k - first, stage = number % STAGES, to = base + stage * STAGE, bar = full + 8 * stage;
                if (number >= STAGES) barrier::wait(empty + 8 * stage, number / STAGES - 1 & 1);
                barrier::expect(bar, WG * kept * 128 + B_BYTES + words * DEPTH);
                tma::load_bulk(to + WORDS, lines + (static_cast<i64>(k) * s.groups + group0) * DEPTH, words * DEPTH, bar);
#pragma unroll
                for (int i = 0; i < WG; ++i) tma::load_2d(to + i * A_BLOCK, a_map, bar, m0 + 64 * i, k * kept, policy);
                const int k0 = k * s.tile_windows * s.m;
                load_tile<BN, BCol>(to + A_BYTES, b_map, bar, k0, n0);
            }
        }
        return;
    }

    // This lane's address for ldmatrix: tile lane/8 of 8x8 is rows 0-7, then 8-15, of columns 0-7, then of columns 8-15.
    const int row0 = m0 + warp * 16, eight = lane / 8 % 2;
    const u32 block = warp / 4 * A_BLOCK, chunk = warp % 4 * 2 + eight;
    const u32 word_at = WORDS + (min(row0 + 8 * eight, s.M - 1) / s.length - group0) * DEPTH + (lane % 8 + lane / 16 * 8) * 4;
    float acc[BN / 2] = {};
    auto load = [&](u32 (&a)[4][4], int k) {
        const u32 number = k - first, stage = number % STAGES, from = base + stage * STAGE;
        barrier::wait(full + 8 * stage, number / STAGES & 1);
        const u32 word = load_shared_word(from + word_at);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const u32 line = word >> 8 * i & 0xFF;
            ldmatrix_x4_trans(a[i], line == NONE ? zero : from + block + swizzled<128>(line, chunk));
        }
    };
    constexpr int AHEAD = Resident == 1 || BN <= 32 ? 2 : 1;
    multiply_steps<T, BN, BCol, STAGES, AHEAD>(acc, first, last, base + A_BYTES, STAGE, empty, load);

    const Result<Out> c{c_map, by_copies != 0, C, ldc, s.M, N};
    auto row_of = [&](int of_warp) { return m0 + of_warp * 16; };
    store_tile<Out, CCol, WG, BN, Parts>(acc, shared, c, row_of, n0, part, [&](int, int row, int col, int cols) {
        again<Out, CCol>(c, row, col, cols, [&](int r, int n) { return stored_only(s, data, indices, B + n * b_n, b_k, r); });
    });
}

}  // namespace spformat::vector_nm
