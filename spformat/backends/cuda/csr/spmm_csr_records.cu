// C[M,N] = alpha * A[M,K] @ B[K,N] + beta * C + bias, A a CSR with 16-bit values in records (include/spformat/csr_records.cuh), few
// columns of B, on the CUDA cores. sm_80 and later.
//
//   records, starts    `steps` records for 64 rows
//   B        T: element (k, c) at k*ldb + c, or, BCol, at k + c*ldb
//   C        Out: element (i, c) at i*c_row + c*c_col         bias  Out[M], or null
//
// LANES lanes of each of WARPS warps compute 16 rows, which are a part of each of the records along K. A warp takes every WARPS-th
// record, and a lane four neighbouring items of it, 16 bytes. Neighbouring items belong to few rows, but which, only the items say.
// Each lane therefore has sums of its own for all 16 rows, in shared memory, where lanes that add to different rows use different
// banks; they are added up once, at the end. NC columns of B are in shared memory too.
//
// Instructions bound the kernel about as much as bytes do. Rows of B and sums therefore lie where few operations on an item find
// them. Of the bits of a place (csr_records::place_of), 2, 6, 7 and 8 stand for the row, 1, 3 to 5, 9 and 10 for the column.
//
// Grid: x: PARTS times the rows of a warp; y: tiles of NC columns.
//   LANES     32, or 16: then a warp has 32 rows, for records of so few items that half a warp takes them at once
//   T, Out    value types of A, B and of C; sums are float
//   BLOCKS    that run on a multiprocessor at a time (__launch_bounds__)
//   LOADS     of four items that a lane has in flight for a record; what a longer one has beyond that is loaded when it is needed
//   Epilogue  false: alpha = 1, beta = 0, no bias
#include "spformat/column_panel.cuh"
#include "spformat/csr_records.cuh"
#include "spformat/launch_order.cuh"

using namespace spformat;
using csr_records::COLUMNS;

constexpr int ROWS = 16;              // of a part of a record
constexpr int FLIGHT = 4;             // loads of a lane that are in flight
constexpr u32 OF_ROW = 0x1C4;         // bits of a place
constexpr u32 TEAM = 8;               // warps whose sums lie between each other's
constexpr u32 TEAM_SUMS = 512 * 32;   // bytes of their sums, for one column: row, warp, lane

// NC columns of a row of B.
template <class T, int NC> struct alignas(sizeof(T) * NC) Values { T of[NC]; };

// The sums of NC columns of a row.
template <int NC> struct alignas(4 * NC) Sums { float of[NC]; };

// Where the columns of B lie in shared memory, in bytes: those of two records share 256 * NC bytes, so that three operations find
// the row of B for an item.
template <int NC> __device__ __forceinline__ u32 panel_step(u32 step) { return step / 2 * 256 * NC + step % 2 * 4 * NC; }
template <int NC> __device__ __forceinline__ u32 panel_row(u32 item) {
    return (item & 0x3A) * NC | (item >> (NC == 1 ? 3 : NC == 2 ? 2 : 1) & 0xC0 * NC);
}

// Where the sums of a row lie behind those of the first, in bytes.
template <int NC> __device__ __forceinline__ u32 sums_row(u32 item) { return (item & OF_ROW) * (32 * NC); }

// The value of an item.
template <class T> __device__ __forceinline__ float value_of(u32 item) {
    if constexpr (same_type<T, __nv_bfloat16>::value) return __uint_as_float(item & 0xFFFF0000);
    const u16 bits = static_cast<u16>(item >> 16);
    return widen(reinterpret_cast<const T&>(bits));
}

// Where row k of the columns of B lies, in bytes.
template <int NC> __device__ __forceinline__ u32 panel_at(int k) {
    return panel_step<NC>(k / COLUMNS) + panel_row<NC>(csr_records::place_of(0, k % COLUMNS));
}

// Columns of B at `B`, `left` of them, zeros in the place of more. `between` is called while values of B are on their way.
template <class T, int NC, int THREADS, bool BCol, class Between>
__device__ __forceinline__ void fill_panel(u8* panel, const T* B, i64 ldb, int K, int left, Between between) {
    constexpr int EACH = 8, AHEAD = NC == 1 ? 4 : NC == 2 ? 2 : 1;
    bool first = true;
    if (BCol && reinterpret_cast<u64>(B) % 16 == 0 && (ldb % EACH == 0 || left == 1)) {  // EACH rows of all columns at a time
        for (int k = EACH * threadIdx.x; first || k < K; k += EACH * AHEAD * THREADS) {
            uint4 words[AHEAD][NC];
#pragma unroll
            for (int i = 0; i < AHEAD; ++i)
#pragma unroll
                for (int c = 0; c < NC; ++c) {
                    const int own = k + EACH * i * THREADS;
                    words[i][c] = load_if(reinterpret_cast<const uint4*>(B + c * ldb + own), c < left && own + EACH <= K);
                }
            if (first) between();
            first = false;
#pragma unroll
            for (int i = 0; i < AHEAD; ++i) {
                const int own = k + EACH * i * THREADS;
                if (own >= K) break;
                if (own + EACH > K)
#pragma unroll
                    for (int c = 0; c < NC; ++c)
#pragma unroll
                        for (int e = 0; e < EACH; ++e)
                            reinterpret_cast<u16*>(&words[i][c])[e] =
                                load_if(reinterpret_cast<const u16*>(B + c * ldb + own + e), c < left && own + e < K);
#pragma unroll
                for (int e = 0; e < EACH; e += 2) {
                    word_t<4 * NC> two;
#pragma unroll
                    for (int c = 0; c < 2 * NC; ++c)
                        reinterpret_cast<u16*>(&two)[c] = reinterpret_cast<const u16*>(&words[i][c % NC])[e + c / NC];
                    *reinterpret_cast<word_t<4 * NC>*>(panel + panel_at<NC>(own + e)) = two;
                }
            }
        }
        return;
    }
    const i64 k_step = BCol ? 1 : ldb, n_step = BCol ? ldb : 1;
    const bool whole = !BCol && NC > 1 && left >= NC && reinterpret_cast<u64>(B) % (2 * NC) == 0 && ldb % NC == 0;
    for (int k = threadIdx.x; first || k < K; k += EACH * THREADS) {
        word_t<2 * NC> words[EACH];
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const int own = k + i * THREADS;
            const T* const from = B + own * k_step;
            if (whole) {
                words[i] = load_if(reinterpret_cast<const word_t<2 * NC>*>(from), own < K);
            } else {
#pragma unroll
                for (int c = 0; c < NC; ++c)
                    reinterpret_cast<u16*>(&words[i])[c] =
                        load_if(reinterpret_cast<const u16*>(from + c * n_step), own < K && c < left);
            }
        }
        if (first) between();
        first = false;
#pragma unroll
        for (int i = 0; i < EACH; ++i)
            if (k + i * THREADS < K) *reinterpret_cast<word_t<2 * NC>*>(panel + panel_at<NC>(k + i * THREADS)) = words[i];
    }
}

template <class T, class Out, int NC, int LANES, int PARTS, int WARPS, int BLOCKS, int LOADS, bool BCol, bool Epilogue>
__global__ void __launch_bounds__(32 * PARTS * WARPS, BLOCKS)
spmm_csr_records(const u8* __restrict__ records, const u32* __restrict__ starts, i64 M, int K, int steps,
                 const T* __restrict__ B, Out* C, int n, i64 ldb, i64 c_row, i64 c_col, const Out* __restrict__ bias, double alpha,
                 double beta) {
    static_assert(sizeof(T) == 2 && PARTS * WARPS % TEAM == 0 && (LANES == 32 || LANES == 16));
    constexpr int GROUP = LOADS < FLIGHT ? FLIGHT / LOADS : 1;  // records whose items are in flight together
    constexpr int BATCH = LANES - GROUP;                        // records of which LANES lanes know one each; the last know none
    constexpr int WARP_ROWS = ROWS * 32 / LANES;
    extern __shared__ __align__(1024) u8 panel[];
    const u32 all_sums = panel_step<NC>(steps + steps % 2);  // bytes from the panel on
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, first = warp % WARPS, first_col = blockIdx.y * NC;
    auto sums_of = [&](int warp, int lane) { return all_sums + warp / TEAM * TEAM_SUMS * NC + (warp % TEAM * 64 + lane) * 4 * NC; };
    const u32 sums = sums_of(warp, lane), unused = all_sums + PARTS * WARPS / TEAM * TEAM_SUMS * NC + threadIdx.x * 4 * NC;
    const int own_lane = lane % LANES, first_lane = lane - own_lane;
    const i64 row = (static_cast<i64>(blockIdx.x) * PARTS + warp / WARPS) * WARP_ROWS + first_lane / LANES * ROWS;
    const i64 record = row / csr_records::ROWS * steps;
    const int part = row / ROWS % csr_records::PARTS;

    // Of the i-th of LANES lanes: where the items of record `step` + i * WARPS start, in pieces of 16 bytes, and how many they are.
    u32 from = 0, pieces = 0;
    auto start_of = [&](int step) {
        const int own = step + own_lane * WARPS;
        const bool there = row < M && own < steps && own_lane < BATCH;
        from = there ? starts[record + own] : 0;
        return there;
    };
    auto part_of = [&](bool there) {
        pieces = 0;
        if (!there) return;
        const u16* const header = reinterpret_cast<const u16*>(records + static_cast<u64>(from) * 16);
        const u32 begin = header[part];
        pieces = header[part + 1] - begin, from += begin;
    };

    const bool there = start_of(first);
#pragma unroll
    for (int i = 0; i < ROWS; ++i)
        *reinterpret_cast<Sums<NC>*>(panel + sums + sums_row<NC>(csr_records::place_of(i, 0))) = Sums<NC>{};
    wait_for_launch_before();
    let_next_launch_begin();
    part_of(there);

    uint4 items[GROUP][LOADS];
    u32 ends[GROUP];
    auto fetch = [&](int g, int at) {  // record number `at` of a batch
        const u32 begin = __shfl_sync(~0u, from, first_lane + at);
        ends[g] = __shfl_sync(~0u, pieces, first_lane + at);
        const uint4* const own = reinterpret_cast<const uint4*>(records) + own_lane + static_cast<u64>(begin);
#pragma unroll
        for (int i = 0; i < LOADS; ++i)
            if (own_lane + LANES * i < ends[g]) items[g][i] = __ldg(own + LANES * i);
    };
    auto fetch_first = [&] {
#pragma unroll
        for (int g = 0; g < GROUP; ++g) fetch(g, g);
    };
    auto add = [&](u32 item, u32 to, u32 b) {
        const Values<T, NC> x = *reinterpret_cast<const Values<T, NC>*>(panel + (panel_row<NC>(item) | b));
        Sums<NC> s = *reinterpret_cast<const Sums<NC>*>(panel + to);
        const float a = value_of<T>(item);
#pragma unroll
        for (int c = 0; c < NC; ++c) s.of[c] += a * widen(x.of[c]);
        *reinterpret_cast<Sums<NC>*>(panel + to) = s;
    };
    auto add_four = [&](const uint4& four, u32 b) {  // the last item may be repeated: such sums are not used
        add(four.x, sums + sums_row<NC>(four.x), b);
        add(four.y, four.y != four.x ? sums + sums_row<NC>(four.y) : unused, b);
        add(four.z, four.z != four.y ? sums + sums_row<NC>(four.z) : unused, b);
        add(four.w, four.w != four.z ? sums + sums_row<NC>(four.w) : unused, b);
    };

    fill_panel<T, NC, 32 * PARTS * WARPS, BCol>(panel, B + first_col * (BCol ? ldb : 1), ldb, K, n - first_col, fetch_first);
    __syncthreads();
    for (int step = first; step < steps; step += BATCH * WARPS) {
        if (step != first) part_of(start_of(step)), fetch_first();
        const int left = (steps - step + WARPS - 1) / WARPS, count = left < BATCH ? left : BATCH;
#pragma unroll 1
        for (int at = 0; at < count; at += GROUP) {
#pragma unroll
            for (int g = 0; g < GROUP; ++g) {
                uint4 now[LOADS];
#pragma unroll
                for (int i = 0; i < LOADS; ++i) now[i] = items[g][i];
                const u32 end = ends[g], b = panel_step<NC>(step + (at + g) * WARPS);
                fetch(g, at + g + GROUP);
#pragma unroll
                for (int i = 0; i < LOADS; ++i)
                    if (own_lane + LANES * i < end) add_four(now[i], b);
                if (__any_sync(~0u, end > LANES * LOADS)) {
                    const u32 begin = __shfl_sync(~0u, from, first_lane + at + g);
                    const uint4* const rest = reinterpret_cast<const uint4*>(records) + static_cast<u64>(begin);
#pragma unroll 1
                    for (u32 i = own_lane + LANES * LOADS; i < end; i += LANES) add_four(__ldg(rest + i), b);
                }
            }
        }
    }
    __syncwarp();

    // Lanes i and i + 16 add the sums of 16 lanes for row i each, each lane beginning at another one.
    Sums<NC> total = {};
    const u8* const of_row = panel + sums_of(warp, 0) + sums_row<NC>(csr_records::place_of(lane % 16, 0));
#pragma unroll
    for (int i = 0; i < 16; ++i) {
        const Sums<NC> s = *reinterpret_cast<const Sums<NC>*>(of_row + (lane / 16 * 16 + (lane + i) % 16) * 4 * NC);
#pragma unroll
        for (int c = 0; c < NC; ++c) total.of[c] += s.of[c];
    }
    if constexpr (LANES == 32)
#pragma unroll
        for (int c = 0; c < NC; ++c) total.of[c] += __shfl_xor_sync(~0u, total.of[c], 16);
    __syncwarp();
    if (lane < WARP_ROWS) *reinterpret_cast<Sums<NC>*>(panel + sums) = total;
    __syncthreads();
    if (threadIdx.x < PARTS * WARP_ROWS) {
        float sum[NC] = {};
#pragma unroll
        for (int w = 0; w < WARPS; ++w) {
            const u8* const of_warp = panel + sums_of(threadIdx.x / WARP_ROWS * WARPS + w, threadIdx.x % WARP_ROWS);
#pragma unroll
            for (int c = 0; c < NC; ++c) sum[c] += reinterpret_cast<const Sums<NC>*>(of_warp)->of[c];
        }
        const i64 mine = static_cast<i64>(blockIdx.x) * PARTS * WARP_ROWS + threadIdx.x;
        const float a = static_cast<float>(alpha), b = static_cast<float>(beta);
        const ColumnSums<Out, float, Epilogue> result{C, c_row, c_col, n, bias, a, b};
        if (mine < M) result.store(static_cast<unsigned>(mine), first_col, sum);
    }
}
