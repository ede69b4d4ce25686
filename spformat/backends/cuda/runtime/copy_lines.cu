// to[line][i] = from[line][i]: lines of `along` words, ld_from and ld_to words apart. Word is an unsigned integer of the
// element's size. Zeros follow up to word `fill` of a line of `to` (at least `along`): who multiplies whole pieces of a line
// must not meet what the memory held before, which may be infinite.
//
// Lines may start anywhere, yet both sides are moved 16 bytes at a time. A thread writes units of a line of `to` that start on
// 16-byte boundaries; it loads the two such units of `from` that hold their bytes, and shifts them into place. At the ends of a
// line these hold bytes of the lines beside it, too, which are dropped: single loads there would keep a warp waiting twice. Only
// units whose loads would begin before the matrix or end after it go element by element.
//
// Units of all lines follow each other, `units` of them in a line, Each of a thread, whose loads are all under way before its first
// store. Grid: x over units of so many lines, y over such groups of lines; units of a group are counted in 32 bits.
#include "spformat/launch_order.cuh"
#include "spformat/units.cuh"

using namespace spformat;

constexpr int THREADS = 256;

template <class Word, int Each>
__global__ void __launch_bounds__(THREADS)
    copy_lines(const Word* __restrict__ from, Word* __restrict__ to, u32 lines, u32 group, int along, i64 ld_from, i64 ld_to, int fill,
               u32 units) {
    let_next_launch_begin();
    constexpr int P = 16 / sizeof(Word);
    const u64 begin = reinterpret_cast<u64>(from), end = begin + ((lines - 1) * ld_from + along) * sizeof(Word);
    const u32 line0 = blockIdx.y * group, all = min(group, lines - line0) * units;
    const u32 first_unit = blockIdx.x * static_cast<u32>(THREADS * Each) + threadIdx.x;
    auto place = [&](u32 unit, i64& line, int& at) {  // of the first word of a unit, which may lie before its line
        const u32 of_group = unit / units;
        line = static_cast<i64>(line0) + of_group;
        at = static_cast<int>((unit - of_group * units) * P) - head_of(to + line * ld_to);
    };
    uint4 low[Each], high[Each];
    Word* target[Each];
    int at[Each];
    u32 bytes[Each], single = 0;
    wait_for_launch_before();
#pragma unroll
    for (int e = 0; e < Each; ++e) {
        const u32 unit = first_unit + e * THREADS;
        i64 line;
        place(unit, line, at[e]);
        if (unit >= all) at[e] = fill;
        target[e] = to + line * ld_to + at[e];
        const u64 source = begin + (line * ld_from + at[e]) * sizeof(Word), start = source & ~u64(15);
        bytes[e] = static_cast<u32>(source) & 15;
        low[e] = high[e] = make_uint4(0, 0, 0, 0);
        if (at[e] >= along) continue;
        if (start >= begin && start + 32 <= end) {
            const uint4* const pair = reinterpret_cast<const uint4*>(reinterpret_cast<const char*>(from) + (start - begin));
            low[e] = pair[0], high[e] = pair[1];
        } else {
            single |= 1u << e;
        }
    }
#pragma unroll
    for (int e = 0; e < Each; ++e) {
        if (at[e] >= fill || single >> e & 1) continue;
        const int there = (along - at[e]) * int(sizeof(Word));  // bytes of the unit that are not zeros
        uint4 unit = shifted(low[e], high[e], bytes[e]);
        if (there < 16) unit = first_bytes(unit, there);
        if (at[e] >= 0 && at[e] + P <= fill) {
            *reinterpret_cast<uint4*>(target[e]) = unit;
        } else {
            Word words[P];
            memcpy(words, &unit, 16);
#pragma unroll
            for (int i = 0; i < P; ++i)
                if (at[e] + i >= 0 && at[e] + i < fill) target[e][i] = words[i];
        }
    }
#pragma unroll 1
    for (; single; single &= single - 1) {
        i64 line;
        int first;
        place(first_unit + (__ffs(single) - 1) * THREADS, line, first);
#pragma unroll 1
        for (int i = max(first, 0); i < min(first + P, fill); ++i)
            to[line * ld_to + i] = i < along ? from[line * ld_from + i] : Word(0);
    }
}
