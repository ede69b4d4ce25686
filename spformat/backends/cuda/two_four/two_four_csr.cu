// CSR to 2:4 and back, in time of the nonzeros and of the 2:4 matrix. sm_80 and later. Launcher: two_four_csr.py.
//
//   indptr   Pointer[M+1]   indices  Column[nnz]   values  T[nnz]     CSR; stored zeros are allowed
//   data     T[Mp, Kp/2]    meta     u16[Mp*Kp/16]                    2:4, the words of meta in any order: Steps
//   refused  u64[2]         zeros before the launch: how many groups have more than two nonzeros, and the complement of the
//                           smallest (row * Kp/4 + group) * 8 + nonzeros of one
//   counts   u32[M*parts]   nonzeros of each part of a row, PART columns
//
// T are the bits of a value; `live` are those that decide whether it is zero.
#include "spformat/lower_bound.cuh"
#include "spformat/prefix_sum.cuh"

namespace spformat::two_four {

constexpr int THREADS = 256, WARPS = THREADS / 32, TILE = 16384, PART = 4096;

// Where the word of row r and columns 16q .. 16q+15 stands in meta: formats/two_four.py, meta_steps.
struct Steps {
    i64 r32, r16, r8, r1, outer, inner;
    int shift, unused;
    __device__ __forceinline__ i64 row(i64 r) const { return r / 32 * r32 + r % 32 / 16 * r16 + r % 16 / 8 * r8 + r % 8 * r1; }
    __device__ __forceinline__ i64 word(i64 q) const { return (q >> shift) * outer + (q & ((1ll << shift) - 1)) * inner; }
};

template <class T> struct alignas(sizeof(T) * 8 < 16 ? 8 : 16) Word { T v[8]; };  // the values of 16 columns

// A block takes `rows` rows (a power of two up to 32) x `cols` columns (a multiple of 64): it writes the items as a dense
// tile into shared memory, TILE bytes at most, and each thread then encodes 16 columns at a time.
template <class T, class Column, class Pointer>
__global__ void __launch_bounds__(THREADS)
from_csr(const Pointer* __restrict__ indptr, const Column* __restrict__ indices, const T* __restrict__ values, i64 M, i64 Kp,
         u64 mask, int rows, int cols, i64 strips, Steps steps, T* __restrict__ data, u16* __restrict__ meta, u64* refused) {
    __shared__ uint4 tile[TILE / 16];
    __shared__ u32 bad_here;
    T* cells = reinterpret_cast<T*>(tile);
    const T live = static_cast<T>(mask);
    const u32 across = static_cast<u32>(strips);
    const i64 c0 = i64(blockIdx.x % across) * cols, r0 = i64(blockIdx.x / across) * rows;
    const int here = static_cast<int>(Kp - c0 < cols ? Kp - c0 : cols), lanes = THREADS / rows;
    for (int i = threadIdx.x; i < rows * cols * static_cast<int>(sizeof(T)) / 16; i += THREADS)
        tile[i] = make_uint4(0, 0, 0, 0);
    if (threadIdx.x == 0) bad_here = 0;
    const int line = threadIdx.x / lanes;
    i64 lo = 0, hi = 0;
    if (r0 + line < M) {
        lo = indptr[r0 + line], hi = indptr[r0 + line + 1];
        if (c0 > 0) lo = first_from(indices, lo, hi, c0);
        if (c0 + cols < Kp) hi = first_from(indices, lo, hi, c0 + cols);
    }
    __syncthreads();
#pragma unroll 4
    for (i64 i = lo + threadIdx.x % lanes; i < hi; i += lanes) {
        const T value = values[i];
        const i64 column = indices[i] - c0;  // before the branch, so that loads of several items are in flight
        if (value & live) cells[line * cols + column] = value;
    }
    __syncthreads();
    u32 bad = 0;
    u64 first = 0;
    const int words = here / 16;
    for (int i = threadIdx.x; i < rows * words; i += THREADS) {
        const int r = i / words, q = i - r * words;
        alignas(16) T v[16];
        const T* from = cells + r * cols + q * 16;
#pragma unroll
        for (int j = 0; j < static_cast<int>(sizeof(T)); ++j)
            reinterpret_cast<uint4*>(v)[j] = reinterpret_cast<const uint4*>(from)[j];
        Word<T> kept;
        u32 word = 0;
#pragma unroll
        for (int g = 0; g < 4; ++g) {
            const T *x = v + 4 * g;
            const u32 some = u32(x[0] != 0) | u32(x[1] != 0) << 1 | u32(x[2] != 0) << 2 | u32(x[3] != 0) << 3;
            const u32 nibble = u32(0x000E0DCC09884444ull >> (4 * some)) & 15;  // formats/two_four.py, NIBBLES; 0: refused
            if (!nibble) {
                const u64 group = static_cast<u64>((r0 + r) * (Kp / 4) + c0 / 4 + q * 4 + g);
                const u64 code = ~(group * 8 + __popc(some));
                ++bad, first = code > first ? code : first;
            }
            const u32 i0 = nibble & 3, i1 = nibble >> 2;
            kept.v[2 * g] = i0 == 0 ? x[0] : i0 == 1 ? x[1] : x[2];
            kept.v[2 * g + 1] = i1 == 3 ? x[3] : i1 == 2 ? x[2] : x[1];
            word |= nibble << (4 * g);
        }
        *reinterpret_cast<Word<T>*>(data + (r0 + r) * (Kp / 2) + c0 / 2 + q * 8) = kept;
        meta[steps.row(r0 + r) + steps.word(c0 / 16 + q)] = static_cast<u16>(word);
    }
    if (bad) {
        atomicAdd(&bad_here, bad);
        if (first > *const_cast<volatile u64*>(refused + 1)) atomicMax(refused + 1, first);
    }
    __syncthreads();
    if (threadIdx.x == 0 && bad_here) atomicAdd(refused, u64(bad_here));
}

// Which of the eight values are not zero: bit i for value i.
template <class T> __device__ __forceinline__ u32 nonzeros(const Word<T>& word, T live) {
    u32 some = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) some |= u32((word.v[i] & live) != 0) << i;
    return some;
}

// A warp counts a part of a row, 16 columns a lane.
template <class T>
__global__ void __launch_bounds__(THREADS)
count(const T* __restrict__ data, i64 size, i64 wide, i64 parts, u64 mask, u32* __restrict__ counts) {
    const i64 piece = i64(blockIdx.x) * WARPS + threadIdx.x / 32;  // row * parts + part; wide = Kp/16
    if (piece >= size) return;
    const i64 row = piece / parts, q0 = piece % parts * (PART / 16), end = q0 + PART / 16 < wide ? q0 + PART / 16 : wide;
    u32 mine = 0;
#pragma unroll 4
    for (i64 q = q0 + threadIdx.x % 32; q < end; q += 32)
        mine += __popc(nonzeros(reinterpret_cast<const Word<T>*>(data)[row * wide + q], static_cast<T>(mask)));
    mine = sum_of_warp(mine);
    if (threadIdx.x % 32 == 0) counts[piece] = mine;
}

// A warp writes the items of a part of a row, from starts[piece] on. They are collected in shared memory, so that lanes
// store side by side.
template <class T, class Column, class Start>
__global__ void __launch_bounds__(THREADS)
to_csr(const T* __restrict__ data, const u16* __restrict__ meta, i64 size, i64 wide, i64 parts, u64 mask, Steps steps,
       const Start* __restrict__ starts, Column* __restrict__ indices, T* __restrict__ values) {
    __shared__ Column all_columns[WARPS][256];
    __shared__ T all_values[WARPS][256];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const i64 piece = i64(blockIdx.x) * WARPS + warp;
    if (piece >= size) return;
    Column* my_columns = all_columns[warp];
    T* my_values = all_values[warp];
    const i64 row = piece / parts, q0 = piece % parts * (PART / 16), end = q0 + PART / 16 < wide ? q0 + PART / 16 : wide;
    const Word<T>* line = reinterpret_cast<const Word<T>*>(data) + row * wide;
    const u16* words = meta + steps.row(row);
    i64 to = starts[piece];
    for (i64 q = q0 + lane; q - lane < end; q += 32) {
        Word<T> kept{};
        u32 word = 0;
        if (q < end) kept = line[q], word = words[steps.word(q)];
        const u32 some = nonzeros(kept, static_cast<T>(mask));
        const int mine = __popc(some);
        int at = sum_before_lane(mine);
        const int total = __shfl_sync(0xFFFFFFFF, at + mine, 31);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            if (some >> i & 1) {
                my_columns[at] = static_cast<Column>(q * 16 + i / 2 * 4 + (word >> (2 * i) & 3));
                my_values[at++] = kept.v[i];
            }
        }
        __syncwarp();
        for (int i = lane; i < total; i += 32) indices[to + i] = my_columns[i], values[to + i] = my_values[i];
        __syncwarp();
        to += total;
    }
}

}  // namespace spformat::two_four
