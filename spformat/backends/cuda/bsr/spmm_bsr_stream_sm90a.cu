// C[M,N] = A[M,K] @ B[K,N], A in BSR or DBSR with blocks of multiples of 64, in equal shares of the stored blocks, by wgmma with
// float32 sums. sm_90a only. docs/decisions/0036-bsr-stream.md.
//
//   a_map    T[nnzb*R, C]        the blocks one below the other; boxes of 64 x 64, 128-byte swizzle
//   steps    int2[count]         a piece of 64 x 64 of A: its first column of A, and its first row in a_map. The pieces of a strip
//                                of 64 rows of A follow each other. A strip without blocks has one step, (-1, any)
//   places   int4[count]         of a step: its strip; the first step of this strip, and the first one of the next; unused
//   width    C
//   b_map    T[K, N]             rows of N, boxes of 64 x 64 (BCol: columns of K, boxes of 64 x TN), 128-byte swizzle
//   c        Out[M, N]           element (i, n) at c[i*ldc + n] (CCol: c[i + n*ldc]); every element is written
//   sums     f32[gridDim.x, TN/8, 128, 4]   any contents; sums of a tile whose beginning is another block's
//   flags    u32[gridDim.x]      0 before and after: whether the sums of a share are there
//
// A tile of C is a strip of 64 rows x TN columns. The steps of all tiles, one column of tiles after the other, are one sequence of
// which each block takes a share; shares differ by one step at most, however long the rows of A are. A block that has a part
// of a tile but not its beginning leaves its sums in `sums`; the block with the beginning adds them in the order of K, so that
// every run gives the same bits. even_shares.cuh says why no block waits forever. The strip without blocks is written as zeros by
// the block whose share has its step.
//
// Grid: 1 to count * tiles of columns blocks. Block: one warpgroup that multiplies, and a warp that loads, Stages steps ahead.
#include "spformat/even_shares.cuh"
#include "spformat/launch_order.cuh"
#include "spformat/staged_store.cuh"
#include "spformat/tma.cuh"
#include "spformat/wgmma.cuh"

using namespace spformat;

constexpr int ROWS = 64, DEPTH = 64, WORKERS = 128;
constexpr int A_BYTES = ROWS * DEPTH * 2;
constexpr int SCRATCH = 16 * 128;  // bytes in which a warp stages C

// The first step of a share. Of `steps` steps in `blocks` shares, the first shares have one step more.
__device__ __forceinline__ int share_start(int steps, int blocks, int share) {
    return share * (steps / blocks) + min(share, steps % blocks);
}

template <class T, class Out, int TN, int Stages, int Resident, bool BCol, bool CCol>
__global__ void __launch_bounds__(WORKERS + 32, Resident)
spmm_bsr_stream_sm90a(const __grid_constant__ TensorMap a_map, const int2* __restrict__ steps, const int4* __restrict__ places,
                      int count, int width, int M, const __grid_constant__ TensorMap b_map, Out* c, int N, i64 ldc, float4* sums,
                      u32* flags) {
    constexpr int PANELS = BCol ? 1 : (TN + 63) / 64;  // boxes of B in a step
    constexpr int B_BYTES = BCol ? DEPTH * TN * 2 : PANELS * DEPTH * 128, STAGE = A_BYTES + B_BYTES;
    static_assert(TN % 16 == 0 && TN <= 256, "boxes are whole 8-line groups of the swizzle, and wgmma has up to 256 columns");
    static_assert(Stages >= 2, "copies must run ahead of the product");
    static_assert(store_m16_scratch<Out, 128 / int(sizeof(Out)) / 8> <= SCRATCH && ROWS_SCRATCH <= SCRATCH, "C fits its place");
    extern __shared__ __align__(1024) char shared[];
    __shared__ __align__(8) u64 barriers[2 * Stages];  // full, empty

    const u32 ring = (shared_address(shared) + 1023) & ~1023u;
    const u32 full = shared_address(barriers), empty = full + 8 * Stages;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, blocks = gridDim.x;
    const int total = count * cdiv(N, TN), share = blocks - 1 - blockIdx.x;
    const int first = share_start(total, blocks, share), last = share_start(total, blocks, share + 1);
    // The loading warp reads the table, 32 steps at once and one such group ahead. The first reads need nothing else.
    auto read = [&](int at) { return at + lane < last ? steps[(at + lane) % count] : make_int2(-1, 0); };
    int2 ahead = make_int2(-1, 0);
    if (warp == WORKERS / 32) ahead = read(first);

    if (threadIdx.x == 0) {
        for (int s = 0; s < Stages; ++s) {
            barrier::init(full + 8 * s, 1);
            barrier::init(empty + 8 * s, 1);
        }
        barrier::fence_init();
        tma::prefetch(a_map);
        tma::prefetch(b_map);
    }
    wait_for_launch_before();
    let_next_launch_begin();
    __syncthreads();

    if (warp == WORKERS / 32) {
        int2 now = ahead;
        int stage = 0, phase = 0;
        for (int at = first; at < last; ++at) {
            const int turn = (at - first) % 32;
            if (turn == 0) now = ahead, ahead = read(at + 32);
            const int k = __shfl_sync(~0u, now.x, turn), y = __shfl_sync(~0u, now.y, turn);
            if (k < 0) continue;  // a strip without blocks
            if (lane == 0) {
                const int col0 = at / count * TN;
                const u32 to = ring + stage * STAGE, bar = full + 8 * stage;
                barrier::wait(empty + 8 * stage, phase ^ 1);
                barrier::expect(bar, STAGE);
                tma::load_2d(to, a_map, bar, k % width, y);
#pragma unroll
                for (int x = 0; x < PANELS; ++x)
                    tma::load_2d(to + A_BYTES + x * (DEPTH * 128), b_map, bar, BCol ? k : col0 + x * 64, BCol ? col0 : k);
            }
            __syncwarp();
            if (++stage == Stages) stage = 0, phase ^= 1;
        }
        return;
    }

    char* const scratch = shared + (ring + Stages * STAGE - shared_address(shared)) + warp * SCRATCH;
    const bool vector = vector_aligned(c, ldc);
    float4* const mine = sums + threadIdx.x;  // where this thread's sums of share 0 are
    auto release = [&](int stage) {
        if (threadIdx.x == 0) barrier::arrive(empty + 8 * stage);
    };
    int stage = 0, phase = 0;
    int4 place = places[first % count];
    bool stored = steps[first % count].x >= 0;
    for (int at = first; at < last;) {
        const int before = at / count * count;  // steps of the columns of tiles before this one
        const int row = place.x * ROWS + warp * 16, col = at / count * TN;
        const bool begins = at == before + place.y, some = stored;
        const int tile_end = before + place.z, end = min(last, tile_end);
        if (end < last) {  // of the next tile; it comes while this one is multiplied
            place = places[end % count];
            stored = steps[end % count].x >= 0;
        }
        float acc[TN / 2] = {};
        const int stop = some ? end : at;  // a loop without a turn: a branch around it would cost registers
#pragma unroll 1
        for (int i = at; i < stop; ++i) {
            barrier::wait(full + 8 * stage, phase);
            const u32 tile = ring + stage * STAGE;
            const u64 a = wgmma::descriptor(tile, 0, 1024, wgmma::B128);
            const u64 b = BCol ? wgmma::descriptor(tile + A_BYTES, 0, 1024, wgmma::B128)
                               : wgmma::descriptor(tile + A_BYTES, DEPTH * 128, 1024, wgmma::B128);
            wgmma::fence();
#pragma unroll
            for (int k = 0; k < DEPTH / 16; ++k)
                wgmma::ss<T, TN, 0, !BCol>(acc, wgmma::advanced(a, 2 * k), wgmma::advanced(b, k * (BCol ? 2 : 128)));
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
            hand_over<WORKERS>(acc, mine + i64(share) * (TN / 8 * WORKERS), flags + share, 1);
            continue;
        }
        if (end < tile_end) {
            constexpr int SUMS = TN / 8 * WORKERS;  // pieces of a share
            int others = 1;
            while (share_start(total, blocks, share + 1 + others) < tile_end) ++others;
            take_over<WORKERS>(acc, mine + i64(share + 1) * SUMS, SUMS, flags + share + 1, 1, others, 1);
        }
        store_panels<Out, CCol, TN>(acc, scratch, c, ldc, row, col, M, N, vector, Unchanged{});
    }
}
