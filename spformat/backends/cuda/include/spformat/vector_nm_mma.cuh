// Tensor-core products of the vector n:m kernels: fragments gathered from staged lines, and C on its way out.
//
// T = __half, __nv_bfloat16: mma.m16n8k16, float sums. T = float: every product is three TF32 products of the leading and
// trailing parts of its factors (the fourth, trailing * trailing, is below 2^-22 of the product and left out).
//
// The sparse side is on the 8-wide axis of the instruction: D^T[16 n, 8 m] += B^T[16 n, k] A^T[k, 8 m]. A staged tile of B
// serves all row groups; each group picks its rows when it loads fragments: the gather costs nothing but addresses.
#pragma once
#include "spformat/mma.cuh"
#include "spformat/vector_nm.cuh"

namespace spformat::vector_nm {

// x = leading + trailing + at most 2^-23 |x|: leading has 11 significant bits, rounded to nearest; of trailing the
// instruction reads 11.
__device__ __forceinline__ void split(float x, u32& leading, u32& trailing) {
    leading = (__float_as_uint(x) + 0x1000u) & 0xFFFFE000u;
    trailing = __float_as_uint(x - __uint_as_float(leading));
}

__device__ __forceinline__ float4 load_shared4(u32 address) {
    float4 v;
    asm volatile("ld.shared.v4.f32 {%0,%1,%2,%3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(address));
    return v;
}
__device__ __forceinline__ float load_shared(u32 address) {
    float v;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(address));
    return v;
}
__device__ __forceinline__ float item(const float4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

// Address of a 16-byte chunk in a tile of staged lines: chunks 0 .. 7 of a line are swizzled among themselves, chunks 8 .. 15
// lie `block` bytes on, and so forth. LINE = bytes between lines.
template <int LINE> __device__ __forceinline__ u32 chunk_at(u32 row, u32 chunk, u32 block) {
    return place<8, (LINE < 128 ? LINE : 128)>(row, chunk % 8) + row * (LINE < 128 ? 0 : LINE - 128) + chunk / 8 * block;
}

// The products of a warp: WM rows of A x WN columns of B. acc[b][j] belongs to instruction (b, j); element r of it in lane
// 4g+t is row(j, t, r) of the WM rows and column(b, g, r) of the WN columns. ROWS: smallest run of whole j's in row order.
// multiply: the k tile at (b_lines, a_lines), `slots` slots per group from shared address `slot`; b_block, a_block: chunk_at.
template <class T, int G, int WM, int WN, int LINE_A, int LINE_B> struct Fragments {
    static constexpr int ROWS = 16;
    static __device__ __forceinline__ int row(int j, int t, int r) { return 8 * j + 2 * t + r % 2; }
    static __device__ __forceinline__ int column(int b, int g, int r) { return 16 * b + g + 8 * (r / 2); }

    static __device__ __forceinline__ void multiply(int slots, float (&acc)[WN / 16][WM / 8][4], u32 b_lines, u32 b_block,
                                                    u32 a_lines, u32 a_block, u32 slot, int m_chunk, int n_chunk, int lane) {
        // Lane 8j+i addresses line i of 8x8 tile j. Tiles of B: chunk j%2 of a pair, slots 8*(j/2)..; of A the other way
        // round, because each instruction wants its registers side by side. A chunk number is an even part that is the
        // same in all lanes plus 0 or 1: swizzling commutes with the even part.
        constexpr int PAIRS = LINE_B < 128 ? LINE_B / 32 : 4;  // pairs of chunks that are swizzled together
        const int low = lane / 8 % 2, high = lane / 16, i8 = lane % 8;
#pragma unroll 2
        for (int k = 0; k < slots; k += 16) {
            u32 a[WM / 16][4];
#pragma unroll
            for (int group = 0; group < (G < 16 ? 1 : WM / G); ++group) {
                constexpr int COUNT = G < 16 ? WM / 16 : G / 16;
                const int at = k + low * 8 + i8;
                const u32 line = G < 16 ? at : load_shared_word(slot + 4 * (group * slots + at)) >> 16;
#pragma unroll
                for (int i = group * COUNT; i < (group + 1) * COUNT; ++i)
                    ldmatrix_x4_trans(a[i], a_lines + chunk_at<LINE_A>(line, m_chunk + 2 * i + high, a_block));
            }
#pragma unroll
            for (int group = 0; group < WM / G; ++group) {
                const u32 rank = load_shared_word(slot + 4 * (group * slots + k + high * 8 + i8)) & 0xFFFF;
                const u32 from = b_lines + chunk_at<LINE_B>(rank, n_chunk + low, b_block);
#pragma unroll
                for (int b = 0; b < WN / 16; ++b) {
                    u32 x[4];
                    ldmatrix_x4_trans(x, (from ^ (b % PAIRS * 32)) + b / PAIRS * b_block);
#pragma unroll
                    for (int j = group * (G / 8); j < (group + 1) * (G / 8); ++j)
                        mma_m16n8k16<T>(acc[b][j], x, a[j / 2][j % 2 * 2], a[j / 2][j % 2 * 2 + 1]);
                }
            }
        }
    }
};

template <int G, int WM, int WN, int LINE_A, int LINE_B> struct Fragments<float, G, WM, WN, LINE_A, LINE_B> {
    static constexpr int V = WN / 32;
    static constexpr bool WIDE = G % 32 == 0;  // a lane's four neighbouring rows go to four instructions: one 16-byte load
    static constexpr int ROWS = WIDE ? 32 : 16;
    static __device__ __forceinline__ int row(int j, int t, int r) {
        return WIDE ? j / 4 * 32 + 4 * (2 * t + r % 2) + j % 4 : 8 * j + 2 * t + r % 2;
    }
    static __device__ __forceinline__ int column(int b, int g, int r) {
        return V == 1 ? 4 * g + b + 2 * (r / 2) : b / 4 * 64 + 32 * (r / 2) + 4 * g + b % 4;
    }

    static __device__ __forceinline__ void multiply(int slots, float (&acc)[WN / 16][WM / 8][4], u32 b_lines, u32 b_block,
                                                    u32 a_lines, u32 a_block, u32 slot, int m_chunk, int n_chunk, int lane) {
        const int g = lane / 4, t = lane % 4;
#pragma unroll 1
        for (int k = 0; k < slots; k += 8) {
            u32 word[WM / G][2];
#pragma unroll
            for (int group = 0; group < WM / G; ++group)
#pragma unroll
                for (int h = 0; h < 2; ++h) word[group][h] = load_shared_word(slot + 4 * (group * slots + k + t + 4 * h));
            u32 lead[WM / 8][2], trail[WM / 8][2];
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                if constexpr (WIDE) {
#pragma unroll
                    for (int i = 0; i < WM / 32; ++i) {
                        const u32 line = word[i * 32 / G][h] >> 16;
                        const float4 v = load_shared4(a_lines + chunk_at<LINE_A>(line, m_chunk + 8 * i + g, a_block));
#pragma unroll
                        for (int e = 0; e < 4; ++e) split(item(v, e), lead[4 * i + e][h], trail[4 * i + e][h]);
                    }
                } else {
#pragma unroll
                    for (int j = 0; j < WM / 8; ++j) {
                        const u32 line = word[j * 8 / G][h] >> 16;
                        const u32 from = a_lines + chunk_at<LINE_A>(line, m_chunk + 2 * j + g / 4, a_block);
                        split(load_shared(from + g % 4 * 4), lead[j][h], trail[j][h]);
                    }
                }
            }
#pragma unroll
            for (int group = 0; group < WM / G; ++group) {
                u32 from[2];
#pragma unroll
                for (int h = 0; h < 2; ++h) from[h] = b_lines + chunk_at<LINE_B>(word[group][h] & 0xFFFF, n_chunk + g, b_block);
#pragma unroll
                for (int p = 0; p < (V + 1) / 2; ++p) {
                    float4 x[2][2];  // [half of k][half of the 16 columns]
#pragma unroll
                    for (int h = 0; h < 2; ++h) {
                        x[h][0] = load_shared4(from[h] + 2 * p * b_block);
                        if constexpr (V > 1) x[h][1] = load_shared4(from[h] + (2 * p + 1) * b_block);
                    }
#pragma unroll
                    for (int e = 0; e < (V == 1 ? 2 : 4); ++e) {
                        u32 big[4], small[4];
#pragma unroll
                        for (int h = 0; h < 2; ++h) {
                            split(item(x[h][0], e), big[2 * h], small[2 * h]);
                            split(V == 1 ? item(x[h][0], e + 2) : item(x[h][1], e), big[2 * h + 1], small[2 * h + 1]);
                        }
                        const int b = 4 * p + e;
#pragma unroll
                        for (int part = 0; part < 3; ++part)  // the small products first; neighbours do not depend on each other
#pragma unroll
                            for (int j = group * (G / 8); j < (group + 1) * (G / 8); ++j)
                                mma_m16n8k8_tf32(acc[b][j], part == 0 ? small : big, part == 1 ? trail[j][0] : lead[j][0],
                                         part == 1 ? trail[j][1] : lead[j][1]);
                    }
                }
            }
        }
    }
};

// Values between rows of a strip of COLUMNS columns: padded by 16 bytes against bank conflicts.
template <class Out, int COLUMNS> inline constexpr int strip_pitch = COLUMNS + 16 / sizeof(Out);

// Writes a warp's sums through its strip of shared memory, F::ROWS x COLUMNS at a time, so that C is written in whole lines.
template <class F, int COLUMNS, class Out, int B, int J>
__device__ __forceinline__ void store_fragments(const float (&acc)[B][J][4], const Target<Out>& target, Out* strip, int m,
                                                int n, int lane) {
    constexpr int PITCH = strip_pitch<Out, COLUMNS>, DOWN = F::ROWS / 8, ACROSS = COLUMNS / 16;
    const int g = lane / 4, t = lane % 4;
#pragma unroll
    for (int down = 0; down < J / DOWN; ++down)
#pragma unroll
        for (int across = 0; across < B / ACROSS; ++across) {
#pragma unroll
            for (int b = 0; b < ACROSS; ++b)
#pragma unroll
                for (int j = 0; j < DOWN; ++j)
#pragma unroll
                    for (int r = 0; r < 4; ++r)
                        strip[F::row(j, t, r) * PITCH + F::column(b, g, r)] =
                            from_float<Out>(acc[across * ACROSS + b][down * DOWN + j][r]);
            __syncwarp();
            store_warp_tile<COLUMNS>(target, strip, F::ROWS, PITCH, m + down * F::ROWS, n + across * COLUMNS, lane);
            __syncwarp();
        }
}

}  // namespace spformat::vector_nm
