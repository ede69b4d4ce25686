// C[M,N] = A[M,K] @ B[K,N], A as one bit per element and the nonzeros in row order; float32 and float64, few columns of B.
//
//   indptr   Ptr[M+1]            first value of each row
//   bitmask  u8[M, cdiv(K,8)]    bit b of byte y is column 8y+b
//   data     T[nnz]              values in row-major order
//   before   u32[M, WARPS]       values of a row that lie before column w*slice (bitmask_slices.cu)
//   B        T: B[k][n] at k*ldb + n (BCOL: k + n*ldb)      C  T: C[i][n] at i*c_row + n*c_col
//
// Grid: x = tiles of 16*MF rows, y walks tiles of NT columns. Block: WARPS warps; warp w sums the columns
// w*slice .. (w+1)*slice of A (slice: a multiple of 64), then the block adds the partial sums in the order of the warps:
// the same bits every run. A step of a warp is 64 columns: lane l owns columns 2l, 2l+1; for each row it counts the set
// bits before them, loads the values (neighbouring lanes, neighbouring values), and writes the expanded 16*MF x 64 tile
// to shared memory. Nothing but a warp's own memory is touched in the loop, so warps run unsynchronised. Values are
// prefetched into L2 a few steps ahead.
//
// Limits: K < 2^26 (positions of a row tile are 32-bit); any M, N, alignment, leading dimension.
#include "spformat/bitmask.cuh"
#include "spformat/cp_async.cuh"
#include "spformat/launch_order.cuh"
#include "spformat/ldmatrix.cuh"

using namespace spformat;

constexpr int STEP = 64;      // columns of A a warp expands at a time
constexpr int AHEAD = 1024;   // bytes of a row's values that are prefetched into L2

template <int Bytes> struct BitsOf { using type = u32; };
template <> struct BitsOf<8> { using type = u64; };

// The bits of the value at p if x >= limit, else 0 and no access.
template <int Bytes> __device__ __forceinline__ typename BitsOf<Bytes>::type load_if(u32 x, u32 limit, const void* p) {
    typename BitsOf<Bytes>::type v;
    if constexpr (Bytes == 4)
        asm("{\n.reg .pred p;\nsetp.ge.u32 p, %2, %3;\n@!p mov.u32 %0, 0;\n@p ld.global.nc.u32 %0, [%1];\n}"
            : "=&r"(v) : "l"(p), "r"(x), "r"(limit));
    else
        asm("{\n.reg .pred p;\nsetp.ge.u32 p, %2, %3;\n@!p mov.u64 %0, 0;\n@p ld.global.nc.u64 %0, [%1];\n}"
            : "=&l"(v) : "l"(p), "r"(x), "r"(limit));
    return v;
}

// Shared memory of one warp; spmm_bitmask.py computes the same.
template <class T, int NT, int MF, bool BCOL> struct Layout {
    static constexpr int ROWS = 16 * MF;
    static constexpr int A_PITCH = STEP + 2;                                     // elements; no bank conflicts
    static constexpr int B_LINES = BCOL ? NT : STEP, B_LINE = BCOL ? STEP : NT;  // contiguous lines of B in shared memory
    static constexpr int B_PITCH = B_LINE + 16 / int(sizeof(T));
    static constexpr int A_BYTES = ROWS * A_PITCH * int(sizeof(T));
    static constexpr int B_BYTES = B_LINES * B_PITCH * int(sizeof(T));
    static constexpr int BYTES = A_BYTES + 2 * B_BYTES + ROWS * 16;
    static_assert(A_BYTES % 16 == 0 && B_BYTES % 16 == 0, "every part of the layout starts on 16 bytes");
};

// Lines of B for columns k .. k+63 of A into shared memory, zero outside K x N; one commit group.
template <class T, int NT, bool BCOL, class L>
__device__ __forceinline__ void stage_b(T* to, const T* B, i64 k, i64 n, i64 K, i64 N, i64 ldb, bool vector, int lane) {
    constexpr int PIECE = 16 / int(sizeof(T)), PIECES = L::B_LINE / PIECE, STRIDE = 32 / PIECES;
    static_assert(32 % PIECES == 0, "a warp copies whole lines");
    const i64 line0 = (BCOL ? n : k) + lane / PIECES, lines = (BCOL ? N : K) - line0;
    const i64 along = (BCOL ? k : n) + lane % PIECES * PIECE, left = (BCOL ? K : N) - along;
    const int valid = left < 0 ? 0 : left < PIECE ? int(left) : PIECE;
    const T* from = B + line0 * ldb + along;
    to += lane / PIECES * L::B_PITCH + lane % PIECES * PIECE;
    if (vector) {
#pragma unroll
        for (int i = 0; i < L::B_LINES; i += STRIDE, from += STRIDE * ldb) {
            const bool inside = i < lines && valid;
            cp_async_16(shared_address(to + i * L::B_PITCH), inside ? from : B, inside ? valid * int(sizeof(T)) : 0);
        }
    } else {
#pragma unroll 1
        for (int i = 0; i < L::B_LINES; i += STRIDE, from += STRIDE * ldb) {
            T value[PIECE];
#pragma unroll
            for (int e = 0; e < PIECE; ++e) value[e] = i < lines && e < valid ? from[e] : T(0.0f);
#pragma unroll
            for (int e = 0; e < PIECE; ++e) to[i * L::B_PITCH + e] = value[e];
        }
    }
}

template <class T, class Ptr, int NT, int MF, int WARPS, bool BCOL>
__global__ void __launch_bounds__(32 * WARPS)
    spmm_bitmask(const Ptr* __restrict__ indptr, const u8* __restrict__ bitmask, const T* __restrict__ data,
                 const u32* __restrict__ before, i64 M, i64 K, i64 slice, const T* __restrict__ B, T* __restrict__ C, i64 N,
                 i64 ldb, i64 c_row, i64 c_col) {
    using L = Layout<T, NT, MF, BCOL>;
    using Sum = sum_t<T>;
    using Word = typename BitsOf<sizeof(T)>::type;  // values that are being loaded, as bits
    static_assert(NT % 8 == 0 && NT <= 64, "a tile is 8 .. 64 columns of B, in steps of 8");
    static_assert(MF == 1 || MF == 2, "a lane looks after one row: 16 or 32 rows a tile");
    extern __shared__ __align__(16) unsigned char shared[];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    T* tile = reinterpret_cast<T*>(shared + warp * L::BYTES);
    T* staged = reinterpret_cast<T*>(shared + warp * L::BYTES + L::A_BYTES);
    uint2* rows = reinterpret_cast<uint2*>(shared + warp * L::BYTES + L::A_BYTES + 2 * L::B_BYTES);

    wait_for_launch_before();
    const i64 row0 = static_cast<i64>(blockIdx.x) * L::ROWS, bytes = (K + 7) / 8;
    const i64 first = indptr[row0];
    const T* values = data + first;
    asm("" : "+l"(values));  // one base, so that an address is one multiply-add
    const bool mask_aligned = bytes % 8 == 0 && reinterpret_cast<u64>(bitmask) % 8 == 0;
    const bool b_vector = reinterpret_cast<u64>(B) % 16 == 0 && ldb * i64(sizeof(T)) % 16 == 0;
    const i64 k_begin = min(K, warp * slice), k_end = min(K, k_begin + slice);

    // What lane l knows of row l: where its values start in this slice, and where the row ends.
    const i64 my_row = row0 + lane % L::ROWS;
    const bool live = my_row < M;
    const u8* my_bits = bitmask + (live ? my_row : 0) * bytes;
    u32 start = 0, end = 0;
    if (live) {
        start = static_cast<u32>(indptr[my_row] - first);
        end = static_cast<u32>(indptr[my_row + 1] - first);
        start += before[my_row * WARPS + warp];
        if (warp + 1 < WARPS) end = static_cast<u32>(indptr[my_row] - first) + before[my_row * WARPS + warp + 1];
        for (u32 at = start; at < end && at < start + AHEAD / sizeof(T); at += 128 / sizeof(T)) prefetch_line(values + at);
    }
    // This lane's two columns of a step, as masks on the half of the 64 bits that holds them.
    const u32 bit0 = 1u << (2 * lane % 32), both = 3 * bit0, below = bit0 - 1;

    for (i64 n0 = static_cast<i64>(blockIdx.y) * NT; n0 < N; n0 += static_cast<i64>(gridDim.y) * NT) {
        constexpr int ACC = MF * NT / 2;  // lane l: rows l%16 (+16), columns l/16*NT/2 ..
        Sum acc[ACC];
#pragma unroll
        for (int i = 0; i < ACC; ++i) acc[i] = 0;

        u32 at = start;
        u64 next = live && k_begin < k_end ? mask_word(my_bits, k_begin / 8, bytes, mask_aligned) : 0;
        if (k_begin < k_end) stage_b<T, NT, BCOL, L>(staged, B, k_begin, n0, K, N, ldb, b_vector, lane);
        cp_async_commit();
        int buffer = 0;
        for (i64 k = k_begin; k < k_end; k += STEP, buffer ^= 1) {
            const u32 low = static_cast<u32>(next), high = static_cast<u32>(next >> 32);
            if (k + STEP < k_end) {
                next = live ? mask_word(my_bits, (k + STEP) / 8, bytes, mask_aligned) : 0;
                T* to = staged + (buffer ^ 1) * (L::B_BYTES / int(sizeof(T)));
                stage_b<T, NT, BCOL, L>(to, B, k + STEP, n0, K, N, ldb, b_vector, lane);
            }
            cp_async_commit();
            if (lane < L::ROWS) {
                rows[2 * lane] = make_uint2(low, at);
                rows[2 * lane + 1] = make_uint2(high, at + __popc(low));
            }
            at += __popc(low) + __popc(high);
            if (at + AHEAD / sizeof(T) < end) prefetch_line(values + at + AHEAD / sizeof(T));
            __syncwarp();

#pragma unroll 1
            for (int m = 0; m < MF; ++m) {
                // Loads of 16 rows first, then their stores: many loads in flight.
                u32 mask[16];
                Word one[16], two[16];
#pragma unroll
                for (int r = 0; r < 16; ++r) {
                    const uint2 row = rows[2 * (16 * m + r) + lane / 16];
                    const T* from = values + (row.y + __popc(row.x & below));
                    mask[r] = row.x & both;
                    one[r] = load_if<sizeof(T)>(mask[r], 1, from);
                    two[r] = load_if<sizeof(T)>(mask[r], both, from + 1);
                }
#pragma unroll
                for (int r = 0; r < 16; ++r) {
                    // With the first bit unset, the one value belongs to the second column.
                    T* to = tile + (16 * m + r) * L::A_PITCH + 2 * lane;
                    struct alignas(2 * sizeof(T)) Pair { Word x, y; };
                    *reinterpret_cast<Pair*>(to) = mask[r] & bit0 ? Pair{one[r], two[r]} : Pair{Word(0), one[r]};
                }
            }
            cp_async_wait<1>();
            __syncwarp();

            const T* b_tile = staged + buffer * (L::B_BYTES / int(sizeof(T)));
#pragma unroll 4
            for (int kk = 0; kk < STEP; ++kk) {
                Sum b[NT / 2];
#pragma unroll
                for (int j = 0; j < NT / 2; ++j) {
                    const int n = lane / 16 * (NT / 2) + j;
                    b[j] = b_tile[BCOL ? n * L::B_PITCH + kk : kk * L::B_PITCH + n];
                }
#pragma unroll
                for (int m = 0; m < MF; ++m) {
                    const Sum a = tile[(16 * m + lane % 16) * L::A_PITCH + kk];
#pragma unroll
                    for (int j = 0; j < NT / 2; ++j) acc[m * (NT / 2) + j] += a * b[j];
                }
            }
            __syncwarp();
        }

        // Partial sums [warp][row][n] take the place of the tiles.
        cp_async_wait<0>();
        __syncthreads();
        Sum* sums = reinterpret_cast<Sum*>(shared);
#pragma unroll
        for (int m = 0; m < MF; ++m) {
            Sum* mine = sums + (warp * L::ROWS + 16 * m) * NT;
#pragma unroll
            for (int j = 0; j < NT / 2; ++j) mine[lane % 16 * NT + lane / 16 * (NT / 2) + j] = acc[m * (NT / 2) + j];
        }
        __syncthreads();
        store_sums<Sum, T, L::ROWS, NT, WARPS>(sums, row0, n0, M, N, C, c_row, c_col, [&](i64 row, i64 n) {
            return stored_only<T, Ptr>(indptr, bitmask, data, row, bytes, B + n * (BCOL ? ldb : 1), BCOL ? 1 : ldb);
        });
        __syncthreads();
    }
}
