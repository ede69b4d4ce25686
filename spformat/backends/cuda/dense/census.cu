// The structure of a dense matrix: every count of preprocess/structure.py that does not follow from others, in one pass.
// sm_80 and later. Launcher: census.py.
//
//   x        T[M, K]            row-major, as unsigned words of the width of its values; Float: -0 is a zero
//   counts   u64[COUNTS]        zeros before the launch; the positions are those below
//   lengths  u32[M]             zeros before; nonzeros of each row
//   eights   u32[ceil(M/8)]     zeros before; nonempty vectors of 8 rows in each tile of 8 rows
//   pairs    u32[ceil(M/16)]    zeros before; likewise of 16 rows
//
// A block takes SIDE x SIDE elements. They become a bit each, in shared memory; the words of 8, 16, .. 256 rows together are those
// bits united. Columns and rows behind the matrix are zeros.
#include "spformat/flat_tiles.cuh"
#include "spformat/nonzero.cuh"

using namespace spformat;

constexpr int SIDE = 256, THREADS = 256, WORDS = SIDE / 32, LINE = WORDS + 1;  // LINE: words between rows, of different banks
constexpr int BAD = 0, NEGATIVE = 1, BLOCKS = 2, TILES = 7, WINDOWS = 9, COUNTS = 21;

// The fields of `bits` bits of a word that hold any bit, counted.
template <int Bits> __device__ __forceinline__ int nonempty(u32 word) {
#pragma unroll
    for (int d = 1; d < Bits; d *= 2) word |= word >> d;
    constexpr u32 LOWEST = Bits == 8 ? 0x01010101u : Bits == 16 ? 0x00010001u : 1u;
    return __popc(word & LOWEST);
}

// The most bits of a field, of 4, 8, 16 and 32 bits, raised to those of a word; returns the fields of four with more than two.
__device__ __forceinline__ int fullest(u32 word, int (&most)[4]) {
    const u32 two = word - (word >> 1 & 0x55555555u), four = (two & 0x33333333u) + (two >> 2 & 0x33333333u);
    const u32 eight = (four & 0x0F0F0F0Fu) + (four >> 4 & 0x0F0F0F0Fu), half = (eight & 0x00FF00FFu) + (eight >> 8 & 0x00FF00FFu);
    int bad = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const int n = four >> (4 * i) & 15;
        most[0] = max(most[0], n), bad += n > 2;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) most[1] = max(most[1], static_cast<int>(eight >> (8 * i) & 255));
    most[2] = max(most[2], static_cast<int>(max(half & 0xFFFF, half >> 16)));
    most[3] = max(most[3], __popc(word));
    return bad;
}

__device__ __forceinline__ void add(u32* sums, int at, int mine) {
    mine = __reduce_add_sync(~0u, mine);
    if (mine && threadIdx.x % 32 == 0) atomicAdd(sums + at, static_cast<u32>(mine));
}

// Puts the bits of the elements of a block at row0, column0 into `bits`; returns how many of them, among those of a thread, are -0.
template <class T, bool Float, bool Wide>
__device__ __forceinline__ int find_bits(const T* __restrict__ x, i64 M, i64 K, i64 row0, i64 column0, u32 (&bits)[SIDE][LINE]) {
    int negative = 0;
    if constexpr (Wide) {  // rows are whole units of 16 bytes
        constexpr int P = 16 / sizeof(T), UNITS = SIDE / P, BATCH = 8;
#pragma unroll 1
        for (int i0 = threadIdx.x; i0 < SIDE * UNITS; i0 += BATCH * THREADS) {
            uint4 unit[BATCH];
#pragma unroll
            for (int j = 0; j < BATCH; ++j) {
                const i64 row = row0 + (i0 + j * THREADS) / UNITS, column = column0 + (i0 + j * THREADS) % UNITS * P;
                unit[j] = row < M && column < K ? *reinterpret_cast<const uint4*>(x + row * K + column) : make_uint4(0, 0, 0, 0);
            }
#pragma unroll
            for (int j = 0; j < BATCH; ++j) {
                const u32 some = nonzero_bits<T, Float>(unit[j]);
                if (Float) negative += __popc(nonzero_bits<T, false>(unit[j]) ^ some);
                put_mask<T>(bits[(i0 + j * THREADS) / UNITS], (i0 + j * THREADS) % UNITS, some);
            }
        }
    } else {  // a warp takes the 32 columns of a word
        constexpr T VALUE = static_cast<T>(static_cast<T>(~0ull) >> Float);
        constexpr int BATCH = 8;
        const int word = threadIdx.x / 32, lane = threadIdx.x % 32;
        const i64 column = column0 + word * 32 + lane;
#pragma unroll 1
        for (int r = 0; r < SIDE; r += BATCH) {
            T value[BATCH];
#pragma unroll
            for (int j = 0; j < BATCH; ++j) value[j] = row0 + r + j < M && column < K ? x[(row0 + r + j) * K + column] : T(0);
#pragma unroll
            for (int j = 0; j < BATCH; ++j) {
                const bool some = (value[j] & VALUE) != 0;
                const u32 all = __ballot_sync(~0u, some);
                if (Float) negative += value[j] != 0 && !some;
                if (lane == 0) bits[r + j][word] = all;
            }
        }
    }
    return negative;
}

template <class T, bool Float, bool Wide>
__global__ void __launch_bounds__(THREADS)
census(const T* __restrict__ x, i64 M, i64 K, i64 across, u64* __restrict__ counts, u32* __restrict__ lengths,
       u32* __restrict__ eights, u32* __restrict__ pairs) {
    __shared__ u32 bits[SIDE][LINE], joined[SIDE / 8][LINE], sums[COUNTS];
    const int tid = threadIdx.x, tile = tid / WORDS, word = tid % WORDS;
    const i64 strip = blockIdx.x / across, row0 = strip * SIDE, column0 = (blockIdx.x - strip * across) * SIDE;
    if (tid < COUNTS) sums[tid] = 0;
    const int negative = find_bits<T, Float, Wide>(x, M, K, row0, column0, bits);
    __syncthreads();
    if (Float) add(sums, NEGATIVE, negative);
    const auto raise = [&](int kind, const int (&most)[4]) {
#pragma unroll
        for (int m = 0; m < 4; ++m) {
            const u32 largest = __reduce_max_sync(~0u, static_cast<u32>(most[m]));
            if (largest && tid % 32 == 0) atomicMax(sums + WINDOWS + 4 * kind + m, largest);
        }
    };
    int here = 0, bad = 0, most[4] = {};
#pragma unroll
    for (int w = 0; w < WORDS; ++w) {  // a thread takes a row
        const u32 mine = bits[tid][w];
        here += __popc(mine), bad += fullest(mine, most);
    }
    add(sums, BAD, bad);
    raise(0, most);
    if (here) atomicAdd(lengths + row0 + tid, static_cast<u32>(here));
    u32 all = 0;
#pragma unroll
    for (int r = 0; r < 8; ++r) all |= bits[tile * 8 + r][word];  // now a word of a tile of 8 rows
    joined[tile][word] = all;
    int of_eight[4] = {};
    fullest(all, of_eight);
    raise(1, of_eight);
    add(sums, BLOCKS, nonempty<8>(all));
    // The eight lanes with the words of a tile add up what it has.
    const auto of_tile = [&](u32 mine) {
        int n = __popc(mine);
        for (int d = 1; d < WORDS; d *= 2) n += __shfl_xor_sync(~0u, n, d);
        return static_cast<u32>(n);
    };
    const u32 vectors = of_tile(all);
    if (word == 0 && vectors) atomicAdd(eights + row0 / 8 + tile, vectors);
    // The words of twice as many rows, half as many threads each time: those of 16, 32, 64, 128 and 256 rows.
#pragma unroll
    for (int level = 1; level < 6; ++level) {
        __syncthreads();
        const bool live = tile < SIDE / 8 >> level;  // whole warps down to 64 rows
        const u32 one = live ? joined[2 * tile][word] : 0, other = live ? joined[2 * tile + 1][word] : 0, mine = one | other;
        __syncthreads();
        if (live) joined[tile][word] = mine;
        if (level == 1) {
            const u32 n = of_tile(mine);
            if (word == 0 && n) atomicAdd(pairs + row0 / 16 + tile, n);
            add(sums, BLOCKS + 1, nonempty<16>(mine));
        } else if (level == 2) {
            int of_many[4] = {};
            fullest(mine, of_many);
            raise(2, of_many);
            add(sums, BLOCKS + 2, mine != 0);
        } else if (level == 3) {
            const u32 next = __shfl_down_sync(~0u, mine, 1);
            add(sums, BLOCKS + 3, word % 2 == 0 && (mine | next) != 0);
        } else {
            u32 four = mine | __shfl_down_sync(~0u, mine, 1);
            four |= __shfl_down_sync(~0u, four, 2);
            if (level == 4) add(sums, BLOCKS + 4, word % 4 == 0 && four != 0);
            add(sums, TILES + level - 4, __popc(mine));
        }
    }
    __syncthreads();
    if (tid < COUNTS && sums[tid]) {
        if (tid < WINDOWS) atomicAdd(counts + tid, static_cast<u64>(sums[tid]));
        else atomicMax(counts + tid, static_cast<u64>(sums[tid]));
    }
}
