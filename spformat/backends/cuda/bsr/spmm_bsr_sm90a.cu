// C[M,N] = A[M,K] @ B[K,N], A in BSR or DBSR with blocks of 16 .. 128: TMA and wgmma, f32 sums. Runs on sm_90a only.
//
//   a_map    T[nnzb*R, C]       the blocks one below the other; box SliceK x R, swizzled
//   row_ids  Row[listed]        block row of each list entry (Listed: DBSR); null for BSR, where listed = cdiv(M, R)
//   plan     int4[groups]       slices begin, end, first position in `order`, number of a group: number*Group is the first of
//                               its Group list entries. Groups stand in the order in which tiles take them
//   slices   int4[..+4]         block column, mask of the group's entries that have a block there; by group, then column
//   order    int[nnzb+32]       blocks by group, column, entry
//   b_map    T[K, N]            rows of N, box 64 x SliceK, or, BCol, columns of K, box SliceK x BN; swizzled
//   c_map    Out[M, N]          as out; box StoreLine x StoreLines, swizzled; read only if BulkC
//   out      Out[M, N]          element (i, n) at i*ldc + n, or, CCol, at i + n*ldc; every element is written
//
// A tile of C is one group (BM rows) x BN columns. Each slice of B (SliceK rows x BN) that any entry of the group needs is
// fetched once, together with the blocks of A that meet it. Slices are packed, 64 rows of k to a ring slot: an item; its
// blocks of A go to a ring of units. One warp loads A, LoadersB warps take turns with B; the barrier of a slot counts both. The
// warpgroups that need an item multiply it, and all of them release it.
//
// Blocks of 64 rows and more lie on the m axis of wgmma (a warpgroup owns 64 x 128 of C); blocks of 16 and 32 lie on its n
// axis, whose width is free: a warpgroup then owns up to 128 rows x 64 columns and computes the transposed product. Fewer rows
// make more tiles, each with fewer slices, where C has hardly as many tiles as there are multiprocessors.
//
// Grid: persistent; tiles are taken in order, groups first, so that CTAs at work share B in L2. Then, Listed, the rows that
// are not listed are zeroed. Block: 128*WM*WN + 128 threads, one CTA an SM.
//
//   T, Out  __nv_bfloat16 or __half; T or float
//   R, C    block height and width, 16, 32, 64 or 128;  WgRows  rows of C of a warpgroup, whole blocks;  WM, WN  warpgroups along rows and columns of the tile
//   Slots   ring slots for B;  Units  ring units for A, a power of two, each one slice of a block
//   BulkC   C is written by TMA: 16-bit Out, out 16-byte aligned with a leading dimension of whole 16 bytes
//   Limits  nnzb*R, M and K < 2^31; B 16-byte aligned with a leading dimension of whole 16 bytes.
#include "spformat/epilogue.cuh"
#include "spformat/launch_order.cuh"
#include "spformat/ldmatrix.cuh"
#include "spformat/staged_store.cuh"
#include "spformat/tma.cuh"
#include "spformat/wgmma.cuh"

using namespace spformat;

namespace {

constexpr u32 last_item = 0x80000000u;

// What a slot holds, per slice: the mask of block rows that have a block there, and the ring unit of the first of them.
__device__ __forceinline__ u32 slice_word(u32 mask, u32 unit) { return mask | unit << 16; }

}  // namespace

template <class T, class Out, class Row, int R, int C, int WgRows, int WM, int WN, int Slots, int Units, int LoadersB, int ZeroRows,
          bool BCol, bool CCol, bool Listed, bool BulkC>
__global__ void __launch_bounds__(128 * WM * WN + 128, 1)
    spmm_bsr_sm90a(const __grid_constant__ TensorMap a_map, const Row* __restrict__ row_ids,
                   const int4* __restrict__ plan, const int4* __restrict__ slices, const int* __restrict__ order,
                   i64 M, i64 listed, const __grid_constant__ TensorMap b_map, const __grid_constant__ TensorMap c_map,
                   Out* __restrict__ out, i64 N, i64 ldc) {
    constexpr bool OnM = R >= 64;
    constexpr int WgCols = OnM ? 128 : 64;
    constexpr int BM = WM * WgRows, BN = WN * WgCols, Group = BM / R;
    constexpr int SliceK = C < 64 ? C : 64, Slices = 64 / SliceK, Parts = C / SliceK;
    constexpr int Warps = 4 * WM * WN, Line = SliceK * 2;
    constexpr u32 UnitBytes = R * Line, SliceBytes = SliceK * BN * 2, SlotBytes = Slices * SliceBytes;
    constexpr auto Pattern = Line == 128 ? wgmma::B128 : Line == 64 ? wgmma::B64 : wgmma::B32;
    static_assert(OnM ? WgRows == 64 : WgRows % R == 0 && WgRows <= 128, "rows of a warpgroup: see above");
    static_assert(R % 16 == 0 && C % 16 == 0 && BM % R == 0 && Group <= 16, "at most 16 whole block rows in a tile");
    static_assert((Units & (Units - 1)) == 0 && Units >= Slices * Group, "the ring of A holds any one item");
    static_assert(Slots <= 32, "one lane keeps the books of one slot");
    static_assert(LoadersB >= 1 && LoadersB <= 3, "three of the four loader warps are left for B");
    static_assert(BN <= 256, "a TMA box spans at most 256 columns");

    extern __shared__ char raw[];
    u32 b_ring = (shared_address(raw) + 1023) & ~1023u;
    asm volatile("" : "+r"(b_ring));  // keep the address: the compiler would compute it again at every use
    const u32 a_ring = b_ring + Slots * SlotBytes, staging = a_ring + Units * UnitBytes;
    __shared__ __align__(8) u64 barriers[2 * Slots];
    __shared__ __align__(16) u32 words[Slots][Slices];
    u32 full = shared_address(barriers);
    asm volatile("" : "+r"(full));
    const u32 empty = full + 8 * Slots;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

    if (threadIdx.x == 0) {
        for (int s = 0; s < Slots; ++s) {
            barrier::init(full + 8 * s, 2);
            barrier::init(empty + 8 * s, Warps);
        }
        barrier::fence_init();
    }
    wait_for_launch_before();
    let_next_launch_begin();
    __syncthreads();

    const u32 groups = static_cast<u32>(cdiv<i64>(listed, Group)), tiles = groups * static_cast<u32>(cdiv<i64>(N, BN));

    if (warp >= Warps) {  // ---- loaders
        if constexpr (WM * WN == 4) give_registers<56>();
        const int loader = warp - Warps;
        u32 tile = blockIdx.x;
        // The entries of `plan` for this tile and the next: each is loaded a tile ahead.
        int4 now = plan[tile < tiles ? tile % groups : 0];
        if (loader == 0) {  // A
            if (lane == 0) tma::prefetch(a_map);
            u32 head = 0, tail = 0, units = 0;  // units handed out and taken back; lane s: units in slot s
            u32 slot = 0, in_flight = 0, oldest = 0, oldest_phase = 0;
            auto take_back = [&]() {
                barrier::wait(empty + 8 * oldest, oldest_phase);
                tail += __shfl_sync(~0u, units, oldest);
                if (++oldest == Slots) oldest = 0, oldest_phase ^= 1;
                --in_flight;
            };
            u32 mask_ahead = slices[now.x + (lane < Slices ? lane : 0)].y;
            int block_ahead = order[now.z + lane];
            while (tile < tiles) {
                const u32 following = tile + gridDim.x < tiles ? (tile + gridDim.x) % groups : 0;
                const int4 next = plan[following];
                int step = now.x * Parts, position = now.z;
                const int end = now.y * Parts;
                do {
                    const int part = step % Parts, first = position;
                    const u32 mask = lane < Slices && step + lane < end ? mask_ahead : 0;
                    const int block = block_ahead;
                    const u32 need = __popc(mask), total = __reduce_add_sync(~0u, need);
                    u32 before = 0;
#pragma unroll
                    for (int p = 0; p < Slices - 1; ++p) {
                        const u32 other = __shfl_sync(~0u, need, p);
                        if (lane > p) before += other;
                    }
                    step += Slices;
                    if (part == Parts - 1) position += total;
                    const bool last = step >= end;
                    mask_ahead = slices[last ? next.x + (lane < Slices ? lane : 0)
                                             : step / Parts + (lane < Slices ? lane : 0)].y;
                    block_ahead = order[(last ? next.z : position) + lane];

                    if (in_flight == Slots) take_back();
                    while (head + total - tail > Units) take_back();
                    for (u32 u = lane; u < total; u += 32)
                        tma::load_2d(a_ring + (head + u) % Units * UnitBytes, a_map, full + 8 * slot, part * SliceK,
                                     (u < 32 ? block : order[first + u]) * R);
                    const u32 word = slice_word(mask, (head + before) % Units);
#pragma unroll
                    for (int p = 0; p < Slices; ++p) {
                        const u32 other = __shfl_sync(~0u, word, p);
                        if (lane == 0) words[slot][p] = p == 0 && last ? other | last_item : other;
                    }
                    if (lane == 0) barrier::expect(full + 8 * slot, total * UnitBytes);
                    if (lane == slot) units = total;
                    head += total;
                    ++in_flight;
                    if (++slot == Slots) slot = 0;
                } while (step < end);
                now = next;
                tile += gridDim.x;
            }
        } else if (loader <= LoadersB) {  // B: every LoadersB-th item
            if (lane == 0) tma::prefetch(b_map);
            constexpr int Boxes = BCol ? 1 : BN / 64;  // TMA boxes in a slice; a lane for each box of an item
            const int p = lane / Boxes, box = lane % Boxes;
            u32 items_before = 0;
            int turn = loader - 1;  // items of this tile before the next one that this warp loads
            while (tile < tiles) {
                const u32 following = tile + gridDim.x < tiles ? (tile + gridDim.x) % groups : 0;
                const int4 next = plan[following];
                const int n0 = static_cast<int>(tile / groups) * BN;
                const int begin = now.x * Parts, end = now.y * Parts;
                int items = cdiv(end - begin, Slices);
                if (items == 0) items = 1;
                auto column_at = [&](int item) {
                    const int step = begin + item * Slices + p;
                    return p < Slices && step < end ? slices[step / Parts].x : -1;
                };
                int ahead = column_at(turn);
                for (; turn < items; turn += LoadersB) {
                    const u32 item = items_before + turn, slot = item % Slots;
                    const int column = ahead, part = (begin + turn * Slices + p) % Parts;
                    ahead = column_at(turn + LoadersB);
                    if (item >= Slots) barrier::wait(empty + 8 * slot, (item / Slots - 1) & 1);
                    const u32 boxes = __popc(__ballot_sync(~0u, column >= 0));
                    if (lane == 0) barrier::expect(full + 8 * slot, boxes * (SliceBytes / Boxes));
                    __syncwarp();
                    if (column >= 0) {
                        const int k = column * C + part * SliceK;
                        const u32 target = b_ring + slot * SlotBytes + p * SliceBytes + box * (SliceBytes / Boxes);
                        if constexpr (BCol) tma::load_2d(target, b_map, full + 8 * slot, k, n0);
                        else tma::load_2d(target, b_map, full + 8 * slot, n0 + box * 64, k);
                    }
                }
                turn -= items;
                items_before += items;
                now = next;
                tile += gridDim.x;
            }
        }
    } else {  // ---- consumers
        if constexpr (WM * WN == 4) take_registers<104>();
        const int group = warp / 4, wm = group % WM, wn = group / WM;
        constexpr int Blocks = OnM ? 1 : WgRows / R, Width = OnM ? WgCols : R;  // accumulators and their wgmma width
        const int first_block = OnM ? wm * 64 / R : wm * Blocks;
        const u32 row_offset = OnM ? wm * 64 % R : 0;
        const bool leader = threadIdx.x % 128 == 0;
        const u64 a_ring_rows = wgmma::descriptor(a_ring + row_offset * Line, 0, 8 * Line, Pattern);
        const u64 x_ring = BCol ? wgmma::descriptor(b_ring + wn * WgCols * Line, 0, 8 * Line, Pattern)
                                : wgmma::descriptor(b_ring + wn * WgCols / 64 * SliceK * 128, SliceK * 128, 1024, wgmma::B128);
        int slot = 0;
        u32 phase = 0;
        for (u32 tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
            const i64 first_entry = static_cast<i64>(plan[tile % groups].w) * Group + first_block;
            float sums[Blocks][Width / 2] = {};
            u32 flags;
            do {
                barrier::wait(full + 8 * slot, phase);
                u32 word[Slices], any = 0;
#pragma unroll
                for (int p = 0; p < Slices; ++p) {  // lane 0 alone reads, because racecheck follows the lane that arrives
                    word[p] = __shfl_sync(~0u, lane == 0 ? words[slot][p] : 0, 0);
                    any |= word[p] >> first_block;
                }
                flags = word[0];
                if (any & ((1u << Blocks) - 1)) {
#pragma unroll
                    for (int p = 0; p < Slices; ++p) {
                        const u32 mask = word[p] & 0xffff, ahead = __popc(mask & ((1u << first_block) - 1));
                        u32 unit = ((word[p] >> 16 & 0x7fff) + ahead) % Units * (UnitBytes / 16);
                        const u64 x_slice = wgmma::advanced(x_ring, slot * (SlotBytes / 16) + p * (SliceBytes / 16));
#pragma unroll
                        for (int b = 0; b < Blocks; ++b) {
                            if (mask >> (first_block + b) & 1) {
                                wgmma::fence();
#pragma unroll
                                for (int k = 0; k < SliceK; k += 16) {
                                    const u64 a = wgmma::advanced(a_ring_rows, unit + k / 8);
                                    const u64 x = wgmma::advanced(x_slice, BCol ? k / 8 : k * 8);
                                    constexpr int Trans = BCol ? 0 : 1;  // columns of a row-major B are contiguous, not k
                                    if constexpr (OnM) wgmma::ss<T, Width, 0, Trans>(sums[b], a, x);
                                    else wgmma::ss<T, Width, Trans, 0>(sums[b], x, a);
                                }
                                wgmma::commit();
                                unit = (unit + UnitBytes / 16) % (Units * UnitBytes / 16);
                            }
                        }
                    }
                    wgmma::wait<0>();
                }
                __syncwarp();
                if (lane == 0) barrier::arrive(empty + 8 * slot);
                if (++slot == Slots) slot = 0, phase ^= 1;
            } while (!(flags & last_item));

            // D has rows of C down its first axis, or columns of C when the product is transposed. `Turn`: lines of C, the
            // contiguous runs, lie across D.
            constexpr bool Turn = OnM ? CCol : !CCol;
            const i64 n0 = static_cast<i64>(tile / groups) * BN + wn * WgCols;
            // Rows of C that start anywhere lie across D in runs of 16 columns for each warp: all warpgroups put them together.
            constexpr bool Together = !BulkC && Turn && !CCol && sizeof(Out) == 2;
            static_assert(!Together || WM == 1, "warpgroups lie side by side");
            const int barrier_id = Together ? 1 : 1 + group, sharers = Together ? 128 * WN : 128;
            if constexpr (BulkC || Together) {
                constexpr int StoreLine = CCol ? (OnM ? 64 : R) : 64;  // elements in a line of the store box, and its lines
                constexpr int StoreLines = CCol ? (OnM ? WgCols : 64) : (OnM ? 64 : R);
                constexpr u32 BoxBytes = StoreLine * StoreLines * 2;
                const u32 mine = staging + group * WgRows * WgCols * 2;
                if (BulkC && leader) tma::store_wait_read<0>();  // the staging of the tile before is free again
                named_barrier(barrier_id, sharers);
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
                if constexpr (BulkC) tma::fence_shared();
                named_barrier(barrier_id, sharers);
                if constexpr (Together) {
#pragma unroll
                    for (int b = 0; b < Blocks; ++b) {
                        const i64 entry = first_entry + b;
                        if (entry >= listed) continue;
                        const i64 block_row = Listed ? static_cast<i64>(row_ids[entry]) : entry, row = block_row * R + row_offset;
                        const char* const boxes = raw + (staging + b * BoxBytes - shared_address(raw));
                        auto chunk = [&](int l, int i) { return boxes + i / 8 * (WgRows * WgCols * 2) + swizzled<128>(l, i % 8); };
                        const i64 left = static_cast<i64>(tile / groups) * BN;
                        store_lines<Out, BN>(chunk, out + row * ldc + left, ldc, static_cast<int>(min(i64(R), M - row)),
                                             static_cast<int>(min(i64(BN), N - left)), threadIdx.x, 128 * WN);
                    }
                } else if (leader) {
                    constexpr int Boxes = OnM ? (CCol ? 1 : WgCols / 64) : Blocks;
#pragma unroll
                    for (int box = 0; box < Boxes; ++box) {
                        const i64 entry = first_entry + (OnM ? 0 : box);
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
                // Through the shared memory where TMA would find C, 4096 bytes a warp: 16 rows x 64 columns of D at a time.
                constexpr int Panel = Width < 64 ? Width : 64;
                static_assert(store_m16_scratch<Out, Panel / 8> <= 4096, "a panel of D fits into the 4096 bytes of a warp");
                char* const scratch = raw + (staging - shared_address(raw)) + warp * 4096;
                const bool vector = vector_aligned(out, ldc);
#pragma unroll
                for (int b = 0; b < Blocks; ++b) {
                    const i64 entry = first_entry + b;
                    if (entry >= listed) continue;
                    const i64 block_row = Listed ? static_cast<i64>(row_ids[entry]) : entry;
                    const int top = static_cast<int>(block_row * R + row_offset), left = static_cast<int>(n0);
                    if constexpr (OnM && !CCol) {
                        if (!vector) {
                            store_rows<Out, Width, 4096>(sums[b], scratch, out, ldc, top + warp % 4 * 16, left, static_cast<int>(M),
                                                         static_cast<int>(N));
                            continue;
                        }
                    }
#pragma unroll
                    for (int j = 0; j < Width; j += Panel) {
                        if constexpr (OnM)
                            store_m16<Out, CCol, Panel / 8>(sums[b] + j / 2, scratch, out, ldc, top + warp % 4 * 16, left + j,
                                                            static_cast<int>(M), static_cast<int>(N), vector);
                        else  // D is the transposed tile of C
                            store_m16<Out, !CCol, Panel / 8>(sums[b] + j / 2, scratch, out, ldc, left + warp % 4 * 16, top + j,
                                                             static_cast<int>(N), static_cast<int>(M), vector);
                    }
                }
            }
        }
        if constexpr (Listed) {
            constexpr int Columns = 2048;
            const i64 pieces = cdiv<i64>(N, Columns), jobs = cdiv<i64>(cdiv<i64>(M, R) - listed, ZeroRows) * pieces;
            for (i64 job = blockIdx.x; job < jobs; job += gridDim.x) {
                const i64 n0 = job % pieces * Columns;
                zero_unlisted<Out, CCol, R>(row_ids, listed, job / pieces * ZeroRows, ZeroRows, M, out, ldc, n0,
                                            N - n0 < Columns ? N - n0 : Columns, threadIdx.x, 32 * Warps);
            }
        }
        if (BulkC && leader) tma::store_wait_read<0>();  // shared memory must outlive the stores
    }
}
