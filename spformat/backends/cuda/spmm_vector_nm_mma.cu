// C[M,N] = A[M,K] @ B[K,N], A vector n:m (NM-SpMM), on the tensor cores; sm_80 and later.
//
//   shape    see vector_nm.cuh
//   data     T[W, Mp]           values, k-major: data[u, i] of row i
//   records  u32[row_tiles, k_tiles, record]
//   B        T, rows pitch_b bytes apart; pointer and pitch multiples of 16
//   C        Out, element (m, n) at m*step_m + n*step_n, one step is 1; or, splits > 1, float[splits, M, N] partial sums
//
// Grid (row tiles * column tiles, 1, splits), row tiles fastest; block 32*WARPS_M*WARPS_N threads.
// T = __half, __nv_bfloat16: mma.m16n8k16, float sums. T = float: every product is three TF32 products of the leading and
// trailing parts of its factors (the fourth, trailing * trailing, is below 2^-22 of the product and left out).
//
// The sparse side is on the 8-wide axis of the instruction: D^T[16 n, 8 m] += B^T[16 n, k] A^T[k, 8 m]. A staged tile of B
// serves all row groups; each group picks its rows when it loads fragments: the gather costs nothing but addresses.
// G = rows that share their columns, as far as a warp can use it: 8, 16, 32 or 64.
// Paper: NM-SpMM (IPDPS 2025), whose hierarchical blocking and col_info packing this follows.
#include "spformat/mma.cuh"
#include "spformat/vector_nm.cuh"

namespace spformat::vector_nm {

__device__ __forceinline__ void mma_tf32(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

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
__device__ __forceinline__ u32 load_rank(u32 address) {
    u16 v;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(address));
    return v;
}
__device__ __forceinline__ float item(const float4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

// acc[b][j]: columns 16b .. of the warp's WN, rows 8j .. of its WM, in the order the load functions choose.
template <class T, int G, int WM, int WN, int BM, int BN> struct Fragments {
    static constexpr int LINE_A = BM * 2, LINE_B = BN * 2, ROWS = 16;  // ROWS: smallest run of whole j's in row order
    static __device__ __forceinline__ int row(int j, int t, int r) { return 8 * j + 2 * t + r % 2; }
    static __device__ __forceinline__ int column(int b, int g, int r) { return 16 * b + g + 8 * (r / 2); }

    static __device__ __forceinline__ void multiply(const Shape& s, float (&acc)[WN / 16][WM / 8][4], u32 b_lines, u32 a_lines,
                                                    u32 ranks, int m_chunk, int n_chunk, int lane) {
#pragma unroll 2
        for (int k = 0; k < s.slots; k += 16) {
            u32 a[WM / 16][4];
            const int ka = k + (lane / 8 % 2) * 8 + lane % 8;
#pragma unroll
            for (int i = 0; i < WM / 16; ++i)
                ldmatrix_x4_trans(a[i], a_lines + place<8, LINE_A>(ka, m_chunk + 2 * i + lane / 16));
#pragma unroll
            for (int group = 0; group < WM / G; ++group) {
                const u32 rank = load_rank(ranks + 4 * (group * s.slots + k + (lane / 16) * 8 + lane % 8));
#pragma unroll
                for (int b = 0; b < WN / 16; ++b) {
                    u32 x[4];
                    ldmatrix_x4_trans(x, b_lines + place<8, LINE_B>(rank, n_chunk + 2 * b + lane / 8 % 2));
#pragma unroll
                    for (int j = group * (G / 8); j < (group + 1) * (G / 8); ++j)
                        mma_m16n8k16<T>(acc[b][j], x, a[j / 2][j % 2 * 2], a[j / 2][j % 2 * 2 + 1]);
                }
            }
        }
    }
};

template <int G, int WM, int WN, int BM, int BN> struct Fragments<float, G, WM, WN, BM, BN> {
    static constexpr int LINE_A = BM * 4, LINE_B = BN * 4, V = WN / 32;
    static constexpr bool WIDE = G % 32 == 0;  // a lane's four neighbouring rows go to four instructions: one 16-byte load
    static constexpr int ROWS = WIDE ? 32 : 16;
    static __device__ __forceinline__ int row(int j, int t, int r) {
        return WIDE ? j / 4 * 32 + 4 * (2 * t + r % 2) + j % 4 : 8 * j + 2 * t + r % 2;
    }
    static __device__ __forceinline__ int column(int b, int g, int r) {
        return V == 1 ? 4 * g + b + 2 * (r / 2) : b / 4 * 64 + 32 * (r / 2) + 4 * g + b % 4;
    }

    static __device__ __forceinline__ void multiply(const Shape& s, float (&acc)[WN / 16][WM / 8][4], u32 b_lines, u32 a_lines,
                                                    u32 ranks, int m_chunk, int n_chunk, int lane) {
        const int g = lane / 4, t = lane % 4;
#pragma unroll 2
        for (int k = 0; k < s.slots; k += 8) {
            u32 lead[WM / 8][2], trail[WM / 8][2];
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const int ka = k + t + 4 * h;
                if constexpr (WIDE) {
#pragma unroll
                    for (int i = 0; i < WM / 32; ++i) {
                        const float4 v = load_shared4(a_lines + place<4, LINE_A>(ka, m_chunk + 8 * i + g));
#pragma unroll
                        for (int e = 0; e < 4; ++e) split(item(v, e), lead[4 * i + e][h], trail[4 * i + e][h]);
                    }
                } else {
#pragma unroll
                    for (int j = 0; j < WM / 8; ++j)
                        split(load_shared(a_lines + place<4, LINE_A>(ka, m_chunk + 2 * j + g / 4) + g % 4 * 4), lead[j][h],
                              trail[j][h]);
                }
            }
#pragma unroll
            for (int group = 0; group < WM / G; ++group) {
                const u32 rank0 = load_rank(ranks + 4 * (group * s.slots + k + t));
                const u32 rank1 = load_rank(ranks + 4 * (group * s.slots + k + t + 4));
#pragma unroll
                for (int p = 0; p < (V + 1) / 2; ++p) {
                    float4 x[2][2];  // [half of k][half of the 16 columns]
#pragma unroll
                    for (int h = 0; h < 2; ++h) {
                        const u32 rank = h ? rank1 : rank0;
                        x[h][0] = load_shared4(b_lines + place<4, LINE_B>(rank, n_chunk + 16 * p + g));
                        if constexpr (V > 1) x[h][1] = load_shared4(b_lines + place<4, LINE_B>(rank, n_chunk + 16 * p + 8 + g));
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
                        for (int j = group * (G / 8); j < (group + 1) * (G / 8); ++j) {
                            mma_tf32(acc[b][j], small, lead[j][0], lead[j][1]);
                            mma_tf32(acc[b][j], big, trail[j][0], trail[j][1]);
                            mma_tf32(acc[b][j], big, lead[j][0], lead[j][1]);
                        }
                    }
                }
            }
        }
    }
};

template <class T, class Out, int G, int WM, int WN, int WARPS_M, int WARPS_N, int STAGES, bool PACKED>
__global__ void __launch_bounds__(32 * WARPS_M * WARPS_N, WM * WN > 2048 ? 1 : 16 / (WARPS_M * WARPS_N))
spmm_vector_nm_mma(const Shape s, const T* __restrict__ data, const u32* __restrict__ records, const T* __restrict__ B,
                   Out* __restrict__ C, int N, u32 pitch_b, i64 step_m, i64 step_n, i64 split_stride) {
    constexpr int BM = WM * WARPS_M, BN = WN * WARPS_N, THREADS = 32 * WARPS_M * WARPS_N;
    static_assert(G == 8 || G == 16 || G == 32 || G == 64, "G is the rows that share columns inside a warp's tile");
    static_assert(WM % G == 0 && WM % 16 == 0 && WN % 16 == 0, "a warp covers whole groups and whole instructions");
    static_assert(sizeof(T) == 2 || WN == 32 || WN % 64 == 0, "float fragments take 32 columns, or pairs of 32");
    extern __shared__ __align__(128) unsigned char shared[];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, wm = warp / WARPS_N, wn = warp % WARPS_N;
    const int row_tile = blockIdx.x % s.row_tiles, m0 = row_tile * BM, n0 = blockIdx.x / s.row_tiles * BN;
    const int first = blockIdx.z * s.k_per_split, last = min(first + s.k_per_split, s.k_tiles);
    using F = Fragments<T, G, WM, WN, BM, BN>;

    float acc[WN / 16][WM / 8][4] = {};
    for_each_k_tile<T, BM, BN, THREADS, STAGES, sizeof(T) == 2 ? 8 : 4, PACKED>(
        s, shared, data, records, B, pitch_b, N, row_tile, m0, n0, G, first, last, [&](u32 b_lines, u32 a_lines, u32 record) {
            constexpr int E = 16 / sizeof(T);
            F::multiply(s, acc, b_lines, a_lines, record + 4 * (wm * (WM / G) * s.slots), wm * WM / E, wn * WN / E, lane);
        });

    // Through shared memory, 16 rows of the warp at a time, so that C is written in whole lines.
    constexpr int STEP = F::ROWS, PITCH = WN + 16 / sizeof(Out);
    Out* tile = reinterpret_cast<Out*>(shared) + warp * STEP * PITCH;
    const Target<Out> target{C + blockIdx.z * split_stride, step_m, step_n, s.M, N};
    const int g = lane / 4, t = lane % 4;
#pragma unroll
    for (int part = 0; part < WM / STEP; ++part) {
#pragma unroll
        for (int b = 0; b < WN / 16; ++b)
#pragma unroll
            for (int j = part * (STEP / 8); j < (part + 1) * (STEP / 8); ++j)
#pragma unroll
                for (int r = 0; r < 4; ++r)
                    tile[(F::row(j, t, r) - part * STEP) * PITCH + F::column(b, g, r)] = from_float<Out>(acc[b][j][r]);
        __syncwarp();
        store_warp_tile<WN>(target, tile, STEP, PITCH, m0 + wm * WM + part * STEP, n0 + wn * WN, lane);
        __syncwarp();
    }
}

}  // namespace spformat::vector_nm
