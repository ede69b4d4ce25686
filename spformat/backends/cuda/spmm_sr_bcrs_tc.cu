// C[M,N] = A[M,K] @ B[K,N], A in SR-BCRS(t, g) with 16-bit values, on tensor cores: m16n8k16, float32 sums. sm_80 and later.
//
//   indptr   Ptr[Mv+1]      first group of each row tile          B  T: B[k][n] at k*ldb + n (BCOL: k + n*ldb)
//   indices  Index[G, g]    column of each vector; -1: none       C  Out: C[i][n] at i*c_row + n*c_col
//   data     T[G, t, g]     element (r, s): row r of the tile, vector s
//
// What runs is the matrix re-chunked once per plan (panel_steps, panel_fill), so that any t and g meet the same kernel:
// a panel is 16*MF rows, a chunk DEPTH columns of A. The columns that a panel uses in a chunk, 16 at a time, are the steps:
//   first    u32[P*Q + 1]         first step of chunk q of panel p, at p*Q + q
//   columns  u8[steps, 16]        column in the chunk; DEPTH in the unused places of a chunk's last step
//   values   T[steps, MF, 32, 8]  the A fragments of m16n8k16, lane by lane: one 16-byte load each
// Columns of a step are ordered so that any 8 of them differ modulo 8 as far as possible: these are the 8 lines that one
// phase of ldmatrix reads, and lines that differ modulo 8 lie in different banks.
//
// A block sums WM panels x WN*NF*8 columns of C. A chunk of B is brought to shared memory once for all panels of the block
// (cp.async, STAGES deep); a step then takes its 16 lines from there with ldmatrix, so that zeros of A cost neither
// tensor-core time nor shared-memory reads. WK warps share a panel step by step; their sums are added in the order of the
// warps: the same bits every run. Grid: x = cdiv(P, WM), y walks tiles of columns.
//
// Rows of a panel share steps, so a tile may multiply zeros it does not store. If B holds inf or NaN, 0 * inf would put a NaN
// where it does not belong; a sum that is not finite is therefore computed again over the stored vectors alone.
//
// Layout after Magicube (Li et al., SC'22) and SparseTIR (Ye et al., ASPLOS'23).
#include "spformat/cp_async.cuh"
#include "spformat/dtypes.cuh"
#include "spformat/ldmatrix.cuh"
#include "spformat/mma.cuh"

using namespace spformat;

constexpr int DEPTH = 128;  // columns of A, rows of B, in a chunk
constexpr int WORDS = DEPTH / 64;

// The set of columns that a panel uses in a chunk.
struct Columns {
    u64 word[WORDS] = {};
    __device__ int size() const {
        int n = 0;
#pragma unroll
        for (int w = 0; w < WORDS; ++w) n += __popcll(word[w]);
        return n;
    }
    // Place of column k: round i takes the i-th used column of each class modulo 8.
    __device__ int place(int k) const {
        const int own = k % 8;
        const u64 every8 = 0x0101010101010101ull;
        int round = 0;
#pragma unroll
        for (int w = 0; w < WORDS; ++w) {
            const u64 before = 64 * w + 63 < k ? ~0ull : 64 * w > k ? 0ull : (1ull << (k % 64)) - 1;
            round += __popcll(word[w] & (every8 << own) & before);
        }
        int place = 0;
        for (int c = 0; c < 8; ++c) {
            int n = 0;
#pragma unroll
            for (int w = 0; w < WORDS; ++w) n += __popcll(word[w] & (every8 << c));
            place += min(n, round) + (c < own && n > round);
        }
        return place;
    }
};

// First vector of the tile, of `count`, whose column is >= k; -1 (no vector) counts as beyond every column.
template <class Index> __device__ i64 first_at(const Index* indices, i64 count, i64 k) {
    i64 low = 0, high = count;
    while (low < high) {
        const i64 middle = (low + high) / 2;
        if (static_cast<u64>(static_cast<i64>(indices[middle])) < static_cast<u64>(k)) low = middle + 1;
        else high = middle;
    }
    return low;
}

// Columns used by panel p in the chunk that starts at k0; all lanes return the same set.
template <class Ptr, class Index>
__device__ Columns columns_of(const Ptr* indptr, const Index* indices, i64 tile0, i64 tile1, int g, i64 k0) {
    Columns set;
    for (i64 tile = tile0 + threadIdx.x % 32; tile <= tile1; tile += 32) {
        const i64 base = static_cast<i64>(indptr[tile]) * g, count = static_cast<i64>(indptr[tile + 1]) * g - base;
        for (i64 v = first_at(indices + base, count, k0); v < count; ++v) {
            const i64 k = static_cast<i64>(indices[base + v]) - k0;
            if (k < 0 || k >= DEPTH) break;
#pragma unroll
            for (int w = 0; w < WORDS; ++w)
                if (k / 64 == w) set.word[w] |= 1ull << (k % 64);
        }
    }
#pragma unroll
    for (int w = 0; w < WORDS; ++w)
        for (int lanes = 16; lanes; lanes /= 2) set.word[w] |= __shfl_xor_sync(0xFFFFFFFFu, set.word[w], lanes);
    return set;
}

// steps[p*Q + q] of every panel and chunk. One warp each.
template <class Ptr, class Index>
__global__ void panel_steps(const Ptr* __restrict__ indptr, const Index* __restrict__ indices, i64 M, int t, int g, int rows,
                            i64 P, i64 Q, u32* __restrict__ steps) {
    const i64 at = (static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x) / 32;
    if (at >= P * Q) return;
    const i64 row0 = at / Q * rows, row1 = min(M, row0 + rows) - 1;
    const Columns set = columns_of(indptr, indices, row0 / t, row1 / t, g, at % Q * DEPTH);
    if (threadIdx.x % 32 == 0) steps[at] = cdiv(set.size(), 16);
}

// Writes columns and values; both are pre-filled with DEPTH and +0. One warp per panel and chunk.
template <class T, class Ptr, class Index>
__global__ void panel_fill(const Ptr* __restrict__ indptr, const Index* __restrict__ indices, const T* __restrict__ data, i64 M,
                           int t, int g, int rows, i64 P, i64 Q, const u32* __restrict__ first, u8* __restrict__ columns,
                           T* __restrict__ values) {
    const i64 at = (static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x) / 32;
    const int lane = threadIdx.x % 32;
    if (at >= P * Q) return;
    const i64 row0 = at / Q * rows, row1 = min(M, row0 + rows) - 1, k0 = at % Q * DEPTH;
    const Columns set = columns_of(indptr, indices, row0 / t, row1 / t, g, k0);
    const i64 step0 = first[at];
    for (int k = lane; k < DEPTH; k += 32) {
        bool used = false;
#pragma unroll
        for (int w = 0; w < WORDS; ++w) used |= k / 64 == w && (set.word[w] >> (k % 64) & 1);
        if (used) columns[step0 * 16 + set.place(k)] = static_cast<u8>(k);
    }
    for (i64 tile = row0 / t; tile <= row1 / t; ++tile) {
        const i64 group0 = indptr[tile], count = (static_cast<i64>(indptr[tile + 1]) - group0) * g;
        const Index* tile_indices = indices + group0 * g;
        for (i64 v = first_at(tile_indices, count, k0) + lane; v < count; v += 32) {
            const i64 k = static_cast<i64>(tile_indices[v]) - k0;
            if (k < 0 || k >= DEPTH) break;
            const int place = set.place(static_cast<int>(k)), kk = place % 16;
            const i64 step = step0 + place / 16;
            const T* from = data + (group0 + v / g) * t * g + v % g;
            const i64 begin = max(row0, tile * t), end = min(row1, tile * t + t - 1);
            for (i64 row = begin; row <= end; ++row) {
                const int m = static_cast<int>(row - row0) / 16, r = static_cast<int>(row - row0) % 16;
                const int to_lane = r % 8 * 4 + kk % 8 / 2, reg = r / 8 + kk / 8 * 2;
                values[((step * (rows / 16) + m) * 32 + to_lane) * 8 + reg * 2 + kk % 2] = from[(row - tile * t) * g];
            }
        }
    }
}

// One element of C over the stored vectors of its tile alone, in order. b: column n of B, its elements b_row apart.
template <class T, class Ptr, class Index>
__device__ __noinline__ float stored_only(const Ptr* indptr, const Index* indices, const T* data, int t, int g, i64 row, const T* b,
                                          i64 b_row) {
    const i64 group0 = indptr[row / t], count = (static_cast<i64>(indptr[row / t + 1]) - group0) * g;
    float sum = 0;
    for (i64 v = 0; v < count; ++v) {
        const i64 k = indices[group0 * g + v];
        if (k >= 0) sum += to_float(data[((group0 + v / g) * t + row % t) * g + v % g]) * to_float(b[k * b_row]);
    }
    return sum;
}

// Rows k0 .. k0+DEPTH-1 of B, columns n0 .. n0+BN-1, to shared memory as [DEPTH][BN + 8]; zero for columns >= N. Rows >= K
// are left as they are: no step names them.
template <class T, int BN, int THREADS, bool BCOL>
__device__ __forceinline__ void stage(T* to, const T* __restrict__ B, i64 k0, i64 n0, i64 K, i64 N, i64 ldb, bool vector) {
    constexpr int PITCH = BN + 8;
    if constexpr (BCOL) {
        for (int p = threadIdx.x; p < BN * (DEPTH / 8); p += THREADS) {
            const int n = p % BN, k = p / BN * 8;
            if (k0 + k >= K) continue;
            alignas(16) T value[8] = {};
            if (n0 + n < N) {
                const T* from = B + (n0 + n) * ldb + k0 + k;
                if (vector && k0 + k + 8 <= K) {
                    *reinterpret_cast<uint4*>(value) = *reinterpret_cast<const uint4*>(from);
                } else {
#pragma unroll
                    for (int e = 0; e < 8; ++e)
                        if (k0 + k + e < K) value[e] = from[e];
                }
            }
#pragma unroll
            for (int e = 0; e < 8; ++e) to[(k + e) * PITCH + n] = value[e];
        }
    } else {
#pragma unroll 4
        for (int p = threadIdx.x; p < DEPTH * (BN / 8); p += THREADS) {
            const int k = p / (BN / 8), n = p % (BN / 8) * 8;
            if (k0 + k >= K) continue;
            const i64 left = N - n0 - n;
            const int valid = left <= 0 ? 0 : left < 8 ? static_cast<int>(left) : 8;
            const T* from = B + (valid ? (k0 + k) * ldb + n0 + n : 0);
            if (vector) {
                cp_async_16(shared_address(to + k * PITCH + n), from, valid * 2);
            } else {
                alignas(16) T value[8] = {};
#pragma unroll
                for (int e = 0; e < 8; ++e)
                    if (e < valid) value[e] = from[e];
                *reinterpret_cast<uint4*>(to + k * PITCH + n) = *reinterpret_cast<const uint4*>(value);
            }
        }
    }
}

// What a warp needs of A for one step.
template <int MF> struct Step {
    uint4 a[MF];
    int line;
    __device__ __forceinline__ void load(const uint4* values, const u8* columns, u32 step, int lane) {
#pragma unroll
        for (int m = 0; m < MF; ++m) a[m] = __ldg(values + (static_cast<i64>(step) * MF + m) * 32 + lane);
        line = __ldg(columns + static_cast<i64>(step) * 16 + lane % 16);
    }
};

template <class T, class Out, class Ptr, class Index, int MF, int WM, int WN, int WK, int NF, int STAGES, bool BCOL>
__global__ void __launch_bounds__(32 * WM * WN * WK)
    spmm_sr_bcrs_tc(const u32* __restrict__ first, const u8* __restrict__ columns, const T* __restrict__ values,
                    const Ptr* __restrict__ indptr, const Index* __restrict__ indices, const T* __restrict__ data, int t, int g,
                    i64 M, i64 K, const T* __restrict__ B, Out* __restrict__ C, i64 N, i64 ldb, i64 c_row, i64 c_col) {
    static_assert(NF % 2 == 0, "ldmatrix brings two groups of 8 columns of B");
    static_assert(STAGES >= 2, "a chunk is loaded while another is used");
    constexpr int THREADS = 32 * WM * WN * WK, BN = WN * NF * 8, PITCH = BN + 8;
    constexpr int SLAB = (DEPTH + 1) * PITCH;  // the last line is zero: the unused places of a step read it
    extern __shared__ __align__(16) unsigned char shared[];
    T* slabs = reinterpret_cast<T*>(shared);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int wk = warp % WK, wn = warp / WK % WN, wm = warp / (WK * WN);
    const i64 P = cdiv<i64>(M, 16 * MF), Q = cdiv<i64>(K, DEPTH), panel = static_cast<i64>(blockIdx.x) * WM + wm;
    const bool vector = reinterpret_cast<u64>(B) % 16 == 0 && ldb % 8 == 0;
    const u32* ends = first + (panel < P ? panel * Q + 1 : 0);

    for (int e = threadIdx.x; e < STAGES * PITCH; e += THREADS) slabs[e / PITCH * SLAB + DEPTH * PITCH + e % PITCH] = T(0.0f);

    for (i64 n0 = static_cast<i64>(blockIdx.y) * BN; n0 < N; n0 += static_cast<i64>(gridDim.y) * BN) {
        float acc[MF][NF][4] = {};
#pragma unroll
        for (int s = 0; s < STAGES - 1; ++s) {
            if (s < Q) stage<T, BN, THREADS, BCOL>(slabs + s * SLAB, B, static_cast<i64>(s) * DEPTH, n0, K, N, ldb, vector);
            cp_async_commit();
        }
        u32 step = panel < P ? first[panel * Q] + wk : 0;
        Step<MF> now, next;
        now.load(reinterpret_cast<const uint4*>(values), columns, step, lane);
        next.load(reinterpret_cast<const uint4*>(values), columns, step + WK, lane);
        int slot = 0;
        for (i64 q = 0; q < Q; ++q) {
            const u32 end = panel < P ? ends[q] : 0;
            cp_async_wait<STAGES - 2>();
            __syncthreads();
            if (q + STAGES - 1 < Q) {
                const int free = slot == 0 ? STAGES - 1 : slot - 1;
                stage<T, BN, THREADS, BCOL>(slabs + free * SLAB, B, (q + STAGES - 1) * DEPTH, n0, K, N, ldb, vector);
            }
            cp_async_commit();
            const u32 slab = shared_address(slabs + slot * SLAB + wn * NF * 8 + lane / 16 * 8);
            for (; step < end; step += WK) {
                Step<MF> later;  // the arrays end with room for these reads
                later.load(reinterpret_cast<const uint4*>(values), columns, step + 2 * WK, lane);
                const u32 line = slab + now.line * (PITCH * 2);
                u32 b[NF / 2][4];
#pragma unroll
                for (int j = 0; j < NF / 2; ++j) ldmatrix_x4_trans(b[j], line + j * 32);
#pragma unroll
                for (int m = 0; m < MF; ++m) {
                    const u32 a[4] = {now.a[m].x, now.a[m].y, now.a[m].z, now.a[m].w};
#pragma unroll
                    for (int j = 0; j < NF; ++j) mma_m16n8k16<T>(acc[m][j], a, b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
                }
                now = next;
                next = later;
            }
            slot = slot + 1 == STAGES ? 0 : slot + 1;
        }
        cp_async_wait<0>();
        __syncthreads();

        if constexpr (WK > 1) {  // the sums of warp 1, 2, .. onto those of warp 0, through shared memory
            constexpr int ACC = MF * NF * 4;
            float* sums = reinterpret_cast<float*>(shared) + (warp / WK) * WK * ACC * 32;
#pragma unroll
            for (int i = 0; i < ACC; ++i) sums[(wk * ACC + i) * 32 + lane] = acc[i / (NF * 4)][i / 4 % NF][i % 4];
            __syncthreads();
            if (wk == 0)
#pragma unroll
                for (int i = 0; i < ACC; ++i)
#pragma unroll
                    for (int w = 1; w < WK; ++w) acc[i / (NF * 4)][i / 4 % NF][i % 4] += sums[(w * ACC + i) * 32 + lane];
            __syncthreads();
            for (int e = threadIdx.x; e < STAGES * PITCH; e += THREADS) slabs[e / PITCH * SLAB + DEPTH * PITCH + e % PITCH] = T(0.0f);
        }
        if (wk == 0 && panel < P) {
            const bool pairs = c_col == 1 && c_row % 2 == 0 && reinterpret_cast<u64>(C) % (2 * sizeof(Out)) == 0;
#pragma unroll
            for (int m = 0; m < MF; ++m)
#pragma unroll
                for (int j = 0; j < NF; ++j)
#pragma unroll
                    for (int h = 0; h < 2; ++h) {
                        const i64 row = (panel * MF + m) * 16 + h * 8 + lane / 4, n = n0 + (wn * NF + j) * 8 + lane % 4 * 2;
                        if (row >= M || n >= N) continue;
                        float x[2] = {acc[m][j][2 * h], acc[m][j][2 * h + 1]};
#pragma unroll
                        for (int e = 0; e < 2; ++e)
                            if (!isfinite(x[e]) && n + e < N)
                                x[e] = stored_only(indptr, indices, data, t, g, row, B + (n + e) * (BCOL ? ldb : 1), BCOL ? 1 : ldb);
                        Out* to = C + row * c_row + n * c_col;
                        if (pairs && n + 1 < N) {
                            struct alignas(2 * sizeof(Out)) Pair { Out x, y; };
                            *reinterpret_cast<Pair*>(to) = Pair{from_float<Out>(x[0]), from_float<Out>(x[1])};
                        } else {
                            to[0] = from_float<Out>(x[0]);
                            if (n + 1 < N) to[c_col] = from_float<Out>(x[1]);
                        }
                    }
        }
    }
}
