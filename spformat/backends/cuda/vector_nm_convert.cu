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

struct Sizes {
    i64 M, K, W, Q, Mp;
    int n, m, length;
    int windows;  // of a strip
    int rows;     // of a block: whole groups (positions), or any number (gather, scatter)
    int strips;   // side by side; blocks are numbered strip by strip, then down the rows
};

struct Place {
    i64 w0, c0, r0;  // first window, column, row of a block
    __device__ __forceinline__ explicit Place(const Sizes& s) {
        w0 = (i64)(blockIdx.x % s.strips) * s.windows, c0 = w0 * s.m, r0 = (i64)(blockIdx.x / s.strips) * s.rows;
    }
};

__device__ __forceinline__ int lowest(i64 a, i64 b) { return (int)(a < b ? a : b); }

// Positions kept in every window of the row groups of a block; with VALUES also data, from a copy of the strip in shared
// memory. refused[0] counts windows that hold more than n vectors, refused[1] is the most of all ones minus
// ((q * windows + w) * 512 + vectors) over them. WIDE: x, its rows and the strips start on 16 bytes.
template <typename T, bool WIDE, bool VALUES>
__global__ void __launch_bounds__(THREADS)
encode(const T* __restrict__ x, Sizes s, u64 mask, int pitch, u8* __restrict__ indices, T* __restrict__ data,
       u64* __restrict__ refused) {
    constexpr int PIECE = WIDE ? 16 / sizeof(T) : 1;                    // values of a load
    constexpr int BATCH = PIECE >= 16 ? 1 : PIECE > 1 ? 16 / PIECE : 8;  // loads of a thread in flight: all, if WIDE
    struct alignas(PIECE * sizeof(T)) Piece { T v[PIECE]; };
    extern __shared__ u64 shared[];
    const int warp = threadIdx.x / LANES, lane = threadIdx.x % LANES;
    const int wide = s.windows * s.m, groups = s.rows / s.length, words = wide / LANES + 2;
    const Place block(s);
    const i64 q0 = block.r0 / s.length, all = s.W / s.n;
    const int cols = lowest(wide, s.K - block.c0), rows = lowest(s.rows, s.M - block.r0);
    const int here = lowest(groups, s.Q - q0), windows = lowest(s.windows, all - block.w0);
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
            // One atomic for all lanes whose rows are of one group: neighbours mostly are.
            const int word = held ? g * words + c / LANES : -1;
            const u32 peers = __match_any_sync(ALL, word), together = __reduce_or_sync(peers, held << c % LANES);
            if (held && lane == __ffs(peers) - 1) atomicOr(used + word, together);
        }
    }
    __syncthreads();

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

// data[u, i] for a block of rows and windows, through a strip in shared memory: x is read along columns, data is
// written along rows. A row of the strip is an odd number of words, so that a column of it meets every bank.
template <typename T>
__global__ void __launch_bounds__(THREADS)
gather(const T* __restrict__ x, Sizes s, u64 mask, int pitch, const u8* __restrict__ indices, T* __restrict__ data) {
    extern __shared__ u64 shared[];
    T* strip = reinterpret_cast<T*>(shared);
    const int warp = threadIdx.x / LANES, lane = threadIdx.x % LANES;
    const Place block(s);
    const i64 w0 = block.w0, c0 = block.c0, r0 = block.r0;
    const T live = (T)mask;
    __shared__ short first[256];  // of kept vector u: where its window starts in the strip
    if (threadIdx.x < s.windows * s.n) first[threadIdx.x] = (short)(threadIdx.x / s.n * s.m);
    const int windows = lowest(s.windows, s.W / s.n - w0), wide = windows * s.m;
    const int cols = lowest(wide, s.K - c0), rows = lowest(s.rows, s.M - r0), out = lowest(s.rows, s.Mp - r0);
    for (int c = lane; c < wide; c += LANES) {
        const T* from = x + r0 * s.K + c0 + c;
#pragma unroll 8
        for (int r = warp; r < s.rows; r += WARPS) {
            const T v = r < rows && c < cols ? from[(i64)r * s.K] : T(0);
            strip[r * pitch + c] = v & live ? v : T(0);
        }
    }
    __syncthreads();
    for (int r = lane; r < out; r += LANES) {
        const i64 q = (r0 + r) / s.length;
        const T* row = strip + r * pitch;
#pragma unroll 4
        for (int u = warp; u < windows * s.n; u += WARPS) {
            const i64 at = w0 * s.n + u;
            data[at * s.Mp + r0 + r] = row[first[u] + indices[at * s.Q + q]];
        }
    }
}

// The reverse: every element of a block's rows and columns is written, those that no vector names as zeros.
template <typename T>
__global__ void __launch_bounds__(THREADS)
scatter(const u8* __restrict__ indices, const T* __restrict__ data, Sizes s, u64 mask, int pitch,
        T* __restrict__ x) {
    extern __shared__ u64 shared[];
    T* strip = reinterpret_cast<T*>(shared);
    const int warp = threadIdx.x / LANES, lane = threadIdx.x % LANES;
    const Place block(s);
    const i64 w0 = block.w0, c0 = block.c0, r0 = block.r0;
    const T live = (T)mask;
    __shared__ short first[256];  // of kept vector u: where its window starts in the strip
    if (threadIdx.x < s.windows * s.n) first[threadIdx.x] = (short)(threadIdx.x / s.n * s.m);
    const int windows = lowest(s.windows, s.W / s.n - w0);
    const int cols = lowest(windows * s.m, s.K - c0), rows = lowest(s.rows, s.M - r0);
    for (int i = threadIdx.x; i < s.rows * pitch; i += THREADS) strip[i] = T(0);
    __syncthreads();
    for (int r = lane; r < rows; r += LANES) {
        const i64 q = (r0 + r) / s.length;
        T* row = strip + r * pitch;
#pragma unroll 4
        for (int u = warp; u < windows * s.n; u += WARPS) {
            const i64 at = w0 * s.n + u;
            const T v = data[at * s.Mp + r0 + r];
            if (v & live) row[first[u] + indices[at * s.Q + q]] = v;
        }
    }
    __syncthreads();
    for (int c = lane; c < cols; c += LANES) {
        T* to = x + r0 * s.K + c0 + c;
#pragma unroll 8
        for (int r = warp; r < rows; r += WARPS) to[(i64)r * s.K] = strip[r * pitch + c];
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
