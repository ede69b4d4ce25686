// 2:4 matrices as Bitmask and back, each array read and written once. sm_80 and later. Launcher: bitmask_two_four.py.
//
//   data     T[Mp, Kp / 2]         values of 2:4, as unsigned words, on 16 bytes; two of them are a group of four columns
//   meta     u16[Mp * Kp / 16]     word (r, q) at Places; nibble g of it says which columns group 4q+g has values of
//   bits     u8[M, ceil(K / 8)]    bit b of byte y is column 8y+b; bits of columns >= K are 0
//   starts   i64[tiles]            nonzeros before each tile of data; or what bitmask_rank.cuh says
//   sums     u64[2 + tiles]        zeros before the launch and after it, see look_back.cuh
//   total    u64                   in host memory, becomes the number of nonzeros
//   indptr, values                 the pointer and the values of the Bitmask, see bitmask_rank.cuh
//   refused  u64[2]                zeros before the launch; how many groups have more than two nonzeros, and the complement
//                                  of the smallest (row * Kp/4 + group) * 8 + nonzeros of one
//
// The values of the Bitmask are the nonzeros of data in its own order: bitmask_values (bitmask_pack.cu) copies them. On the
// way back a block takes TILE_THREADS words of 32 columns.
#include "spformat/bitmask_rank.cuh"
#include "spformat/look_back.cuh"

using namespace spformat;

// Where an order of the metadata keeps its words: steps for r/32, r%32/16, r%16/8, r%8, q>>shift and the rest of q.
struct Places {
    i64 r32, r16, r8, r1, shift, outer, inner;
    __device__ __forceinline__ i64 operator()(i64 r, i64 q) const {
        const u32 low = u32(r);  // shifts: divisions of a signed number take more instructions
        const i64 row = (r >> 5) * r32 + (low >> 4 & 1) * r16 + (low >> 3 & 1) * r8 + (low & 7) * r1;
        return row + (q >> shift) * outer + (q & ((1 << shift) - 1)) * inner;
    }
};

template <class T>
__global__ void __launch_bounds__(TILE_THREADS)
two_four_bits(const T* __restrict__ data, const u16* __restrict__ meta, i64 M, i64 K, i64 Kp, Places at, u64 live,
              u8* __restrict__ bits, i64* __restrict__ starts, u64* sums, u64* total) {
    using Sizes = Tile<T>;
    constexpr int BYTES = Sizes::WIDE / 4, WORDS = (Sizes::WIDE + 7) / 8;  // of the bitmap and of the metadata, for a unit
    __shared__ u32 counts[TILE_THREADS / 32];
    __shared__ u64 shared_tile;
    const int tid = threadIdx.x;
    const i64 length = Kp / 2, n = M * length, wide = (K + 7) / 8;
    const i64 tile = taken_tile(sums, shared_tile), first = tile * Sizes::SIZE;
    const Rows<Sizes::SIZE> rows(first, length);
    Unit<T> units[Sizes::UNITS];
    u32 nibbles[Sizes::UNITS];
    i64 to[Sizes::UNITS];    // the first byte of a unit
    int room[Sizes::UNITS];  // bytes of it that exist
#pragma unroll
    for (int j = 0; j < Sizes::UNITS; ++j) {
        const int d = (j * TILE_THREADS + tid) * Sizes::WIDE;
        units[j] = load_unit<false>(data, first + d, n);
        nibbles[j] = 0, room[j] = 0;
        if (first + d >= n) continue;
        i64 k;  // the first value in its row
        const i64 row = rows(d, k);
#pragma unroll
        for (int i = 0; i < WORDS; ++i) nibbles[j] |= u32(meta[at(row, k / 8 + i)]) << (16 * i);
        if (WORDS * 8 > Sizes::WIDE) nibbles[j] >>= 2 * (k % 8);
        to[j] = row * wide + k / 4, room[j] = int(max(i64(0), min(i64(BYTES), wide - k / 4)));
    }
    u32 count = 0;
#pragma unroll
    for (int j = 0; j < Sizes::UNITS; ++j) {
        const u32 mask = nonzeros(units[j], T(live));
        count += __popc(mask);
        u32 out = 0;
#pragma unroll
        for (int g = 0; g < Sizes::WIDE / 2; ++g) {
            const u32 nibble = nibbles[j] >> (4 * g), pair = mask >> (2 * g);
            out |= ((pair & 1) << (nibble & 3) | (pair >> 1 & 1) << (nibble >> 2 & 3)) << (4 * g);
        }
        if (BYTES > 1 && wide % BYTES == 0) {  // either all of them exist or none
            if (room[j] && BYTES == 2) *reinterpret_cast<u16*>(bits + to[j]) = u16(out);
            if (room[j] && BYTES == 4) *reinterpret_cast<u32*>(bits + to[j]) = out;
            continue;
        }
#pragma unroll
        for (int i = 0; i < BYTES; ++i)
            if (i < room[j]) bits[to[j] + i] = u8(out >> (8 * i));
    }
    count = sum_of_warp(count);
    if (tid % 32 == 0) counts[tid / 32] = count;
    __syncthreads();
    write_start_of_tile(counts, tile, starts, sums, total);
    leave_tile(sums, shared_tile);
}

// The nibble for the nonzero mask of a group, 0 for more than two nonzeros; all of them in `table`, that of mask 0 lowest.
__device__ __forceinline__ u32 nibble_of(u64 table, u32 mask) { return u32(table >> (4 * mask)) & 15; }

template <class T, class Ptr>
__global__ void __launch_bounds__(TILE_THREADS)
bitmask_to_two_four(const Ptr* __restrict__ indptr, const u8* __restrict__ bits, const i64* __restrict__ starts,
                    const T* __restrict__ values, i64 nnz, i64 M, i64 wide, i64 Mp, i64 Kp, Places at, u64 table,
                    T* __restrict__ data, u16* __restrict__ meta, u64* refused) {
    constexpr int WIDE = 16 / sizeof(T), MOST = 16 * TILE_THREADS;  // values of a block that can be packed
    __shared__ __align__(16) T image[MOST + WIDE];
    __shared__ u32 words[TILE_THREADS], before[TILE_THREADS], sums[33];
    __shared__ i64 wide_sums[33];
    const int tid = threadIdx.x;
    const i64 length = Kp / 32, first = i64(blockIdx.x) * TILE_THREADS;
    const int live = int(min(i64(TILE_THREADS), Mp * length - first));  // words of this block
    const Rows<TILE_THREADS> rows(first, length);
    i64 w, w0;
    const i64 row = rows(tid, w), row0 = rows(0, w0);
    u32 word = 0;
    if (row < M) {
        const u8* from = bits + row * wide + 4 * w;
        if (wide % 4 == 0) {
            if (4 * w < wide) word = __ldcs(reinterpret_cast<const u32*>(from));
        } else {
#pragma unroll
            for (int i = 0; i < 4; ++i)
                if (4 * w + i < wide) word |= u32(from[i]) << (8 * i);
        }
    }
    words[tid] = word;
    u32 total;
    before[tid] = sum_before_thread<TILE_THREADS>(u32(__popc(word)), sums, total);
    u32 bad = 0;
    u64 first_bad = 0;
    if (tid < live) {
        u32 nibbles = 0;
#pragma unroll
        for (int g = 0; g < 8; ++g) {
            const u32 mask = word >> (4 * g) & 15, nibble = nibble_of(table, mask);
            nibbles |= nibble << (4 * g);
            if (nibble == 0) {
                ++bad;
                first_bad = max(first_bad, ~(u64(row * (Kp / 4) + 8 * w + g) * 8 + __popc(mask)));
            }
        }
        meta[at(row, 2 * w)] = u16(nibbles);
        meta[at(row, 2 * w + 1)] = u16(nibbles >> 16);
    }
    if (__any_sync(~0u, bad != 0)) {
        const u32 all = sum_of_warp(bad);
        if (tid % 32 == 0) atomicAdd(refused, u64(all));
        if (first_bad > *const_cast<volatile u64*>(refused + 1)) atomicMax(refused + 1, first_bad);
    }
    if (__syncthreads_or(bad != 0)) return;  // nobody will read what this block leaves out
    int head = 0;
    if (total) {
        const i64 start = values_before(indptr, starts, bits, wide, row0, min(4 * w0, wide), 0, wide_sums);
        head = load_run<MOST>(values, start, int(total), nnz, image);
    }
    __syncthreads();
#pragma unroll 2
    for (int u = tid; u < live * 16 / WIDE; u += TILE_THREADS) {
        constexpr int PER = 16 / WIDE;  // units of a word; a unit is 2 * WIDE columns
        const u32 whole = words[u / PER], shift = u % PER * 2 * WIDE, mine = whole >> shift;
        u32 next = head + before[u / PER] + __popc(whole & ((1u << shift) - 1));
        Unit<T> unit{};
#pragma unroll
        for (int g = 0; g < WIDE / 2; ++g) {
            const u32 mask = mine >> (4 * g) & 15, nibble = nibble_of(table, mask);
            if (mask >> (nibble & 3) & 1) unit.put(2 * g, image[next++]);
            if (mask >> (nibble >> 2) & 1) unit.put(2 * g + 1, image[next++]);
        }
        uint4* to = reinterpret_cast<uint4*>(data + first * 16) + u;
        __stcs(to, make_uint4(unit.w[0], unit.w[1], unit.w[2], unit.w[3]));
    }
}
