// CSR to vector n:m and back, in time of the nonzeros and of the vector n:m matrix. sm_80 and later.
// Launcher: vector_nm_csr.py.
//
//   indptr   Pointer[M+1]   indices  Column[nnz]   values  T[nnz]     CSR; stored zeros are allowed
//   places   u8[W, Q]       data     T[W, Mp]                         vector n:m: `indices` and `data` of the format
//   used     u32[Q, words]  zeros before `mark`: a bit for each column in which a row group has a nonzero
//   parts    u32[M, strips+1]   items of a row before each strip of `wide` columns, whole windows
//   refused  u64[2]         zeros before the launch: how many windows have more than n vectors that are not empty, and the
//                           complement of the smallest (row group * windows + window) * 512 + vectors of one
//
// T are the bits of a value; `live` are those that decide whether it is zero.
// From CSR: `mark` reads the items once and notes what the others need; `choose` says which vectors stay; `place` brings the
// items of a tile of rows x one strip into shared memory, from where they are stored along rows.
#include "spformat/prefix_sum.cuh"

namespace spformat::vector_nm {

constexpr int THREADS = 256, WARPS = THREADS / 32, TILE = 32768, ROWS = 64;
constexpr u32 EVERY = 0xFFFFFFFF;

struct Extents {
    i64 M, Mp, Q, W, words, strips;
    int n, m, length, wide;
};

// 32 bits of a row group from column `at` on; bits that belong to columns behind `at + left` are 0.
__device__ __forceinline__ u32 columns_used(const u32* __restrict__ line, i64 at, int left) {
    const u32 bits = __funnelshift_r(line[at / 32], line[at / 32 + 1], static_cast<u32>(at % 32));
    return left < 32 ? bits & ((1u << left) - 1) : bits;
}

// Quotients of 32 bits where the numbers allow it: those of 64 bits take four times as long.
template <class Column> __device__ __forceinline__ i64 strip_of(Column column, int wide) {
    if constexpr (sizeof(Column) == 4) return static_cast<u32>(column) / static_cast<u32>(wide);
    else return column / wide;
}
__device__ __forceinline__ i64 group_of(i64 row, int length) {
    return row >> 32 ? row / length : static_cast<u32>(row) / static_cast<u32>(length);
}

// A warp takes one of `shares` shares of the items of a row.
template <class T, class Column, class Pointer>
__global__ void __launch_bounds__(THREADS)
mark(const Pointer* __restrict__ indptr, const Column* __restrict__ indices, const T* __restrict__ values, Extents s, u64 mask,
     i64 shares, u32* used, u32* __restrict__ parts) {
    const i64 task = i64(blockIdx.x) * WARPS + threadIdx.x / 32, row = task / shares, share = task % shares;
    const int lane = threadIdx.x % 32;
    if (row >= s.M) return;
    const i64 first = indptr[row], end = indptr[row + 1], items = end - first;
    const i64 each = (items + shares - 1) / shares, lo = first + share * each, hi = lo + each < end ? lo + each : end;
    u32* line = used + group_of(row, s.length) * s.words;
    u32* part = parts + row * (s.strips + 1);
    if (items == 0 && share == 0)
        for (i64 i = lane; i <= s.strips; i += 32) part[i] = 0;
    for (i64 i = lo + lane; i - lane < hi; i += 32) {
        const bool mine = i < hi;
        const Column column = mine ? indices[i] : Column(0);
        const i64 strip = strip_of(column, s.wide);
        i64 before = __shfl_up_sync(EVERY, strip, 1), word = -1;
        if (lane == 0) before = mine && i > first ? strip_of(indices[i - 1], s.wide) : -1;
        u32 bit = 0;
        if (mine) {
            for (i64 p = before + 1; p <= strip; ++p) part[p] = static_cast<u32>(i - first);
            if (i == end - 1)
                for (i64 p = strip + 1; p <= s.strips; ++p) part[p] = static_cast<u32>(items);
            word = column / 32;
            if (values[i] & static_cast<T>(mask)) bit = 1u << column % 32;
        }
        const u32 peers = __match_any_sync(EVERY, static_cast<u64>(word)), bits = __reduce_or_sync(peers, bit);
        if (bits && lane == __ffs(peers) - 1) {
            // Most rows of a group use the same columns, so that looking first saves most of the atomics.
            if ((*const_cast<volatile u32*>(line + word) & bits) != bits) atomicOr(line + word, bits);
        }
    }
}

// A thread takes a window of a row group, neighbours neighbouring groups. Windows are counted over all of Kp.
__global__ void __launch_bounds__(THREADS)
choose(const u32* __restrict__ used, Extents s, i64 windows, u8* __restrict__ places, u64* refused) {
    const i64 groups = (s.Q + 31) / 32, q = i64(blockIdx.x) % groups * 32 + threadIdx.x % 32;
    const i64 window = i64(blockIdx.x) / groups * WARPS + threadIdx.x / 32;
    bool bad = false;
    if (q < s.Q && window < windows) {
        const u32* line = used + q * s.words;
        int count = 0;
        for (int j = 0; j < s.m; j += 32) count += __popc(columns_used(line, window * s.m + j, s.m - j));
        bad = count > s.n;
        if (bad) {
            const u64 code = ~static_cast<u64>((q * windows + window) * 512 + count);
            if (code > *const_cast<volatile u64*>(refused + 1)) atomicMax(refused + 1, code);
        } else {  // a window that uses fewer takes the lowest free positions, too
            int spare = s.n - count;
            u8* to = places + window * s.n * s.Q + q;
            for (int j = 0; j < s.m; j += 32) {
                const u32 bits = columns_used(line, window * s.m + j, s.m - j);
                const int here = s.m - j < 32 ? s.m - j : 32;
                for (int i = 0; i < here; ++i) {
                    const bool taken = bits >> i & 1;
                    if (!taken && spare <= 0) continue;
                    spare -= !taken;
                    *to = static_cast<u8>(j + i);
                    to += s.Q;
                }
            }
        }
    }
    const u32 several = __ballot_sync(EVERY, bad);
    if (several && threadIdx.x % 32 == 0) atomicAdd(refused, u64(__popc(several)));
}

// Which of the n kept vectors of its window `column` is; n or more only in windows that are refused.
__device__ __forceinline__ int number_in_window(const u32* __restrict__ line, const Extents& s, i64 start, int position) {
    int count = 0, before = 0;
    for (int j = 0; j < s.m; j += 32) {
        const u32 bits = columns_used(line, start + j, s.m - j);
        count += __popc(bits);
        const int below = position - j;
        before += __popc(below <= 0 ? 0 : below >= 32 ? bits : bits & ((1u << below) - 1));
    }
    const int spare = s.n - count, free = position - before;
    return before + (spare < free ? spare : free);
}

// A block takes `rows` rows of data and one strip. pitch: values between vectors in shared memory, an odd number of banks.
template <class T, class Column, class Pointer>
__global__ void __launch_bounds__(THREADS)
place(const Pointer* __restrict__ indptr, const Column* __restrict__ indices, const T* __restrict__ values, Extents s, u64 mask,
      int rows, int pitch, const u32* __restrict__ used, const u32* __restrict__ parts, T* __restrict__ data) {
    extern __shared__ uint4 shared[];
    constexpr int SPAN = 8;  // threads that share a row
    T* cells = reinterpret_cast<T*>(shared);
    const u32 across = static_cast<u32>(s.strips);
    const i64 strip = blockIdx.x % across, r0 = i64(blockIdx.x / across) * rows, c0 = strip * s.wide;
    const i64 u0 = c0 / s.m * s.n, left = s.W - u0;
    const int kept = s.wide / s.m * s.n, vectors = static_cast<int>(left < kept ? left : kept);
    for (int i = threadIdx.x; i < (kept * pitch * static_cast<int>(sizeof(T)) + 15) / 16; i += THREADS)
        shared[i] = make_uint4(0, 0, 0, 0);
    __syncthreads();
    for (int r = threadIdx.x / SPAN; r < rows && r0 + r < s.M; r += THREADS / SPAN) {
        const i64 row = r0 + r, first = indptr[row];
        const u32* part = parts + row * (s.strips + 1) + strip;
        const u32* line = used + group_of(row, s.length) * s.words;
        const i64 end = first + part[1];
#pragma unroll 2
        for (i64 i = first + part[0] + threadIdx.x % SPAN; i < end; i += SPAN) {
            const T value = values[i];
            const int c = static_cast<int>(indices[i] - c0), window = c / s.m, position = c - window * s.m;
            if (!(value & static_cast<T>(mask))) continue;
            const int number = number_in_window(line, s, c0 + window * s.m, position);
            if (number >= 0 && number < s.n) cells[(window * s.n + number) * pitch + r] = value;
        }
    }
    __syncthreads();
    const int out = static_cast<int>(s.Mp - r0 < rows ? s.Mp - r0 : rows);  // rows is a power of two
    for (int i = threadIdx.x; i < vectors * rows; i += THREADS) {
        const int u = i / rows, r = i % rows;
        if (r < out) data[(u0 + u) * s.Mp + r0 + r] = cells[u * pitch + r];
    }
}

// The way back. A tile is ROWS rows x vectors_of<T> vectors.
template <class T> constexpr int vectors_of = sizeof(T) == 8 ? 64 : 128;
template <class T, int Piece> struct alignas(Piece * sizeof(T)) Values { T v[Piece]; };

// visit(vector in the tile, row in the tile, Piece values) for what of a tile lies in data. Piece divides Mp.
template <int Piece, class T, class Visit>
__device__ __forceinline__ void each_piece(const T* __restrict__ data, i64 W, i64 Mp, i64 u0, i64 r0, Visit visit) {
    constexpr int ACROSS = ROWS / Piece;
#pragma unroll 4
    for (int i = threadIdx.x; i < vectors_of<T> * ACROSS; i += THREADS) {
        const int u = i / ACROSS, r = i % ACROSS * Piece;
        if (u0 + u < W && r0 + r < Mp) visit(u, r, *reinterpret_cast<const Values<T, Piece>*>(data + (u0 + u) * Mp + r0 + r));
    }
}

// counts[row, part]: nonzeros of a row in a tile.
template <class T, int Piece>
__global__ void __launch_bounds__(THREADS)
count(const T* __restrict__ data, i64 M, i64 Mp, i64 W, i64 tiles, u64 mask, u32* __restrict__ counts) {
    __shared__ u32 sums[ROWS];
    const i64 part = blockIdx.x % static_cast<u32>(tiles), r0 = i64(blockIdx.x / static_cast<u32>(tiles)) * ROWS;
    if (threadIdx.x < ROWS) sums[threadIdx.x] = 0;
    __syncthreads();
    u32 mine[Piece];  // a thread visits the same rows each time
#pragma unroll
    for (int e = 0; e < Piece; ++e) mine[e] = 0;
    each_piece<Piece>(data, W, Mp, part * vectors_of<T>, r0, [&](int, int, const Values<T, Piece>& values) {
#pragma unroll
        for (int e = 0; e < Piece; ++e) mine[e] += (values.v[e] & static_cast<T>(mask)) != 0;
    });
    const int r = threadIdx.x % (ROWS / Piece) * Piece;
#pragma unroll
    for (int e = 0; e < Piece; ++e)
        if (mine[e]) atomicAdd(sums + r + e, mine[e]);
    __syncthreads();
    if (threadIdx.x < ROWS && r0 + threadIdx.x < M) counts[(r0 + threadIdx.x) * tiles + part] = sums[threadIdx.x];
}

// The items of a tile, those of row r from starts[r * tiles + part] on.
template <class T, int Piece, class Column, class Start>
__global__ void __launch_bounds__(THREADS)
to_csr(const u8* __restrict__ places, const T* __restrict__ data, i64 M, i64 Mp, i64 Q, i64 W, int n, int m, int length,
       i64 tiles, u64 mask, const Start* __restrict__ starts, Column* __restrict__ indices, T* __restrict__ values) {
    constexpr int VECTORS = vectors_of<T>, PITCH = VECTORS + (sizeof(T) < 4 ? 4 / sizeof(T) : 1);
    __shared__ T cells[ROWS][PITCH];
    __shared__ i64 window_start[VECTORS];
    __shared__ u8 positions[VECTORS][ROWS + 1];
    const i64 part = blockIdx.x % static_cast<u32>(tiles), r0 = i64(blockIdx.x / static_cast<u32>(tiles)) * ROWS;
    const i64 u0 = part * VECTORS, q0 = group_of(r0, length);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int vectors = static_cast<int>(W - u0 < VECTORS ? W - u0 : VECTORS);
    const int rows = static_cast<int>(M - r0 < ROWS ? M - r0 : ROWS);
    const int before = static_cast<int>(r0 - q0 * length), groups = (before + rows - 1) / length + 1;
    each_piece<Piece>(data, W, Mp, u0, r0, [&](int u, int r, const Values<T, Piece>& piece) {
#pragma unroll
        for (int e = 0; e < Piece; ++e) cells[r + e][u] = piece.v[e];
    });
    for (int u = threadIdx.x; u < vectors; u += THREADS) window_start[u] = (u0 + u) / n * m;
    for (int i = threadIdx.x; i < vectors * groups; i += THREADS) {
        const int u = i / groups, g = i - u * groups;
        positions[u][g] = places[(u0 + u) * Q + q0 + g];
    }
    __syncthreads();
    for (int r = warp; r < rows; r += WARPS) {
        i64 to = starts[(r0 + r) * tiles + part];
        const int g = (before + r) / length;
        for (int first = 0; first < vectors; first += 32) {
            const int u = first + lane;
            const T value = u < vectors ? cells[r][u] : T(0);
            const u32 some = __ballot_sync(EVERY, (value & static_cast<T>(mask)) != 0);
            if (some >> lane & 1) {
                const i64 at = to + __popc(some & ((1u << lane) - 1));
                indices[at] = static_cast<Column>(window_start[u] + positions[u][g]);
                values[at] = value;
            }
            to += __popc(some);
        }
    }
}

}  // namespace spformat::vector_nm
