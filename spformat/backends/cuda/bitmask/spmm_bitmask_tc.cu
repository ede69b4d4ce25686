// C[M,N] = A[M,K] @ B[K,N], A with 16-bit values as one bit per element and the nonzeros; tensor cores, few columns of B
// (weight-bound). sm_80 and later.
//
//   records, starts    A in the order of the registers (bitmask_records.cuh), `steps` records a row tile
//   B        T: B[k][n] at k*ldb + n (BCOL: k + n*ldb)      C  Out: C[i][n] at i*c_row + n*c_col
//   room     bytes of the longest record, rounded up to 128
//
// Grid: x = tiles of 16*MF*PARTS rows, y walks tiles of NT columns. Block: RANGES x PARTS warps. Range r sums the steps
// r*share .. (r+1)*share of K, 64 columns each; its PARTS warps have MF row tiles each and share what a step needs of B. Then
// the block adds the partial sums in the order of the ranges: the same bits every run. The records of a row tile are one
// contiguous stream; they and 64 rows of B a step come to shared memory with cp.async, STAGES - 1 steps ahead. Five rounds of
// a scan over the lanes find where each lane's values of all eight groups start; from there a lane reads one value for each
// of its set bits: that is the A fragment of m16n8k16, no expanded tile exists. Ranges run unsynchronised.
//
// Any M, N, K, alignment of B, leading dimension.
#include "spformat/bitmask.cuh"
#include "spformat/bitmask_records.cuh"
#include "spformat/cp_async.cuh"
#include "spformat/ldmatrix.cuh"
#include "spformat/mma.cuh"
#include "spformat/take_group.cuh"

using namespace spformat;

constexpr int STEP = 64;  // columns of A a warp takes at a time

// How the 64 x NT pieces of B come to shared memory: lines run along N, or along K if BCOL, in 16-byte chunks, which are
// swizzled. PARTS warps share a piece; lane `lane` of warp `part` takes chunk `chunk` of every EVERY-th line from `line` on.
template <int NT, bool BCOL, int PARTS> struct Piece {
    static constexpr int ALONG = BCOL ? STEP : NT, LINES = BCOL ? NT : STEP, CHUNKS = ALONG / 8, STRIDE = 32 / CHUNKS;
    static constexpr int EVERY = STRIDE * PARTS;
    int line, chunk;
    __device__ __forceinline__ Piece(int part, int lane) : line(part * STRIDE + lane / CHUNKS), chunk(lane % CHUNKS) {}

    // How many of the lines from `line` on this lane copies when N - n columns are left: none where its chunk is outside.
    // What is outside of N is not written: it affects only columns of C that are not stored.
    __device__ __forceinline__ int inside(i64 n_left) const {
        const int lines = BCOL ? static_cast<int>(min(i64(NT), n_left)) : chunk * 8 < n_left ? STEP : 0;
        return lines - line;
    }
    // A piece inside of K whose lines start on 16 bytes and whose chunks are inside or outside of N. from: the first chunk.
    template <class T> __device__ __forceinline__ void copy(u32 to, const T* from, i64 ldb, int lines) const {
#pragma unroll
        for (int i = 0; i < LINES; i += EVERY, from += EVERY * ldb)
            if (i < lines) cp_async_16(to + swizzled<ALONG * 2>(i + line, chunk), from);
    }
    // Any piece: `lines` lines of `along` items are inside of B; zero outside. vector: lines start on 16 bytes.
    template <class T>
    __device__ __forceinline__ void copy_edge(u32 to, const T* from, i64 ldb, i64 lines, i64 along, bool vector,
                                              const T* B) const {
        const int items = static_cast<int>(max(i64(0), min(i64(8), along - chunk * 8)));
#pragma unroll 1
        for (int i = line; i < LINES; i += EVERY, from += EVERY * ldb) {
            const bool inside = i < lines && items > 0;
            const u32 at = to + swizzled<ALONG * 2>(i, chunk);
            if (vector) {
                cp_async_16(at, inside ? from : B, inside ? items * 2 : 0);
                continue;
            }
            u32 x[8];
#pragma unroll
            for (int e = 0; e < 8; ++e) x[e] = inside && e < items ? reinterpret_cast<const u16*>(from)[e] : 0;
            asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(x[0] | x[1] << 16), "r"(x[2] | x[3] << 16),
                         "r"(x[4] | x[5] << 16), "r"(x[6] | x[7] << 16)
                         : "memory");
        }
    }
};

// Piece P + lane of a record of `left` + lane pieces of 16 bytes, if it has as many; to and from are this lane's first.
template <int P> __device__ __forceinline__ void copy_piece(u32 to, const u8* from, int left, u64 policy) {
    asm volatile(
            "{\n.reg .pred p;\nsetp.gt.s32 p, %2, %4;\n"
            "@p cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0 + %5], [%1 + %5], 16, %3;\n}" ::"r"(to),
            "l"(from), "r"(left), "l"(policy), "n"(P), "n"(16 * P)
            : "memory");
}
// A record to shared memory. The address passes through a maximum that changes nothing (what comes before the records is
// longer than `lane`): otherwise ptxas 13.0 splits off the part that all lanes share, and a copy with both such an offset and an
// L2 policy (LDGSTS [R+UR], desc[UR]) gets an encoding that traps as an illegal instruction.
__device__ __forceinline__ void copy_record(u32 to, const u8* from, int pieces, int lane, u64 policy) {
    const int left = pieces - lane;
    to = max(to + 16 * lane, u32(lane)), from += 16 * lane;
    copy_piece<0>(to, from, left, policy), copy_piece<32>(to, from, left, policy), copy_piece<64>(to, from, left, policy);
    if (left > 96) copy_piece<96>(to, from, left, policy), copy_piece<128>(to, from, left, policy);
}

// acc += the records of one step, which start at `first` in shared memory, `room` bytes apart, times 64 rows of B at `piece`.
template <class T, int NT, int MF, bool BCOL>
__device__ __forceinline__ void multiply(float (&acc)[MF][NT / 8][4], u32 piece, u32 first, u32 room, int tiles, int lane) {
    u32 bits[MF], lanes[MF][2];
#pragma unroll
    for (int m = 0; m < MF; ++m) {
        asm volatile("ld.shared.u32 %0, [%1];" : "=r"(bits[m]) : "r"(first + m * room + RECORD_BITS + 4 * lane) : "memory");
        if (m >= tiles) bits[m] = 0;
    }
#pragma unroll
    for (int m = 0; m < MF; ++m) bytes_before(bits[m], lanes[m]);
#pragma unroll
    for (int kk = 0; kk < 4; ++kk) {  // 16 columns each
        u32 b[NT / 8][2];
        if constexpr (NT == 8) {
            if constexpr (BCOL) ldmatrix_x2(b[0], piece + swizzled<STEP * 2>(lane % 8, kk * 2 + lane / 8 % 2));
            else ldmatrix_x2_trans(b[0], piece + swizzled<NT * 2>(kk * 16 + lane % 16, 0));
        } else {
#pragma unroll
            for (int j = 0; j < NT / 8; j += 2) {
                u32 two[4];
                if constexpr (BCOL)
                    ldmatrix_x4(two, piece + swizzled<STEP * 2>(8 * j + lane / 16 * 8 + lane % 8, kk * 2 + lane / 8 % 2));
                else
                    ldmatrix_x4_trans(two, piece + swizzled<NT * 2>(kk * 16 + lane % 16, j + lane / 16));
                b[j][0] = two[0], b[j][1] = two[1], b[j + 1][0] = two[2], b[j + 1][1] = two[3];
            }
        }
#pragma unroll
        for (int m = 0; m < MF; ++m) {
            const u32 record = first + m * room;
            u32 a[4], groups;
            asm volatile("ld.shared.u32 %0, [%1];" : "=r"(groups) : "r"(record + 4 * kk) : "memory");
            const u32 one = record + (groups & 0xFFFF) + __byte_perm(lanes[m][0], 0, 0x4440 + kk);
            const u32 two = record + (groups >> 16) + __byte_perm(lanes[m][1], 0, 0x4440 + kk);
            if (kk == 0) take_group<0>(a[0], a[2], bits[m], one), take_group<1>(a[1], a[3], bits[m], two);
            if (kk == 1) take_group<2>(a[0], a[2], bits[m], one), take_group<3>(a[1], a[3], bits[m], two);
            if (kk == 2) take_group<4>(a[0], a[2], bits[m], one), take_group<5>(a[1], a[3], bits[m], two);
            if (kk == 3) take_group<6>(a[0], a[2], bits[m], one), take_group<7>(a[1], a[3], bits[m], two);
#pragma unroll
            for (int j = 0; j < NT / 8; ++j) mma_m16n8k16<T>(acc[m][j], a, b[j][0], b[j][1]);
        }
    }
}

template <class T, class Out, int NT, int MF, int PARTS, int RANGES, int STAGES, bool BCOL>
__global__ void __launch_bounds__(32 * RANGES * PARTS)
    spmm_bitmask_tc(const u8* __restrict__ records, const u32* __restrict__ starts, i64 M, i64 K, int steps, int share,
                    int room, const T* __restrict__ B, Out* __restrict__ C, i64 N, i64 ldb, i64 c_row, i64 c_col) {
    static_assert(NT == 8 || NT == 16 || NT == 32 || NT == 64, "lines of B are a power of two, at most 128 bytes");
    static_assert(PARTS == 1 || RANGES < 16, "a named barrier each, and barrier 0 for all");
    constexpr int ROWS = 16 * MF * PARTS, B_BYTES = STEP * NT * 2;
    // With three stages and shared steps, one barrier a step: the stage that is filled is the one before.
    constexpr bool LATE = PARTS > 1 && STAGES > 2;
    extern __shared__ __align__(128) unsigned char shared[];
    const int warp = threadIdx.x / 32, range = warp / PARTS, part = warp % PARTS;
    int lane = threadIdx.x % 32;
    asm("" : "+r"(lane));
    const int g = lane / 4, t = lane % 4;
    const u32 stage = B_BYTES + MF * PARTS * room, mine = shared_address(shared) + range * STAGES * stage;
    const u32 my_records = B_BYTES + part * MF * room;
    const i64 tile0 = static_cast<i64>(blockIdx.x) * (MF * PARTS) + part * MF, row0 = static_cast<i64>(blockIdx.x) * ROWS;
    const int tiles = static_cast<int>(max(i64(0), min(i64(MF), (M + 15) / 16 - tile0)));  // of this warp that exist
    const int begin = min(steps, range * share), last = min(steps, begin + share);
    const bool b_vector = reinterpret_cast<u64>(B) % 16 == 0 && ldb % 8 == 0;
    const u64 policy = evict_first();
    const Piece<NT, BCOL, PARTS> mine_of_b(part, lane);
    auto sync = [&] {  // the warps that share steps
        if constexpr (PARTS == 1) __syncwarp();
        else asm volatile("bar.sync %0, %1;" ::"r"(range + 1), "n"(32 * PARTS) : "memory");
    };

    for (i64 n0 = static_cast<i64>(blockIdx.y) * NT; n0 < N; n0 += static_cast<i64>(gridDim.y) * NT) {
        float acc[MF][NT / 8][4] = {};
        // The next record of each row tile, in pieces of 16 bytes; none where there is no such row tile.
        const u32* ends = starts + tile0 * steps + begin;
        u32 start[MF] = {}, end[MF] = {};
#pragma unroll
        for (int m = 0; m < MF; ++m)
            if (m < tiles && begin < last) start[m] = ends[i64(m) * steps], end[m] = ends[i64(m) * steps + 1];
        ends += 2;
        // Steps whose piece of B lies inside of K and N; kept in a register, so that it is not computed in every step.
        int whole = b_vector && (BCOL || n0 + NT <= N || N % 8 == 0) ? static_cast<int>(K / STEP) : 0;
        asm("" : "+r"(whole));
        const int lines = mine_of_b.inside(N - n0);
        const T* b_from = B + (BCOL ? (n0 + mine_of_b.line) * ldb + begin * i64(STEP) + mine_of_b.chunk * 8
                                    : (begin * i64(STEP) + mine_of_b.line) * ldb + n0 + mine_of_b.chunk * 8);
        int copied = begin;
        u32 fill = mine, read = mine;  // the stage that is filled next, and read next
        auto advance = [&](u32& at) {
            at += stage;
            if (at == mine + STAGES * stage) at = mine;
        };
        auto copy_step = [&] {
            if (copied < last) {
                if (copied < whole) {
                    mine_of_b.copy(fill, b_from, ldb, lines);
                } else {
                    const i64 k_left = K - copied * i64(STEP), n_left = N - n0;
                    mine_of_b.copy_edge(fill, b_from, ldb, BCOL ? n_left : k_left, BCOL ? k_left : n_left, b_vector, B);
                }
                b_from += BCOL ? static_cast<i64>(STEP) : STEP * ldb;
#pragma unroll
                for (int m = 0; m < MF; ++m) {
                    copy_record(fill + my_records + m * room, records + u64(start[m]) * 16, end[m] - start[m], lane, policy);
                    start[m] = end[m];
                    if (m < tiles && copied + 1 < last) end[m] = ends[i64(m) * steps];
                }
                ++ends, ++copied;
                advance(fill);
            }
            cp_async_commit();
        };
#pragma unroll
        for (int s = 0; s < STAGES - 1; ++s) copy_step();
        // Ranges with fewer steps arrive at their barrier as often as the others.
        const int stop = PARTS == 1 ? last : begin + share;
        for (int step = begin; step < stop; ++step) {
            if constexpr (LATE) {
                cp_async_wait<STAGES - 2>();
                sync();
                copy_step();
            } else {
                copy_step();
                cp_async_wait<STAGES - 1>();
                sync();
            }
            if (PARTS == 1 || step < last) multiply<T, NT, MF, BCOL>(acc, read, read + my_records, room, tiles, lane);
            if constexpr (!LATE) sync();
            advance(read);
        }
        cp_async_wait<0>();

        // Partial sums [range][row][n] take the place of the stages.
        __syncthreads();
        float* sums = reinterpret_cast<float*>(shared);
#pragma unroll
        for (int m = 0; m < MF; ++m)
#pragma unroll
            for (int j = 0; j < NT / 8; ++j)
#pragma unroll
                for (int h = 0; h < 2; ++h)
                    *reinterpret_cast<float2*>(sums + (range * ROWS + 16 * (part * MF + m) + 8 * h + g) * NT + 8 * j + 2 * t) =
                            make_float2(acc[m][j][2 * h], acc[m][j][2 * h + 1]);
        __syncthreads();
        store_sums<float, Out, ROWS, NT, RANGES>(sums, row0, n0, M, N, C, c_row, c_col, [&](i64 row, i64 n) {
            return stored_only<T>(records, starts, steps, static_cast<int>(row), B + n * (BCOL ? ldb : 1), BCOL ? 1 : ldb);
        });
        __syncthreads();
    }
}
