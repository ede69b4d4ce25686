// C[M,N] = alpha * (A1 + A2 + ..) @ B[K,N] + beta * C + bias: at most one structured part (BSR, DBSR or 2:4) and the items of
// all others, one launch, C written once. float32 sums; mma.sync for 16-bit values, CUDA cores for float32. sm_80 and later.
//
//   tasks    Task[grid.x]    what a block computes: a range of blocks and a range of items of one tile of rows
//   cuts     {u32 first, count}[]  tiles that several tasks share: their tasks. Tasks of cut tiles come first
//   data     Blocks: T[nnzb, R, C], each row-major; TwoFour: T[Mp, Kp/2] of the format two-four, Mp = pad(M, 32), Kp = pad(K, 64)
//   indices  Blocks: Index[nnzb], block columns
//   meta     TwoFour: u16[Mp * Kp/16], order "ldmatrix" or "fragment": 8 words for row i of tile t of 16 rows and chunk q of 64
//            columns lie at t * Kp + i * meta_row + q * meta_chunk
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
#include "spformat/gather.cuh"
#include "spformat/ldmatrix.cuh"
#include "spformat/mma.cuh"

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

// Values between lines of shared memory: an odd number of 16-byte units for A, and of 32-bit words modulo 32 for B.
template <class T, int Width> __host__ __device__ constexpr int pitch() { return Width + 16 / int(sizeof(T)); }

// The sums of a block for a tile BM x BN: fragments of mma (16-bit values), or 4 columns of BM / TY rows of each thread.
template <class T, int BM, int BN, int WM> struct Sums {
    static constexpr bool tensor = sizeof(T) == 2;
    static constexpr int MI = BM / WM / 16, NI = BN / 32, TX = BN / 4, TY = 128 * WM / TX, RM = BM / TY;
    static_assert(tensor ? BM % (16 * WM) == 0 : BM % TY == 0, "every thread has the same rows of the tile");
    static_assert(BN == 64 || BN == 128, "a warp has 16 or 32 columns of the tile");
    float x[tensor ? MI : RM][tensor ? NI : 1][4] = {};

    // += a [BM, KC] @ b [KC, BN]
    template <int KC> __device__ __forceinline__ void multiply(const T* a, const T* b) {
        constexpr int PitchA = pitch<T, KC>(), PitchB = pitch<T, BN>();
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        if constexpr (tensor) {
            const u32 a_base = shared_address(a + (warp / 4 * (BM / WM) + lane % 16) * PitchA + lane / 16 * 8);
            const u32 b_base = shared_address(b + lane % 16 * PitchB + warp % 4 * (BN / 4) + lane / 16 * 8);
#pragma unroll
            for (int k = 0; k < KC; k += 16) {
                u32 fragment[MI][4];
#pragma unroll
                for (int m = 0; m < MI; ++m) ldmatrix_x4(fragment[m], a_base + (m * 16 * PitchA + k) * sizeof(T));
#pragma unroll
                for (int n = 0; n < NI; n += 2) {
                    u32 w[4];
                    ldmatrix_x4_trans(w, b_base + (k * PitchB + n * 8) * sizeof(T));
#pragma unroll
                    for (int m = 0; m < MI; ++m) {
                        mma_m16n8k16<T>(x[m][n], fragment[m], w[0], w[1]);
                        mma_m16n8k16<T>(x[m][n + 1], fragment[m], w[2], w[3]);
                    }
                }
            }
        } else {
            const int tx = threadIdx.x % TX, ty = threadIdx.x / TX;
#pragma unroll 4
            for (int k = 0; k < KC; k += 4) {
                float4 w[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) w[i] = *reinterpret_cast<const float4*>(b + (k + i) * PitchB + tx * 4);
#pragma unroll
                for (int r = 0; r < RM; ++r) {
                    const float4 v = *reinterpret_cast<const float4*>(a + (ty + r * TY) * PitchA + k);
                    const float line[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        x[r][0][0] += line[i] * w[i].x, x[r][0][1] += line[i] * w[i].y;
                        x[r][0][2] += line[i] * w[i].z, x[r][0][3] += line[i] * w[i].w;
                    }
                }
            }
        }
    }

    // To tile [BM, Pitch].
    template <int Pitch> __device__ __forceinline__ void put(float* tile) const {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        if constexpr (tensor) {
            float* to = tile + (warp / 4 * (BM / WM) + lane / 4) * Pitch + warp % 4 * (BN / 4) + lane % 4 * 2;
#pragma unroll
            for (int m = 0; m < MI; ++m)
#pragma unroll
                for (int n = 0; n < NI; ++n)
#pragma unroll
                    for (int h = 0; h < 2; ++h)
                        *reinterpret_cast<float2*>(to + (m * 16 + h * 8) * Pitch + n * 8) =
                            make_float2(x[m][n][2 * h], x[m][n][2 * h + 1]);
        } else {
#pragma unroll
            for (int r = 0; r < RM; ++r)
                *reinterpret_cast<float4*>(tile + (threadIdx.x / TX + r * TY) * Pitch + threadIdx.x % TX * 4) =
                    make_float4(x[r][0][0], x[r][0][1], x[r][0][2], x[r][0][3]);
        }
    }
};

// 16 neighbouring columns of a row of a 2:4 matrix: eight kept values, and their word of metadata.
template <class T> struct Kept {
    uint4 value[sizeof(T) / 2];
    u32 word;

    __device__ __forceinline__ void decode(T* to) const {
        const u32* w = reinterpret_cast<const u32*>(value);
        uint4* line = reinterpret_cast<uint4*>(to);
        if constexpr (sizeof(T) == 2) {
            u64 out[4];
#pragma unroll
            for (int g = 0; g < 4; ++g) {
                const u32 at = word >> (4 * g);
                out[g] = static_cast<u64>(w[g] & 0xffff) << (16 * (at & 3)) | static_cast<u64>(w[g] >> 16) << (16 * (at >> 2 & 3));
            }
#pragma unroll
            for (int i = 0; i < 2; ++i)
                line[i] = make_uint4(u32(out[2 * i]), u32(out[2 * i] >> 32), u32(out[2 * i + 1]), u32(out[2 * i + 1] >> 32));
        } else {
#pragma unroll
            for (int g = 0; g < 4; ++g) {
                const u32 i0 = word >> (4 * g) & 3, i1 = word >> (4 * g + 2) & 3;
                u32 out[4];
#pragma unroll
                for (u32 i = 0; i < 4; ++i) out[i] = i == i0 ? w[2 * g] : i == i1 ? w[2 * g + 1] : 0;
                line[g] = make_uint4(out[0], out[1], out[2], out[3]);
            }
        }
    }
};

// The columns of a lane in a tile of BN: neighbours, or 32 apart where B has no alignment.
template <int BN, bool WideB> __device__ __forceinline__ int column_of(int v) {
    return WideB ? threadIdx.x % 32 * (BN / 32) + v : threadIdx.x % 32 + 32 * v;
}

// Rows of B for the items at .. at + Depth - 1 that lanes hold, k their columns: the values in the columns of this lane, zeros
// where there is none. Full: the tile has all its columns, so that a row is one load, without a branch.
template <class T, int BN, bool WideB, bool Full, int Depth>
__device__ __forceinline__ void load_rows(T (&w)[Depth][BN / 32], const T* b, i64 ldb, u32 k, int at, int live, int n_left) {
#pragma unroll
    for (int d = 0; d < Depth; ++d) {
        const T* row = b + static_cast<i64>(__shfl_sync(~0u, k, at + d)) * ldb;
        if constexpr (Full) {
            using W = word_t<BN / 32 * sizeof(T)>;
            reinterpret_cast<W&>(w[d]) = load_if(reinterpret_cast<const W*>(row + column_of<BN, WideB>(0)), at + d < live);
        } else {
#pragma unroll
            for (int v = 0; v < BN / 32; ++v) {
                const int c = column_of<BN, WideB>(v);
                w[d][v] = at + d < live && c < n_left ? row[c] : from_float<T>(0.0f);
            }
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
    const int tid = threadIdx.x, lane = tid % 32, warp = tid / 32;

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

        // The share of this warp in the items, and the 32 of them that come next, one a lane: they arrive meanwhile.
        constexpr int V = BN / 32, Depth = V * sizeof(T) <= 4 ? 16 : 8;  // columns of a lane; rows of B that are in flight
        const u32 share = A::two_four ? 0 : cdiv<u32>(task.items, Warps);
        const u32 begin = warp * share < task.items ? warp * share : task.items;
        const u32 end = begin + share < task.items ? begin + share : task.items;
        const u32* const column = columns + task.item;
        const u16* const place = places + task.item;
        const T* const value = values + task.item;
        u32 next_k = 0;
        int next_row = 0;
        float next_a = 0;
        auto fetch = [&](u32 at) {
            if (at + lane < end) next_k = column[at + lane], next_row = place[at + lane], next_a = to_float(value[at + lane]);
        };
        if (!A::two_four) fetch(begin);

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
            const T* kept_from = data;  // of the first row of this thread, in the chunk that is fetched next
            const u16* meta_from = meta;
            if constexpr (A::two_four) {
                kept_from += (row0 * chunks_of_row + task.block) * 32 + tid % 4 * 8;
                meta_from += row0 / 16 * chunks_of_row * 64 + task.block * meta_chunk + tid % 4 * 2;
            }
            auto fetch_kept = [&](u32 chunk) {
#pragma unroll
                for (int j = 0; j < Words; ++j) {
                    const u32 r = tid / 4 + j * (Threads / 4);
                    const bool real = r < left && chunk < chunks;
#pragma unroll
                    for (int i = 0; i < int(sizeof(T)) / 2; ++i)
                        kept[j].value[i] = real ? reinterpret_cast<const uint4*>(kept_from + r * line_of_kept)[i] : make_uint4(0, 0, 0, 0);
                    kept[j].word = real ? meta_from[r / 16 * line_of_kept * 2 + r % 8 * meta_row + r / 8 % 2] : 0x4444;
                }
                kept_from += 32, meta_from += meta_chunk;
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

        if (!A::two_four && task.items) {  // a condition of the block
            if (tid < Warps) carry_row[tid] = -1;
            __syncthreads();
            float row_sum[V] = {};
            int current = begin < end ? place[begin] : -1;
            bool goes_on = begin > 0 && begin < end && place[begin - 1] == current;
            auto flush = [&] {
                float* const to = (goes_on ? carry + warp * BN : tile + current * Pitch) + column_of<BN, WideB>(0);
                if (goes_on && lane == 0) carry_row[warp] = current;
                if constexpr (WideB) {
                    struct alignas(4 * V) Line { float x[V]; };
                    Line line = *reinterpret_cast<const Line*>(to);
#pragma unroll
                    for (int v = 0; v < V; ++v) line.x[v] = goes_on ? row_sum[v] : line.x[v] + row_sum[v];
                    *reinterpret_cast<Line*>(to) = line;
                } else {
#pragma unroll
                    for (int v = 0; v < V; ++v) to[32 * v] = goes_on ? row_sum[v] : to[32 * v] + row_sum[v];
                }
#pragma unroll
                for (int v = 0; v < V; ++v) row_sum[v] = 0;
                goes_on = false;
            };
            for (u32 at = begin; at < end; at += 32) {
                const u32 k = next_k;
                const int row = next_row;
                const float a = next_a;
                fetch(at + 32);
                const int live = end - at < 32 ? static_cast<int>(end - at) : 32;
                for (int g = 0; g < live; g += Depth) {
                    alignas(V * sizeof(T)) T w[Depth][V];
                    if (WideB && n_left == BN) load_rows<T, BN, WideB, WideB>(w, b_tile, ldb, k, g, live, n_left);
                    else load_rows<T, BN, WideB, false>(w, b_tile, ldb, k, g, live, n_left);
#pragma unroll
                    for (int d = 0; d < Depth; ++d) {
                        const int r = __shfl_sync(~0u, row, g + d);
                        const float x = __shfl_sync(~0u, a, g + d);
                        if (g + d < live) {
                            if (r != current) flush(), current = r;
#pragma unroll
                            for (int v = 0; v < V; ++v) row_sum[v] += x * to_float(w[d][v]);
                        }
                    }
                }
            }
            if (begin < end) flush();
            __syncthreads();
            for (int c = tid; c < BN; c += Threads)
                for (int w = 1; w < Warps; ++w)
                    if (carry_row[w] >= 0) tile[carry_row[w] * Pitch + c] += carry[w * BN + c];
        }
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
        if (mine) {
            constexpr int Along = CCol ? BM : BN, Lines = CCol ? BN : BM;  // four neighbours in C for each thread
            struct alignas(4 * sizeof(Out)) Four { Out x[4]; };
            for (int i = tid; i < Lines * (Along / 4); i += Threads) {
                const int line = i / (Along / 4), along = i % (Along / 4) * 4;
                const int left = (CCol ? rows : n_left) - along;
                if (line >= (CCol ? n_left : rows) || left <= 0) continue;
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
        __syncthreads();  // the next column tile uses the same memory
    }
}
