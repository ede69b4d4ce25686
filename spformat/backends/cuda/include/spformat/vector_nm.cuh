// What the vector n:m kernels share: the shape of the work, the staging of one k tile in shared memory, the last store.
//
// A CTA computes a tile of BM rows x BN columns of C over k tiles: `tile_kept` consecutive kept vectors of every row group.
// The host (vector_nm_tiles.py) writes one record per (row tile, k tile):
//     slots  u32[BM/G][slots]   low half: which staged row of B a kept vector multiplies; high half: its number u - first u
//                               of the tile in `data`. NONE in the high half: no vector, the low half names the zero row
//     rows   u32[staged]        packed only: the row of B that each staged row holds, NO_ROW after the last
// Unpacked, a k tile is whole windows and all its tile_cols rows of B are staged in order. Staged row `staged` is all zero.
#pragma once
#include "spformat/cp_async.cuh"
#include "spformat/ldmatrix.cuh"

namespace spformat::vector_nm {

constexpr u32 NONE = 0xFFFF, NO_ROW = 0xFFFFFFFF;

// The kernels' first parameter, by value; ctypes twin: vector_nm_tiles.Shape.
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
// modulo 8 use different banks at any one chunk (ldmatrix). 4: four rows that differ modulo 4 use different banks at an
// even chunk and its neighbour (float fragments).
template <int SWIZZLE, int LINE> __device__ __forceinline__ u32 place(u32 row, u32 chunk) {
    if constexpr (SWIZZLE == 8) return swizzled<LINE>(row, chunk);
    else if constexpr (SWIZZLE == 4) return row * LINE + ((chunk ^ ((row & 3) << 1)) * 16);
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
// cp_async_16 where `wanted`, without a branch.
__device__ __forceinline__ void copy_if(bool wanted, u32 shared, const void* global, u32 valid) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %3, 0;\n@p cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;\n}" ::"r"(
                     shared),
                 "l"(global), "r"(valid), "r"(static_cast<u32>(wanted))
                 : "memory");
}

// Starts the copies of k tile `kt` into the stage at `stage`, reading the record at shared address `record`. Indices are
// read in batches and copies are predicated, so that no copy waits for another.
template <class T, int BM, int BN, int THREADS, int SWIZZLE, bool PACKED>
__device__ __forceinline__ void stage_tile(const Shape& s, u32 stage, u32 record, const T* data, const T* B, u32 pitch_b,
                                           int N, int kt, int m0, int n0, int group_rows) {
    constexpr int E = 16 / sizeof(T), LINE_B = BN * sizeof(T), LINE_A = BM * sizeof(T), BATCH = 4;
    constexpr int CHUNKS_B = BN / E, CHUNKS_A = BM / E, PASS_B = THREADS / CHUNKS_B, PASS_A = THREADS / CHUNKS_A;
    static_assert(THREADS % CHUNKS_A == 0 && THREADS % CHUNKS_B == 0, "every thread keeps its chunk of the line");
    static_assert(!SWIZZLE || (PASS_A % SWIZZLE == 0 && PASS_B % SWIZZLE == 0), "and its place in the swizzle");
    {
        const int chunk = threadIdx.x % CHUNKS_B, n = n0 + chunk * E, r0 = threadIdx.x / CHUNKS_B;
        const u32 width = min(max(N - n, 0), E) * static_cast<int>(sizeof(T));
        const unsigned char* column = reinterpret_cast<const unsigned char*>(B + n);
        u32 to = stage + place<SWIZZLE, LINE_B>(r0, chunk);
        const u32 rows = record + 4 * (BM / group_rows * s.slots);
#pragma unroll 1
        for (int r = r0; r < s.staged; r += BATCH * PASS_B, to += BATCH * PASS_B * LINE_B) {
            u32 k[BATCH];
#pragma unroll
            for (int j = 0; j < BATCH; ++j)
                k[j] = PACKED ? load_shared_word(rows + 4 * min(r + j * PASS_B, s.staged - 1)) : kt * s.tile_cols + r + j * PASS_B;
#pragma unroll
            for (int j = 0; j < BATCH; ++j) {
                const u32 inside = min(k[j], static_cast<u32>(s.K - 1));  // zero rows past K: never read B there
                copy_if(r + j * PASS_B < s.staged && (!PACKED || k[j] != NO_ROW), to + j * PASS_B * LINE_B,
                        column + static_cast<u64>(inside) * pitch_b, inside == k[j] ? width : 0);
            }
        }
    }
    const int chunk = threadIdx.x % CHUNKS_A, m = m0 + chunk * E, k0 = threadIdx.x / CHUNKS_A;
    const unsigned char* rows = reinterpret_cast<const unsigned char*>(data + m) +
                                static_cast<u64>(static_cast<u32>(kt * s.tile_kept)) * s.data_pitch;
    const bool inside = m * sizeof(T) < s.data_pitch;
    const u32 slots = record + 4 * (chunk * E / group_rows * s.slots);
    u32 to = stage + (s.staged + 1) * LINE_B + place<SWIZZLE, LINE_A>(k0, chunk);
#pragma unroll 1
    for (int k = k0; k < s.slots; k += BATCH * PASS_A, to += BATCH * PASS_A * LINE_A) {
        u32 u[BATCH];
#pragma unroll
        for (int j = 0; j < BATCH; ++j) u[j] = load_shared_word(slots + 4 * min(k + j * PASS_A, s.slots - 1)) >> 16;
#pragma unroll
        for (int j = 0; j < BATCH; ++j) {
            const bool stored = u[j] != NONE && inside;  // else nothing is read: the address does not matter
            copy_if(k + j * PASS_A < s.slots, to + j * PASS_A * LINE_A, rows + static_cast<u64>(u[j] & -stored) * s.data_pitch, 16 & -stored);
        }
    }
}

template <int THREADS>
__device__ __forceinline__ void stage_record(const Shape& s, u32 shared, const u32* records, int row_tile, int kt) {
    const u32* from = records + (static_cast<i64>(row_tile) * s.k_tiles + kt) * s.record;
#pragma unroll 1
    for (int i = threadIdx.x * 4; i < s.record; i += THREADS * 4) cp_async_16(shared + i * 4, from + i);
}

// The pipeline both kernels run: `compute(stage, record)` once per k tile of this CTA.
template <class T, int BM, int BN, int THREADS, int STAGES, int SWIZZLE, bool PACKED, class Compute>
__device__ __forceinline__ void for_each_k_tile(const Shape& s, unsigned char* shared, const T* data, const u32* records,
                                                const T* B, u32 pitch_b, int N, int row_tile, int m0, int n0, int group_rows,
                                                int first, int last, Compute compute) {
    using L = Layout<T, BM, BN, STAGES>;
    const u32 base = shared_address(shared), stage_bytes = L::stage_bytes(s);
    const u32 ring = base + STAGES * stage_bytes, record_bytes = s.record * 4;
    for (int st = 0; st < STAGES; ++st) {
        unsigned char* zero = shared + st * stage_bytes + s.staged * L::LINE_B;
        for (int i = threadIdx.x * 4; i < L::LINE_B; i += THREADS * 4) *reinterpret_cast<u32*>(zero + i) = 0;
    }
    // Records run STAGES-1 tiles ahead of the data they describe; the first ones are fetched alone.
    for (int i = 0; i < STAGES - 1; ++i)
        if (first + i < last) stage_record<THREADS>(s, ring + i * record_bytes, records, row_tile, first + i);
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();
    int load_record = STAGES - 1;  // ring slot of the record that goes with the next group of copies
    auto fetch = [&](int i) {      // i: tile number from `first`
        const int kt = first + i;
        if (kt < last)
            stage_tile<T, BM, BN, THREADS, SWIZZLE, PACKED>(s, base + (i % STAGES) * stage_bytes, ring + (i % L::RING) * record_bytes,
                                                    data, B, pitch_b, N, kt, m0, n0, group_rows);
        if (kt + STAGES - 1 < last)
            stage_record<THREADS>(s, ring + load_record * record_bytes, records, row_tile, kt + STAGES - 1);
        load_record = load_record + 1 == L::RING ? 0 : load_record + 1;
        cp_async_commit();
    };
#pragma unroll 1
    for (int i = 0; i < STAGES - 1; ++i) fetch(i);
    // Half of the warps start their copies while the other half multiplies: each unit always has work.
    const bool early = threadIdx.x < THREADS / 2;
#pragma unroll 1
    for (int i = 0; i < last - first; ++i) {
        cp_async_wait<STAGES - 2>();
        __syncthreads();
        if (early) fetch(i + STAGES - 1);
        const u32 stage = base + (i % STAGES) * stage_bytes;
        compute(stage, stage + (s.staged + 1) * L::LINE_B, ring + (i % L::RING) * record_bytes);
        if (!early) fetch(i + STAGES - 1);
    }
    cp_async_wait<0>();
    __syncthreads();
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
    const bool wide = to.step_n == 1 && to.step_m % E == 0 && reinterpret_cast<u64>(to.c) % 16 == 0;
    if (wide) {
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
        for (int i = lane; i < rows * WN; i += 32) {
            const int r = i / WN, c = i % WN;
            if (m + r < to.M && n + c < to.N) to.c[(m + r) * to.step_m + n + c] = tile[r * pitch + c];
        }
    } else {
        for (int i = lane; i < rows * WN; i += 32) {
            const int r = i % rows, c = i / rows;
            if (m + r < to.M && n + c < to.N) to.c[(m + r) + (n + c) * to.step_n] = tile[r * pitch + c];
        }
    }
}

}  // namespace spformat::vector_nm
