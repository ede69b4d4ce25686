// C[M,N] = A[M,K] @ B[K,N], A in BSR or DBSR with blocks of 16 .. 128: TMA and wgmma, f32 sums. Runs on sm_90a only.
//
//   a_map    T[nnzb*R, C]       the blocks one below the other; box SliceK x R, swizzled
//   row_ids  Row[listed]        block row of each list entry (Listed: DBSR); null for BSR, where listed = cdiv(M, R)
//   indptr   Pointer[listed+1]  first block of each listed block row
//   indices  Index[nnzb]        block column
//   b_map    T[K, N]            rows of N, box 64 x SliceK, or, BCol, columns of K, box SliceK x BN; swizzled
//   out      Out[M, N]          element (i, n) at i*ldc + n, or, CCol, at i + n*ldc; every element is written
//
// A tile of C is Group list entries (BM rows) x BN columns. One warp merges the Group sorted lists of block columns: each
// slice of B (SliceK rows x BN) that any block row of the tile needs is fetched once, together with the blocks of A that
// meet it. Slices are packed, 64 rows of k to a ring slot; blocks of A go to a ring of units of their own. Both are announced by
// one barrier a slot. Four warpgroups multiply what concerns them and release the slot.
//
// Blocks of 64 rows and more lie on the m axis of wgmma (64 x 128 of C a warpgroup); blocks of 16 and 32 lie on its n axis, whose
// width is free: a warpgroup then owns 128 rows x 64 columns and computes the transposed product, 64 columns of C at a time.
//
// Clusters of Cluster CTAs work on the same block rows and neighbouring column tiles: each fetches its share of the blocks of
// A for all of them.
//
// Grid: persistent, a multiple of Cluster; tiles are taken in order, block rows first, so that CTAs at work share B in L2. Then,
// Listed, the rows that are not listed are zeroed. Block: 128*WM*WN + 32 threads, one CTA an SM.
//
//   T, Out  __nv_bfloat16 or __half; T or float
//   R, C    block height and width, 16, 32, 64 or 128;  WM, WN  warpgroups along rows and columns of the tile
//   Slots   ring slots for B;  Units  ring units for A, a power of two, each one slice of a block
//   Limits  nnzb*R < 2^31, K < 2^31; B 16-byte aligned with a leading dimension of whole 16 bytes.
#include "spformat/epilogue.cuh"
#include "spformat/ldmatrix.cuh"
#include "spformat/tma.cuh"
#include "spformat/wgmma.cuh"

using namespace spformat;

namespace {

constexpr u32 last_item = 0x80000000u;

// What a slot holds: for each slice the mask of block rows that have a block there and the ring unit of the first of them.
__device__ __forceinline__ u32 slice_word(u32 mask, u32 unit) { return mask | unit << 16; }

}  // namespace

template <class T, class Out, class Row, class Pointer, class Index, int R, int C, int WM, int WN, int Slots, int Units,
          int Cluster, int ZeroRows, bool BCol, bool CCol, bool Listed>
__global__ void __cluster_dims__(Cluster, 1, 1) __launch_bounds__(128 * WM * WN + 32, 1)
    spmm_bsr_sm90a(const __grid_constant__ TensorMap a_map, const Row* __restrict__ row_ids,
                   const Pointer* __restrict__ indptr, const Index* __restrict__ indices, i64 M, i64 listed,
                   const __grid_constant__ TensorMap b_map, Out* __restrict__ out, i64 N, i64 ldc) {
    constexpr bool OnM = R >= 64;
    constexpr int BM = WM * (OnM ? 64 : 128), BN = WN * (OnM ? 128 : 64), Group = BM / R;
    constexpr int SliceK = C < 64 ? C : 64, Slices = 64 / SliceK, Parts = C / SliceK;
    constexpr int Warps = 4 * WM * WN, Line = SliceK * 2;
    constexpr u32 UnitBytes = R * Line, SliceBytes = SliceK * BN * 2, SlotBytes = Slices * SliceBytes;
    constexpr auto Pattern = Line == 128 ? wgmma::B128 : Line == 64 ? wgmma::B64 : wgmma::B32;
    static_assert(R % 16 == 0 && C % 16 == 0 && BM % R == 0 && Group <= 16, "at most 16 whole block rows in a tile");
    static_assert((Units & (Units - 1)) == 0 && Units >= Slices * Group, "the ring of A holds any one item");
    static_assert(Slots <= 32, "one lane of the producer keeps the books of one slot");
    static_assert(BN <= 256, "a TMA box spans at most 256 columns");

    extern __shared__ char raw[];
    u32 b_ring = (shared_address(raw) + 1023) & ~1023u;
    asm volatile("" : "+r"(b_ring));  // keep the address: the compiler would compute it again at every use
    const u32 a_ring = b_ring + Slots * SlotBytes;
    __shared__ __align__(8) u64 barriers[2 * Slots];
    __shared__ u32 words[Slots][Slices];
    u32 full = shared_address(barriers);
    asm volatile("" : "+r"(full));
    const u32 empty = full + 8 * Slots;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const u32 rank = Cluster > 1 ? cluster::rank() : 0;

    if (threadIdx.x == 0) {
        for (int s = 0; s < Slots; ++s) {
            barrier::init(full + 8 * s, 1);
            barrier::init(empty + 8 * s, Warps * Cluster);
        }
        barrier::fence_init();
    }
    if constexpr (Cluster > 1) cluster::sync();
    else __syncthreads();

    const i64 groups = cdiv<i64>(listed, Group), panels = cdiv<i64>(cdiv<i64>(N, BN), Cluster);
    const i64 tiles = groups * panels, clusters = gridDim.x / Cluster;

    if (warp == Warps) {  // ---- producer
        u32 head = 0, tail = 0, units = 0;  // A units handed out and taken back; lane s: units in slot s
        int slot = 0, in_flight = 0, oldest = 0;
        u32 oldest_phase = 0;
        auto take_back = [&]() {
            if constexpr (Cluster > 1) barrier::wait_cluster(empty + 8 * oldest, oldest_phase);
            else barrier::wait(empty + 8 * oldest, oldest_phase);
            tail += __shfl_sync(~0u, units, oldest);
            if (++oldest == Slots) oldest = 0, oldest_phase ^= 1;
            --in_flight;
        };
        if (lane == 0) {
            tma::prefetch(a_map);
            tma::prefetch(b_map);
        }
        for (i64 tile = blockIdx.x / Cluster; tile < tiles; tile += clusters) {
            const int n0 = static_cast<int>((tile / groups * Cluster + rank) * BN);
            const i64 entry = tile % groups * Group + lane;
            // Lane b walks the list of block row b: `column` is its head, `following` the one after, already on its way.
            i64 at = 0, end = 0;
            if (lane < Group && entry < listed) at = indptr[entry], end = indptr[entry + 1];
            constexpr u32 None = 0x7fffffffu;
            u32 column = at < end ? static_cast<u32>(indices[at]) : None;
            u32 following = at + 1 < end ? static_cast<u32>(indices[at + 1]) : None;
            int part = 0;
            u32 nearest = __reduce_min_sync(~0u, column);
            do {
                if (in_flight == Slots) take_back();
                u32 bytes = 0, units_here = 0, word[Slices];
#pragma unroll
                for (int p = 0; p < Slices; ++p) {
                    word[p] = 0;
                    if (nearest == None) continue;
                    const bool mine = column == nearest;
                    const u32 mask = __ballot_sync(~0u, mine), need = __popc(mask);
                    while (head + need - tail > Units) take_back();
                    const int k = static_cast<int>(nearest) * C + part * SliceK;
                    if constexpr (BCol) {
                        if (lane == 0)
                            tma::load_2d(b_ring + slot * SlotBytes + p * SliceBytes, b_map, full + 8 * slot, k, n0);
                    } else {
                        if (lane == 0) {
#pragma unroll
                            for (int j = 0; j < BN / 64; ++j)
                                tma::load_2d(b_ring + slot * SlotBytes + p * SliceBytes + j * SliceK * 128, b_map,
                                             full + 8 * slot, n0 + j * 64, k);
                        }
                    }
                    if (mine) {
                        const u32 unit = (head + __popc(mask & ((1u << lane) - 1))) % Units;
                        const u32 to = a_ring + unit * UnitBytes;
                        const int y = static_cast<int>(at * R);
                        if constexpr (Cluster == 1) {
                            tma::load_2d(to, a_map, full + 8 * slot, part * SliceK, y);
                        } else {
                            if (unit % Cluster == rank)
                                tma::load_2d_multicast(to, a_map, full + 8 * slot, part * SliceK, y, (1 << Cluster) - 1);
                        }
                        if (part == Parts - 1) {
                            ++at;
                            column = following;
                            following = at + 1 < end ? static_cast<u32>(indices[at + 1]) : None;
                        }
                    }
                    __syncwarp();
                    word[p] = slice_word(mask, head % Units);
                    head += need;
                    units_here += need;
                    bytes += SliceBytes + need * UnitBytes;
                    part = part == Parts - 1 ? 0 : part + 1;
                    nearest = __reduce_min_sync(~0u, column);
                }
                if (lane == slot) units = units_here;
                if (lane == 0) {
                    if (nearest == None) word[0] |= last_item;
#pragma unroll
                    for (int p = 0; p < Slices; ++p) words[slot][p] = word[p];
                    barrier::expect(full + 8 * slot, bytes);
                }
                __syncwarp();
                ++in_flight;
                if (++slot == Slots) slot = 0;
            } while (nearest != None);
        }
    } else {  // ---- consumers
        const int group = warp / 4, wm = group % WM, wn = group / WM;
        constexpr int Blocks = OnM ? 1 : 128 / R, Width = OnM ? 128 : R;  // accumulators and their wgmma width
        const int first_block = OnM ? wm * 64 / R : wm * Blocks;
        const u32 row_offset = OnM ? wm * 64 % R : 0;
        int slot = 0;
        u32 phase = 0;
        for (i64 tile = blockIdx.x / Cluster; tile < tiles; tile += clusters) {
            float sums[Blocks][Width / 2] = {};
            u32 flags;
            do {
                barrier::wait(full + 8 * slot, phase);
                u32 word[Slices], any = 0;
#pragma unroll
                for (int p = 0; p < Slices; ++p) word[p] = words[slot][p], any |= word[p] >> first_block;
                flags = word[0];
                if (any & ((1u << Blocks) - 1)) {
#pragma unroll
                    for (int p = 0; p < Slices; ++p) {
                        const u32 b_slice = b_ring + slot * SlotBytes + p * SliceBytes;
                        const u32 mask = word[p] & 0xffff, base = word[p] >> 16 & 0x7fff;
#pragma unroll
                        for (int b = 0; b < Blocks; ++b) {
                            if (mask >> (first_block + b) & 1) {
                                wgmma::fence();
                                const u32 before = __popc(mask & ((1u << (first_block + b)) - 1));
                                const u32 a_unit = a_ring + (base + before) % Units * UnitBytes + row_offset * Line;
#pragma unroll
                                for (int k = 0; k < SliceK; k += 16) {
                                    const u64 a = wgmma::descriptor(a_unit + k * 2, 0, 8 * Line, Pattern);
                                    if constexpr (BCol) {
                                        const u64 x = wgmma::descriptor(b_slice + wn * (OnM ? 128 : 64) * Line + k * 2, 0,
                                                                        8 * Line, Pattern);
                                        if constexpr (OnM) wgmma::ss<T, Width, 0, 0>(sums[b], a, x);
                                        else wgmma::ss<T, Width, 0, 0>(sums[b], x, a);
                                    } else {
                                        const u64 x = wgmma::descriptor(b_slice + (wn * (OnM ? 2 : 1) * SliceK + k) * 128,
                                                                        SliceK * 128, 1024, wgmma::B128);
                                        if constexpr (OnM) wgmma::ss<T, Width, 0, 1>(sums[b], a, x);
                                        else wgmma::ss<T, Width, 1, 0>(sums[b], x, a);
                                    }
                                }
                                wgmma::commit();
                            }
                        }
                    }
                    wgmma::wait<0>();
                }
                if constexpr (Cluster > 1) {
                    if (lane < Cluster) barrier::arrive_remote(empty + 8 * slot, lane);
                } else {
                    if (lane == 0) barrier::arrive(empty + 8 * slot);
                }
                if (++slot == Slots) slot = 0, phase ^= 1;
            } while (!(flags & last_item));

            const i64 n0 = (tile / groups * Cluster + rank) * BN + wn * (OnM ? 128 : 64);
#pragma unroll
            for (int b = 0; b < Blocks; ++b) {
                const i64 entry = tile % groups * Group + first_block + b;
                if (entry >= listed) continue;
                const i64 block_row = Listed ? static_cast<i64>(row_ids[entry]) : entry;
                const i64 top = block_row * R + row_offset;
#pragma unroll
                for (int j = 0; j < Width / 2; j += 8) {
                    const float left[4] = {sums[b][j], sums[b][j + 1], sums[b][j + 2], sums[b][j + 3]};
                    const float right[4] = {sums[b][j + 4], sums[b][j + 5], sums[b][j + 6], sums[b][j + 7]};
                    // 16 x 16 of D: rows of C down its first axis, or columns of C when the product is transposed.
                    const i64 row = top + (OnM ? warp % 4 * 16 : 2 * j), n = n0 + (OnM ? 2 * j : warp % 4 * 16);
                    Out* const to = out + (CCol ? row + n * ldc : row * ldc + n);
                    store_16x16<Out, OnM ? CCol : !CCol>(to, ldc, OnM ? M - row : N - n, OnM ? N - n : M - row, left, right);
                }
            }
        }
        if constexpr (Listed) {
            constexpr int Columns = 2048;
            const i64 pieces = cdiv<i64>(N, Columns), jobs = cdiv<i64>(cdiv<i64>(M, R), ZeroRows) * pieces;
            for (i64 job = listed * R < M ? blockIdx.x : jobs; job < jobs; job += gridDim.x) {
                const i64 n0 = job % pieces * Columns;
                zero_unlisted<Out, CCol, R>(row_ids, listed, job / pieces * ZeroRows, ZeroRows, M, out, ldc, n0,
                                            N - n0 < Columns ? N - n0 : Columns, threadIdx.x, 32 * Warps);
            }
        }
    }
    if constexpr (Cluster > 1) cluster::sync();  // nobody leaves while others may still signal its barriers
}
