// C[M,N] = alpha * A[M,K] @ B[K,N] + bias + beta * C, A vector n:m with 16-bit values, few columns of B; tensor cores. The values
// are read once. sm_80 and later.
//
//   data      T[W, pitch]    value of row i at its kept column number u (k-major); lines start on 16 bytes
//   places    u8[row tiles, slabs, MT/Share, 16*steps]   for 16*Share rows: the line of B in its slab that a kept column
//                            multiplies
//   b         T[K, N]        row k at b + k*ldb (BCol: column n at b + n*ldb)
//   c         Out[M, N]      row i at c + i*ldc (CCol: column n at c + n*ldc); every element is written
//   partials, counters       see token_sums.cuh      bias  Out[M], or null
//
// A slab is whole windows: s.kept kept columns, in steps of 16, out of s.columns columns of A. Grid: (tiles of 16*MT rows,
// Splits ranges of slabs); N <= 8*NT. The warps of a block take every Warps-th slab of its range, each with a ring of Slots
// slabs of its own, A and the rows of B, by cp.async: no warp waits for another before the sums are added. Kept columns are
// dense columns for the tensor cores: ldmatrix takes a fragment of B from the lines that `places` names, so gathering costs
// nothing more. A column-major B lies in the ring as it comes and is transposed, slab by slab, to lines of the warp.
//
//   Blocks    blocks that run on a multiprocessor at a time (__launch_bounds__)
//   Share     fragments of 16 rows that share their places
//   Cluster   the Splits blocks of a tile are one cluster
//   Epilogue  false: alpha = 1, beta = 0, no bias
#include "spformat/cp_async.cuh"
#include "spformat/ldmatrix.cuh"
#include "spformat/mma.cuh"
#include "spformat/staged_store.cuh"
#include "spformat/token_sums.cuh"

namespace spformat::vector_nm {

struct Slabs {  // ctypes counterpart: spmm_vector_nm_tokens_tc.Slabs
    int M, K, W;
    int slabs, kept, steps, columns;
    int lines;   // of B in a slab: its columns, to the next multiple of 8, then a line of zeros
    int column;  // bytes from column to column of a column-major B in the ring, an odd multiple of 16
    int slot;    // bytes of a slab in the ring
    i64 pitch;
};

template <class T, class Out, int MT, int NT, int Warps, int Slots, int Blocks, int Splits, int Share, bool Cluster, bool BCol,
          bool CCol, bool Epilogue>
__global__ void CLUSTER_OF(Cluster ? Splits : 1) __launch_bounds__(Warps * 32, Blocks)
spmm_vector_nm_tokens_tc(const Slabs s, const T* __restrict__ data, const u8* __restrict__ places, const T* __restrict__ b,
                         Out* c, int N, i64 ldb, i64 ldc, float* partials, u32* counters, const Out* __restrict__ bias,
                         float alpha, float beta) {
    static_assert(NT == 1 || NT == 2, "columns come in 8 or 16");
    static_assert(MT % Share == 0, "whole groups of fragments share their places");
    constexpr int ROWS = 16 * MT, COLS = 8 * NT, LINE_A = ROWS * 2, LINE_B = COLS * 2, GROUPS = MT / Share;
    extern __shared__ __align__(128) char shared[];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4, split = blockIdx.y;
    const int begin = int(i64(s.slabs) * split / Splits) + warp, end = int(i64(s.slabs) * (split + 1) / Splits);
    const int row0 = blockIdx.x * ROWS, turns = begin < end ? cdiv(end - begin, Warps) : 0;
    const int padded = 16 * s.steps, record = GROUPS * padded;
    // A slot: lines of A, places, B. Behind the ring, of a column-major B, the lines of the slab at hand.
    const u32 ring = shared_address(shared) + warp * (Slots * s.slot + (BCol ? s.lines * LINE_B : 0));
    const u32 at_places = padded * LINE_A, at_b = at_places + record, own_lines = ring + Slots * s.slot;
    const bool vector = vector_aligned(b, ldb) && (!BCol || s.columns % 8 == 0);
    const u64 policy = evict_first();

    auto zero = [&](u32 from, int bytes) {
#pragma unroll 1
        for (int at = lane * 16; at < bytes; at += 512)
            asm volatile("st.shared.v4.b32 [%0], {%1,%1,%1,%1};" ::"r"(from + at), "r"(0) : "memory");
    };
    // What no copy writes: lines of A that fill up the last step, and lines of B of zeros for their places.
#pragma unroll 1
    for (int i = 0; i < Slots; ++i) {
        zero(ring + i * s.slot + s.kept * LINE_A, (padded - s.kept) * LINE_A);
        if constexpr (!BCol) zero(ring + i * s.slot + at_b + (s.lines - 1) * LINE_B, LINE_B);
    }
    if constexpr (BCol) zero(own_lines + (s.lines - 1) * LINE_B, LINE_B);
    __syncwarp();

    // A: this lane's chunk of 16 bytes, in every EVERY-th line; TURNS of them are eight lines, the period of the swizzle.
    constexpr int CHUNKS = LINE_A / 16, EVERY = 32 / CHUNKS, TURNS = 8 / EVERY;
    const int a_line = lane / CHUNKS, a_row = row0 + lane % CHUNKS * 8;
    const T* a_from = data + (i64(begin) * s.kept + a_line) * s.pitch + a_row;
    i64 a_step = EVERY * s.pitch, a_next = i64(Warps) * s.kept * s.pitch;  // to the next such line; to the next slab
    u32 a_to[TURNS];
#pragma unroll
    for (int i = 0; i < TURNS; ++i) a_to[i] = swizzled<LINE_A>(a_line + i * EVERY, lane % CHUNKS);
    // Kept in registers: else the compiler computes all of them again for every line.
    asm("" : "+l"(a_step), "+l"(a_next));
#pragma unroll
    for (int i = 0; i < TURNS; ++i) asm("" : "+r"(a_to[i]));
    // B in chunks of 8 elements, of lines along N, or along K for BCol: this lane's first.
    const int per_line = BCol ? s.lines / 8 : NT, b_line = lane / per_line, b_chunk = lane % per_line;
    const int jump = 32 / per_line, rest = 32 % per_line;

    // A slab of B that may end before K or N, or with lines that do not start on 16 bytes.
    auto copy_edge = [&](u32 to, int k0) {
        int line = b_line, chunk = b_chunk;
#pragma unroll 1
        for (int i = lane; i < (BCol ? COLS * per_line : s.columns * NT); i += 32) {
            const int k = k0 + (BCol ? chunk * 8 : line), n = BCol ? line : chunk * 8;
            const int left = k < s.K && n < N ? min(BCol ? s.K - k : N - n, 8) : 0;
            const T* const from = left ? b + (BCol ? i64(n) * ldb + k : i64(k) * ldb + n) : b;
            const u32 chunk_to = to + (BCol ? line * s.column + chunk * 16 : swizzled<LINE_B>(line, chunk));
            if (vector) cp_async_16(chunk_to, from, left * 2);
            else copy_singly_16(chunk_to, from, left);
            line += jump, chunk += rest;
            if (chunk >= per_line) chunk -= per_line, ++line;
        }
    };
    // Any other slab. Columns behind N are not written: they affect only columns of C that are not stored.
    auto copy_whole = [&](u32 to, int k0) {
        if constexpr (BCol) {
            const T* from = b + b_line * ldb + k0 + b_chunk * 8;
            const i64 step = jump * ldb + rest * 8, carry = ldb - per_line * 8;
            const int to_step = jump * s.column + rest * 16, to_carry = s.column - per_line * 16;
            const int chunks = min(COLS, N) * per_line;
            int chunk = b_chunk;
            to += b_line * s.column + b_chunk * 16;
#pragma unroll 1
            for (int i = lane; i < chunks; i += 32) {
                cp_async_16(to, from);
                to += to_step, from += step, chunk += rest;
                if (chunk >= per_line) chunk -= per_line, to += to_carry, from += carry;
            }
        } else {
            constexpr int LINES = 32 / NT;  // a multiple of the swizzle's period of eight
            const T* from = b + i64(k0 + b_line) * ldb + b_chunk * 8;
            const u32 bytes = 2 * max(0, min(N - b_chunk * 8, 8));
            to += swizzled<LINE_B>(b_line, b_chunk);
            if (bytes) {
#pragma unroll 1
                for (int line = b_line; line < s.columns; line += LINES, to += LINES * LINE_B, from += LINES * ldb)
                    cp_async_16(to, from, bytes);
            }
        }
    };
    int filled = begin;  // slab that is copied next, and where to
    u32 fill = ring;
    auto copy = [&] {
        const int slab = filled;
        const u32 to = fill;
        const int kept = min(s.kept, s.W - slab * s.kept);
        if (a_row < s.pitch) {  // else never written to C
            const T* from = a_from;
#pragma unroll 1
            for (int line = 0; line < kept; line += 8)
#pragma unroll
                for (int i = 0; i < TURNS; ++i, from += a_step)
                    // The maximum changes nothing: see copy_record in spmm_bitmask_tc.cu.
                    if (kept - a_line > line + i * EVERY)
                        cp_async_16_policy(max(to + line * LINE_A + a_to[i], u32(lane)), from, policy);
        }
        if (kept < s.kept) zero(to + kept * LINE_A, (s.kept - kept) * LINE_A);
        const u8* record_from = places + (i64(blockIdx.x) * s.slabs + slab) * record;
#pragma unroll 1
        for (int at = lane * 16; at < record; at += 512) cp_async_16(to + at_places + at, record_from + at);
        const int k0 = slab * s.columns;
        if (vector && k0 + s.columns <= s.K) copy_whole(to + at_b, k0);
        else copy_edge(to + at_b, k0);
        a_from += a_next, filled += Warps, fill += s.slot;
        if (fill == ring + Slots * s.slot) fill = ring;
    };

    // The slab's B from [n][k] to lines [k][n]: 8x8 tiles, four at a time, NT beside each other. Lane 8j+i reads row i of
    // tile j.
    const u32 tile_from = (lane / 8 % NT * 8 + lane % 8) * s.column + lane / 8 / NT * 16;
    u32 tile_to[NT];
#pragma unroll
    for (int j = 0; j < NT; ++j) tile_to[j] = own_lines + swizzled<LINE_B>(g, j) + 4 * t;
    auto transpose = [&](u32 from) {
        const int down = s.lines / 8;
        from += tile_from;
#pragma unroll 1
        for (int i = 0; i < down; i += 4 / NT, from += 64 / NT) {
            u32 r[4];
            ldmatrix_x4_trans(r, from);  // reads behind the last tile, too, and does not write that
#pragma unroll
            for (int j = 0; j < 4; ++j)
                if (i + j / NT < down) {
                    const u32 to = tile_to[j % NT] + (i + j / NT) * (8 * LINE_B);
                    asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(r[j]) : "memory");
                }
        }
    };

    float acc[MT][NT][4] = {};
#pragma unroll 1
    for (int turn = 0; turn < Slots; ++turn) {
        if (turn < turns) copy();
        cp_async_commit();
    }
#pragma unroll 1
    for (int turn = 0; turn < turns; ++turn) {
        cp_async_wait<Slots - 1>();
        __syncwarp();
        const u32 slot = ring + turn % Slots * s.slot, lines = BCol ? own_lines : slot + at_b;
        if constexpr (BCol) {
            transpose(slot + at_b);
            __syncwarp();
        }
#pragma unroll 1
        for (int step = 0; step < s.steps; ++step) {
            u32 place[GROUPS];
            const u32 first_place = slot + at_places + step * 16 + lane % 16;
#pragma unroll
            for (int i = 0; i < GROUPS; ++i)
                asm volatile("ld.shared.u8 %0, [%1];" : "=r"(place[i]) : "r"(first_place + i * padded) : "memory");
#pragma unroll
            for (int i = 0; i < GROUPS; ++i) {
                u32 w[2 * NT];  // B of 16 kept columns
                if constexpr (NT == 1) ldmatrix_x2_trans(w, lines + place[i] * LINE_B);
                else ldmatrix_x4_trans(w, lines + swizzled<LINE_B>(place[i], lane / 16));
#pragma unroll
                for (int m = i * Share; m < (i + 1) * Share; ++m) {
                    u32 a[4];
                    ldmatrix_x4_trans(a, slot + swizzled<LINE_A>(step * 16 + lane / 16 * 8 + lane % 8, 2 * m + lane / 8 % 2));
#pragma unroll
                    for (int j = 0; j < NT; ++j) mma_m16n8k16<T>(acc[m][j], a, w[2 * j], w[2 * j + 1]);
                }
            }
        }
        __syncwarp();
        if (turn + Slots < turns) copy();
        cp_async_commit();
    }
    cp_async_wait<0>();
    __syncthreads();
    const tokens::Result<Out> result{c, ldc, s.M, N, bias, alpha, beta};
    tokens::add_up<Out, MT, NT, Warps, Splits, Cluster, CCol, Epilogue>(acc, shared, result, partials, counters);
}

}  // namespace spformat::vector_nm
