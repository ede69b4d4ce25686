// Whether data and meta are what the 2:4 encoder makes of some matrix, in one pass: as TwoFour.check_memory and
// check_canonical require. It does not say where.
//
//   data  u16[Mp, Kp/2]    16-bit floats as words, on 16 bytes; a pair of them is a group of four columns
//   meta  u16[Mp*Kp/16]    word (r, q) at Places; nibble g of it says which columns the pair 4q+g holds
//   bad   becomes 1 if something is wrong
//
// A warp takes a row, a lane a word and its eight values. A nibble is right only if the encoder writes it for the columns of
// the nonzeros; any other is wrong, even one that mma.sp accepts.
#include "spformat/scan.cuh"

namespace spformat {

// Where an order of the metadata keeps its words: steps for r/32, r%32/16, r%16/8, r%8, q>>shift and the rest of q.
struct Places {
    i64 r32, r16, r8, r1, shift, outer, inner;
};

__global__ void __launch_bounds__(scan::THREADS)
two_four_scan(const u16* __restrict__ data, const u16* __restrict__ meta, i64 M, i64 K, i64 Mp, i64 Kp, Places at,
              u64 nibbles, u64* bad) {
    struct alignas(16) Values { u32 pair[4]; };
    const i64 words = Kp / 16;
    const i64 low = (1 << at.shift) - 1;
    bool wrong = false;
    for (i64 r = scan::thread() / 32; r < Mp; r += scan::threads() / 32) {
        const Values* row = reinterpret_cast<const Values*>(data + r * (Kp / 2));
        const u16* first = meta + r / 32 * at.r32 + r % 32 / 16 * at.r16 + r % 16 / 8 * at.r8 + r % 8 * at.r1;
#pragma unroll 4
        for (i64 q = threadIdx.x % 32; q < words; q += 32) {
            const Values values = row[q];
            const u32 word = first[(q >> at.shift) * at.outer + (q & low) * at.inner];
            const bool edge = r >= M || 16 * q + 16 > K;
#pragma unroll
            for (int g = 0; g < 4; ++g) {
                const u32 pair = values.pair[g], nibble = word >> 4 * g & 15;
                const u32 held = ((pair & 0x7FFF7FFF) + 0x7FFF7FFF & 0x80008000) >> 15;  // in bits 0 and 16
                const u32 mask = (held & 1) << (nibble & 3) | held >> 16 << (nibble >> 2);
                wrong |= (u32)(nibbles >> 4 * mask & 15) != nibble;
                wrong |= (pair & 0x80008000) >> 15 & ~held;  // a -0.0
                if (edge) {
                    const i64 column = 16 * q + 4 * g;
                    wrong |= (held & 1) && (r >= M || column + (nibble & 3) >= K);
                    wrong |= held >> 16 && (r >= M || column + (nibble >> 2) >= K);
                }
            }
        }
    }
    scan::report(wrong, bad);
}

}  // namespace spformat
