// Kernels for Hopper that turn A into dense tiles in the registers of wgmma: what does not depend on how A is stored. Tiles of
// C have 64*WG rows, WG warpgroups, and BN columns; a k tile has DEPTH columns of A.
#pragma once
#include "spformat/parts_of_k.cuh"
#include "spformat/staged_store.cuh"
#include "spformat/tma.cuh"
#include "spformat/wgmma.cuh"

namespace spformat::expanding {

constexpr int DEPTH = 64;
constexpr int SLOT = 2048;  // bytes of a warp in which sums wait for their way to C
// The same of a tile: twice as many where rows of C are up to 512 bytes long, so that eight of them leave together.
template <int BN, int Parts> constexpr int slot_bytes = Parts == 1 && BN > 128 ? 2 * SLOT : SLOT;
template <int BN> constexpr int box_columns = BN < 64 ? BN : 64;  // of a box of a row-major B
template <int BN> constexpr int boxes = (BN + 63) / 64;  // of a row-major B; the last one may have columns that no product uses
template <int BN> constexpr int strip_columns = BN % 64 ? box_columns<BN % 64> : 64;  // of a box of C
template <int BN, bool BCol> constexpr int tile_bytes = DEPTH * 2 * (BCol ? BN : boxes<BN> * box_columns<BN>);  // of a k tile of B

// Whether the warp that loads has a warpgroup of its own, which hands its registers over to the others: in wide tiles. The threads of
// a block.
template <int WG, int BN> constexpr bool hands_over = WG * BN >= 384;
template <int WG, int BN> constexpr int threads = 128 * WG + (hands_over<WG, BN> ? 128 : 32);

// In wide tiles the warpgroup that loads gives most of its registers to those that multiply. All threads call it. At the start
// each of 384 threads has 168 registers, each of 512 has 128; afterwards they have as many in all. What these kernels call afterwards
// is inlined; functions that are called beside setmaxnreg were not tried.
template <int WG, int BN> __device__ __forceinline__ void hand_registers_over() {
    if constexpr (hands_over<WG, BN>) {
        static_assert(WG == 2 || WG == 3);
        if (threadIdx.x >= 128 * WG) give_registers<WG == 2 ? 24 : 32>();
        else take_registers<WG == 2 ? 240 : 160>();
    }
}

// The k tile of B from (k0, n0), DEPTH x BN, to `to` in boxes that bar counts. One thread calls it.
template <int BN, bool BCol>
__device__ __forceinline__ void load_tile(u32 to, const TensorMap& b_map, u32 bar, int k0, int n0) {
    constexpr int COLS = box_columns<BN>;
    if constexpr (BCol) {
        tma::load_2d(to, b_map, bar, k0, n0);
    } else {
#pragma unroll
        for (int i = 0; i < boxes<BN>; ++i) tma::load_2d(to + i * DEPTH * COLS * 2, b_map, bar, n0 + i * COLS, k0);
    }
}

// acc += a times the k tile of B at `from`. Asynchronous: until wgmma::wait, a, acc and the tile are in use.
//   a[i]     this warp's 16 rows x columns 16i .. 16i+15, as wgmma takes a fragment of A
template <class T, int BN, bool BCol>
__device__ __forceinline__ void multiply_tile(float (&acc)[BN / 2], const u32 (&a)[4][4], u32 from) {
    constexpr int COLS = box_columns<BN>, LINE = COLS * 2;
    constexpr wgmma::Swizzle span = BCol || COLS == 64 ? wgmma::B128 : COLS == 32 ? wgmma::B64 : wgmma::B32;
    constexpr u32 sixteen = BCol ? 32 : 16 * LINE;  // bytes between 16 k and the next
    const u64 b = BCol ? wgmma::descriptor(from, 0, 1024, span) : wgmma::descriptor(from, DEPTH * LINE, 8 * LINE, span);
    wgmma::pin(acc);
    wgmma::fence();
#pragma unroll
    for (int i = 0; i < 4; ++i) wgmma::rs<T, BN, !BCol>(acc, a[i], wgmma::advanced(b, i * sixteen / 16));
    wgmma::commit();
    wgmma::pin(acc);
}

// acc = A times B over steps first .. last-1 of 64 columns of A.
//   Ahead                how far a warp reads ahead. 0: it reads a step after the one before is multiplied; other warps use the time.
//                        1: it reads a step while the one before is multiplied. 2: it also hands that step to the tensor cores
//                        before the one before is finished. 1 needs registers for two steps, 2 for three; where a thread has too
//                        few, the compiler makes each product wait for the one before
//   tiles, stage_bytes   the k tile of B in stage 0, and from stage to stage
//   empty                barriers of the stages: every thread arrives for its own reads; racecheck follows only who arrives
//   load(a, k)           waits for step k and puts this warp's 16 rows of it into a, as multiply_tile takes them
template <class T, int BN, bool BCol, int STAGES, int Ahead, class Load>
__device__ __forceinline__ void multiply_steps(float (&acc)[BN / 2], int first, int last, u32 tiles, u32 stage_bytes, u32 empty,
                                               Load load) {
    auto multiply = [&](const u32 (&a)[4][4], int k) {
        multiply_tile<T, BN, BCol>(acc, a, tiles + (k - first) % STAGES * stage_bytes);
    };
    auto finished = [&](int k) { barrier::arrive(empty + 8 * ((k - first) % STAGES)); };
    auto finish = [&](int k) {
        wgmma::wait<0>();
        wgmma::pin(acc);
        finished(k);
    };
    if (first >= last) return;
    u32 even[4][4], odd[4][4];
    if constexpr (Ahead == 0) {
#pragma unroll 1
        for (int k = first; k < last; ++k) load(even, k), multiply(even, k), finish(k);
    } else if constexpr (Ahead == 1) {
        load(even, first);
        for (int k = first; k < last; k += 2) {
            multiply(even, k);
            if (k + 1 < last) load(odd, k + 1);
            finish(k);
            if (k + 1 == last) break;
            multiply(odd, k + 1);
            if (k + 2 < last) load(even, k + 2);
            finish(k + 1);
        }
    } else {
        load(even, first), multiply(even, first);
        int k = first + 1;
#pragma unroll 1
        for (; k + 1 < last; k += 2) {
            load(odd, k), multiply(odd, k);
            wgmma::wait<1>(), finished(k - 1);
            load(even, k + 1), multiply(even, k + 1);
            wgmma::wait<1>(), finished(k);
        }
        if (k < last) {
            load(odd, k), multiply(odd, k);
            wgmma::wait<1>(), finished(k - 1);
        }
        finish(last - 1);
    }
}

// C: rows ldc apart (CCol: columns). by_copies: `map` is a TMA map of it, see store_tile.
template <class Out> struct Result {
    const TensorMap& map;
    bool by_copies;
    Out* data;
    i64 ldc;
    int M, N;
};

// Strips of 16-bit C that find room in a warp's SLOT bytes beside each other.
template <class Out, int COLS> constexpr int strips_at_once = sizeof(Out) == 2 ? SLOT / (16 * COLS * 2) : 1;

// Whether all sums of a warp's 16 rows x COLS columns are finite in C.
template <class Out, int COLS> __device__ __forceinline__ bool all_finite(const float* sums) {
    bool finite = true;
#pragma unroll
    for (int i = 0; i < COLS / 2; ++i) finite = finite && isfinite(to_float(from_float<Out>(sums[i])));
    return __all_sync(0xFFFFFFFF, finite);
}

// One warp stores 16 rows x COLS columns of C from (row, col) through `slot`, its SLOT bytes. number: of the strips that this warp
// stored before. vector: see store_m16. Narrow: the tile has few columns. Whether all of the sums are finite; if not, they went by
// ordinary stores, and the lanes of this warp may read them.
template <class Out, bool CCol, int COLS, bool Narrow>
__device__ __forceinline__ bool store_strip(const float* sums, char* slot, const Result<Out>& c, int row, int col, int number,
                                            bool vector) {
    constexpr int AT_ONCE = strips_at_once<Out, COLS>;
    const int lane = threadIdx.x % 32;
    const bool finite = all_finite<Out, COLS>(sums);
    if constexpr (sizeof(Out) == 2) {
        if (c.by_copies && finite) {
            if (lane == 0) tma::store_wait_read<AT_ONCE - 1>();  // what the slot held there
            __syncwarp();
            const u32 to = shared_address(slot) + number % AT_ONCE * (16 * COLS * 2);
#pragma unroll
            for (int j = 0; j < COLS / 8; j += 2) {
                const float* x = sums + 4 * j;
                // Rows 0-7 and 8-15 of eight columns, then of the next eight.
                const u32 r[4] = {pack2<Out>(x[0], x[1]), pack2<Out>(x[2], x[3]), pack2<Out>(x[4], x[5]), pack2<Out>(x[6], x[7])};
                if constexpr (CCol) stmatrix_x4_trans(to + swizzled<32>(8 * j + lane / 16 * 8 + lane % 8, lane / 8 % 2), r);
                else stmatrix_x4(to + swizzled<COLS * 2>(lane % 16, j + lane / 16), r);
            }
            tma::fence_shared();
            __syncwarp();
            if (lane == 0) {  // strips outside of C count, too: the wait above is for a number of them
                if (row < c.M && col < c.N) tma::store_2d(c.map, to, CCol ? row : col, CCol ? col : row);
                tma::store_commit();
            }
            return true;
        }
    }
    if (lane == 0) tma::store_wait_read<0>();
    __syncwarp();
    constexpr int PART = COLS < 128 / int(sizeof(Out)) ? COLS : 128 / int(sizeof(Out));
    static_assert(store_m16_scratch<Out, PART / 8> <= SLOT && ROWS_SCRATCH <= SLOT, "a warp's strip fits");
#pragma unroll
    for (int part = 0; part < COLS / PART; ++part)
        store_m16<Out, CCol, PART / 8, Narrow>(sums + part * (PART / 2), slot, c.data, c.ldc, row, col + part * PART, c.M, c.N, vector);
    __syncwarp();
    return finite;
}

// Elements of C that are not finite among 16 x cols from (row, col), again: the lanes of this warp wrote them, by ordinary stores.
template <class Out, bool CCol, class Sum>
__device__ __forceinline__ void again(const Result<Out>& c, int row, int col, int cols, Sum sum) {
#pragma unroll 1
    for (int i = threadIdx.x % 32; i < 16 * cols; i += 32) {
        const int r = row + i % 16, n = col + i / 16;
        if (r >= c.M || n >= c.N) continue;
        Out* x = c.data + (CCol ? r + n * c.ldc : r * c.ldc + n);
        if (!isfinite(to_float(*x))) *x = from_float<Out>(sum(r, n));
    }
}

// Strips of 16 x 16 sums of a tile, numbered along its rows; of a run, which a warp adds up and stores together: up to four of the
// same rows, if every warp then has one; and those that each block of a cluster adds up.
template <int WG, int BN> constexpr int strips = 4 * WG * BN / 16;
template <int BN, int Parts> constexpr int run_strips = BN / 16 / Parts >= 4 && BN % 64 == 0   ? 4
                                                      : BN / 16 / Parts >= 2 && BN % 32 == 0 ? 2
                                                                                             : 1;
template <int WG, int BN, int Parts> constexpr int own_strips = (strips<WG, BN> / run_strips<BN, Parts> + Parts - 1) / Parts *
                                                                run_strips<BN, Parts>;
constexpr int STRIP_BYTES = 16 * 16 * 4;
// Bytes for what the blocks of a cluster hand over, and all that store_tile needs: these, a slot for each warp, and a barrier.
template <int WG, int BN, int Parts> constexpr int handed_over = Parts > 1 ? own_strips<WG, BN, Parts> * Parts * STRIP_BYTES : 0;
template <int WG, int BN, int Parts>
constexpr int way_out = handed_over<WG, BN, Parts> + 4 * WG * slot_bytes<BN, Parts> + (Parts > 1 ? 128 : 0);

// The sums of a tile to C from column n0 on, through `shared` (1024-byte aligned), which held stages: no copy is on its way to
// them any more, and no product of this thread reads them. All threads that multiply call it.
//   row_of(warp)   the first of the 16 rows of C of a warp; all lanes call it
//   c.map    rows of N, boxes of STRIP x 16 (CCol: columns of M, boxes of 16 x STRIP), STRIP = strip_columns, with Parts those of
//            a run
//   part     with Parts: the blocks of a cluster have a part of K each; each block adds up strips of 16 x 16 sums that follow each
//            other, in the order of the parts
//   redo(warp, row, col, cols)   called where the sums of `warp`, 16 x cols elements from (row, col) on, are not all finite
template <class Out, bool CCol, int WG, int BN, int Parts, class RowOf, class Redo>
__device__ __forceinline__ void store_tile(const float (&acc)[BN / 2], unsigned char* shared, const Result<Out>& c, RowOf row_of,
                                           int n0, int part, Redo redo) {
    constexpr int THREADS = 128 * WG, WARPS = 4 * WG;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const bool vector = vector_aligned(c.data, c.ldc);
    named_barrier(1, THREADS);
    char* const slot = reinterpret_cast<char*>(shared) + handed_over<WG, BN, Parts> + warp * slot_bytes<BN, Parts>;
    if constexpr (Parts == 1) {
        constexpr int STRIP = strip_columns<BN>;
        constexpr bool LONG = !CCol && BN > 64;  // rows of C that start anywhere are longer than a strip
        const int row = row_of(warp);
        u32 not_finite = 0;  // strips, a bit each
        if (LONG && !vector) {
#pragma unroll
            for (int i = 0; i < BN / STRIP; ++i)
                if (!all_finite<Out, STRIP>(acc + i * (STRIP / 2))) not_finite |= 1u << i;
            if constexpr (LONG) store_rows<Out, BN, slot_bytes<BN, Parts>>(acc, slot, c.data, c.ldc, row, n0, c.M, c.N);
            __syncwarp();
        } else {
#pragma unroll
            for (int i = 0; i < BN / STRIP; ++i)
                if (!store_strip<Out, CCol, STRIP, BN <= 64>(acc + i * (STRIP / 2), slot, c, row, n0 + i * STRIP, i, LONG || vector))
                    not_finite |= 1u << i;
        }
#pragma unroll 1
        for (; not_finite; not_finite &= not_finite - 1) redo(warp, row, n0 + (__ffs(not_finite) - 1) * STRIP, STRIP);
    } else {
        // Strips OWN * p .. OWN * (p + 1) - 1 belong to block p, which has room for them from every part.
        constexpr int STRIPS = strips<WG, BN>, RUN = run_strips<BN, Parts>, OWN = own_strips<WG, BN, Parts>;
        const int first = part * OWN, count = max(0, min(OWN, STRIPS - first));
        const u32 base = shared_address(shared), bar = base + way_out<WG, BN, Parts> - 128;
        if (threadIdx.x == 0) barrier::init(bar, 1), barrier::fence_init();
        __syncwarp();
        if (threadIdx.x == 0) barrier::expect(bar, count * ((Parts - 1) * STRIP_BYTES));
        __syncwarp();
        cluster::arrive();  // no block of the cluster reads its stages any more: they have room for sums
        cluster::wait();
#pragma unroll
        for (int j = 0; j < BN / 16; ++j) {
            const int i = warp * (BN / 16) + j, owner = i / OWN;
            const u32 to = base + ((i - owner * OWN) * Parts + part) * STRIP_BYTES + lane * 16;
            parts_of_k::send<STRIP_BYTES / 2>(acc + 8 * j, to, owner, part, bar);
        }
        named_barrier(1, THREADS);  // what this block's own warps stored
        barrier::wait_cluster(bar, 0);
#pragma unroll 1
        for (int own = warp * RUN, number = 0; own < count; own += WARPS * RUN, ++number) {
            float sums[8 * RUN] = {};
#pragma unroll
            for (int r = 0; r < RUN; ++r)
                parts_of_k::add<Parts, STRIP_BYTES / 2>(sums + 8 * r, base + (own + r) * Parts * STRIP_BYTES + lane * 16);
            const int i = first + own, of_warp = i / (BN / 16), row = row_of(of_warp), col = n0 + i % (BN / 16) * 16;
            if (!store_strip<Out, CCol, 16 * RUN, BN <= 64>(sums, slot, c, row, col, number, vector)) redo(of_warp, row, col, 16 * RUN);
        }
    }
    if (lane == 0) tma::store_wait_read<0>();
}

}  // namespace spformat::expanding
