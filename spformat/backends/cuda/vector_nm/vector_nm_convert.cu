// Dense to and from vector n:m on the device. Launcher and array shapes: vector_nm_convert.py.
//
// Values are moved as unsigned words T; `live` masks the bits that decide whether one is zero. Blocks take a strip of
// whole windows, `wide` columns, so that a window's vectors meet in one block.

namespace spformat {
namespace vector_nm {

typedef unsigned char u8;
typedef unsigned int u32;
typedef long long i64;
typedef unsigned long long u64;

constexpr int THREADS = 256, LANES = 32, WARPS = THREADS / LANES;
constexpr u32 ALL = 0xffffffffu;

constexpr int EXACT = 0, BFLOAT16 = 1, FLOAT16 = 2, FLOAT32 = 3;  // what encode takes: what fits, or values to be ranked

struct Sizes {
    i64 M, K, W, Q, Mp;
    int n, m, length;
    int windows;  // of a strip
    int rows;     // of a block: whole groups (positions), or any number (gather, scatter)
    int strips;   // side by side; blocks are numbered strip by strip, then down the rows
};

__device__ __forceinline__ int lowest(i64 a, i64 b) { return (int)(a < b ? a : b); }

struct Ranking {
    int squares;   // l2 norms; 0: l1
    u32 infinite;  // magnitudes from here on are infinities and NaN
    int norms;     // where they stand in shared memory, in words of eight bytes
};

struct Place {
    i64 w0, c0, r0;           // first window, column, row of a block
    int windows, cols, rows;  // of them inside the matrix
    __device__ __forceinline__ explicit Place(const Sizes& s) {
        w0 = (i64)(blockIdx.x % s.strips) * s.windows, c0 = w0 * s.m, r0 = (i64)(blockIdx.x / s.strips) * s.rows;
        windows = lowest(s.windows, s.W / s.n - w0);
        cols = lowest(s.windows * s.m, s.K - c0), rows = lowest(s.rows, s.M - r0);
    }
};

// What masks rank by: the magnitude of a value's bits, exact.
template <int KIND> __device__ __forceinline__ double magnitude(u32 bits) {
    float x;
    if constexpr (KIND == FLOAT16) asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"((unsigned short)bits));
    else x = __uint_as_float(KIND == BFLOAT16 ? bits << 16 : bits);
    double wide;
    asm("cvt.f64.f32 %0, %1;" : "=d"(wide) : "f"(x));  // CuPy compiles with -ftz, which would make (double)x lose subnormals
    return fabs(wide);
}

// Sets the bits of the n columns of largest norm in every window of every group of a strip, the lower column first among
// equals, as preprocess.masks: norms are sums over the rows, in order. Returns this thread's values above `infinite`.
template <int KIND, typename T>
__device__ __forceinline__ int rank(const T* strip, int pitch, const Sizes& s, int groups, const Ranking& by, T live,
                                    u64* norms, u32* used, int words) {
    const int wide = s.windows * s.m;
    int odd = 0;
    for (int i = threadIdx.x; i < groups * wide; i += THREADS) {
        const T* column = strip + i / wide * s.length * pitch + i % wide;
        double sum = 0;
#pragma unroll 8
        for (int r = 0; r < s.length; ++r) {
            const T bits = column[r * pitch];
            const double x = magnitude<KIND>(bits);
            sum += by.squares ? x * x : x;  // a square is exact, so a fused one is the same
            odd += (u32)(bits & live) >= by.infinite;
        }
        const u64 key = __double_as_longlong(sum), nan = 0x7ff0000000000001ull;
        norms[i] = key < nan ? key : nan;  // no norm is negative
    }
    __syncthreads();
    for (int i = threadIdx.x; i < groups * wide; i += THREADS) {
        const int at = i % wide % s.m;
        const u64 mine = norms[i], *window = norms + i - at;
        int larger = 0;
#pragma unroll 8
        for (int j = 0; j < s.m; ++j) larger += window[j] > mine || (window[j] == mine && j < at);
        if (larger < s.n) atomicOr(used + i / wide * words + i % wide / LANES, 1u << i % wide % LANES);
    }
    return odd;
}

// Positions kept in every window of the row groups of a block; with VALUES also data, from a copy of the strip in shared
// memory. refused[0] counts windows that hold more than n vectors, refused[1] is the most of all ones minus
// ((q * windows + w) * 512 + vectors) over them. WIDE: x, its rows and the strips start on 16 bytes. KIND other than EXACT
// (needs VALUES): the n vectors of largest norm stay, and refused[0] counts values that are not finite.
template <typename T, bool WIDE, bool VALUES, int KIND>
__global__ void __launch_bounds__(THREADS)
encode(const T* __restrict__ x, Sizes s, u64 mask, Ranking by, int pitch, u8* __restrict__ indices, T* __restrict__ data,
       u64* __restrict__ refused) {
    static_assert(KIND == EXACT || VALUES, "ranked in shared memory");
    constexpr int PIECE = WIDE ? 16 / sizeof(T) : 1;                    // values of a load
    constexpr int BATCH = PIECE >= 16 ? 1 : PIECE > 1 ? 16 / PIECE : 8;  // loads of a thread in flight: all, if WIDE
    struct alignas(PIECE * sizeof(T)) Piece { T v[PIECE]; };
    extern __shared__ u64 shared[];
    const int warp = threadIdx.x / LANES, lane = threadIdx.x % LANES;
    const int wide = s.windows * s.m, groups = s.rows / s.length, words = wide / LANES + 2;
    const Place block(s);
    const i64 q0 = block.r0 / s.length, all = s.W / s.n;
    const int cols = block.cols, rows = block.rows, windows = block.windows, here = lowest(groups, s.Q - q0);
    T* strip = reinterpret_cast<T*>(shared);                                                   // [rows][pitch]
    u32* used = reinterpret_cast<u32*>(strip + (VALUES ? (s.rows * pitch + 7) / 8 * 8 : 0));   // [groups][words]
    u8* place = reinterpret_cast<u8*>(used + groups * words);                                  // [windows * n][groups]
    const T live = (T)mask;
    for (int i = threadIdx.x; i < groups * words; i += THREADS) used[i] = 0;
    __syncthreads();

    const int pieces = wide / PIECE, abreast = THREADS / pieces;  // rows loaded together
    const int c = threadIdx.x % pieces * PIECE;
    const bool reads = (int)threadIdx.x < pieces * abreast;
    const T* from = x + block.r0 * s.K + block.c0 + c;
    for (int r0 = threadIdx.x / pieces; __any_sync(ALL, reads && r0 < s.rows); r0 += abreast * BATCH) {
        Piece piece[BATCH];
#pragma unroll
        for (int b = 0; b < BATCH; ++b) {
            const int r = r0 + b * abreast;
            piece[b] = Piece{};
            if (reads && r < rows && c < cols) piece[b] = *reinterpret_cast<const Piece*>(from + (i64)r * s.K);
        }
#pragma unroll
        for (int b = 0; b < BATCH; ++b) {
            const int r = r0 + b * abreast, g = r / s.length;
            u32 held = 0;
#pragma unroll
            for (int i = 0; i < PIECE; ++i) {
                const bool some = (piece[b].v[i] & live) != 0;
                held |= (u32)some << i;
                if (!some) piece[b].v[i] = 0;  // a -0.0
            }
            if (VALUES && reads && r < s.rows) {
                constexpr int WORD = sizeof(T) * PIECE < 4 ? sizeof(T) : sizeof(T) > 4 ? 8 : 4;  // pitches are odd in it
                struct alignas(WORD) Word { T v[WORD / sizeof(T)]; };
                Word* to = reinterpret_cast<Word*>(strip + r * pitch + c);
                const Word* of = reinterpret_cast<const Word*>(piece[b].v);
#pragma unroll
                for (int i = 0; i < (int)(PIECE * sizeof(T) / WORD); ++i) to[i] = of[i];
            }
            if (KIND != EXACT) continue;
            // One atomic for all lanes whose rows belong to one group, as those of neighbouring lanes mostly do.
            const int word = held ? g * words + c / LANES : -1;
            const u32 peers = __match_any_sync(ALL, word), together = __reduce_or_sync(peers, held << c % LANES);
            if (held && lane == __ffs(peers) - 1) atomicOr(used + word, together);
        }
    }
    __syncthreads();
    if constexpr (KIND != EXACT) {
        u64* norms = shared + by.norms;  // [groups][wide]
        const int odd = rank<KIND>(strip, pitch, s, groups, by, live, norms, used, words);
        if (odd && refused) atomicAdd(refused, (u64)odd);
        __syncthreads();
    }

    for (int i = warp; i < here * windows; i += WARPS) {
        const int g = i / windows, w = i % windows;
        const auto bits = [&](int j) {  // positions j .. j+31 of the window
            const int at = w * s.m + j;
            const u32* word = used + g * words + at / LANES;
            return __funnelshift_r(word[0], word[1], at % LANES) & (s.m - j < LANES ? (1u << (s.m - j)) - 1 : ALL);
        };
        int held = 0;
        for (int j = 0; j < s.m; j += LANES) held += __popc(bits(j));
        if (held > s.n) {
            for (int j = lane; j < s.n; j += LANES) place[(w * s.n + j) * groups + g] = (u8)j;  // addresses, not results
            if (lane == 0) {
                atomicAdd(refused, 1ull);
                atomicMax(refused + 1, ~(u64)(((q0 + g) * all + block.w0 + w) * 512 + held));
            }
            continue;
        }
        int spare = s.n - held, next = 0;  // a window that holds fewer takes the lowest free positions too
        for (int j = 0; j < s.m; j += LANES) {
            const u32 kept = bits(j), below = (1u << lane) - 1;
            const u32 vacant = ~kept & (s.m - j < LANES ? (1u << (s.m - j)) - 1 : ALL);
            const bool taken = kept >> lane & 1 || (vacant >> lane & 1 && __popc(vacant & below) < spare);
            const u32 taking = __ballot_sync(ALL, taken);
            if (taken) place[(w * s.n + next + __popc(taking & below)) * groups + g] = (u8)(j + lane);
            next += __popc(taking);
            spare -= __popc(taking & vacant);
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < windows * s.n * groups; i += THREADS) {
        const int u = i / groups, g = i % groups;
        if (g < here) indices[(block.w0 * s.n + u) * s.Q + q0 + g] = place[i];
    }
    if (!VALUES) return;
    for (int r = lane; r < here * s.length; r += LANES) {
        const int g = r / s.length;
        for (int w = 0; w < windows; ++w) {
            const T* row = strip + r * pitch + w * s.m;
#pragma unroll 4
            for (int k = warp; k < s.n; k += WARPS) {
                const int u = w * s.n + k;
                data[(block.w0 * s.n + u) * s.Mp + block.r0 + r] = row[place[u * groups + g]];
            }
        }
    }
}

// A block's rows and columns in shared memory, through which x is read or written along columns and data along rows. A row
// is an odd number of words, so that a column meets every bank.
template <typename T> struct Strip : Place {
    T* cells;
    const T live;
    const int pitch, warp = threadIdx.x / LANES, lane = threadIdx.x % LANES;
    short* first;  // of a kept vector: where its window starts
    __device__ __forceinline__ Strip(const Sizes& s, u64 mask, int pitch) : Place(s), live((T)mask), pitch(pitch) {
        extern __shared__ u64 shared[];
        __shared__ short starts[256];
        cells = reinterpret_cast<T*>(shared), first = starts;
        if (threadIdx.x < s.windows * s.n) starts[threadIdx.x] = (short)(threadIdx.x / s.n * s.m);
    }
    __device__ __forceinline__ T* row(int r) const { return cells + r * pitch; }
    __device__ __forceinline__ i64 group(const Sizes& s, int r) const {
        const i64 row = r0 + r;
        return row >> 32 ? row / s.length : (u32)row / (u32)s.length;  // a division of 64 bits takes four times as long
    }
    // visit(row, vector of data, row group, column where its window starts) for the block's vectors and `rows` rows
    template <class Visit> __device__ __forceinline__ void each(const Sizes& s, int rows, Visit visit) const {
        for (int r = lane; r < rows; r += LANES) {
            const i64 q = group(s, r);
#pragma unroll 4
            for (int u = warp; u < windows * s.n; u += WARPS) visit(r, w0 * s.n + u, q, first[u]);
        }
    }
};

// data[u, i] for a block of rows and windows.
template <typename T>
__global__ void __launch_bounds__(THREADS)
gather(const T* __restrict__ x, Sizes s, u64 mask, int pitch, const u8* __restrict__ indices, T* __restrict__ data) {
    const Strip<T> b(s, mask, pitch);
    const int wide = b.windows * s.m, out = lowest(s.rows, s.Mp - b.r0);
    for (int c = b.lane; c < wide; c += LANES) {
        const T* from = x + b.r0 * s.K + b.c0 + c;
#pragma unroll 8
        for (int r = b.warp; r < s.rows; r += WARPS) {
            const T v = r < b.rows && c < b.cols ? from[(i64)r * s.K] : T(0);
            b.row(r)[c] = v & b.live ? v : T(0);
        }
    }
    __syncthreads();
    b.each(s, out, [&](int r, i64 u, i64 q, int start) { data[u * s.Mp + b.r0 + r] = b.row(r)[start + indices[u * s.Q + q]]; });
}

// The reverse: every element of a block's rows and columns is written, those that no vector names as zeros. Rows of x are ld
// elements apart. WIDE: they, and the strips, start on 16 bytes, so that a thread stores that many at once.
template <typename T, bool WIDE>
__global__ void __launch_bounds__(THREADS)
scatter(const u8* __restrict__ indices, const T* __restrict__ data, Sizes s, u64 mask, int pitch,
        T* __restrict__ x, i64 ld) {
    constexpr int PIECE = WIDE ? 16 / sizeof(T) : 1, WORD = sizeof(T) < 4 ? 4 : sizeof(T);
    const Strip<T> b(s, mask, pitch);
    for (int i = threadIdx.x; i < s.rows * pitch * (int)sizeof(T) / 4; i += THREADS)
        reinterpret_cast<u32*>(b.cells)[i] = 0;  // a row is a whole number of words
    __syncthreads();
    constexpr int BATCH = 4;  // loads of a thread in flight
    const int vectors = b.windows * s.n;
    const i64 u0 = b.w0 * s.n;
    for (int r = b.lane; r < b.rows; r += LANES) {
        const i64 q = b.group(s, r);
        for (int k = b.warp; k < vectors; k += BATCH * WARPS) {
            T v[BATCH];
            int at[BATCH];
#pragma unroll
            for (int i = 0; i < BATCH; ++i) {
                const int u = k + i * WARPS;
                v[i] = 0, at[i] = 0;
                if (u < vectors) {
                    v[i] = data[(u0 + u) * s.Mp + b.r0 + r];
                    at[i] = b.first[u] + indices[(u0 + u) * s.Q + q];
                }
            }
#pragma unroll
            for (int i = 0; i < BATCH; ++i)
                if (v[i] & b.live) b.row(r)[at[i]] = v[i];
        }
    }
    __syncthreads();
    T* to = x + b.r0 * ld + b.c0;
    if constexpr (!WIDE) {
        for (int c = b.lane; c < b.cols; c += LANES) {
#pragma unroll 8
            for (int r = b.warp; r < b.rows; r += WARPS) to[(i64)r * ld + c] = b.row(r)[c];
        }
    } else {
        struct alignas(WORD) Word { T v[WORD / sizeof(T)]; };
        struct alignas(16) Piece { Word w[PIECE * sizeof(T) / WORD]; };
        const int pieces = (b.cols + PIECE - 1) / PIECE;
#pragma unroll 2
        for (int i = threadIdx.x; i < b.rows * pieces; i += THREADS) {
            const int r = i / pieces, c = (i - r * pieces) * PIECE;
            const T* from = b.row(r) + c;
            if (c + PIECE <= b.cols) {
                Piece piece;
#pragma unroll
                for (int w = 0; w < (int)(sizeof(Piece) / WORD); ++w) piece.w[w] = reinterpret_cast<const Word*>(from)[w];
                *reinterpret_cast<Piece*>(to + r * ld + c) = piece;
            } else {
                for (int e = 0; c + e < b.cols; ++e) to[r * ld + c + e] = from[e];
            }
        }
    }
}

struct Packing {
    i64 W, Q;
    int n, m, tile_cols, groups;  // groups: of a row tile
    int k_tiles;
};

// The paper's queryColInfo, reorderingIdx and transformLayout for one (k tile, row tile).
__global__ void __launch_bounds__(THREADS)
pack(const u8* __restrict__ indices, Packing p, short* __restrict__ col_info, u8* __restrict__ ranks) {
    __shared__ u8 needed[256];
    __shared__ short place[256], listed[256];
    const i64 k = blockIdx.x % p.k_tiles, tile = blockIdx.x / p.k_tiles, kept = p.tile_cols / p.m * p.n;
    const int size = (int)kept * p.groups;
    needed[threadIdx.x] = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < size; i += THREADS) {
        const int u = i / p.groups, g = i % p.groups;
        needed[u / p.n * p.m + indices[(k * kept + u) * p.Q + tile * p.groups + g]] = 1;
    }
    __syncthreads();
    const int c = threadIdx.x;
    if (c < LANES) {
        int before = 0;
        for (int j = 0; j < 256; j += LANES) {
            const u32 live = __ballot_sync(ALL, needed[j + c]);
            place[j + c] = (short)(before + __popc(live & ((1u << c) - 1)));
            before += __popc(live);
        }
    }
    listed[c] = -1;
    __syncthreads();
    if (needed[c]) listed[place[c]] = (short)c;
    __syncthreads();
    if (c < p.tile_cols) col_info[(tile * p.k_tiles + k) * p.tile_cols + c] = listed[c];
    for (int i = threadIdx.x; i < size; i += THREADS) {
        const int u = i / p.groups, g = i % p.groups;
        const int column = u / p.n * p.m + indices[(k * kept + u) * p.Q + tile * p.groups + g];
        ranks[(tile * p.W + k * kept + u) * p.groups + g] = (u8)place[column];
    }
}

}  // namespace vector_nm
}  // namespace spformat
