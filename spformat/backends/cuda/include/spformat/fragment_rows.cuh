// A fragments of mma m16n8k16, as rows of a dense matrix of 16-bit values.
#pragma once
#include "spformat/dtypes.cuh"

namespace spformat {

// Of four lanes in a row, lane t has word t of four units; then it has the four words of unit t.
__device__ __forceinline__ void gather_unit(u32 (&w)[4], int t) {
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
        const u32 other = __shfl_xor_sync(~0u, t & 1 ? w[i] : w[i + 1], 1);
        if (t & 1) w[i] = other;
        else w[i + 1] = other;
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const u32 other = __shfl_xor_sync(~0u, t & 2 ? w[i] : w[i + 2], 2);
        if (t & 2) w[i] = other;
        else w[i + 2] = other;
    }
}

// a[i]: the fragment of columns 16i .. 16i+15 of 16 rows x 64 columns from (row0, column0), to x u16[M, ld]. Rows from M on and
// columns from ld on are left out. Aligned: rows of x start on 16 bytes. All lanes of the warp call it.
template <bool Aligned>
__device__ __forceinline__ void store_fragments(const u32 (&a)[4][4], u16* x, i64 ld, i64 row0, i64 column0, i64 M) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int side = 0; side < 2; ++side)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            u32 w[4] = {a[2 * half][side], a[2 * half][side + 2], a[2 * half + 1][side], a[2 * half + 1][side + 2]};
            gather_unit(w, t);
            const i64 row = row0 + g + 8 * side, column = column0 + 32 * half + 8 * t;
            if (row >= M || column >= ld) continue;
            u16* to = x + row * ld + column;
            if constexpr (Aligned) {
                *reinterpret_cast<uint4*>(to) = make_uint4(w[0], w[1], w[2], w[3]);
            } else {
#pragma unroll
                for (int e = 0; e < 8; ++e)
                    if (column + e < ld) to[e] = static_cast<u16>(w[e / 2] >> (16 * (e % 2)));
            }
        }
}

}  // namespace spformat
