// Dense to and from vector n:m for values of two bytes, four rows at a time. Launcher, array shapes and what these
// kernels take: vector_nm_quads.py. Everything else is left to vector_nm_convert.cu.
//
// A block takes COLUMNS columns of x and `groups` row groups, at most 4 * QUADS rows. Four rows that follow each other
// (a quad) lie in one row group, so that they share their columns: in shared memory the four values of a column are one
// word of eight bytes, as they are in data. `live`: the bits that decide whether a value is zero, twice.

namespace spformat {
namespace vector_nm_quads {

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef long long i64;
typedef unsigned long long u64;

constexpr int THREADS = 256, LANES = 32, WARPS = THREADS / LANES;
constexpr int COLUMNS = 64, QUADS = 32, HALVES = COLUMNS / LANES;
constexpr int PIECE = 8, PIECES = COLUMNS / PIECE;  // values of a load of 16 bytes; loads of a row
constexpr u32 ALL = 0xffffffffu, LOW = 0x7fff7fffu;
static_assert(THREADS == PIECES * QUADS, "a thread takes a piece of a quad");

struct Sizes {
    i64 M, K, Q, Mp;
    int n, log_m;    // m is a power of two, at most LANES
    int all;         // windows side by side in the matrix
    int groups;      // row groups of a block
    int per;         // quads of a row group
    int reciprocal;  // 65536 / per, rounded up: exact for the quads of a block
    int windows;     // window of a lane's first m, first vector of a window: 65536 / n, rounded up
    int strips;      // side by side; blocks are numbered strip by strip, then down the rows
};

struct alignas(8) Quad { u32 low, high; };  // four values: rows 0 and 1, rows 2 and 3
struct alignas(16) Piece { u32 w[PIECE / 2]; };  // eight columns of a row

// The part of the matrix that a block takes, and the thread's place in it.
struct Place {
    i64 c0, r0, q0;               // first column, row, row group
    int w0, windows, here, cols;  // first window; windows, row groups and columns of x that are there
    int warp, lane;
    int piece, quad;           // of this thread, where x is read or written
    __device__ __forceinline__ explicit Place(const Sizes& s) {
        const int across = COLUMNS >> s.log_m, down = (int)(blockIdx.x / (u32)s.strips);
        w0 = (int)(blockIdx.x - down * s.strips) * across, c0 = (i64)w0 << s.log_m;
        q0 = (i64)down * s.groups, r0 = q0 * (4 * s.per);
        windows = s.all - w0 < across ? s.all - w0 : across;
        here = (int)(s.Q - q0 < s.groups ? s.Q - q0 : s.groups);
        cols = (int)(s.K - c0 < COLUMNS ? s.K - c0 : COLUMNS);
        warp = threadIdx.x / LANES, lane = threadIdx.x % LANES;
        piece = threadIdx.x % PIECES, quad = threadIdx.x / PIECES;
    }
    // How many rows of this thread's piece are in x.
    __device__ __forceinline__ int rows(const Sizes& s) const {
        const i64 left = s.M - r0 - 4 * quad;
        return quad < here * s.per && piece * PIECE < cols ? (int)(left < 4 ? left : 4) : 0;
    }
};

// The row group of a quad of the block.
__device__ __forceinline__ int group(const Sizes& s, int quad) { return quad * s.reciprocal >> 16; }

// Two values without the sign of a zero: the sum carries into the top bit of each that is not zero.
__device__ __forceinline__ u32 positive_zeros(u32 v, u32 live) { return v & (((v & LOW) + LOW) | live); }
__device__ __forceinline__ Quad positive_zeros(Quad v, u32 live) {
    return {positive_zeros(v.low, live), positive_zeros(v.high, live)};
}

// A window in a warp that looks at 32 columns: `bits` are the columns that are kept, the lane's own is number `at`.
struct Window {
    int at;
    u32 bits, below;  // columns of the window, from its first on; those before the lane's own
    __device__ __forceinline__ Window(const Sizes& s, u32 columns, int lane) {
        const int m = 1 << s.log_m;
        at = lane & (m - 1), below = (1u << at) - 1;
        bits = columns >> (lane - at) & ALL >> (LANES - m);
    }
};

// Column of the strip -> where it stands in a row: eight neighbouring threads then store 16 bytes each to all banks.
__device__ __forceinline__ int swizzled(int column) { return column ^ (column >> 4 & 3) << 1; }

// Positions kept in every window, and data. refused: as for vector_nm_convert.cu, of values that are not ranked.
__global__ void __launch_bounds__(THREADS, 6)
encode(const u16* __restrict__ x, Sizes s, u32 live, u8* __restrict__ indices, u16* __restrict__ data,
       u64* __restrict__ refused) {
    constexpr int PITCH = COLUMNS + 2;                     // quads between rows of the strip: an odd number of 16 bytes
    __shared__ alignas(16) Quad strip[QUADS * PITCH];
    __shared__ alignas(16) u16 some[QUADS * COLUMNS];      // the bits of all four rows of a quad
    __shared__ u8 place[COLUMNS * QUADS];                  // [vector][row group of the block], swizzled columns
    const Place b(s);
    {
        const int rows = b.rows(s);
        const u16* from = x + (b.r0 + 4 * b.quad) * s.K + b.c0 + b.piece * PIECE;
        Piece v[4];
        if (rows == 4) {  // without conditions between the loads
#pragma unroll
            for (int i = 0; i < 4; ++i, from += s.K) v[i] = *reinterpret_cast<const Piece*>(from);
        } else {
#pragma unroll
            for (int i = 0; i < 4; ++i, from += s.K) v[i] = i < rows ? *reinterpret_cast<const Piece*>(from) : Piece{};
        }
        Piece any;
#pragma unroll
        for (int j = 0; j < PIECE / 2; ++j) {
            const u32 v0 = v[0].w[j], v1 = v[1].w[j], v2 = v[2].w[j], v3 = v[3].w[j];
            any.w[j] = v0 | v1 | v2 | v3;
            const Piece columns = {__byte_perm(v0, v1, 0x5410), __byte_perm(v2, v3, 0x5410),   // four rows of one,
                                   __byte_perm(v0, v1, 0x7632), __byte_perm(v2, v3, 0x7632)};  // and of the next
            const int column = b.piece * PIECE + 2 * (j ^ b.piece >> 1);  // swizzled
            *reinterpret_cast<Piece*>(strip + b.quad * PITCH + column) = columns;
        }
        *reinterpret_cast<Piece*>(some + threadIdx.x * PIECE) = any;
    }
    __syncthreads();

    for (int i = b.warp; i < b.here * HALVES; i += WARPS) {
        const int g = i / HALVES, column = i % HALVES * LANES + b.lane, w = column >> s.log_m;
        const u16* rows = some + g * s.per * COLUMNS + column;
        u32 value = 0;
#pragma unroll 4
        for (int k = 0; k < s.per; ++k) value |= rows[k * COLUMNS];
        const Window window(s, __ballot_sync(ALL, (value & live) != 0), b.lane);
        if (w >= b.windows) continue;
        // A window that holds fewer than n vectors takes the lowest free positions, too.
        const int kept = __popc(window.bits), spare = s.n - kept, vacant = __popc(~window.bits & window.below);
        bool taken = window.bits >> window.at & 1 || vacant < spare;
        int k = __popc(window.bits & window.below) + (vacant < spare ? vacant : spare);
        if (spare < 0) {
            taken = window.at < s.n, k = window.at;  // addresses, not results
            if (window.at == 0) {
                atomicAdd(refused, 1ull);
                atomicMax(refused + 1, ~(u64)(((b.q0 + g) * s.all + b.w0 + w) * 512 + kept));
            }
        }
        if (taken) place[(w * s.n + k) * QUADS + g] = (u8)swizzled(column);
    }
    __syncthreads();

    const int vectors = b.windows * s.n;
    for (u32 i = threadIdx.x; i < (u32)(vectors * b.here); i += THREADS) {
        const u32 u = i / (u32)b.here, g = i - u * b.here;
        indices[((i64)b.w0 * s.n + u) * s.Q + b.q0 + g] = (u8)(swizzled(place[u * QUADS + g]) & ((1 << s.log_m) - 1));
    }
    if (b.lane >= b.here * s.per) return;
    const Quad* row = strip + b.lane * PITCH;
    const u8* column = place + group(s, b.lane);
    u16* to = data + ((i64)b.w0 * s.n + b.warp) * s.Mp + b.r0 + 4 * b.lane;
#pragma unroll 2
    for (int u = b.warp; u < vectors; u += WARPS, to += WARPS * s.Mp)
        *reinterpret_cast<Quad*>(to) = positive_zeros(row[column[u * QUADS]], live);
}

// The reverse: every element of x is written, those that no vector names as zeros. Rows of x are ld elements apart.
// Indices increase in a window, so that the place of a position among the kept ones is the number of its vector.
__global__ void __launch_bounds__(THREADS, 6)
scatter(const u8* __restrict__ indices, const u16* __restrict__ data, Sizes s, u32 live, u16* __restrict__ x, i64 ld) {
    constexpr int PITCH = QUADS + 1, BATCH = 2;
    __shared__ Quad values[(COLUMNS + 1) * PITCH];              // [vector][quad], after the last vector zeros
    __shared__ alignas(PIECE) u8 vector[QUADS * COLUMNS];          // [row group of the block][column]
    const Place b(s);
    const int vectors = b.windows * s.n;
    const bool present = b.lane < b.here * s.per;
    const u16* from = data + ((i64)b.w0 * s.n + b.warp) * s.Mp + b.r0 + 4 * b.lane;
    Quad first[BATCH];  // in flight while the positions are read
#pragma unroll
    for (int i = 0; i < BATCH; ++i, from += WARPS * s.Mp)
        first[i] = present && b.warp + i * WARPS < vectors ? *reinterpret_cast<const Quad*>(from) : Quad{};
    if (b.warp == WARPS - 1) values[vectors * PITCH + b.lane] = Quad{};
    for (int i = b.warp; i < b.here * HALVES; i += WARPS) {
        const int g = i / HALVES, half = i % HALVES, column = half * LANES + b.lane;
        const int of_half = (LANES >> s.log_m) * s.n, u = half * of_half + b.lane;
        u32 bit = 0;
        if (b.lane < of_half && u < vectors) {
            const int position = indices[((i64)b.w0 * s.n + u) * s.Q + b.q0 + g] & ((1 << s.log_m) - 1);
            bit = 1u << ((b.lane * s.windows >> 16 << s.log_m) + position);
        }
        const Window window(s, __reduce_or_sync(ALL, bit), b.lane);
        const int k = (column >> s.log_m) * s.n + __popc(window.bits & window.below);
        vector[g * COLUMNS + column] = (u8)(window.bits >> window.at & 1 ? k : vectors);
    }
    if (present) {
        Quad* to = values + b.warp * PITCH + b.lane;
#pragma unroll
        for (int i = 0; i < BATCH; ++i)
            if (b.warp + i * WARPS < vectors) to[i * WARPS * PITCH] = positive_zeros(first[i], live);
#pragma unroll 2
        for (int u = b.warp + BATCH * WARPS; u < vectors; u += WARPS, from += WARPS * s.Mp)
            values[u * PITCH + b.lane] = positive_zeros(*reinterpret_cast<const Quad*>(from), live);
    }
    __syncthreads();

    const int rows = b.rows(s);
    if (rows <= 0) return;
    const u8* named = vector + group(s, b.quad) * COLUMNS + b.piece * PIECE;
    const u64 eight = *reinterpret_cast<const u64*>(named);
    Piece v[4];
#pragma unroll
    for (int j = 0; j < PIECE / 2; ++j) {
        const Quad left = values[(u8)(eight >> 16 * j) * PITCH + b.quad];
        const Quad right = values[(u8)(eight >> (16 * j + 8)) * PITCH + b.quad];
        v[0].w[j] = __byte_perm(left.low, right.low, 0x5410), v[1].w[j] = __byte_perm(left.low, right.low, 0x7632);
        v[2].w[j] = __byte_perm(left.high, right.high, 0x5410), v[3].w[j] = __byte_perm(left.high, right.high, 0x7632);
    }
    u16* to = x + (b.r0 + 4 * b.quad) * ld + b.c0 + b.piece * PIECE;
    if (rows == 4) {
#pragma unroll
        for (int i = 0; i < 4; ++i, to += ld) *reinterpret_cast<Piece*>(to) = v[i];
    } else {
#pragma unroll
        for (int i = 0; i < 3; ++i, to += ld)
            if (i < rows) *reinterpret_cast<Piece*>(to) = v[i];
    }
}

}  // namespace vector_nm_quads
}  // namespace spformat
