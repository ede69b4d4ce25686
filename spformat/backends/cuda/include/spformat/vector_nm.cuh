// What the vector n:m kernels share: the shape of the work, the staging of one k tile in shared memory, the last store.
//
// A CTA computes a tile of BM rows x BN columns of C over k tiles: `tile_kept` consecutive kept vectors of every row group,
// that is, `tile_kept` consecutive rows of data. The host (vector_nm_tiles.py) writes one record per (row tile, k tile):
//     slots  u32[BM/G][slots]   which staged row of B (low half) a line of A (high half) multiplies; for the
//                               CUDA-core kernel: only the byte offset of the staged row, the lines of A in order
//     rows   u32[staged]        packed only: the row of B that each staged row holds, NO_ROW after the last
// Unpacked, a k tile is whole windows and all its tile_cols rows of B are staged in order. Staged row `staged` is all zero,
// and so are the lines of A from tile_kept on; empty slots refer to these.
#pragma once
#include "spformat/cp_async.cuh"
#include "spformat/staged_store.cuh"

namespace spformat::vector_nm {

constexpr u32 NO_ROW = 0xFFFFFFFF;

// The kernels' first parameter, by value; ctypes counterpart: vector_nm_tiles.Shape.
struct Shape {
    u32 data_pitch;   // bytes between rows of data
    int M, K, W;      // W: rows of data
    int tile_cols;    // unpacked: columns of a k tile
    int tile_kept;    // rows of data in a k tile
    int slots;        // the same, padded to the k step of the kernel
    int staged;       // rows of B staged per k tile
    int record;       // words of a record, a multiple of 4
    int k_tiles;      // records per row tile
    int k_per_split;  // k tiles a CTA covers
    int row_tiles;
    int group_rows;   // G, rows per group of slots
};

// Byte offset of 16-byte chunk `chunk` of line `row`; lines are LINE bytes. Swizzle 0: none. 8: eight rows that differ
// modulo 8 use different banks at any one chunk (ldmatrix), and four rows that differ in bits 1 and 2 use different banks
// at an even chunk and its neighbour (float fragments).
template <int SWIZZLE, int LINE> __device__ __forceinline__ u32 place(u32 row, u32 chunk) {
    if constexpr (SWIZZLE == 8) return swizzled<LINE>(row, chunk);
    else return row * LINE + chunk * 16;
}

// Shared memory of a CTA: STAGES x (B lines, zero line, A lines), then RING records.
template <class T, int BM, int BN, int STAGES> struct Layout {
    static constexpr int LINE_B = BN * sizeof(T), LINE_A = BM * sizeof(T), RING = 2 * STAGES - 1;
    static __device__ __forceinline__ u32 stage_bytes(const Shape& s) { return (s.staged + 1) * LINE_B + s.slots * LINE_A; }
};

__device__ __forceinline__ u32 load_shared_word(u32 address) {
    u32 word;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(word) : "r"(address));
    return word;
}
// cp_async_16 where `wanted`, without a branch. With valid = 0 the global address is not used.
__device__ __forceinline__ void copy_if(bool wanted, u32 shared, u64 global, u32 valid) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %3, 0;\n@p cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;\n}" ::"r"(
                     shared),
                 "l"(global), "r"(valid), "r"(static_cast<u32>(wanted))
                 : "memory");
}

// What one thread copies of a k tile: one chunk of every PASS-th line of B and of A. Indices are read in batches and copies
// are predicated, so that no copy waits for another. Nothing is kept from tile to tile: the sums need the registers.
template <class T, int BM, int BN, int THREADS, int SWIZZLE, bool PACKED> struct Loader {
    static constexpr int E = 16 / sizeof(T), LINE_B = BN * sizeof(T), LINE_A = BM * sizeof(T), BATCH = 4;
    static constexpr int CHUNKS_B = BN / E, CHUNKS_A = BM / E, PASS_B = THREADS / CHUNKS_B, PASS_A = THREADS / CHUNKS_A;
    static_assert(THREADS % CHUNKS_A == 0 && THREADS % CHUNKS_B == 0, "every thread keeps its chunk of the line");
    static_assert(!SWIZZLE || (PASS_A % SWIZZLE == 0 && PASS_B % SWIZZLE == 0), "and its place in the swizzle");

    // Lines `first`, + PASS, .. below `count`; those from `left` on become zero.
    template <int PASS, int LINE>
    static __device__ __forceinline__ void lines(u32 to, u64 from, u32 pitch, int first, int count, int left, u32 width) {
#pragma unroll 1
        for (int r = first; r < count; r += BATCH * PASS) {
#pragma unroll
            for (int j = 0; j < BATCH; ++j)
                copy_if(r + j * PASS < count, to + j * PASS * LINE, from + static_cast<u64>(j * PASS) * pitch,
                        r + j * PASS < left ? width : 0);
            to += BATCH * PASS * LINE;
            from += static_cast<u64>(BATCH * PASS) * pitch;
        }
    }

    // Starts the copies of k tile kt into `stage`; `rows`: shared address of its list of rows.
    static __device__ __forceinline__ void start(const Shape& s, u32 stage, u32 rows, const T* data, const T* B, u32 pitch_b,
                                                 int N, int kt, int m0, int n0) {
        {
            const int row = threadIdx.x / CHUNKS_B, chunk = threadIdx.x % CHUNKS_B, n = n0 + chunk * E;
            const u32 width = min(max(N - n, 0), E) * static_cast<int>(sizeof(T));
            const u64 from = reinterpret_cast<u64>(B + n);
            u32 to = stage + place<SWIZZLE, LINE_B>(row, chunk);
            if constexpr (PACKED) {
#pragma unroll 1
                for (int r = row; r < s.staged; r += BATCH * PASS_B) {
                    u32 k[BATCH];
#pragma unroll
                    for (int j = 0; j < BATCH; ++j) k[j] = load_shared_word(rows + 4 * min(r + j * PASS_B, s.staged - 1));
#pragma unroll
                    for (int j = 0; j < BATCH; ++j)
                        copy_if(r + j * PASS_B < s.staged && k[j] != NO_ROW, to + j * PASS_B * LINE_B,
                                from + static_cast<u64>(k[j]) * pitch_b, width);
                    to += BATCH * PASS_B * LINE_B;
                }
            } else {
                const u32 first = kt * s.tile_cols + row;
                lines<PASS_B, LINE_B>(to, from + static_cast<u64>(first) * pitch_b, pitch_b, row, s.staged,
                                      s.K - kt * s.tile_cols, width);
            }
        }
        const int slot = threadIdx.x / CHUNKS_A, chunk = threadIdx.x % CHUNKS_A, m = m0 + chunk * E;
        const u32 first = kt * s.tile_kept + slot;
        lines<PASS_A, LINE_A>(stage + (s.staged + 1) * LINE_B + place<SWIZZLE, LINE_A>(slot, chunk),
                              reinterpret_cast<u64>(data + m) + static_cast<u64>(first) * s.data_pitch, s.data_pitch, slot,
                              s.tile_kept, s.W - kt * s.tile_kept, m * sizeof(T) < s.data_pitch ? 16 : 0);
    }
};

template <int THREADS>
__device__ __forceinline__ void stage_record(const Shape& s, u32 shared, const u32* records, int row_tile, int kt) {
    const u32* from = records + (static_cast<i64>(row_tile) * s.k_tiles + kt) * s.record;
#pragma unroll 1
    for (int i = threadIdx.x * 4; i < s.record; i += THREADS * 4) cp_async_16(shared + i * 4, from + i);
}

// The pipeline of these kernels: `start(stage, rows, k tile)` starts the copies of a k tile and `compute(B lines, A lines,
// record)` multiplies it, each once per k tile of this CTA; all but the number of the tile are shared addresses.
template <class T, int BM, int BN, int THREADS, int STAGES, class Start, class Compute>
__device__ __forceinline__ void for_each_k_tile_by(const Shape& s, unsigned char* shared, const u32* records, int row_tile,
                                                   int group_rows, int first, int last, Start start, Compute compute) {
    using L = Layout<T, BM, BN, STAGES>;
    const u32 base = shared_address(shared), stage_bytes = L::stage_bytes(s), a_lines = (s.staged + 1) * L::LINE_B;
    const u32 ring = base + STAGES * stage_bytes, record_bytes = s.record * 4;
    // Written once, read where a slot is empty: the zero row of B and the lines of A past tile_kept.
    for (int st = 0; st < STAGES; ++st) {
        u32* zero = reinterpret_cast<u32*>(shared + st * stage_bytes + s.staged * L::LINE_B);
        for (int i = threadIdx.x; i < L::LINE_B / 4; i += THREADS) zero[i] = 0;
        zero = reinterpret_cast<u32*>(shared + st * stage_bytes + a_lines + s.tile_kept * L::LINE_A);
        for (int i = threadIdx.x; i < (s.slots - s.tile_kept) * (L::LINE_A / 4); i += THREADS) zero[i] = 0;
    }
    // Records run STAGES-1 tiles ahead of the data they describe; the first ones are fetched alone.
    for (int i = 0; i < STAGES - 1; ++i)
        if (first + i < last) stage_record<THREADS>(s, ring + i * record_bytes, records, row_tile, first + i);
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();
    const u32 rows = BM / group_rows * s.slots * 4;  // where a record lists its rows
    int fetched = first;
    u32 to = base, from_record = ring, to_record = ring + (STAGES - 1) * record_bytes;
    const u32 end = base + STAGES * stage_bytes, ring_end = ring + L::RING * record_bytes;
    auto fetch = [&]() {  // the next k tile, and the record STAGES-1 tiles on
        if (fetched < last) start(to, from_record + rows, fetched);
        if (fetched + STAGES - 1 < last) stage_record<THREADS>(s, to_record, records, row_tile, fetched + STAGES - 1);
        cp_async_commit();
        ++fetched;
        to = to + stage_bytes == end ? base : to + stage_bytes;
        from_record = from_record + record_bytes == ring_end ? ring : from_record + record_bytes;
        to_record = to_record + record_bytes == ring_end ? ring : to_record + record_bytes;
    };
#pragma unroll 1
    for (int i = 0; i < STAGES - 1; ++i) fetch();
    // Half of the warps start their copies while the other half multiplies: each unit always has work. With two stages the next
    // k tile waits for these very copies: nobody may start them late.
    const bool early = STAGES == 2 || threadIdx.x < THREADS / 2;
    u32 stage = base, record = ring;
#pragma unroll 1
    for (int k = first; k < last; ++k) {
        cp_async_wait<STAGES - 2>();
        __syncthreads();
        if (early) fetch();
        compute(stage, stage + a_lines, record);
        if (!early) fetch();
        stage = stage + stage_bytes == end ? base : stage + stage_bytes;
        record = record + record_bytes == ring_end ? ring : record + record_bytes;
    }
    cp_async_wait<0>();
    __syncthreads();
}

// The same with the copies of a Loader.
template <class T, int BM, int BN, int THREADS, int STAGES, int SWIZZLE, bool PACKED, class Compute>
__device__ __forceinline__ void for_each_k_tile(const Shape& s, unsigned char* shared, const T* data, const u32* records,
                                                const T* B, u32 pitch_b, int N, int row_tile, int m0, int n0, int group_rows,
                                                int first, int last, Compute compute) {
    using Copies = Loader<T, BM, BN, THREADS, SWIZZLE, PACKED>;
    for_each_k_tile_by<T, BM, BN, THREADS, STAGES>(
        s, shared, records, row_tile, group_rows, first, last,
        [&](u32 stage, u32 rows, int kt) { Copies::start(s, stage, rows, data, B, pitch_b, N, kt, m0, n0); }, compute);
}

// Where C goes: element (m, n) at m * step_m + n * step_n, one of them 1.
template <class Out> struct Target {
    Out* c;
    i64 step_m, step_n;
    int M, N;
};

// Writes rows m .. m+rows-1 (valid ones) x WN columns from n of a [rows][pitch] tile in shared memory; one warp.
template <int WN, class Out>
__device__ __forceinline__ void store_warp_tile(const Target<Out>& to, const Out* tile, int rows, int pitch, int m, int n,
                                                int lane) {
    constexpr int E = 16 / sizeof(Out);
    const bool aligned = reinterpret_cast<u64>(to.c) % 16 == 0;
    if (to.step_n == 1 && to.step_m % E == 0 && aligned) {
        constexpr int CHUNKS = WN / E;
        for (int i = lane; i < rows * CHUNKS; i += 32) {
            const int r = i / CHUNKS, c = i % CHUNKS * E;
            if (m + r >= to.M || n + c >= to.N) continue;
            Out* out = to.c + (m + r) * to.step_m + n + c;
            const Out* from = tile + r * pitch + c;
            if (n + c + E <= to.N) *reinterpret_cast<uint4*>(out) = *reinterpret_cast<const uint4*>(from);
            else
                for (int e = 0; n + c + e < to.N; ++e) out[e] = from[e];
        }
    } else if (to.step_n == 1) {
        store_lines<Out, WN>([&](int r, int i) { return tile + r * pitch + i * E; }, to.c + m * to.step_m + n, to.step_m,
                             min(rows, to.M - m), min(WN, to.N - n), lane, 32);
    } else if (to.step_n % E == 0 && aligned && m % E == 0 && rows % E == 0) {  // E rows of a column at a time
        for (int i = lane; i < rows / E * WN; i += 32) {
            const int r = i % (rows / E) * E, c = i / (rows / E);
            if (m + r >= to.M || n + c >= to.N) continue;
            Out* out = to.c + (m + r) + (n + c) * to.step_n;
            const Out* from = tile + r * pitch + c;
            if (m + r + E <= to.M) {
                alignas(16) Out some[E];
#pragma unroll
                for (int e = 0; e < E; ++e) some[e] = from[e * pitch];
                *reinterpret_cast<uint4*>(out) = *reinterpret_cast<const uint4*>(some);
            } else {
                for (int e = 0; m + r + e < to.M; ++e) out[e] = from[e * pitch];
            }
        }
    } else {
        for (int i = lane; i < rows * WN; i += 32) {
            const int r = i % rows, c = i / rows;
            if (m + r < to.M && n + c < to.N) to.c[(m + r) + (n + c) * to.step_n] = tile[r * pitch + c];
        }
    }
}

}  // namespace spformat::vector_nm
