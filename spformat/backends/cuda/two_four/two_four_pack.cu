// Dense 16-bit matrices to 2:4, and 2:4 of 1, 2 and 4 bytes back, each in one pass over the bytes. sm_80 and later.
//
//   x        u16[M, K]          row-major: the bits of float16 or bfloat16
//   data     u32[Mp, Kp/4]      pairs of values, row-major; Mp = pad(M, 32), Kp = pad(K, 64)
//   meta     u16[Mp*Kp/16]      one word per row and 16 columns, in Order; every word and pair is written, padding too
//   refused  u64[2]             zeros before the launch; pack: how many groups (Prune: values) are refused, and the
//                               complement of the smallest (row * Kp/4 + group) * 8 + nonzeros of one
//
// A block turns 32 rows x Cols columns; block x = strip of rows * pieces + piece of columns. A thread takes chunks of
// eight columns, 16 bytes, neighbours in a warp side by side, and leaves the byte of their two nibbles in shared memory,
// where the block's words lie as they will in meta: pieces of 32 bytes (logical) to 512 bytes are then written whole.
//
// Pack keeps what formats/two_four.py keeps. Prune keeps the two largest magnitudes of four, the lower column of equals,
// as preprocess/masks.py ranks them, NaN above infinity; it counts values that are not finite and packs them all the same.
#include "spformat/dtypes.cuh"

using namespace spformat;

constexpr int ROWS = 32;
enum Order { Logical, Ldmatrix, Fragment, CutlassSm80 };

// Place of word (r, q) of a block among its ROWS * Q words.
template <int order, int Q> __device__ __forceinline__ int local_word(int r, int q) {
    const int h = r % 16 / 8, i = r % 8;
    if (order == Logical) return r * Q + q;
    if (order == Ldmatrix) return ((r / 16 * 8 + i) * Q + q) * 2 + h;
    if (order == Fragment) return (r / 16 * (Q / 4) + q / 4) * 64 + 8 * i + 2 * (q % 4) + h;
    return q / 2 * 64 + 8 * i + 4 * (r / 16) + 2 * (q % 2) + h;
}

// Where pair j of the block's words stands among the pairs of meta, and whether its columns exist. wide = Kp/16.
template <int order, int Q> __device__ __forceinline__ bool home(int j, i64 strip, i64 piece, i64 wide, i64 strips, i64& at) {
    const i64 q0 = piece * Q;
    i64 q;
    if (order == Logical) {
        q = q0 + j % (Q / 2) * 2;
        at = ((strip * ROWS + j / (Q / 2)) * wide + q) / 2;
    } else if (order == Ldmatrix) {
        q = q0 + j % Q;
        at = (strip * (ROWS / 2) + j / Q) * wide + q;
    } else if (order == Fragment) {
        const int tile = j / 32;
        q = q0 + tile % (Q / 4) * 4;
        at = ((strip * 2 + tile / (Q / 4)) * (wide / 4) + q / 4) * 32 + j % 32;
    } else {
        q = q0 + j / 32 * 2;
        at = (q / 2 * strips + strip) * 32 + j % 32;
    }
    return q < wide;
}

// The part of a block's rows and columns that a thread takes: eight columns of every STEP-th row, COUNT times.
template <int Cols, int Threads> struct Share {
    static constexpr int Q = Cols / 16, CHUNKS = Cols / 8, STEP = Threads / CHUNKS, COUNT = ROWS / STEP;
    static_assert(Threads % CHUNKS == 0 && ROWS % STEP == 0 && Cols % 64 == 0, "all threads take as many rows");
    i64 strip, piece, row, k;  // row and k: the first row and the first of the columns
    __device__ __forceinline__ explicit Share(i64 pieces) {
        strip = u32(blockIdx.x) / u32(pieces), piece = blockIdx.x - strip * pieces;
        row = strip * ROWS + threadIdx.x / CHUNKS, k = piece * Cols + threadIdx.x % CHUNKS * 8;
    }
    // Byte among the block's words that holds the two nibbles of the thread's part of row number c.
    template <int order> __device__ __forceinline__ int nibbles_at(int c) const {
        const int at = threadIdx.x % CHUNKS;
        return 2 * local_word<order, Q>(threadIdx.x / CHUNKS + c * STEP, at / 2) + at % 2;
    }
};

// 0x8000 in each half of w that is neither +0 nor -0.
__device__ __forceinline__ u32 held_of(u32 w) { return ((w & 0x7FFF7FFF) + 0x7FFF7FFF) & 0x80008000; }

// Halves i0 and i1 of the four values in (low, high), where nibble = i0 + 4*i1; -0 becomes +0.
__device__ __forceinline__ u32 picked(u32 low, u32 high, u32 nibble) {
    const u32 pair = __byte_perm(low, high, 0x1010 + (nibble & 3) * 0x22 + (nibble >> 2) * 0x2200);
    return pair & ((held_of(pair) >> 15) * 0xFFFF);
}

// Bit i: value i of the four is not zero.
__device__ __forceinline__ u32 mask_of(u32 low, u32 high) {
    const u32 held = held_of(low) >> 15 | held_of(high) >> 13;
    return (held | held >> 15) & 15;
}

// The nibble for each mask, 0 for a group with more than two nonzeros.
__device__ __forceinline__ u32 nibble_of(u32 mask) { return u32(0x000E0DCC09884444ull >> (4 * mask)) & 15; }

template <class T> constexpr u32 INFINITE = same_type<T, __half>::value ? 0x7C00 : 0x7F80;

// The nibble of the two largest; adds the values that are not finite to `odd`.
template <class T> __device__ __forceinline__ u32 largest_two(u32 low, u32 high, u32& odd) {
    u32 key[4] = {low & 0x7FFF, low >> 16 & 0x7FFF, high & 0x7FFF, high >> 16 & 0x7FFF};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        odd += key[i] >= INFINITE<T>;
        key[i] = min(key[i], INFINITE<T> + 1) * 4 + 3 - i;  // all NaN alike; of equals the lower column wins
    }
    const u32 a = max(key[0], key[1]), b = min(key[0], key[1]), c = max(key[2], key[3]), d = min(key[2], key[3]);
    const u32 first = 3 - (max(a, c) & 3), second = 3 - (max(min(a, c), max(b, d)) & 3);
    return min(first, second) + 4 * max(first, second);
}

// Eight values at columns k .. k+7 of a row; what lies at or beyond K is zero. Aligned: K % 8 = 0 and 16-byte lines.
template <bool Aligned> __device__ __forceinline__ uint4 load_eight(const u16* line, i64 k, i64 K) {
    if (Aligned) return k < K ? __ldcs(reinterpret_cast<const uint4*>(line + k)) : make_uint4(0, 0, 0, 0);
    u32 w[4] = {0, 0, 0, 0};
#pragma unroll
    for (int e = 0; e < 8; ++e)
        if (k + e < K) w[e / 2] |= u32(line[k + e]) << (16 * (e % 2));
    return make_uint4(w[0], w[1], w[2], w[3]);
}

template <class T, int order, bool Prune, bool Aligned, int Cols, int Threads>
__global__ void __launch_bounds__(Threads)
two_four_pack(const u16* __restrict__ x, i64 M, i64 K, u32* __restrict__ data, u32* __restrict__ meta, i64 strips, i64 wide,
              i64 pieces, u64* refused) {
    using Part = Share<Cols, Threads>;
    __shared__ __align__(16) unsigned char words[ROWS * Part::Q * 2];
    const Part part(pieces);
    const i64 rows = M - part.row, k = part.k, Kp = wide * 16;
    uint4 chunk[Part::COUNT];
    const u16* line = x + part.row * K;
#pragma unroll
    for (int c = 0; c < Part::COUNT; ++c, line += Part::STEP * K)
        chunk[c] = c * Part::STEP < rows ? load_eight<Aligned>(line, k, K) : make_uint4(0, 0, 0, 0);
    u32 bad = 0;
    u64 first = 0;
    uint2* to = reinterpret_cast<uint2*>(data + part.row * (Kp / 4) + k / 4);
#pragma unroll
    for (int c = 0; c < Part::COUNT; ++c, to += Part::STEP * (Kp / 8)) {
        const uint4 v = chunk[c];
        u32 n0, n1;
        if (Prune) {
            n0 = largest_two<T>(v.x, v.y, bad), n1 = largest_two<T>(v.z, v.w, bad);
        } else {
            const u32 m0 = mask_of(v.x, v.y), m1 = mask_of(v.z, v.w);
            n0 = nibble_of(m0), n1 = nibble_of(m1);
            if (n0 == 0 || n1 == 0) {
                const u64 group = u64((part.row + c * Part::STEP) * (Kp / 4) + k / 4);
                const u64 here = n0 == 0 ? group * 8 + __popc(m0) : (group + 1) * 8 + __popc(m1);
                first = max(first, ~here);
                bad += (n0 == 0) + (n1 == 0);
            }
        }
        words[part.template nibbles_at<order>(c)] = static_cast<unsigned char>(n0 | n1 << 4);
        if (k < Kp) __stcs(to, make_uint2(picked(v.x, v.y, n0), picked(v.z, v.w, n1)));
    }
    __syncthreads();
#pragma unroll
    for (int j = threadIdx.x; j < ROWS * Part::Q / 2; j += Threads) {
        i64 to_pair;
        if (home<order, Part::Q>(j, part.strip, part.piece, wide, strips, to_pair))
            meta[to_pair] = reinterpret_cast<const u32*>(words)[j];
    }
    if ((!Prune || refused) && __any_sync(~0u, bad != 0)) {
        const u32 total = __reduce_add_sync(~0u, bad);
        if (threadIdx.x % 32 == 0) atomicAdd(refused, u64(total));
        if (first > *const_cast<volatile u64*>(refused + 1)) atomicMax(refused + 1, first);
    }
}

// Four values of a group from its pair, the others zero.
__device__ __forceinline__ uint2 spread(u32 pair, u32 nibble) {
    const u64 four = u64(pair & 0xFFFF) << (16 * (nibble & 3)) | u64(pair >> 16) << (16 * (nibble >> 2 & 3));
    return make_uint2(u32(four), u32(four >> 32));
}

// Values of W as they are loaded and stored: Count of them, as few accesses as their size allows.
template <int Bytes> struct Raw { using type = uint4; };
template <> struct Raw<4> { using type = u32; };
template <> struct Raw<8> { using type = uint2; };
template <class W, int Count> union Values {
    using Part = typename Raw<(sizeof(W) * Count < 16 ? sizeof(W) * Count : 16)>::type;
    static constexpr int PARTS = sizeof(W) * Count / sizeof(Part);
    W value[Count];
    Part part[PARTS];
    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int i = 0; i < Count; ++i) value[i] = 0;
    }
    __device__ __forceinline__ void load(const W* from) {
#pragma unroll
        for (int i = 0; i < PARTS; ++i) part[i] = __ldcs(reinterpret_cast<const Part*>(from) + i);
    }
    __device__ __forceinline__ void store(W* to) const {
#pragma unroll
        for (int i = 0; i < PARTS; ++i) __stcs(reinterpret_cast<Part*>(to) + i, part[i]);
    }
};

// The eight values of two groups from their four that are stored, the others zero.
template <class W> __device__ __forceinline__ Values<W, 8> spread_groups(const Values<W, 4>& stored, u32 nibbles) {
    Values<W, 8> x;
    if constexpr (sizeof(W) == 2) {
        const uint2 a = spread(stored.part[0].x, nibbles), b = spread(stored.part[0].y, nibbles >> 4);
        x.part[0] = make_uint4(a.x, a.y, b.x, b.y);
    } else {
#pragma unroll
        for (int e = 0; e < 8; ++e) {
            const u32 nibble = nibbles >> (e / 4 * 4), place = e % 4;
            const W first = stored.value[e / 4 * 2], second = stored.value[e / 4 * 2 + 1];
            x.value[e] = (nibble & 3) == place ? first : (nibble >> 2 & 3) == place ? second : W(0);
        }
    }
    return x;
}

// The way back, for values of 1, 2 and 4 bytes: x from data and meta. The nibbles are legal and data holds no -0: what
// validate() promises.
template <class W, int order, bool Aligned, int Cols, int Threads>
__global__ void __launch_bounds__(Threads)
two_four_unpack(const W* __restrict__ data, const u32* __restrict__ meta, W* __restrict__ x, i64 M, i64 K, i64 strips, i64 wide,
                i64 pieces) {
    using Part = Share<Cols, Threads>;
    __shared__ __align__(16) unsigned char words[ROWS * Part::Q * 2];
    const Part part(pieces);
    const i64 rows = M - part.row, k = part.k, Kp = wide * 16;
    Values<W, 4> stored[Part::COUNT];
    const W* from = data + part.row * (Kp / 2) + k / 2;
#pragma unroll
    for (int c = 0; c < Part::COUNT; ++c, from += Part::STEP * (Kp / 2)) {
        if (k < Kp)
            stored[c].load(from);
        else
            stored[c].clear();
    }
#pragma unroll
    for (int j = threadIdx.x; j < ROWS * Part::Q / 2; j += Threads) {
        i64 at;
        const bool there = home<order, Part::Q>(j, part.strip, part.piece, wide, strips, at);
        reinterpret_cast<u32*>(words)[j] = there ? __ldcs(meta + at) : 0;
    }
    __syncthreads();
    W* to = x + part.row * K + k;
#pragma unroll
    for (int c = 0; c < Part::COUNT; ++c, to += Part::STEP * K) {
        if (c * Part::STEP >= rows || k >= K) continue;
        const Values<W, 8> eight = spread_groups(stored[c], words[part.template nibbles_at<order>(c)]);
        if (Aligned) {
            eight.store(to);
            continue;
        }
#pragma unroll
        for (int e = 0; e < 8; ++e)
            if (k + e < K) to[e] = eight.value[e];
    }
}
