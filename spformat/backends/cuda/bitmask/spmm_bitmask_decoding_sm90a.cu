// C[M,N] = A[M,K] @ B[K,N], A with 16-bit values as one bit per element and the nonzeros, on Hopper's wgmma. Some warps turn A
// into dense tiles in shared memory while others multiply: a tile of A is decoded once for up to 256 columns.
//
//   indptr Ptr[M+1], bitmask u8[M, cdiv(K,8)], data T[nnz]    A as stored, for sums that are not finite (bitmask.cuh)
//   records, starts    A in the order of the registers (bitmask_records.cuh), s.steps records a row tile of 16 rows
//   even     whether blocks share out the last rounds of tiles by steps along K (even_shares.cuh); else they take whole tiles
//   sums     with `even`: f32[gridDim.x, BN/8, 256, 4], any contents; sums of a tile whose beginning is another block's
//   flags    with `even`: u32[2 * gridDim.x + 1], 0 before and after: sums of a block and warpgroup are there; blocks started
//   b_map    TMA map of B: rows of N, boxes of box_columns<BN> x 64 k; BCol: columns of K, boxes of 64 k x BN
//   B        T: element (k, n) at k*b_k + n*b_n, the memory of b_map, for sums that are not finite
//   c_map    used when by_copies (16-bit C): see store_strip in expanding.cuh
//   C        Out: rows ldc apart (CCol: columns)
//
// A step is 128 rows x 64 columns of A. The last warp loads: its lanes 0 .. 7 copy the records of a step, lane 0 the tile of B,
// STAGES steps ahead. DECODERS warps take the records of all steps in turn, whatever their number: a record goes to registers
// as a fragment of A, and from there by stmatrix to a tile whose lines are 64 columns, swizzled as wgmma reads them. Two
// warpgroups multiply 64 rows x BN columns each. A zero times an infinite value of B is NaN, which does not belong into C: sums
// that are not finite are computed again over the stored elements.
//
// Block: 256 threads that multiply, 128 * GROUPS that decode and load. Grid: any number of blocks; they walk over all tiles, row
// tiles faster than column tiles. Sums of a tile are added in the order of K whoever computes them: the same bits every run.
#include "spformat/bitmask.cuh"
#include "spformat/bitmask_records.cuh"
#include "spformat/even_shares.cuh"
#include "spformat/expanding.cuh"
#include "spformat/take_group.cuh"

using namespace spformat;
using namespace spformat::expanding;

struct Extents {  // ctypes twin: spmm_bitmask_decoding_sm90a.Extents
    int M, K;
    int steps, row_tiles;
    int room;  // bytes of a record in shared memory, a multiple of 128
};

constexpr int ROWS = 128, WORKERS = 256, RECORDS = 8;  // of a tile and step: rows, threads that multiply, records
constexpr int A_TILE = ROWS * DEPTH * 2;

// Registers of a thread that multiplies, and of one that decodes: all together as many as a block gets at its start.
template <int GROUPS> constexpr int multiplying = GROUPS == 2 ? 168 : GROUPS == 3 ? 128 : 112;
template <int GROUPS> constexpr int decoding = GROUPS == 2 ? 88 : GROUPS == 3 ? 72 : 64;

template <class T, class Out, class Ptr, int BN, int GROUPS, int STAGES, int TILES, bool BCol, bool CCol>
__global__ void __launch_bounds__(WORKERS + 128 * GROUPS, 1)
spmm_bitmask_decoding_sm90a(const __grid_constant__ Extents s, const Ptr* __restrict__ indptr, const u8* __restrict__ bitmask,
                            const T* __restrict__ data, const u8* __restrict__ records, const u32* __restrict__ starts,
                            int even, float4* sums, u32* flags, const __grid_constant__ TensorMap b_map,
                            const T* __restrict__ B, i64 b_k, i64 b_n, const __grid_constant__ TensorMap c_map, int by_copies,
                            Out* C, int N, i64 ldc) {
    static_assert(sizeof(T) == 2, "16-bit values");
    constexpr int B_BYTES = DEPTH * BN * 2, DECODERS = 4 * GROUPS - 1, STRIP = box_columns<BN>;
    static_assert(B_BYTES % 1024 == 0, "swizzle patterns start on 1024 bytes");
    extern __shared__ __align__(1024) unsigned char shared[];
    const u32 stage_bytes = (B_BYTES + RECORDS * s.room + 1023) / 1024 * 1024;
    // Tiles of A, stages, slots of 2048 bytes for C, barriers, the number of this block.
    const u32 tiles = shared_address(shared), stages = tiles + TILES * A_TILE, slots = stages + STAGES * stage_bytes;
    const u32 full = slots + WORKERS / 32 * SLOT, empty = full + 8 * STAGES, decoded = empty + 8 * STAGES, used = decoded + 8 * TILES;
    u32* const number = reinterpret_cast<u32*>(shared + (used + 8 * TILES - tiles));
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) barrier::init(full + 8 * i, 1), barrier::init(empty + 8 * i, RECORDS + WORKERS / 128);
        for (int i = 0; i < TILES; ++i) barrier::init(decoded + 8 * i, RECORDS), barrier::init(used + 8 * i, WORKERS / 128);
        barrier::fence_init();
        *number = even ? gridDim.x - 1 - started(flags + 2 * gridDim.x, gridDim.x) : blockIdx.x;
    }
    __syncthreads();
    EvenShares work(s.row_tiles * cdiv(N, BN), s.steps, gridDim.x, *number, even != 0);
    Piece piece;

    if (warp >= WORKERS / 32) {
        give_registers<decoding<GROUPS>>();
        if (warp == WORKERS / 32 + DECODERS) {  // the one that loads
            u32 count = 0;
            while (work.next(piece)) {
                const int m0 = piece.tile % s.row_tiles * ROWS, n0 = piece.tile / s.row_tiles * BN;
                // Past the last row tile of 16 the last one is decoded again; its rows are not written.
                const int row = min(m0 / 16 + lane % RECORDS, (s.M - 1) / 16);
                const u32* ends = starts + static_cast<i64>(row) * s.steps + piece.begin;
                u32 start = ends[0], end = ends[1];
                for (int k = piece.begin; k < piece.end; ++k, ++count) {
                    const u32 following = k + 1 < piece.end ? ends[k - piece.begin + 2] : end;
                    const u32 stage = count % STAGES, to = stages + stage * stage_bytes, bar = full + 8 * stage;
                    const u32 bytes = lane < RECORDS ? (end - start) * 16 : 0, all = __reduce_add_sync(0xFFFFFFFFu, bytes);
                    if (count >= STAGES) barrier::wait(empty + 8 * stage, count / STAGES - 1 & 1);
                    if (lane == 0) barrier::expect(bar, all + B_BYTES);
                    __syncwarp();
                    if (lane == 0) load_tile<BN, BCol>(to, b_map, bar, k * DEPTH, n0);
                    if (lane < RECORDS)
                        tma::load_bulk(to + B_BYTES + lane * s.room, records + static_cast<u64>(start) * 16, bytes, bar);
                    start = end, end = following;
                }
            }
        }
        u32 items = 0;  // records of all steps of this block
        while (work.next(piece)) items += (piece.end - piece.begin) * RECORDS;  // none are left for the warp that loads
        // Row of this lane's address in a tile of stmatrix, and its pieces of 16 bytes: columns 0-7 or 8-15 of a group of 16.
        const int line = lane % 16, right = lane / 16;
#pragma unroll 1
        for (u32 item = warp - WORKERS / 32; item < items; item += DECODERS) {
            const u32 step = item / RECORDS, which = item % RECORDS, stage = step % STAGES, tile = step % TILES;
            const u32 record = stages + stage * stage_bytes + B_BYTES + which * s.room;
            barrier::wait(full + 8 * stage, step / STAGES & 1);
            u32 bits, before[2], groups[4], a[4][4];
            asm volatile("ld.shared.u32 %0, [%1];" : "=r"(bits) : "r"(record + RECORD_BITS + 4 * lane) : "memory");
            asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                         : "=r"(groups[0]), "=r"(groups[1]), "=r"(groups[2]), "=r"(groups[3]) : "r"(record) : "memory");
            bytes_before(bits, before);
            auto at = [&](int q) {
                return record + (groups[q / 2] >> 16 * (q % 2) & 0xFFFF) + __byte_perm(before[q % 2], 0, 0x4440 + q / 2);
            };
            take_group<0>(a[0][0], a[0][2], bits, at(0)), take_group<1>(a[0][1], a[0][3], bits, at(1));
            take_group<2>(a[1][0], a[1][2], bits, at(2)), take_group<3>(a[1][1], a[1][3], bits, at(3));
            take_group<4>(a[2][0], a[2][2], bits, at(4)), take_group<5>(a[2][1], a[2][3], bits, at(5));
            take_group<6>(a[3][0], a[3][2], bits, at(6)), take_group<7>(a[3][1], a[3][3], bits, at(7));
            if (step >= TILES) barrier::wait(used + 8 * tile, step / TILES - 1 & 1);
            const u32 to = tiles + tile * A_TILE + which * (16 * 128);
#pragma unroll
            for (int i = 0; i < 4; ++i) stmatrix_x4(to + swizzled<128>(line, 2 * i + right), a[i]);
            tma::fence_shared();  // wgmma reads the tile
            __syncwarp();
            if (lane == 0) {
                barrier::arrive(decoded + 8 * tile);
                barrier::arrive(empty + 8 * stage);
            }
        }
    } else {
        take_registers<multiplying<GROUPS>>();
        const int group = warp / 4;
        const Result<Out> c{c_map, by_copies != 0, C, ldc, s.M, N};
        char* const slot = reinterpret_cast<char*>(shared) + (slots - tiles) + warp * SLOT;
        u32 count = 0;
        auto release = [&](u32 step) {  // this warpgroup is done with a step
            if (threadIdx.x % 128 == 0) {
                barrier::arrive(used + 8 * (step % TILES));
                barrier::arrive(empty + 8 * (step % STAGES));
            }
        };
        while (work.next(piece)) {
            const int m0 = piece.tile % s.row_tiles * ROWS + warp * 16, n0 = piece.tile / s.row_tiles * BN;
            float acc[BN / 2] = {};
            for (int k = piece.begin; k < piece.end; ++k, ++count) {
                const u32 stage = count % STAGES, tile = count % TILES;
                barrier::wait(full + 8 * stage, count / STAGES & 1);  // B; the tile of A was decoded after that
                barrier::wait(decoded + 8 * tile, count / TILES & 1);
                constexpr int LINE = STRIP * 2;  // bytes of a line of a box of a row-major B
                constexpr wgmma::Swizzle span = BCol || STRIP == 64 ? wgmma::B128 : STRIP == 32 ? wgmma::B64 : wgmma::B32;
                constexpr u32 sixteen = BCol ? 32 : 16 * LINE;  // bytes between 16 k and the next
                const u32 from = stages + stage * stage_bytes;
                const u64 a = wgmma::descriptor(tiles + tile * A_TILE + group * (A_TILE / 2), 0, 1024, wgmma::B128);
                const u64 b = BCol ? wgmma::descriptor(from, 0, 1024, span) : wgmma::descriptor(from, DEPTH * LINE, 8 * LINE, span);
                wgmma::pin(acc);
                wgmma::fence();
#pragma unroll
                for (int i = 0; i < DEPTH / 16; ++i)
                    wgmma::ss<T, BN, 0, !BCol>(acc, wgmma::advanced(a, 2 * i), wgmma::advanced(b, i * sixteen / 16));
                wgmma::commit();
                wgmma::pin(acc);
                wgmma::wait<1>();  // the step before this one is multiplied
                if (k > piece.begin) release(count - 1);
            }
            wgmma::wait<0>();
            wgmma::pin(acc);
            release(count - 1);

            float4* const mine = sums + threadIdx.x;  // where this thread's sums of block 0 are
            if (piece.begin > 0) {
                const int own = work.share;
                hand_over<WORKERS>(acc, mine + static_cast<i64>(own) * (BN / 8 * WORKERS), flags + 2 * own + group, group + 1);
                continue;
            }
            for (int done = piece.end, other = work.share + 1; done < s.steps; ++other) {
                take_over<WORKERS>(acc, mine + static_cast<i64>(other) * (BN / 8 * WORKERS), flags + 2 * other + group, group + 1);
                done += work.start(other + 1) - work.start(other);
            }
            u32 wrong = 0;  // strips with sums that are not finite
#pragma unroll
            for (int i = 0; i < BN / STRIP; ++i)
                if (!store_strip<Out, CCol, STRIP>(acc + i * (STRIP / 2), slot, c, m0, n0 + i * STRIP)) wrong |= 1u << i;
            for (; wrong; wrong &= wrong - 1)
                again<Out, CCol>(c, m0, n0 + (__ffs(wrong) - 1) * STRIP, STRIP, [&](int r, int n) {
                    return stored_only_inline<T, Ptr>(indptr, bitmask, data, r, (s.K + 7) / 8, B + n * b_n, b_k);
                });
        }
        if (lane == 0) tma::store_wait_read<0>();
    }
}
