// C[M,N] = A[M,K] @ B[K,N] on Hopper's wgmma for A in records: pieces of some rows x 64 columns, or a multiple of them, that become
// dense on their way to the registers. What a record is, and how a warp decodes its 16 rows, is in `Records`.
//
//   records, starts    the records of a line, Records::ROWS rows, follow each other in the order of K; where each lies in memory
//                      follows from its entry of starts and the next one
//   b_map    TMA map of B: rows of N, boxes of min(BN, 64) x 64 k; BCol: columns of K, boxes of 64 k x BN
//   B        T: element (k, n) at k*b_k + n*b_n
//   copied_b   with Parts: where the blocks copy B to before they multiply, the memory of b_map; or nothing, then B is that memory
//   c_map    used when by_copies (16-bit C): see store_tile in expanding.cuh
//   C        Out: rows ldc apart (CCol: columns)
//
// A zero times an infinite value of B is NaN, which does not belong into C: sums that are not finite are computed again over the
// stored elements.
//
// Grid: x = tiles * Parts, from tile first_tile on. Tiles are numbered by row, then by column: first those of lines that have records,
// then the others. Parts blocks, a cluster, multiply a tile of C, each a part of K. Block: WG warpgroups that multiply 64 rows x BN
// columns each, and one warp that loads, STAGES steps ahead. In wide tiles that warp has a warpgroup of its own, which hands its
// registers over to the others.
//
// first_tile > 0: the launch before this one multiplies the tiles before, of the same operands. Nothing that it writes is read
// here, so that this launch does not wait for it until its own tiles are stored; then the next launch need wait for this one only.
#pragma once
#include "spformat/expanding.cuh"
#include "spformat/launch_order.cuh"
#include "spformat/own_copy.cuh"

namespace spformat::expanding {

struct RecordExtents {  // ctypes counterpart: record_products.Extents
    int M, K;
    int steps, steps_per_part, row_tiles;  // a part begins with a record
    int filled;      // lines that have records: the first ones
    int listed;      // whether the lines are in another order than in C; behind the entries of starts is then where each belongs
    int room;        // bytes of a record in shared memory, a multiple of 128
    int images;      // where the memory starts in which warps put their records together
    int barriers;    // where the barriers start, and the notes behind them: after all else
};

// What a class of records whose entries of `starts` count 16-byte pieces has from here; a record has 64 columns.
struct PlainRecords {
    static constexpr int STEPS = 1;
    static constexpr bool NOTES = false;
    static __device__ __forceinline__ u64 offset(u32 start) { return static_cast<u64>(start) * 16; }
    static __device__ __forceinline__ u32 bytes(u32 start, u32 next) { return (next - start) * 16; }
};

// Records of the same rows in shared memory or on their way there, each used in as many steps as it covers.
template <int STAGES, int STEPS> constexpr int records_at_once = STEPS == 1 ? STAGES : STAGES / 2 + 1;

// C of a tile. Records: a class with
//   ROWS, STEPS, IMAGE           rows of a record, and steps that it covers (1 or 2); bytes of shared memory of its own for each warp
//   offset(start), bytes(start, next)   where a record begins in `records`, and its length, a multiple of 16; of entries of starts
//   NOTES, note(start)           whether a warp needs more than the record to read it: a word that is not 0
//   Records(image)               of a warp
//   take(a, record, note, step)  puts this warp's 16 rows of a step of the record at `record` in shared memory into fragments of A:
//                                step 0 first, then, if it covers two, step 1. note: 0, and zeros for A, if there is no such record
//   stored_only(records, starts, steps, row, b, b_k)   one element of C over the stored elements alone; row: by the order of lines
template <class Records, class T, class Out, int WG, int BN, int STAGES, int Parts, bool Ahead, bool BCol, bool CCol>
__device__ __forceinline__ void multiply_records(const RecordExtents& s, const u8* __restrict__ records,
                                                 const u32* __restrict__ starts, const TensorMap& b_map, const T* __restrict__ B,
                                                 i64 b_k, i64 b_n, const TensorMap& c_map, int by_copies, Out* C, int N, i64 ldc,
                                                 int first_tile, const CopyTo& copied_b) {
    static_assert(sizeof(T) == 2, "16-bit values");
    constexpr int ROWS = 64 * WG, WARPS = 4 * WG, B_BYTES = DEPTH * BN * 2;
    constexpr int RECORDS = ROWS / Records::ROWS, SHARERS = Records::ROWS / 16;  // records of a step; warps that read the same one
    constexpr int STEPS = Records::STEPS, AT_ONCE = records_at_once<STAGES, STEPS>;
    static_assert(B_BYTES % 1024 == 0, "swizzle patterns start on 1024 bytes");
    extern __shared__ __align__(1024) unsigned char shared[];
    const u32 base = shared_address(shared), full = base + s.barriers, empty = full + 8 * STAGES;
    // Behind the tiles of B: the records of a step, one ring of AT_ONCE places. What a fetch overwrites, no warp reads any more.
    auto place = [&](u32 number, int record) { return static_cast<int>(number / STEPS % AT_ONCE) * RECORDS + record; };
    auto record_at = [&](int place) { return STAGES * B_BYTES + place * s.room; };
    u32* const notes = reinterpret_cast<u32*>(shared + s.barriers + 16 * STAGES);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int part = blockIdx.x % Parts;
    // Row tiles, and tiles, that have records: these come first. A single division, because divisions take long.
    const int busy_rows = cdiv(s.filled, RECORDS), busy = busy_rows * cdiv(N, BN);
    const int tile = first_tile + blockIdx.x / Parts, idle = tile >= busy ? 1 : 0;
    const int of_kind = tile - idle * busy, rows = idle ? s.row_tiles - busy_rows : busy_rows, column = of_kind / rows;
    const int m0 = (idle * busy_rows + of_kind - column * rows) * ROWS, n0 = column * BN;
    const int line0 = m0 / Records::ROWS, records_here = max(0, min(RECORDS, s.filled - line0));
    const int first = min(part * s.steps_per_part, s.steps), last = records_here ? min(first + s.steps_per_part, s.steps) : first;

    const int arrivals = Records::NOTES ? max(1, records_here) : 1;  // at what says that a step is there
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) barrier::init(full + 8 * i, arrivals), barrier::init(empty + 8 * i, 128 * WG);
        barrier::fence_init();
    }
    if (first_tile == 0)
        wait_for_launch_before();
    let_next_launch_begin();
    // Lane i copies the records of the i-th line, which follow each other in memory. Where the next one ends is loaded a step ahead.
    const bool loads = warp == WARPS, copies = loads && lane < records_here;
    const i64 line = line0 + (copies ? lane : 0), of_line = (s.steps + STEPS - 1) / STEPS;
    const u32* ends = starts + line * of_line + first / STEPS;
    u32 start = 0, end = 0;
    const OwnCopy own_copy = OwnCopy::of<BCol>(copied_b, B, b_k, b_n, s.K, N);
    const bool copies_b = Parts > 1 && own_copy.wanted();
    if (copies_b) {
        if (copies && first < last) start = ends[0], end = ends[1];
        own_copy.copy();
    }
    __syncthreads();

    if (copies_b) {
        if (const u32 bytes = copies && first < last ? Records::bytes(start, end) : 0)
            bring_to_l2(records + Records::offset(start), bytes);
        if (loads) own_copy.wait();
    } else if (copies && first < last) {
        start = ends[0], end = ends[1];
    }
    auto fetch_b = [&](int k) {
        const u32 stage = (k - first) % STAGES;
        load_tile<BN, BCol>(base + stage * B_BYTES, b_map, full + 8 * stage, k * DEPTH, n0);
    };
    if (loads && lane == 0 && first < last) barrier::announce(full, B_BYTES), fetch_b(first);  // before `starts` is there
    auto fetch = [&](int k) {  // steps in order; all lanes of the warp that loads
        const u32 number = k - first, stage = number % STAGES, bar = full + 8 * stage;
        const bool begins = number % STEPS == 0;  // a record
        const u32 following = begins && copies && k + STEPS < last ? ends[number / STEPS + 2] : end;
        if (number >= STAGES) barrier::wait(empty + 8 * stage, number / STAGES - 1 & 1);
        const u32 bytes = begins && copies ? Records::bytes(start, end) : 0;
        const u32 b_bytes = number > 0 ? B_BYTES : 0;  // the first step has its tile
        const int to = place(number, lane);
        if constexpr (Records::NOTES) {  // each lane announces what it copies: then its note is there for all who wait
            if (copies && begins) notes[to] = Records::note(start);
            if (copies) barrier::expect(bar, bytes + (lane == 0 ? b_bytes : 0));
        } else {
            const u32 all = __reduce_add_sync(0xFFFFFFFFu, bytes);
            if (lane == 0) barrier::expect(bar, all + b_bytes);
        }
        __syncwarp();
        if (bytes) tma::load_bulk(base + record_at(to), records + Records::offset(start), bytes, bar);
        if (lane == 0 && b_bytes) fetch_b(k);
        if (begins) start = end, end = following;
    };
    hand_registers_over<WG, BN>();
    if (warp >= WARPS) {
        if (loads)
            for (int k = first; k < last; ++k) fetch(k);
        if (loads && lane == 0 && copies_b) own_copy.leave();
        return;
    }

    // Lane i: where the 16 rows of warp i belong in C.
    const int line_of_warp = line0 + lane / SHARERS;
    int row_of_warp = s.M;
    if (lane < WARPS && line_of_warp * Records::ROWS < s.M) {
        const int at = s.listed ? starts[s.filled * of_line + 1 + line_of_warp] : line_of_warp;
        row_of_warp = at * Records::ROWS + lane % SHARERS * 16;
    }

    float acc[BN / 2] = {};
    Records own(shared + s.images + warp * Records::IMAGE);
    auto load = [&](u32 (&a)[4][4], int k) {
        const u32 number = k - first, stage = number % STAGES;
        barrier::wait(full + 8 * stage, number / STAGES & 1);
        const int from = place(number, warp / SHARERS);
        u32 note = warp / SHARERS < records_here;
        if constexpr (Records::NOTES)
            if (note) note = notes[from];
        own.take(a, shared + record_at(from), note, number % STEPS);
    };
    multiply_steps<T, BN, BCol, STAGES, Ahead ? 2 : 0>(acc, first, last, base, B_BYTES, empty, load);

    const Result<Out> c{c_map, by_copies != 0, C, ldc, s.M, N};
    auto row_of = [&](int of_warp) { return __shfl_sync(0xFFFFFFFFu, row_of_warp, of_warp); };
    store_tile<Out, CCol, WG, BN, Parts>(acc, shared, c, row_of, n0, part, [&](int of_warp, int row, int col, int cols) {
        const bool stored = line0 + of_warp / SHARERS < s.filled;  // else only zeros met what is not finite
        again<Out, CCol>(c, row, col, cols, [&](int r, int n) {
            const int at = m0 + of_warp * 16 + r - row;
            return stored ? Records::template stored_only<T>(records, starts, s.steps, at, B + n * b_n, b_k) : 0.0f;
        });
    });
    if (first_tile > 0) wait_for_launch_before();
}

}  // namespace spformat::expanding
