// Masks that keep n of every m columns, the largest keys, the lower column first among equals. sm_80 and later.
//
//   x      T[lines, K]   the bits of values, or of norms in float64
//   mask   u8[M, K]      1 where a value stays; line q says it for rows q * repeat .. q * repeat + repeat - 1
//   odd    u64           in host memory: how many values of x are not finite is added; 0: nobody asks
//
// The rank of a key is the number of keys of its window that come before it, as in preprocess/masks.py: m comparisons a
// key, and no sort. A window that ends behind K is filled up with keys that come last.
#include "spformat/magnitudes.cuh"
#include "spformat/prefix_sum.cuh"

namespace spformat::masks {

constexpr int THREADS = 256, LINES = 8;

// Of the values a thread has met; all threads call it.
__device__ __forceinline__ void report(u32 strange, u64* odd) {
    const u64 total = sum_of_warp<u64>(strange);
    if (odd && total && threadIdx.x % 32 == 0) atomicAdd(odd, total);
}

// K is a multiple of m, so that x is `size` values in windows that lie one behind another; x starts on 16 bytes. A thread
// takes 16 bytes, or a window if that is more, and ranks in registers.
template <class T, int m>
__global__ void __launch_bounds__(THREADS)
whole_windows(const T* __restrict__ x, i64 size, int n, Keys keys, u8* __restrict__ mask, u64* odd) {
    using Key = key_t<T>;
    constexpr int PIECE = 16 / sizeof(T), SHARE = m > PIECE ? m : PIECE, LOADS = SHARE / PIECE;
    struct alignas(16) Piece { T v[PIECE]; };
    struct alignas(SHARE < 16 ? SHARE : 16) Flags { u8 v[SHARE]; };
    const i64 at = (i64(blockIdx.x) * THREADS + threadIdx.x) * SHARE;
    u32 strange = 0;
    if (at < size) {
        Piece piece[LOADS];
#pragma unroll
        for (int j = 0; j < LOADS; ++j) {
            if (at + (j + 1) * PIECE <= size) piece[j] = reinterpret_cast<const Piece*>(x + at)[j];
            else
                for (int e = 0; e < PIECE; ++e) piece[j].v[e] = at + j * PIECE + e < size ? x[at + j * PIECE + e] : T(0);
        }
        Key key[SHARE];
        u8 before[SHARE];
#pragma unroll
        for (int e = 0; e < SHARE; ++e) {
            key[e] = keys.of(piece[e / PIECE].v[e % PIECE]);
            strange += !keys.template is_finite<T>(key[e]);
            before[e] = 0;
        }
#pragma unroll
        for (int w = 0; w < SHARE; w += m) {
#pragma unroll
            for (int i = w; i < w + m; ++i) {
#pragma unroll
                for (int j = i + 1; j < w + m; ++j) {
                    const bool beaten = key[j] > key[i];
                    before[i] += beaten, before[j] += !beaten;
                }
            }
        }
        Flags stays;
#pragma unroll
        for (int e = 0; e < SHARE; ++e) stays.v[e] = before[e] < n;
        if (at + SHARE <= size) *reinterpret_cast<Flags*>(mask + at) = stays;
        else
            for (int e = 0; at + e < size; ++e) mask[at + e] = stays.v[e];
    }
    report(strange, odd);
}

// Any m up to 256 and any K. A block takes LINES lines and `windows` windows, at most 256 columns, a thread a column.
template <class T>
__global__ void __launch_bounds__(THREADS)
any_windows(const T* __restrict__ x, i64 lines, i64 M, i64 K, int n, int m, int windows, int repeat, i64 strips, Keys keys,
            u8* __restrict__ mask, u64* odd) {
    using Key = key_t<T>;
    __shared__ Key cells[LINES][THREADS];
    const u32 across = static_cast<u32>(strips);
    const i64 strip = blockIdx.x % across, q0 = i64(blockIdx.x / across) * LINES;
    const int c = threadIdx.x, start = c / m * m;
    const i64 column = strip * windows * m + c;
    const bool reads = c < windows * m && column < K;
    u32 strange = 0;
#pragma unroll
    for (int r = 0; r < LINES; ++r) {
        const Key key = reads && q0 + r < lines ? keys.of(x[(q0 + r) * K + column]) : Key(0);
        strange += !keys.template is_finite<T>(key);
        cells[r][c] = key;
    }
    __syncthreads();
    report(strange, odd);
    if (!reads) return;
    Key mine[LINES];
    int before[LINES];
#pragma unroll
    for (int r = 0; r < LINES; ++r) mine[r] = cells[r][c], before[r] = 0;
    for (int j = start; j < start + m && j < THREADS; ++j) {
#pragma unroll
        for (int r = 0; r < LINES; ++r) before[r] += cells[r][j] > mine[r] || (cells[r][j] == mine[r] && j < c);
    }
    for (int r = 0; r < LINES && q0 + r < lines; ++r) {
        const i64 row = (q0 + r) * repeat;
        for (int i = 0; i < repeat && row + i < M; ++i) mask[(row + i) * K + column] = before[r] < n;
    }
}

}  // namespace spformat::masks
