// C[M,N] = alpha * (A1 + A2 + ..) @ B[K,N] + beta * C + bias: at most one structured part (BSR, DBSR or 2:4) and the items of
// all others, one launch, C written once. float32 sums; mma.sync for 16-bit values, CUDA cores for float32. sm_80 and later.
//
//   tasks    Task[grid.x]    what a block computes: a range of blocks and a range of items of one tile of rows
//   cuts     {u32 first, count}[]  tiles that several tasks share: their tasks. Tasks of cut tiles come first
//   data     Blocks: T[nnzb, R, C], each row-major; TwoFour with values of 16 bits: the records of two_four_records.cu; of 32 bits:
//            T[Mp, Kp/2] of the format two-four, Mp = pad(M, 32), Kp = pad(K, 64)
//   indices  Blocks: Index[nnzb], block columns
//   meta     TwoFour with 32 bits: u16[Mp * Kp/16], order "ldmatrix" or "fragment": 8 words for row i of tile t of 16 rows and chunk
//            q of 64 columns lie at t * Kp + i * meta_row + q * meta_chunk
//   columns, places, values  u32, u16, T[items]  the scattered nonzeros, tile after tile: the column, where in the tile, the value.
//            place: the row in the tile, ascending in a tile; TwoFour: row in the tile * 64 + column in the chunk, chunk after chunk
//   first    TwoFour: i64[tiles * Kp/64 + 1]  first item of each tile and chunk
//   sums     float[tasks of cut tiles, column tiles, BM, BN];  arrived  u32[cuts, column tiles]: zeros, before and after
//   B        T[K, N]    row k at B + k*ldb
//   out      Out[M, N]  row i at out + i*ldc (CCol: column n at out + n*ldc); every element is written, read only if beta is not 0
//   bias     Out[M] or null
//
// Grid: x = tasks, y = tiles of BN columns (strided). Block: 4 * WM warps. A tile is BM rows of C: a block row or a piece of one
// (Blocks), or BM neighbouring rows. First the blocks are multiplied, chunks of KC of their columns at a time, through a ring in
// shared memory. Then the sums go to shared memory, and each warp adds an equal share of the items to them: for each item a row
// of B, from L2. Rows inside a share are added by one warp; of a row that goes on from the share before, the sum
// is kept apart and added after all, in order. In a 2:4 part every row of B is loaded anyway: there the items are put into
// the decoded chunk of A, where the 2:4 part has zeros, and cost no row of B.
//
// A tile that is long (a hub of a graph) is cut into tasks: each leaves its sums in `sums`, and the last to arrive adds
// all of them, in their order. The same operands give the same bits.
//
//   A      Blocks<Index, R, C>, TwoFour or Nothing;  WideA  C values are whole 16-byte units
//   WideB  B and ldb allow 16-byte copies
//   Limits K < 2^31 - 2048; M, N otherwise free.
#include "spformat/cp_async.cuh"
#include "spformat/tile_items.cuh"
#include "spformat/tile_sums.cuh"
#include "spformat/two_four_dense.cuh"

using namespace spformat;

// What the parts are.
template <class I, int Rows, int Columns> struct Blocks {
    using Index = I;
    static constexpr int R = Rows, C = Columns, KC = 32;
    static constexpr bool blocks = true, two_four = false;
};
struct TwoFour {
    using Index = int;
    static constexpr int R = 0, C = 64, KC = 64;
    static constexpr bool blocks = false, two_four = true;
};
struct Nothing {
    using Index = int;
    static constexpr int R = 0, C = 1, KC = 32;
    static constexpr bool blocks = false, two_four = false;
};

namespace {

struct Task {
    i64 block, item;    // the first of each; TwoFour: the first chunk, and no item
    u32 blocks, items;  // how many
    u32 tile;
    int cut;            // number of the cut that the tile is, or -1
};
struct Cut { u32 first, count; };

// alpha * tile + beta * C + bias to C, four neighbours in C for each thread.
template <class Out, int BM, int BN, int Pitch, int Threads, bool CCol>
__device__ __forceinline__ void write_tile(const float* tile, Out* out, i64 ldc, i64 row0, i64 n0, int rows, int columns,
                                           const Out* bias, float alpha, float beta) {
    constexpr int Along = CCol ? BM : BN, Lines = CCol ? BN : BM;
    struct alignas(4 * sizeof(Out)) Four { Out x[4]; };
    for (int i = threadIdx.x; i < Lines * (Along / 4); i += Threads) {
        const int line = i / (Along / 4), along = i % (Along / 4) * 4;
        const int left = (CCol ? rows : columns) - along;
        if (line >= (CCol ? columns : rows) || left <= 0) continue;
        Out* const to = out + (CCol ? row0 + along + (n0 + line) * ldc : (row0 + line) * ldc + n0 + along);
        Four result;
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const int r = CCol ? along + e : line, c = CCol ? line : along + e;
            float x = alpha != 0 ? alpha * tile[r * Pitch + c] : 0.0f;  // as BLAS: infinities do not come into C
            if (bias && r < rows) x += to_float(bias[row0 + r]);
            if (beta != 0 && e < left) x += beta * to_float(to[e]);
            result.x[e] = from_float<Out>(x);
        }
        if (left >= 4 && reinterpret_cast<u64>(to) % sizeof(Four) == 0) {
            *reinterpret_cast<Four*>(to) = result;
        } else {
            for (int e = 0; e < 4 && e < left; ++e) to[e] = result.x[e];
        }
    }
}

}  // namespace

template <class T, class Out, class A, int BM, int BN, int WM, bool WideA, bool WideB, bool CCol>
__global__ void __launch_bounds__(128 * WM, A::two_four && sizeof(T) == 2 ? 4 / WM : 1)
    spmm_sum(const Task* __restrict__ tasks, const Cut* __restrict__ cuts, const T* __restrict__ data,
             const typename A::Index* __restrict__ indices, const u16* __restrict__ meta, u32 meta_row, u32 meta_chunk,
             const i64* __restrict__ first, const u32* __restrict__ columns, const u16* __restrict__ places,
             const T* __restrict__ values, i64 M, i64 K, float* sums, u32* arrived, const T* __restrict__ B, Out* out, i64 N,
             i64 ldb, i64 ldc, const Out* __restrict__ bias, float alpha, float beta) {
    constexpr int Threads = 128 * WM, Warps = 4 * WM, Vector = 16 / sizeof(T), KC = A::KC, Stages = 3;
    constexpr int PitchA = pitch<T, KC>(), PitchB = pitch<T, BN>(), Pitch = BN + 4;
    constexpr int SizeA = BM * PitchA, SizeB = KC * PitchB;
    static_assert(!WideA || (A::blocks && A::C % Vector == 0), "16-byte copies of A need rows of whole 16-byte units");
    static_assert(!A::two_four || BM % (32 * WM) == 0, "whole words of metadata for each thread, and whole tiles of 16 rows");
    static_assert(BM * 64 <= 65536, "a place has 16 bits");
    extern __shared__ __align__(16) char shared[];
    T* const ring = reinterpret_cast<T*>(shared);
    float* const tile = reinterpret_cast<float*>(shared);  // after the ring
    float* const carry = tile + BM * Pitch;                // [Warps, BN]: sums of rows that go on from the share before
    __shared__ int carry_row[Warps];
    __shared__ bool last;
    const int tid = threadIdx.x;

    const Task task = tasks[blockIdx.x];
    i64 row0 = static_cast<i64>(task.tile) * BM;
    int height = BM, row_of_block = 0;
    if constexpr (A::blocks) {
        constexpr u32 RowTiles = cdiv(A::R, BM);
        row_of_block = static_cast<int>(task.tile % RowTiles) * BM;
        row0 = static_cast<i64>(task.tile / RowTiles) * A::R + row_of_block;
        height = A::R - row_of_block < BM ? A::R - row_of_block : BM;
    }
    const int rows = M - row0 < height ? static_cast<int>(M - row0) : height;
    const int rows_of_b = static_cast<int>(K);
    const u32 depth = task.blocks * A::C, chunks = cdiv<u32>(depth, KC);

    for (i64 n0 = static_cast<i64>(blockIdx.y) * BN; n0 < N; n0 += static_cast<i64>(gridDim.y) * BN) {
        const int n_left = N - n0 < BN ? static_cast<int>(N - n0) : BN;
        const T* const b_tile = B + n0;
        Sums<T, BM, BN, WM> sum;

        TileItems<T> items(columns + task.item, places + task.item, values + task.item, A::two_four ? 0 : task.items, Warps);

        if constexpr (A::blocks || A::two_four) {
            // Row of B for position k of the task; K and more where there is none.
            auto b_row = [&](u32 k) -> int {
                if (k >= depth) return rows_of_b;
                if constexpr (A::two_four) return static_cast<int>(task.block * 64 + k);
                else return static_cast<int>(indices[task.block + k / A::C]) * A::C + static_cast<int>(k % A::C);
            };
            constexpr int LineB = BN / Vector, StepB = Threads / LineB, CopiesB = cdiv(KC, StepB);
            static_assert(KC % StepB == 0, "every thread copies the same number of units of B");
            const int first_b = tid / LineB, along_b = tid % LineB * Vector;
            const int valid = n_left - along_b < 0 ? 0 : n_left - along_b < Vector ? n_left - along_b : Vector;
            int ahead[CopiesB];  // Blocks: rows of B of the chunk that is loaded next, read one chunk before for their latency
            auto look_ahead = [&](u32 chunk) {
#pragma unroll
                for (int i = 0; i < CopiesB; ++i) ahead[i] = A::two_four ? 0 : b_row(chunk * KC + first_b + i * StepB);
            };
            // 2:4: the kept values of the chunk that is decoded next, and one item of the chunk that is merged next.
            constexpr int Words = A::two_four ? BM * 4 / Threads : 1;
            Kept<T> kept[Words];
            const i64 chunks_of_row = cdiv<i64>(K, 64), stored = cdiv<i64>(M, 32) * 32 - row0;
            const u32 left = stored < BM ? static_cast<u32>(stored) : BM, line_of_kept = static_cast<u32>(chunks_of_row) * 32;
            const i64* const first_of_chunk = first + (A::two_four ? task.tile * chunks_of_row + task.block : 0);
            const i64 items_from = A::two_four ? *first_of_chunk : 0;
            u32 item = 0, item_end = 0;  // from there on
            u16 merged_place = 0;
            T merged_value = from_float<T>(0.0f);
            constexpr bool Records = A::two_four && sizeof(T) == 2;
            constexpr int RecordWords = 288;
            const u32* record_from = reinterpret_cast<const u32*>(data);  // of the first tile, in the chunk that is fetched next
            if constexpr (Records) record_from += (row0 / 16 * chunks_of_row + task.block) * RecordWords;
            const T* kept_from = data;  // of the first row of this thread, in the chunk that is fetched next
            const u16* meta_from = meta;
            if constexpr (A::two_four && !Records) {
                kept_from += (row0 * chunks_of_row + task.block) * 32 + tid % 4 * 8;
                meta_from += row0 / 16 * chunks_of_row * 64 + task.block * meta_chunk + tid % 4 * 2;
            }
            auto fetch_kept = [&](u32 chunk) {
#pragma unroll
                for (int j = 0; j < Words; ++j) {
                    const u32 r = tid / 4 + j * (Threads / 4);
                    const bool real = r < left && chunk < chunks;
                    if constexpr (Records) {  // word 128s + 16g + 4t + 2i + h: pair t of the 16 columns number 2s + i of row g + 8h
                        const u32 g = r % 8, h = r / 8 % 2, q = tid % 4;
                        const u32* const record = record_from + r / 16 * chunks_of_row * RecordWords;
                        const u32* const pairs = record + q / 2 * 128 + 16 * g + q % 2 * 2 + h;
                        kept[j].value[0] = real ? make_uint4(pairs[0], pairs[4], pairs[8], pairs[12]) : make_uint4(0, 0, 0, 0);
                        kept[j].word = real ? record[256 + 4 * g + q] >> (16 * h) & 0xFFFF : 0x4444;
                        continue;
                    }
#pragma unroll
                    for (int i = 0; i < int(sizeof(T)) / 2; ++i)
                        kept[j].value[i] = real ? reinterpret_cast<const uint4*>(kept_from + r * line_of_kept)[i] : make_uint4(0, 0, 0, 0);
                    kept[j].word = real ? meta_from[r / 16 * line_of_kept * 2 + r % 8 * meta_row + r / 8 % 2] : 0x4444;
                }
                if constexpr (Records) record_from += RecordWords;
                else kept_from += 32, meta_from += meta_chunk;
            };
            auto fetch_item = [&](u32 chunk) {
                item = item_end = 0;
                if (chunk >= chunks) return;
                item = static_cast<u32>(first_of_chunk[chunk] - items_from) + tid;
                item_end = static_cast<u32>(first_of_chunk[chunk + 1] - items_from);
                if (item < item_end) merged_place = places[items_from + item], merged_value = values[items_from + item];
            };
            auto merge = [&](u32 chunk, int stage) {
                T* const a = ring + stage * (SizeA + SizeB);
                if (item < item_end) a[merged_place / 64 * PitchA + merged_place % 64] = merged_value;
                for (u32 i = item + Threads; i < item_end; i += Threads) {
                    const int at = places[items_from + i];
                    a[at / 64 * PitchA + at % 64] = values[items_from + i];
                }
                fetch_item(chunk + 1);
            };
            auto load = [&](u32 chunk, int stage) {
                T* const a_to = ring + stage * (SizeA + SizeB);
                T* const b_to = a_to + SizeA;
                if constexpr (A::two_four) {
#pragma unroll
                    for (int j = 0; j < Words; ++j) kept[j].decode(a_to + (tid + j * Threads) / 4 * PitchA + tid % 4 * 16);
                    fetch_kept(chunk + 1);
                } else if constexpr (WideA) {
                    constexpr int LineA = KC / Vector, Units = BM * LineA;
#pragma unroll
                    for (int i = 0; i < cdiv(Units, Threads); ++i) {
                        const int unit = tid + i * Threads, row = unit / LineA, along = unit % LineA * Vector;
                        const u32 k = chunk * KC + along;
                        const bool real = k < depth && row_of_block + row < A::R;
                        const i64 block = task.block + (real ? k / A::C : 0);
                        const T* from = data + (block * A::R + (real ? row_of_block + row : 0)) * A::C + k % A::C;
                        if (unit < Units) cp_async_16(shared_address(a_to + row * PitchA + along), from, real ? 16 : 0);
                    }
                } else {
#pragma unroll 4
                    for (int i = tid; i < BM * KC; i += Threads) {
                        const int row = i / KC, at = i % KC;
                        const u32 k = chunk * KC + at;
                        const bool real = k < depth && row_of_block + row < A::R;
                        a_to[row * PitchA + at] =
                            real ? data[((task.block + k / A::C) * A::R + row_of_block + row) * A::C + k % A::C] : from_float<T>(0.0f);
                    }
                }
                if constexpr (WideB) {
#pragma unroll
                    for (int i = 0; i < CopiesB; ++i) {
                        const int row = A::two_four ? b_row(chunk * KC + first_b + i * StepB) : ahead[i];
                        const bool real = row < rows_of_b;
                        const T* from = b_tile + (real ? row * ldb + (valid ? along_b : 0) : 0);
                        cp_async_16(shared_address(b_to + (first_b + i * StepB) * PitchB + along_b), from,
                                    real ? valid * sizeof(T) : 0);
                    }
                    look_ahead(chunk + 1);
                } else {
#pragma unroll 4
                    for (int i = tid; i < KC * BN; i += Threads) {
                        const int n = i % BN, row = n < n_left ? b_row(chunk * KC + i / BN) : rows_of_b;
                        b_to[i / BN * PitchB + n] = row < rows_of_b ? b_tile[row * ldb + n] : from_float<T>(0.0f);
                    }
                }
            };

            if (chunks) {
                if (WideB) look_ahead(0);
                if (A::two_four) fetch_kept(0), fetch_item(0);
            }
#pragma unroll 1
            for (u32 s = 0; s < Stages - 1; ++s) {
                if (s < chunks) load(s, s);
                cp_async_commit();
            }
            if (A::two_four && chunks) {
                __syncthreads();
                merge(0, 0);
            }
            int stage = 0;
            for (u32 chunk = 0; chunk < chunks; ++chunk) {
                cp_async_wait<Stages - 2>();
                __syncthreads();  // the chunk has landed, and everyone is done with the buffer that is loaded next
                if (A::two_four && chunk + 1 < chunks) merge(chunk + 1, stage == Stages - 1 ? 0 : stage + 1);
                if (chunk + Stages - 1 < chunks) load(chunk + Stages - 1, stage == 0 ? Stages - 1 : stage - 1);
                cp_async_commit();
                const T* const a = ring + stage * (SizeA + SizeB);
                sum.template multiply<KC>(a, a + SizeA);
                stage = stage == Stages - 1 ? 0 : stage + 1;
            }
            cp_async_wait<0>();
            __syncthreads();  // the ring becomes the tile
        }
        sum.template put<Pitch>(tile);

        if (!A::two_four && task.items)  // a condition of the block
            add_items<BN, Pitch, Warps, WideB>(items, tile, carry, carry_row, B + n0, ldb, n_left);
        __syncthreads();

        bool mine = true;
        if (task.cut >= 0) {
            const i64 column_tiles = cdiv<i64>(N, BN), column_tile = n0 / BN, size = BM * BN;
            const Cut cut = cuts[task.cut];
            float* const to = sums + (blockIdx.x * column_tiles + column_tile) * size;
            for (int i = tid * 4; i < size; i += Threads * 4)
                *reinterpret_cast<float4*>(to + i) = *reinterpret_cast<const float4*>(tile + i / BN * Pitch + i % BN);
            __threadfence();
            __syncthreads();
            if (tid == 0) {
                u32* const counter = arrived + task.cut * column_tiles + column_tile;
                last = atomicAdd(counter, 1u) + 1 == cut.count;
                if (last) *counter = 0;  // for the next launch
                __threadfence();
            }
            __syncthreads();
            mine = last;
            if (mine) {
                const float* const from = sums + (cut.first * column_tiles + column_tile) * size;
                for (int i = tid * 4; i < size; i += Threads * 4) {
                    float4 total = make_float4(0, 0, 0, 0);
#pragma unroll 4
                    for (u32 j = 0; j < cut.count; ++j) {
                        const float4 x = __ldcg(reinterpret_cast<const float4*>(from + j * column_tiles * size + i));
                        total.x += x.x, total.y += x.y, total.z += x.z, total.w += x.w;
                    }
                    *reinterpret_cast<float4*>(tile + i / BN * Pitch + i % BN) = total;
                }
                __syncthreads();
            }
        }
        if (mine)
            write_tile<Out, BM, BN, Pitch, Threads, CCol>(tile, out, ldc, row0, n0, rows, n_left, bias, alpha, beta);
        __syncthreads();  // the next column tile uses the same memory
    }
}
