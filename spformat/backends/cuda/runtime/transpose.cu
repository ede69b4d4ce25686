// to[c][r] = from[r][c]: from is Word[rows, ld_from], to is Word[cols, ld_to], both row-major; Word is an unsigned
// integer of the element's size. Zeros follow up to word `fill` of a line of `to` (at least `rows`).
// A block of 256 threads moves tiles of SIDE x SIDE elements through shared memory, so that both sides are read and
// written in whole lines. Grid: x over column tiles, y over row tiles, both strided.
//
// Elements of 2 bytes go 16 bytes at a time on both sides. A thread loads 8 columns of two neighbouring rows, wherever
// these start, and stores the pairs of elements of a column as 8 words: a line of the tile in shared memory is a column of
// `from`, LINE words apart. 16 row pairs and 2 units of 8 columns make a warp: with LINE = 34 its stores lie in 32 different
// banks, and so do its loads of 8 bytes.
#include "spformat/launch_order.cuh"
#include "spformat/units.cuh"

using namespace spformat;

constexpr int THREADS = 256;

template <class Word> constexpr int SIDE = sizeof(Word) == 2 ? 64 : 32;  // the same in transpose.py

// Elements first .. first + 7 of a line, zeros outside of 0 .. along - 1. Bytes from `begin` to `end` may be loaded.
__device__ __forceinline__ uint4 eight(const u16* line, i64 first, i64 along, u64 begin, u64 end) {
    const u64 at = reinterpret_cast<u64>(line + first), start = at - at % 16;
    if (first + 8 <= along && start >= begin && start + (at % 16 ? 32 : 16) <= end) {
        const uint4* const unit = reinterpret_cast<const uint4*>(start);
        const uint4 low = unit[0];
        return at % 16 ? shifted(low, unit[1], static_cast<u32>(at % 16)) : low;
    }
    u32 w[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const u32 x = first + 2 * i < along ? line[first + 2 * i] : 0, y = first + 2 * i + 1 < along ? line[first + 2 * i + 1] : 0;
        w[i] = x | y << 16;
    }
    return make_uint4(w[0], w[1], w[2], w[3]);
}

template <class Word>
__global__ void __launch_bounds__(THREADS)
    transpose(const Word* __restrict__ from, Word* __restrict__ to, i64 rows, i64 cols, i64 ld_from, i64 ld_to, i64 fill) {
    let_next_launch_begin();
    wait_for_launch_before();
    constexpr int N = SIDE<Word>;
    for (i64 r0 = blockIdx.y * i64(N); r0 < fill; r0 += gridDim.y * i64(N))
        for (i64 c0 = blockIdx.x * i64(N); c0 < cols; c0 += gridDim.x * i64(N)) {
            if constexpr (sizeof(Word) == 2) {
                constexpr int LINE = N / 2 + 2, UNITS = N / 8;
                __shared__ __align__(16) u32 tile[N * LINE];
                const u64 begin = reinterpret_cast<u64>(from), end = reinterpret_cast<u64>(from + ((rows - 1) * ld_from + cols));
                const int pair = threadIdx.x % 16 + threadIdx.x / 128 * 16, unit = threadIdx.x / 16 % UNITS;
                const i64 r = r0 + 2 * pair, c = c0 + 8 * unit;
                uint4 x = make_uint4(0, 0, 0, 0), y = x;
                if (r < rows) x = eight(from + r * ld_from, c, cols, begin, end);
                if (r + 1 < rows) y = eight(from + (r + 1) * ld_from, c, cols, begin, end);
                const u32 upper[4] = {x.x, x.y, x.z, x.w}, lower[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    tile[(8 * unit + 2 * i) * LINE + pair] = __byte_perm(upper[i], lower[i], 0x5410);
                    tile[(8 * unit + 2 * i + 1) * LINE + pair] = __byte_perm(upper[i], lower[i], 0x7632);
                }
                __syncthreads();
#pragma unroll
                for (int i = threadIdx.x; i < N * UNITS; i += THREADS) {
                    const int column = i / UNITS, piece = i % UNITS;
                    const i64 at = r0 + 8 * piece;
                    if (c0 + column >= cols || at >= fill) continue;
                    const uint2* const words = reinterpret_cast<const uint2*>(tile + column * LINE + 4 * piece);
                    const uint2 low = words[0], high = words[1];
                    Word* const target = to + (c0 + column) * ld_to + at;
                    if (at + 8 <= fill && reinterpret_cast<u64>(target) % 16 == 0) {
                        *reinterpret_cast<uint4*>(target) = make_uint4(low.x, low.y, high.x, high.y);
                    } else {
                        const u32 w[4] = {low.x, low.y, high.x, high.y};
#pragma unroll
                        for (int k = 0; k < 8; ++k)
                            if (at + k < fill) target[k] = static_cast<Word>(w[k / 2] >> k % 2 * 16);
                    }
                }
            } else {
                __shared__ Word tile[N][N + 1];  // one more: a column of the tile lies in 32 different banks
                const int x = threadIdx.x % N, y = threadIdx.x / N;
#pragma unroll
                for (int i = y; i < N; i += THREADS / N)
                    if (c0 + x < cols) tile[i][x] = r0 + i < rows ? from[(r0 + i) * ld_from + c0 + x] : Word(0);
                __syncthreads();
#pragma unroll
                for (int i = y; i < N; i += THREADS / N)
                    if (c0 + i < cols && r0 + x < fill) to[(c0 + i) * ld_to + r0 + x] = tile[x][i];
            }
            __syncthreads();
        }
}
