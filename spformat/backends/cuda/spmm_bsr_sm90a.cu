// C[M,N] = A[M,K] @ B[K,N], A in BSR or DBSR with blocks of 16 .. 128: TMA and wgmma, f32 sums. Runs on sm_90a only.
//
//   a_map    T[nnzb*R, C]       the blocks one below the other; box SliceK x R, swizzled
//   row_ids  Row[listed]        block row of each list entry (Listed: DBSR); null for BSR, where listed = cdiv(M, R)
//   indptr   Pointer[listed+1]  first block of each listed block row
//   indices  Index[nnzb]        block column
//   b_map    T[K, N]            rows of N, box 64 x SliceK, or, BCol, columns of K, box SliceK x BN; swizzled
//   c_map    Out[M, N]          as out; box StoreLine x StoreLines, swizzled; read only if BulkC
//   out      Out[M, N]          element (i, n) at i*ldc + n, or, CCol, at i + n*ldc; every element is written
//
// A tile of C is Group list entries (BM rows) x BN columns. A producer warp merges the Group sorted lists of block columns:
// each slice of B (SliceK rows x BN) that any block row of the tile needs is fetched once, together with the blocks of A that meet
// it. Slices are packed, 64 rows of k to a ring slot: an item; its blocks of A go to a ring of units. One barrier a slot announces
// both. The warpgroups that need an item multiply it, and all of them release it. Items go round the Producers warps, each of which
// owns every Producers-th slot and an equal share of the units, and all of which merge the same lists.
//
// Blocks of 64 rows and more lie on the m axis of wgmma (a warpgroup owns 64 x 128 of C); blocks of 16 and 32 lie on its n axis,
// whose width is free: a warpgroup then owns 128 rows x 64 columns and computes the transposed product.
//
// Grid: persistent; tiles are taken in order, block rows first, so that CTAs at work share B in L2. Then, Listed, the rows
// that are not listed are zeroed. Block: 128*WM*WN + 128 threads, one CTA an SM.
//
//   T, Out  __nv_bfloat16 or __half; T or float
//   R, C    block height and width, 16, 32, 64 or 128;  WM, WN  warpgroups along rows and columns of the tile
//   Slots   ring slots for B, a multiple of Producers;  Units  ring units for A, each one slice of a block
//   BulkC   C is written by TMA: 16-bit Out, out 16-byte aligned with a leading dimension of whole 16 bytes
//   Limits  nnzb*R < 2^31, K < 2^31; B 16-byte aligned with a leading dimension of whole 16 bytes.
#include "spformat/epilogue.cuh"
#include "spformat/ldmatrix.cuh"
#include "spformat/tma.cuh"
#include "spformat/wgmma.cuh"

using namespace spformat;

namespace {

constexpr u32 last_item = 0x80000000u;

// What a slot holds, per slice: the mask of block rows that have a block there, and the ring unit of the first of them.
__device__ __forceinline__ u32 slice_word(u32 mask, u32 unit) { return mask | unit << 16; }

}  // namespace

template <class T, class Out, class Row, class Pointer, class Index, int R, int C, int WM, int WN, int Slots, int Units,
          int Producers, int ZeroRows, bool BCol, bool CCol, bool Listed, bool BulkC>
__global__ void __launch_bounds__(128 * WM * WN + 128, 1)
    spmm_bsr_sm90a(const __grid_constant__ TensorMap a_map, const Row* __restrict__ row_ids,
                   const Pointer* __restrict__ indptr, const Index* __restrict__ indices, i64 M, i64 listed,
                   const __grid_constant__ TensorMap b_map, const __grid_constant__ TensorMap c_map,
                   Out* __restrict__ out, i64 N, i64 ldc) {
    constexpr bool OnM = R >= 64;
    constexpr int WgRows = OnM ? 64 : 128, WgCols = OnM ? 128 : 64;
    constexpr int BM = WM * WgRows, BN = WN * WgCols, Group = BM / R;
    constexpr int SliceK = C < 64 ? C : 64, Slices = 64 / SliceK, Parts = C / SliceK;
    constexpr int Warps = 4 * WM * WN, Line = SliceK * 2, Share = Units / Producers;
    constexpr u32 UnitBytes = R * Line, SliceBytes = SliceK * BN * 2, SlotBytes = Slices * SliceBytes;
    constexpr auto Pattern = Line == 128 ? wgmma::B128 : Line == 64 ? wgmma::B64 : wgmma::B32;
    static_assert(R % 16 == 0 && C % 16 == 0 && BM % R == 0 && Group <= 16, "at most 16 whole block rows in a tile");
    static_assert((Share & (Share - 1)) == 0 && Share >= Group, "a share of the ring of A holds any one slice");
    static_assert(Slots % Producers == 0 && Slots / Producers <= 32, "a slot has one owner, and a lane keeps its books");
    static_assert(BN <= 256, "a TMA box spans at most 256 columns");

    extern __shared__ char raw[];
    u32 b_ring = (shared_address(raw) + 1023) & ~1023u;
    asm volatile("" : "+r"(b_ring));  // keep the address: the compiler would compute it again at every use
    const u32 a_ring = b_ring + Slots * SlotBytes, staging = a_ring + Units * UnitBytes;
    __shared__ __align__(8) u64 barriers[2 * Slots];
    __shared__ u32 words[Slots][Slices];
    u32 full = shared_address(barriers);
    asm volatile("" : "+r"(full));
    const u32 empty = full + 8 * Slots;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

    if (threadIdx.x == 0) {
        for (int s = 0; s < Slots; ++s) {
            barrier::init(full + 8 * s, 1);
            barrier::init(empty + 8 * s, Warps);
        }
        barrier::fence_init();
    }
    __syncthreads();

    const i64 groups = cdiv<i64>(listed, Group), tiles = groups * cdiv<i64>(N, BN);

    if (warp >= Warps) {  // ---- producers
        give_registers<56>();
        const int producer = warp - Warps;
        if (producer >= Producers) return;
        const u32 share = producer * Share;
        u32 head = 0, tail = 0, units = 0;  // units handed out and taken back; lane s: units in own slot s
        int slot = producer, in_flight = 0, oldest = 0, turn = 0;
        u32 oldest_phase = 0;
        auto take_back = [&]() {
            barrier::wait(empty + 8 * (oldest * Producers + producer), oldest_phase);
            tail += __shfl_sync(~0u, units, oldest);
            if (++oldest == Slots / Producers) oldest = 0, oldest_phase ^= 1;
            --in_flight;
        };
        if (lane == 0) {
            tma::prefetch(a_map);
            tma::prefetch(b_map);
        }
        for (i64 tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
            const int n0 = static_cast<int>(tile / groups * BN);
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
                const bool own = turn == producer;
                if (own && in_flight == Slots / Producers) take_back();
                u32 bytes = 0, units_here = 0, word[Slices];
#pragma unroll
                for (int p = 0; p < Slices; ++p) {
                    word[p] = 0;
                    const bool mine = column == nearest;
                    const u32 mask = __ballot_sync(~0u, mine), need = __popc(mask);
                    if (nearest == None || units_here + need > Share) continue;  // the item ends here, for all producers
                    if (own) {
                        while (head + need - tail > Share) take_back();
                        const int k = static_cast<int>(nearest) * C + part * SliceK;
                        const u32 bar = full + 8 * slot, to = b_ring + slot * SlotBytes + p * SliceBytes;
                        if (lane == 0) {
                            if constexpr (BCol) {
                                tma::load_2d(to, b_map, bar, k, n0);
                            } else {
#pragma unroll
                                for (int j = 0; j < BN / 64; ++j)
                                    tma::load_2d(to + j * SliceK * 128, b_map, bar, n0 + j * 64, k);
                            }
                        }
                        if (mine) {
                            const u32 unit = share + (head + __popc(mask & ((1u << lane) - 1))) % Share;
                            tma::load_2d(a_ring + unit * UnitBytes, a_map, bar, part * SliceK, static_cast<int>(at * R));
                        }
                        word[p] = slice_word(mask, head % Share);
                        head += need;
                        bytes += SliceBytes + need * UnitBytes;
                    }
                    units_here += need;
                    if (mine && part == Parts - 1) {
                        ++at;
                        column = following;
                        following = at + 1 < end ? static_cast<u32>(indices[at + 1]) : None;
                    }
                    part = part == Parts - 1 ? 0 : part + 1;
                    nearest = __reduce_min_sync(~0u, column);
                }
                if (own) {
                    if (lane == slot / Producers) units = units_here;
                    if (lane == 0) {
                        if (nearest == None) word[0] |= last_item;
#pragma unroll
                        for (int p = 0; p < Slices; ++p) words[slot][p] = word[p];
                        barrier::expect(full + 8 * slot, bytes);
                    }
                    __syncwarp();
                    ++in_flight;
                    if ((slot += Producers) >= Slots) slot = producer;
                }
                turn = turn == Producers - 1 ? 0 : turn + 1;
            } while (nearest != None);
        }
    } else {  // ---- consumers
        take_registers<104>();
        const int group = warp / 4, wm = group % WM, wn = group / WM;
        constexpr int Blocks = OnM ? 1 : 128 / R, Width = OnM ? WgCols : R;  // accumulators and their wgmma width
        const int first_block = OnM ? wm * 64 / R : wm * Blocks;
        const u32 row_offset = OnM ? wm * 64 % R : 0;
        const bool leader = threadIdx.x % 128 == 0;
        int slot = 0;
        u32 phase = 0;
        for (i64 tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
            float sums[Blocks][Width / 2] = {};
            u32 flags;
            do {
                barrier::wait(full + 8 * slot, phase);
                u32 word[Slices], any = 0;
#pragma unroll
                for (int p = 0; p < Slices; ++p) word[p] = words[slot][p], any |= word[p] >> first_block;
                flags = word[0];
                if (any & ((1u << Blocks) - 1)) {
                    const u32 units = a_ring + slot % Producers * Share * UnitBytes + row_offset * Line;
#pragma unroll
                    for (int p = 0; p < Slices; ++p) {
                        const u32 b_slice = b_ring + slot * SlotBytes + p * SliceBytes;
                        const u32 mask = word[p] & 0xffff, base = word[p] >> 16 & 0x7fff;
#pragma unroll
                        for (int b = 0; b < Blocks; ++b) {
                            if (mask >> (first_block + b) & 1) {
                                wgmma::fence();
                                const u32 before = __popc(mask & ((1u << (first_block + b)) - 1));
                                const u32 a_unit = units + (base + before) % Share * UnitBytes;
#pragma unroll
                                for (int k = 0; k < SliceK; k += 16) {
                                    const u64 a = wgmma::descriptor(a_unit + k * 2, 0, 8 * Line, Pattern);
                                    if constexpr (BCol) {
                                        const u64 x =
                                            wgmma::descriptor(b_slice + wn * WgCols * Line + k * 2, 0, 8 * Line, Pattern);
                                        if constexpr (OnM) wgmma::ss<T, Width, 0, 0>(sums[b], a, x);
                                        else wgmma::ss<T, Width, 0, 0>(sums[b], x, a);
                                    } else {
                                        const u64 x = wgmma::descriptor(b_slice + (wn * WgCols / 64 * SliceK + k) * 128,
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
                if (lane == 0) barrier::arrive(empty + 8 * slot);
                if (++slot == Slots) slot = 0, phase ^= 1;
            } while (!(flags & last_item));

            // D has rows of C down its first axis, or columns of C when the product is transposed. `Turn`: lines of C, the
            // contiguous runs, lie across D.
            constexpr bool Turn = OnM ? CCol : !CCol;
            const i64 n0 = tile / groups * BN + wn * WgCols;
            if constexpr (BulkC) {
                constexpr int StoreLine = CCol ? (OnM ? 64 : R) : 64;  // elements in a line of the store box, and its lines
                constexpr int StoreLines = CCol ? (OnM ? WgCols : 64) : (OnM ? 64 : R);
                constexpr u32 BoxBytes = StoreLine * StoreLines * 2;
                const u32 mine = staging + group * WgRows * WgCols * 2;
                if (leader) tma::store_wait_read<0>();  // the staging of the tile before is free again
                named_barrier(1 + group, 128);
#pragma unroll
                for (int b = 0; b < Blocks; ++b) {
#pragma unroll
                    for (int j = 0; j < Width / 2; j += 8) {
                        const float* d = &sums[b][j];
                        const u32 tiles_8x8[4] = {pack2<Out>(d[0], d[1]), pack2<Out>(d[2], d[3]), pack2<Out>(d[4], d[5]),
                                                  pack2<Out>(d[6], d[7])};
                        const int first = warp % 4 * 16 + lane / 8 % 2 * 8, second = 2 * j + lane / 16 * 8;  // of this lane's tile
                        const int line = Turn ? second + lane % 8 : first + lane % 8, start = Turn ? first : second;
                        const u32 box = mine + (OnM ? start / StoreLine : b) * BoxBytes;
                        const u32 to = box + swizzled<StoreLine * 2>(line, start % StoreLine / 8);
                        if constexpr (Turn) stmatrix_x4_trans(to, tiles_8x8);
                        else stmatrix_x4(to, tiles_8x8);
                    }
                }
                tma::fence_shared();
                named_barrier(1 + group, 128);
                if (leader) {
                    constexpr int Boxes = OnM ? (CCol ? 1 : WgCols / 64) : Blocks;
#pragma unroll
                    for (int box = 0; box < Boxes; ++box) {
                        const i64 entry = tile % groups * Group + first_block + (OnM ? 0 : box);
                        if (entry < listed) {
                            const i64 block_row = Listed ? static_cast<i64>(row_ids[entry]) : entry;
                            const int row = static_cast<int>(block_row * R + row_offset);
                            const int n = static_cast<int>(n0) + (OnM ? box * 64 : 0);
                            tma::store_2d(c_map, mine + box * BoxBytes, CCol ? row : n, CCol ? n : row);
                        }
                    }
                    tma::store_commit();
                }
            } else {
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
                        const i64 row = top + (OnM ? warp % 4 * 16 : 2 * j), n = n0 + (OnM ? 2 * j : warp % 4 * 16);
                        Out* const to = out + (CCol ? row + n * ldc : row * ldc + n);
                        store_16x16<Out, Turn>(to, ldc, OnM ? M - row : N - n, OnM ? N - n : M - row, left, right);
                    }
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
        if (BulkC && leader) tma::store_wait_read<0>();  // shared memory must outlive the stores
    }
}
