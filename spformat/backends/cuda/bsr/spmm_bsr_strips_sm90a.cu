// C[M,N] = A[M,K] @ B[K,N], A in BSR or DBSR with blocks 16, 32 or 64 high, by wgmma with float32 sums: several block rows
// together make up the rows of a product. sm_90a only. docs/decisions/0056-strips-of-block-rows.md.
//
// A strip is 64 rows of C: as many block rows, with blocks first and in their order, then those without any. A unit is U columns
// of A, U = min(64, columns of a block). The units of a strip are those that any of its block rows has; a step multiplies
// S = 64 / U of them. Where a block row does not have a unit, zeros are multiplied.
//
//   a_map    T[nnzb*R, C]        the blocks one below the other; boxes of R x U
//   units    int32[count, S]     of a step: the first column of A of each of its units, at least K where the strip has no more; all
//                                -1 in the only step of a strip without blocks
//   blocks   int32[count, S, H]  of a unit and of each of the H = 64/R block rows of its strip: the first row in a_map,
//                                nnzb*R or more where it has no such block
//   places   int4[count]         of a step: its strip; the first step of this strip, and the first one of the next; unused
//   rows     int32[strips, 4]    the rows of C, 16 at a time, that a warp has: the first of them, M for none
//   width    C
//   b_map    T[K, N]             rows of N, boxes of U x 64 (BCol: columns of K, boxes of U x TN)
//   c        Out[M, N]           element (i, n) at c[i*ldc + n] (CCol: c[i + n*ldc]); every element is written
//   sums     f32[gridDim.x, TN/8, 128, 4]   any contents; sums of a tile whose beginning is another block's
//   flags    u32[gridDim.x]   0 before and after: whether the sums of a share are there
//
// A tile of C is a strip x TN columns. The steps of all tiles, one column of tiles after the other, are one sequence of which each
// block takes a share, as in spmm_bsr_stream_sm90a.cu: shares differ by one step at most, the block with the beginning of a tile
// adds what others leave in `sums`, in the order of K, so that every run gives the same bits.
//
// Grid: 1 to count * tiles of columns blocks. Block: a warpgroup that multiplies, and one that loads, Stages steps ahead: each
// of its lanes has a box of A or of B. A warp hands the boxes of its lanes to the copy engine one after the other, so that four
// warps take a quarter of the time. What a box has outside A or B are zeros, which the copy engine writes.
#include "spformat/even_shares.cuh"
#include "spformat/launch_order.cuh"
#include "spformat/staged_store.cuh"
#include "spformat/tma.cuh"
#include "spformat/wgmma.cuh"

using namespace spformat;

constexpr int ROWS = 64, DEPTH = 64, WORKERS = 128;
constexpr int SCRATCH = 16 * 128;  // bytes in which a warp stages C
constexpr int AHEAD = 4;           // steps of which the loading lanes read the tables before they need them
constexpr int LOADERS = 4;         // warps that load

// The first step of a share. Of `steps` steps in `blocks` shares, the first shares have one step more.
__device__ __forceinline__ int share_start(int steps, int blocks, int share) {
    return share * (steps / blocks) + min(share, steps % blocks);
}

template <class T, class Out, int R, int U, int TN, int Stages, int Resident, bool BCol, bool CCol>
__global__ void __launch_bounds__(WORKERS + 32 * LOADERS, Resident)
spmm_bsr_strips_sm90a(const __grid_constant__ TensorMap a_map, const int* __restrict__ units, const int* __restrict__ blocks,
                      const int4* __restrict__ places, const int* __restrict__ rows, int count, int width, int M,
                      const __grid_constant__ TensorMap b_map, Out* c, int N, i64 ldc, float4* sums, u32* flags) {
    constexpr int S = DEPTH / U, H = ROWS / R, BOXES_A = S * H;
    constexpr int PANELS = BCol ? 1 : (TN + 63) / 64, BOXES_B = S * PANELS;  // boxes of B in a step
    constexpr int LINE = 2 * U, UNIT_A = ROWS * LINE, BOX_A = R * LINE, A_BYTES = S * UNIT_A;
    constexpr int UNIT_B = BCol ? TN * LINE : U * 128, B_BYTES = BCol ? S * UNIT_B : PANELS * DEPTH * 128;
    constexpr int STAGE = A_BYTES + B_BYTES;
    constexpr auto PATTERN = U == 64 ? wgmma::B128 : U == 32 ? wgmma::B64 : wgmma::B32;
    static_assert(R == 16 || R == 32 || R == 64, "a strip is whole block rows");
    static_assert(U == 16 || U == 32 || U == 64, "a line of a unit is one line of a swizzle");
    static_assert(BOXES_A + BOXES_B <= 32 * LOADERS, "a lane has one box");
    static_assert(TN % 16 == 0 && TN <= 256, "boxes are whole 8-line groups of the swizzle, and wgmma has up to 256 columns");
    static_assert(Stages >= 2, "copies must run ahead of the product");
    static_assert(store_m16_scratch<Out, 128 / int(sizeof(Out)) / 8> <= SCRATCH && ROWS_SCRATCH <= SCRATCH, "C fits its place");
    extern __shared__ __align__(1024) char shared[];
    __shared__ __align__(8) u64 barriers[2 * Stages];  // full, empty

    const u32 ring = (shared_address(shared) + 1023) & ~1023u;
    const u32 full = shared_address(barriers), empty = full + 8 * Stages;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, shares = gridDim.x;
    const int total = count * cdiv(N, TN), share = shares - 1 - blockIdx.x;
    const int first = share_start(total, shares, share), last = share_start(total, shares, share + 1);
    const int box = lane * LOADERS + warp - WORKERS / 32;  // of a loading lane: those of B, then those of A

    // Of a step: the column of the lane's unit, and the row in a_map of its block.
    const bool loads_b = box < BOXES_B, loads_a = !loads_b && box < BOXES_A + BOXES_B;
    const int block = loads_a ? box - BOXES_B : 0, unit = loads_b ? box / PANELS : block / H;
    int column[AHEAD], y[AHEAD], next = first % count, left = last - first;
    auto read = [&](int to) {
        column[to] = left > 0 ? units[next * S + unit] : -1;
        y[to] = left > 0 && loads_a ? blocks[next * BOXES_A + block] : 0;
        --left;
        if (++next == count) next = 0;
    };
    if (warp >= WORKERS / 32) {
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) read(i);
    }

    if (threadIdx.x == 0) {
        for (int s = 0; s < Stages; ++s) {
            barrier::init(full + 8 * s, LOADERS);
            barrier::init(empty + 8 * s, 1);
        }
        barrier::fence_init();
        tma::prefetch(a_map);
        tma::prefetch(b_map);
    }
    wait_for_launch_before();
    let_next_launch_begin();
    __syncthreads();

    if (warp >= WORKERS / 32) {
        const int x = box % PANELS * 64;  // of a box of B: its first column in the tile
        const u32 to = loads_b ? A_BYTES + unit * UNIT_B + (BCol ? 0 : x * (DEPTH * 2)) : unit * UNIT_A + block % H * BOX_A;
        const u32 bytes = __reduce_add_sync(~0u, loads_b ? B_BYTES / BOXES_B : loads_a ? BOX_A : 0);  // of the boxes of this warp
        int stage = 0, phase = 0, step = first % count, col0 = first / count * TN;
        for (int at = first; at < last; at += AHEAD) {
#pragma unroll
            for (int i = 0; i < AHEAD; ++i) {
                if (at + i >= last) break;
                const int k = column[i], row = y[i];
                read(i);
                if (__shfl_sync(~0u, k, 0) >= 0) {  // else a strip without blocks
                    const u32 bar = full + 8 * stage;
                    if (lane == 0) {
                        barrier::wait(empty + 8 * stage, phase ^ 1);
                        barrier::expect(bar, bytes);
                    }
                    __syncwarp();
                    const u32 there = ring + stage * STAGE + to;
                    if (loads_b) tma::load_2d(there, b_map, bar, BCol ? k : col0 + x, BCol ? col0 : k);
                    if (loads_a) tma::load_2d(there, a_map, bar, S == 1 ? k % width : 0, row);
                    __syncwarp();
                    if (++stage == Stages) stage = 0, phase ^= 1;
                }
                if (++step == count) step = 0, col0 += TN;
            }
        }
        return;
    }

    char* const scratch = shared + (ring + Stages * STAGE - shared_address(shared)) + warp * SCRATCH;
    const bool vector = vector_aligned(c, ldc);
    constexpr int SUMS = TN / 8 * WORKERS;   // pieces of a share
    float4* const mine = sums + threadIdx.x;  // where this thread's sums of share 0 are
    auto release = [&](int stage) {
        if (threadIdx.x == 0) barrier::arrive(empty + 8 * stage);
    };
    int stage = 0, phase = 0;
    int4 place = places[first % count];
    bool stored = units[first % count * S] >= 0;
    for (int at = first; at < last;) {
        const int before = at / count * count;  // steps of the columns of tiles before this one
        const int row = rows[place.x * (WORKERS / 32) + warp], col = at / count * TN;
        const bool begins = at == before + place.y, some = stored;
        const int tile_end = before + place.z, end = min(last, tile_end);
        if (end < last) {  // of the next tile; it comes while this one is multiplied
            place = places[end % count];
            stored = units[end % count * S] >= 0;
        }
        float acc[TN / 2] = {};
        const int stop = some ? end : at;  // a loop without a turn: a branch around it would cost registers
#pragma unroll 1
        for (int i = at; i < stop; ++i) {
            barrier::wait(full + 8 * stage, phase);
            const u32 tile = ring + stage * STAGE;
            const u64 a = wgmma::descriptor(tile, 0, 8 * LINE, PATTERN);
            const u64 b = BCol ? wgmma::descriptor(tile + A_BYTES, 0, 8 * LINE, PATTERN)
                               : wgmma::descriptor(tile + A_BYTES, DEPTH * 128, 1024, wgmma::B128);
            wgmma::fence();
#pragma unroll
            for (int s = 0; s < S; ++s)
#pragma unroll
                for (int k = 0; k < U / 16; ++k)
                    wgmma::ss<T, TN, 0, !BCol>(acc, wgmma::advanced(a, s * UNIT_A / 16 + 2 * k),
                                               wgmma::advanced(b, s * UNIT_B / 16 + k * (BCol ? 2 : 128)));
            wgmma::commit();
            wgmma::wait<1>();  // the product before this one is done: its stage is free
            if (i > at) release(stage == 0 ? Stages - 1 : stage - 1);
            if (++stage == Stages) stage = 0, phase ^= 1;
        }
        wgmma::wait<0>();
        wgmma::pin(acc);
        if (some) release(stage == 0 ? Stages - 1 : stage - 1);
        at = end;
        if (!begins) {
            hand_over<WORKERS>(acc, mine + i64(share) * SUMS, flags + share, 1);
            continue;
        }
        if (end < tile_end) {
            int others = 1;
            while (share_start(total, shares, share + 1 + others) < tile_end) ++others;
            take_over<WORKERS>(acc, mine + i64(share + 1) * SUMS, SUMS, flags + share + 1, 1, others, 1);
        }
        store_panels<Out, CCol, TN>(acc, scratch, c, ldc, row, col, M, N, vector, Unchanged{});
    }
}
