// to[line][i] = from[line][i]: lines of `along` words, ld_from and ld_to words apart. Word is an unsigned integer of the
// element's size. Zeros follow up to word `fill` of a line of `to` (at least `along`): who multiplies whole pieces of a line
// must not meet what the memory held before, which may be infinite.
//
// Lines may start anywhere, yet both sides are moved 16 bytes at a time. A thread writes units of a line of `to` that start on
// 16-byte boundaries; it loads the two such units of `from` that hold their bytes, and shifts them into place. At the ends of a
// line these hold bytes of the lines beside it, too, which are dropped: single loads there would keep a warp waiting twice. Only
// units whose loads would begin before the matrix or end after it go element by element. A block is 2^narrow threads wide
// along a line and moves several lines at once; all loads of a thread's EACH units are under way before its first store. Grid:
// x over pieces of a line, y over groups of lines, both strided.
#include "spformat/launch_order.cuh"
#include "spformat/units.cuh"

using namespace spformat;

constexpr int THREADS = 256, EACH = 4;

template <class Word>
__global__ void __launch_bounds__(THREADS)
    copy_lines(const Word* __restrict__ from, Word* __restrict__ to, i64 lines, i64 along, i64 ld_from, i64 ld_to, i64 fill,
               int narrow) {
    let_next_launch_begin();
    wait_for_launch_before();
    constexpr int P = 16 / sizeof(Word);
    const int wide = 1 << narrow, together = THREADS >> narrow, x = threadIdx.x & (wide - 1);
    const u64 begin = reinterpret_cast<u64>(from), end = begin + ((lines - 1) * ld_from + along) * sizeof(Word);
    for (i64 line = blockIdx.y * static_cast<i64>(together) + (threadIdx.x >> narrow); line < lines;
         line += gridDim.y * static_cast<i64>(together)) {
        const Word* const source = from + line * ld_from;
        Word* const target = to + line * ld_to;
        const i64 head = head_of(target), units = (head + fill + P - 1) / P;
        for (i64 q0 = blockIdx.x * static_cast<i64>(wide) * EACH; q0 < units; q0 += gridDim.x * static_cast<i64>(wide) * EACH) {
            uint4 low[EACH], high[EACH];
            u32 bytes[EACH];
#pragma unroll
            for (int e = 0; e < EACH; ++e) {
                const i64 q = q0 + e * wide + x, first = q * P - head;
                low[e] = high[e] = make_uint4(0, 0, 0, 0), bytes[e] = 0;
                if (q >= units || first >= along) continue;
                const u64 at = reinterpret_cast<u64>(source + first), start = at - at % 16;
                if (start >= begin && start + (at % 16 ? 32 : 16) <= end) {
                    const char* const unit = reinterpret_cast<const char*>(source + first) - at % 16;
                    const uint4* const pair = reinterpret_cast<const uint4*>(unit);
                    bytes[e] = static_cast<u32>(at % 16);
                    low[e] = pair[0];
                    if (bytes[e]) high[e] = pair[1];
                } else {
                    Word words[P];
#pragma unroll
                    for (int i = 0; i < P; ++i) words[i] = first + i >= 0 && first + i < along ? source[first + i] : Word(0);
                    memcpy(&low[e], words, 16);
                }
            }
#pragma unroll
            for (int e = 0; e < EACH; ++e) {
                const i64 q = q0 + e * wide + x, first = q * P - head;
                if (q >= units) continue;
                const uint4 unit = shifted(low[e], high[e], bytes[e]);
                if (first >= 0 && first + P <= min(fill, along)) {
                    *reinterpret_cast<uint4*>(target + first) = unit;
                } else {
                    Word words[P];
                    memcpy(words, &unit, 16);
#pragma unroll
                    for (int i = 0; i < P; ++i) words[i] = first + i < along ? words[i] : Word(0);
                    if (first >= 0 && first + P <= fill) {
                        uint4 cut;
                        memcpy(&cut, words, 16);
                        *reinterpret_cast<uint4*>(target + first) = cut;
                    } else {
#pragma unroll
                        for (int i = 0; i < P; ++i)
                            if (first + i >= 0 && first + i < fill) target[first + i] = words[i];
                    }
                }
            }
        }
    }
}
