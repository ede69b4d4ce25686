// C[M,N] = A[M,K] @ B[K,N], A as one bit per element and the nonzeros in row order; float32 and float64, a handful of columns of B.
//
//   indptr   Ptr[M+1]               first value of each row
//   bitmask  u8[M, cdiv(K,8)]       bit b of byte y is column 8y+b
//   data     T[nnz]                 values in row-major order
//   before   u32[M, SLICES]         values of a row that lie before column s*slice (bitmask_slices.cu)
//   B        T: B[k][n] at k*b_k + n*b_n      C  T: C[i][n] at i*c_row + n*c_col
//
// Grid: x = tiles of R*PARTS rows, y walks tiles of NT columns. Block: SLICES * PARTS warps; each has R rows and the columns
// s*slice .. (s+1)*slice of A (slice: a multiple of 64). A step of a warp is 64 columns, of which lane l owns 2l and 2l+1: it
// keeps its rows of B in registers, and for each row of A it counts the set bits before its columns, loads its values
// (neighbouring lanes, neighbouring values) and multiplies. No value passes through shared memory: each lane sums what its own
// columns contribute, and the sums of the 32 lanes, then those of the slices, are added at the end, in a fixed order.
//
//   Way      how a lane loads B. SINGLE: element by element; ALONG_K: both of its rows at once (b_k is 1; address and b_n allow
//            it); ALONG_N: several values of a row (b_n is 1; address and b_k allow loads of min(NT, 16 bytes))
//   Resident  blocks that run on a multiprocessor at a time (__launch_bounds__)
//   G        rows whose values are loaded before the first of them is used
//
// Limits: K < 2^26 (positions of a row tile are 32-bit); any M, N, alignment, leading dimension.
#include "spformat/bitmask_steps.cuh"
#include "spformat/few_columns.cuh"

using namespace spformat;

// The value at p if x >= limit, else 0 and no access.
__device__ __forceinline__ float load_if(u32 x, u32 limit, const float* p) {
    u32 v;
    asm("{\n.reg .pred p;\nsetp.ge.u32 p, %2, %3;\n@!p mov.u32 %0, 0;\n@p ld.global.nc.u32 %0, [%1];\n}"
        : "=&r"(v) : "l"(p), "r"(x), "r"(limit));
    return __uint_as_float(v);
}
__device__ __forceinline__ double load_if(u32 x, u32 limit, const double* p) {
    u64 v;
    asm("{\n.reg .pred p;\nsetp.ge.u32 p, %2, %3;\n@!p mov.u64 %0, 0;\n@p ld.global.nc.u64 %0, [%1];\n}"
        : "=&l"(v) : "l"(p), "r"(x), "r"(limit));
    return __longlong_as_double(static_cast<long long>(v));
}

// E values from an address that is a multiple of their bytes.
template <class T, int E> __device__ __forceinline__ void load_several(const T* from, T* to) {
    struct alignas(E * sizeof(T)) Several { T value[E]; };
    const Several x = *reinterpret_cast<const Several*>(from);
#pragma unroll
    for (int e = 0; e < E; ++e) to[e] = x.value[e];
}

// Rows k and k+1 of B for columns n0 .. n0+NT-1; 0 where there is no element.
template <class T, int Way, int NT>
__device__ __forceinline__ void load_b(T (&b)[2][NT], const T* B, i64 k, i64 K, i64 n0, i64 N, i64 b_k, i64 b_n) {
    constexpr int EACH = NT * sizeof(T) > 16 ? 16 / sizeof(T) : NT;
    const T* const from = B + k * b_k + n0 * b_n;
    if constexpr (Way == ALONG_K) {
#pragma unroll
        for (int j = 0; j < NT; ++j) {
            T both[2] = {T(0), T(0)};
            if (n0 + j < N) {
                if (k + 1 < K) load_several<T, 2>(from + j * b_n, both);
                else if (k < K) both[0] = from[j * b_n];
            }
            b[0][j] = both[0], b[1][j] = both[1];
        }
    } else {
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
            for (int j = 0; j < NT; j += EACH) {
                const bool inside = k + i < K;
                if (Way == ALONG_N && inside && n0 + j + EACH <= N) {
                    load_several<T, EACH>(from + i * b_k + j, &b[i][j]);
                } else {
#pragma unroll
                    for (int e = j; e < j + EACH; ++e) b[i][e] = inside && n0 + e < N ? from[i * b_k + e * b_n] : T(0);
                }
            }
    }
}

// Adds the V sums of each lane over the warp: lane l then has the sums from l*V/32 on, V/32 of them (at least one).
template <int V, class Sum> __device__ __forceinline__ void add_lanes(Sum (&sums)[V]) {
    const int lane = threadIdx.x % 32;
    int count = V;
#pragma unroll
    for (int offset = 16; offset; offset /= 2) {
        const bool upper = lane & offset;
        if (count > 1) {
            count /= 2;
#pragma unroll
            for (int i = 0; i < V / 2; ++i)
                if (i < count) {
                    const Sum away = upper ? sums[i] : sums[i + count], mine = upper ? sums[i + count] : sums[i];
                    sums[i] = mine + __shfl_xor_sync(~0u, away, offset);
                }
        } else {
            sums[0] += __shfl_xor_sync(~0u, sums[0], offset);
        }
    }
}

template <class T, class Ptr, int R, int NT, int PARTS, int SLICES, int G, int Resident, int Way>
__global__ void __launch_bounds__(32 * PARTS * SLICES, Resident)
    spmm_bitmask_tokens(const Ptr* __restrict__ indptr, const u8* __restrict__ bitmask, const T* __restrict__ data,
                        const u32* __restrict__ before, i64 M, i64 K, i64 slice, const T* __restrict__ B, T* __restrict__ C, i64 N,
                        i64 b_k, i64 b_n, i64 c_row, i64 c_col) {
    using Sum = sum_t<T>;
    constexpr int ROWS = R * PARTS, V = R * NT;
    static_assert(R <= 32 && R % G == 0, "a lane looks after one row; rows are taken in whole groups");
    static_assert((V & (V - 1)) == 0, "sums are halved among the lanes");
    __shared__ Sum sums[SLICES * ROWS * NT];
    __shared__ uint2 table[PARTS * SLICES][2][2 * R];  // of a step: for each row and half, bits and where its values start
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, part = warp % PARTS, s = warp / PARTS;

    const i64 row0 = static_cast<i64>(blockIdx.x) * ROWS;
    RowSteps<T> row_steps(indptr, bitmask, data, before, M, K, slice, row0, row0 + part * R + lane % R, lane < R, s, SLICES);
    const i64 k_begin = row_steps.k, k_end = row_steps.k_end;
    const u32 start = row_steps.at;
    const T* const values = row_steps.values;
    // This lane's two columns of a step, as masks on the half of the 64 bits that holds them.
    const u32 bit0 = 1u << (2 * lane % 32), both = 3 * bit0, below = bit0 - 1;

    for (i64 n0 = static_cast<i64>(blockIdx.y) * NT; n0 < N; n0 += static_cast<i64>(gridDim.y) * NT) {
        Sum acc[V] = {};
        row_steps.restart(k_begin, start);
        int buffer = 0;
        for (i64 k = k_begin; k < k_end; k += MASK_STEP, buffer ^= 1) {
            T b[2][NT];
            load_b<T, Way, NT>(b, B, k + 2 * lane, K, n0, N, b_k, b_n);
            uint2* const rows = table[warp][buffer];
            row_steps.template publish<R>(rows);
            __syncwarp();  // of two tables, so that no lane writes the one that others still read
#pragma unroll
            for (int r0 = 0; r0 < R; r0 += G) {
                u32 mask[G];
                T one[G], two[G];
#pragma unroll
                for (int r = 0; r < G; ++r) {
                    const uint2 row = rows[2 * (r0 + r) + lane / 16];
                    const T* const from = values + (row.y + __popc(row.x & below));
                    mask[r] = row.x & both;
                    one[r] = load_if(mask[r], 1, from);
                    two[r] = load_if(mask[r], both, from + 1);
                }
#pragma unroll
                for (int r = 0; r < G; ++r) {
                    // With the first bit unset, the one value belongs to the second column.
                    const Sum x = mask[r] & bit0 ? one[r] : T(0), y = mask[r] & bit0 ? two[r] : one[r];
#pragma unroll
                    for (int j = 0; j < NT; ++j) {
                        Sum& sum = acc[(r0 + r) * NT + j];
                        sum += x * b[0][j];
                        sum += y * b[1][j];
                    }
                }
            }
        }
        add_lanes<V>(acc);
        constexpr int EACH = V > 32 ? V / 32 : 1;
        const int mine = V >= 32 ? lane * EACH : lane * V / 32;
#pragma unroll
        for (int i = 0; i < EACH; ++i) sums[(s * ROWS + part * R) * NT + mine + i] = acc[i];
        __syncthreads();
        store_sums<Sum, T, ROWS, NT, SLICES>(sums, row0, n0, M, N, C, c_row, c_col, [&](i64 row, i64 n) {
            return stored_only<T, Ptr>(indptr, bitmask, data, row, row_steps.bytes, B + n * b_n, b_k);
        });
        __syncthreads();
    }
}
