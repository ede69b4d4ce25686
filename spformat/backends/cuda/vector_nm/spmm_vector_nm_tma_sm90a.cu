// C[M,N] = A[M,K] @ B[K,N], A vector n:m (NM-SpMM), tensor cores fed by Hopper's copy engine; sm_90a.
//
//   b_map    TMA map of B, boxes of tile_cols rows x 128 bytes of columns, 128-byte swizzle
//   a_map    TMA map of data T[W, Mp], boxes of tile_kept lines x 128 bytes of rows, 128-byte swizzle
//   shape, records   see vector_nm.cuh; unpacked
//   together columns of (clusters of) tiles that do so (tile_order.cuh)
//   C        Out, element (m, n) at m*step_m + n*step_n, one step is 1; or, splits > 1, as many of float: vector_nm_sums.cu
//
// The products are those of spmm_vector_nm_mma.cu. What limits them is L2 -> SM traffic and the instructions that copies
// cost: here one warp issues TMA loads, and a cluster of 2 x 2 CTAs (row tiles x column tiles) shares them: each CTA fetches
// half of its B tile for both CTAs of its column, and half of its A tile for both CTAs of its row. All rows of B in a k tile
// are staged (TMA cannot gather rows); the row lists only steer the fragment loads. Persistent: a cluster takes items (tiles in
// the order of tile_order.cuh, then splits) in turn. Grid: a multiple of 4 blocks that are resident together; block
// 384 threads: two warpgroups that multiply, one that loads. G, WM, WN: spmm_vector_nm_mma.cu.
#include "spformat/launch_order.cuh"
#include "spformat/tile_order.cuh"
#include "spformat/tma.cuh"
#include "spformat/vector_nm_mma.cuh"

namespace spformat::vector_nm {

template <class T, class Out, int G, int WM, int WN, int WARPS_M, int WARPS_N, int CLUSTER_M, int CLUSTER_N>
__global__ void __cluster_dims__(CLUSTER_M * CLUSTER_N, 1, 1) __launch_bounds__(384, 1)
spmm_vector_nm_tma(const __grid_constant__ TensorMap a_map, const Shape s, int stages, int splits,
                   const u32* __restrict__ records, const __grid_constant__ TensorMap b_map, int together,
                   Out* __restrict__ C, int N, i64 step_m, i64 step_n, i64 split_stride) {
    constexpr int BM = WM * WARPS_M, BN = WN * WARPS_N, WARPS = WARPS_M * WARPS_N;
    constexpr int WIDE = 128 / sizeof(T), BLOCKS_B = BN / WIDE, BLOCKS_A = BM / WIDE;  // 128-byte column blocks of a tile
    constexpr int PEERS = CLUSTER_M + CLUSTER_N - 1;  // CTAs that share a copy with this one, itself included
    // Arrivals of a warp at a free stage. Without a cluster every lane arrives for its own reads; lane 0 alone after a __syncwarp
    // would be enough, but racecheck follows only the lane that arrives.
    constexpr int ARRIVALS = PEERS > 1 ? PEERS : 32;
    static_assert(WARPS == 8, "two warpgroups multiply");
    static_assert(BLOCKS_B % CLUSTER_M == 0 && BLOCKS_A % CLUSTER_N == 0, "a CTA's share is whole blocks");
    using F = Fragments<T, G, WM, WN, 128, 128>;
    constexpr int STRIP = WN < 64 ? WN : 64;
    extern __shared__ __align__(1024) unsigned char shared[];
    const u32 base = shared_address(shared);
    const u32 block_b = (s.staged + 8) / 8 * 1024, block_a = cdiv(s.slots, 8) * 1024;  // a zero line after those of B
    const u32 record_at = BLOCKS_B * block_b + BLOCKS_A * block_a, record_bytes = s.record * 4;
    const u32 stage_bytes = (record_at + record_bytes + 1023) / 1024 * 1024;
    const u32 strips = stages * stage_bytes, strip_bytes = F::ROWS * strip_pitch<Out, STRIP> * sizeof(Out);
    const u32 full = base + strips + WARPS * strip_bytes, empty = full + 8 * stages;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

    // Zeros where no copy writes: the zero line, slots and words that fill up. All of the ring would take a microsecond.
    constexpr int REGIONS = BLOCKS_B + BLOCKS_A + 1;
    for (int i = warp; i < stages * REGIONS; i += blockDim.x / 32) {
        const int part = i % REGIONS;
        const bool of_b = part < BLOCKS_B, of_a = !of_b && part < REGIONS - 1;
        const u32 from = of_b ? part * block_b : BLOCKS_B * block_b + (part - BLOCKS_B) * block_a;
        const u32 copied = of_b ? s.tile_cols * 128 : of_a ? s.tile_kept * 128 : record_bytes;
        const u32 size = of_b ? block_b : of_a ? block_a : stage_bytes - record_at;
        unsigned char* to = shared + i / REGIONS * stage_bytes + from;
        for (u32 at = copied + 16 * lane; at < size; at += 512) *reinterpret_cast<uint4*>(to + at) = uint4{};
    }
    if (threadIdx.x == 0) {
        for (int i = 0; i < stages; ++i) barrier::init(full + 8 * i, 1), barrier::init(empty + 8 * i, WARPS * ARRIVALS);
        barrier::fence_init();
    }
    wait_for_launch_before();
    let_next_launch_begin();
    tma::fence_shared();  // the zeros, before the copy engine writes around them
    if constexpr (CLUSTER_M * CLUSTER_N > 1) cluster::sync();
    else __syncthreads();
    const int rank = CLUSTER_M * CLUSTER_N > 1 ? cluster::rank() : 0, rank_m = rank % CLUSTER_M, rank_n = rank / CLUSTER_M;
    const int items_m = cdiv(s.row_tiles, CLUSTER_M), columns = cdiv(N, BN * CLUSTER_N);
    const int tiles = items_m * columns, items = tiles * splits;
    const TileOrder order{items_m, columns, together};
    const int first_item = blockIdx.x / (CLUSTER_M * CLUSTER_N), item_step = gridDim.x / (CLUSTER_M * CLUSTER_N);
    int stage = 0, phase = 0;
    auto advance = [&]() {
        if (++stage == stages) stage = 0, phase ^= 1;
    };

    if (warp >= WARPS) {
        give_registers<40>();
        if (threadIdx.x == 32 * WARPS) {
            const u32 bytes = BLOCKS_B * s.tile_cols * 128 + BLOCKS_A * s.tile_kept * 128 + record_bytes;
            u16 to_column = 0, to_row = 0;  // CTAs of the same column tile, of the same row tile
            const u64 policy = evict_first();
            for (int i = 0; i < CLUSTER_M; ++i) to_column |= 1 << (rank_n * CLUSTER_M + i);
            for (int i = 0; i < CLUSTER_N; ++i) to_row |= 1 << (i * CLUSTER_M + rank_m);
            for (int item = first_item; item < items; item += item_step) {
                const int split = splits > 1 ? item / tiles : 0;
                const Place place = order.place(item - split * tiles);
                const int row_tile = place.row * CLUSTER_M + rank_m, col_tile = place.column * CLUSTER_N + rank_n;
                const int first = split * s.k_per_split, last = min(first + s.k_per_split, s.k_tiles);
                const u32* list = records + static_cast<i64>(min(row_tile, s.row_tiles - 1)) * s.k_tiles * s.record;
                for (int k = first; k < last; ++k) {
                    const u32 bar = full + 8 * stage, to = base + stage * stage_bytes;
                    if constexpr (PEERS > 1) barrier::wait_cluster(empty + 8 * stage, phase ^ 1);
                    else barrier::wait(empty + 8 * stage, phase ^ 1);
                    barrier::expect(bar, bytes);
                    for (int i = rank_m; i < BLOCKS_B; i += CLUSTER_M) {
                        const int x = col_tile * BN + i * WIDE, y = k * s.tile_cols;
                        if constexpr (CLUSTER_M > 1) tma::load_2d_multicast(to + i * block_b, b_map, bar, x, y, to_column);
                        else tma::load_2d(to + i * block_b, b_map, bar, x, y);
                    }
                    const u32 to_a = to + BLOCKS_B * block_b;
                    for (int i = rank_n; i < BLOCKS_A; i += CLUSTER_N) {
                        const int x = row_tile * BM + i * WIDE, y = k * s.tile_kept;
                        if constexpr (CLUSTER_N > 1) tma::load_2d_multicast(to_a + i * block_a, a_map, bar, x, y, to_row);
                        else tma::load_2d(to_a + i * block_a, a_map, bar, x, y, policy);
                    }
                    tma::load_bulk(to + record_at, list + static_cast<i64>(k) * s.record, record_bytes, bar);
                    advance();
                }
            }
        }
        __syncwarp();
    } else {
        take_registers<232>();
        const int wm = warp / WARPS_N, wn = warp % WARPS_N;
        Out* strip = reinterpret_cast<Out*>(shared + strips + warp * strip_bytes);
        // The CTAs that write to a stage and must learn that it is free, one per lane.
        const int peer = lane < CLUSTER_M ? rank_n * CLUSTER_M + lane
                                          : (lane - CLUSTER_M + (lane - CLUSTER_M >= rank_n)) * CLUSTER_M + rank_m;
        for (int item = first_item; item < items; item += item_step) {
            const int split = splits > 1 ? item / tiles : 0;
            const Place place = order.place(item - split * tiles);
            const int row_tile = place.row * CLUSTER_M + rank_m, col_tile = place.column * CLUSTER_N + rank_n;
            const int first = split * s.k_per_split, last = min(first + s.k_per_split, s.k_tiles);
            float acc[WN / 16][WM / 8][4] = {};
            for (int k = first; k < last; ++k) {
                const u32 from = base + stage * stage_bytes;
                barrier::wait(full + 8 * stage, phase);
                constexpr int E = 16 / sizeof(T);
                F::multiply(s.slots, acc, from, block_b, from + BLOCKS_B * block_b, block_a,
                            from + record_at + 4 * (wm * (WM / G) * s.slots), wm * WM / E, wn * WN / E, lane);
                if constexpr (PEERS > 1) {
                    __syncwarp();
                    if (lane < PEERS) barrier::arrive_remote(empty + 8 * stage, peer);
                } else {
                    barrier::arrive(empty + 8 * stage);
                }
                advance();
            }
            store_fragments<F, STRIP>(acc, Target<Out>{C + split * split_stride, step_m, step_n, s.M, N}, strip,
                                      row_tile * BM + wm * WM, col_tile * BN + wn * WN, lane);
        }
    }
    if constexpr (CLUSTER_M * CLUSTER_N > 1) cluster::sync();  // nobody leaves while others may still signal it
}

}  // namespace spformat::vector_nm
