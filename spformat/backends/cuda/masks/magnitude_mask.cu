// The mask of the `count` largest of n magnitudes, lower places first among equals, as preprocess/masks.py. sm_80 and later.
//
//   x      T[n]     the bits of the values
//   s      one Selection and, behind it, u64[BINS] and u64[tiles]; all zeros before the first launch
//   mask   u8[n]    1 where a value stays
//   odd    u64      in host memory: how many values are not finite is added
//
// A radix selection: `digit` is launched for every digit of the keys, from the top, with up to 11 bits each. It counts the
// keys that start with the digits known so far by their next digit. The last block to finish finds the digit of the
// count-th largest key, so that the host waits for nothing. Then `keep` reads x once more and writes the mask. If some of
// the keys that equal that one must go, blocks number them in their order: look_back.cuh.
#include "spformat/largest.cuh"
#include "spformat/last_block.cuh"
#include "spformat/look_back.cuh"
#include "spformat/scan.cuh"

namespace spformat::masks {

constexpr int THREADS = scan::THREADS, WARPS = THREADS / 32, BINS = 2048, TIMES = 32 / WARPS;

// Adds the digits of the block's share to the counts of all, and finds the wanted digit in the last block.
template <class T>
__global__ void __launch_bounds__(THREADS)
digit(const T* __restrict__ x, i64 n, Keys keys, int shift, int width, int first, u64 count, Selection* s, u64* odd) {
    using Key = key_t<T>;
    __shared__ u32 here[BINS];
    __shared__ u64 sums[33];
    u64* bins = reinterpret_cast<u64*>(s + 1);
    for (int i = threadIdx.x; i < BINS; i += THREADS) here[i] = 0;
    const Key prefix = static_cast<Key>(s->prefix), low = (Key(1) << width) - 1;
    const u64 remaining = first ? count : s->remaining;
    __syncthreads();
    u32 strange = 0;
    scan::each(x, n, scan::thread(), scan::threads(), [&](T raw) {
        const Key key = keys.of(raw);
        if (first) strange += !keys.template is_finite<T>(key);
        if ((key >> shift) >> width == prefix) atomicAdd(here + static_cast<u32>(key >> shift & low), 1u);
    });
    __syncthreads();
    for (int i = threadIdx.x; i < 1 << width; i += THREADS)
        if (here[i]) atomicAdd(bins + i, u64(here[i]));
    if (first) {
        const u64 total = sum_of_warp<u64>(strange);
        if (total && threadIdx.x % 32 == 0) atomicAdd(odd, total);
    }
    if (!is_last_block(&s->finished)) return;
    constexpr int SHARE = BINS / THREADS;
    u64 counts[SHARE], mine = 0, all;
#pragma unroll
    for (int j = 0; j < SHARE; ++j) {
        const int d = (1 << width) - 1 - (static_cast<int>(threadIdx.x) * SHARE + j);  // from the largest digit down
        counts[j] = d >= 0 ? *const_cast<volatile u64*>(bins + d) : 0;
        mine += counts[j];
    }
    u64 above = sum_before_thread<THREADS>(mine, sums, all);
#pragma unroll
    for (int j = 0; j < SHARE; ++j) {
        const int d = (1 << width) - 1 - (static_cast<int>(threadIdx.x) * SHARE + j);
        if (above < remaining && remaining <= above + counts[j]) {
            s->prefix = static_cast<u64>(prefix) << width | static_cast<u64>(d);
            s->remaining = remaining - above;
            s->equal = counts[j];
        }
        above += counts[j];
        if (d >= 0) bins[d] = 0;
    }
    if (threadIdx.x == 0) s->finished = 0;
}

// Bytes 1 and 0 for the four low bits, the lowest bit in the lowest byte.
__device__ __forceinline__ u32 bytes_of(u32 bits) { return (bits & 15) * 0x00204081u & 0x01010101u; }

// Wide: x starts on 16 bytes. s->prefix is the smallest key that stays, and the first s->remaining keys that equal it do.
template <class T, bool Wide>
__global__ void __launch_bounds__(THREADS)
keep(const T* __restrict__ x, i64 n, Keys keys, Selection* s, u8* __restrict__ mask) {
    using Key = key_t<T>;
    constexpr int PIECE = 16 / sizeof(T);
    struct alignas(16) Piece { T v[PIECE]; };
    __shared__ i64 shared_tile;
    __shared__ u64 before_tile;
    __shared__ int before_warp[32];  // equal keys of the tile before piece 32 * (i * WARPS + warp)
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const Key threshold = static_cast<Key>(s->prefix);
    const u64 ties = s->remaining;
    const bool every = ties == s->equal;
    if (threadIdx.x == 0) shared_tile = every ? blockIdx.x : static_cast<i64>(atomicAdd(&s->started, 1ull));
    __syncthreads();
    const i64 tile = shared_tile, start = (tile * TIMES * THREADS + threadIdx.x) * PIECE;
    u32 larger[TIMES], equal[TIMES];
    Piece piece[TIMES];
#pragma unroll
    for (int i = 0; i < TIMES; ++i) {
        const i64 at = start + i64(i) * THREADS * PIECE;
        if (Wide && at + PIECE <= n) piece[i] = *reinterpret_cast<const Piece*>(x + at);
        else
            for (int e = 0; e < PIECE; ++e) piece[i].v[e] = at + e < n ? x[at + e] : T(0);
    }
#pragma unroll
    for (int i = 0; i < TIMES; ++i) {
        larger[i] = equal[i] = 0;
#pragma unroll
        for (int e = 0; e < PIECE; ++e) {
            const Key key = keys.of(piece[i].v[e]);
            larger[i] |= u32(key > threshold) << e;
            equal[i] |= u32(key == threshold) << e;
        }
        const i64 left = n - (start + i64(i) * THREADS * PIECE);
        if (left < PIECE) equal[i] &= left > 0 ? (1u << left) - 1 : 0;
    }
    if (!every) {
        int before[TIMES];
#pragma unroll
        for (int i = 0; i < TIMES; ++i) {
            const int mine = __popc(equal[i]);
            before[i] = sum_before_lane(mine);
            if (lane == 31) before_warp[i * WARPS + warp] = before[i] + mine;
        }
        __syncthreads();
        if (warp == 0) {
            const int of_warp = before_warp[lane], first = sum_before_lane(of_warp);
            before_warp[lane] = first;
            const u64 total = static_cast<u64>(__shfl_sync(0xFFFFFFFF, first + of_warp, 31));
            const u64 others = sum_before_tile(total, tile, reinterpret_cast<u64*>(s + 1) + BINS);
            if (lane == 0) before_tile = others;
        }
        __syncthreads();
#pragma unroll
        for (int i = 0; i < TIMES; ++i) {
            const i64 room = static_cast<i64>(ties - before_tile) - before_warp[i * WARPS + warp] - before[i];
            while (__popc(equal[i]) > (room > 0 ? room : 0)) equal[i] &= ~(1u << (31 - __clz(equal[i])));
        }
    }
#pragma unroll
    for (int i = 0; i < TIMES; ++i) {
        const i64 at = start + i64(i) * THREADS * PIECE;
        const u32 stays = larger[i] | equal[i];
        if (at + PIECE <= n) {
            if constexpr (PIECE == 16)
                *reinterpret_cast<uint4*>(mask + at) =
                    make_uint4(bytes_of(stays), bytes_of(stays >> 4), bytes_of(stays >> 8), bytes_of(stays >> 12));
            else if constexpr (PIECE == 8)
                *reinterpret_cast<uint2*>(mask + at) = make_uint2(bytes_of(stays), bytes_of(stays >> 4));
            else if constexpr (PIECE == 4) *reinterpret_cast<u32*>(mask + at) = bytes_of(stays);
            else *reinterpret_cast<u16*>(mask + at) = static_cast<u16>(bytes_of(stays));
        } else {
            for (int e = 0; at + e < n; ++e) mask[at + e] = stays >> e & 1;
        }
    }
}

}  // namespace spformat::masks
