// Blocks of BSR or DBSR that lie side by side in a row of blocks, times their rows of B: a tile of sums in registers.
#pragma once
#include "spformat/cp_async.cuh"
#include "spformat/tile_sums.cuh"

namespace spformat {

// Blocks of Rows x Columns values, whose block columns are of type I.
template <class I, int Rows, int Columns> struct Blocks {
    using Index = I;
    static constexpr int R = Rows, C = Columns;
};

// How a thread block multiplies blocks: KC of their columns at a time, through Stages buffers in shared memory.
template <class T, class A, int BM, int BN, int WM> struct BlockSteps {
    static constexpr int Threads = 128 * WM, Vector = 16 / sizeof(T), KC = sizeof(T) == 2 && A::C % 64 == 0 ? 64 : 32;
    static constexpr int Stages = KC == 32 && sizeof(T) == 2 ? 4 : 3;
    static constexpr int PitchA = pitch<T, KC>(), PitchB = pitch<T, BN>(), SizeA = BM * PitchA, SizeB = KC * PitchB;
    static constexpr int LineA = KC / Vector, Units = BM * LineA;
    static constexpr int LineB = BN / Vector, StepB = Threads / LineB, CopiesB = cdiv(KC, StepB);
    static_assert(KC % StepB == 0, "every thread copies the same number of units of B");

    const T* data;                  // T[nnzb, R, C]
    const typename A::Index* from;  // block columns, from the first block on
    i64 block;                      // the first block
    u32 depth;                      // columns of all blocks together
    int row_of_block;               // the first row of the tile in its blocks
    const char* b;                  // of the first column
    i64 ldb;                        // bytes
    int rows_of_b, n_left;          // rows of B, and its columns from the first one on

    // Row of B for position k; rows_of_b and more where there is none.
    __device__ __forceinline__ int b_row(u32 k) const {
        return k < depth ? static_cast<int>(from[k / A::C]) * A::C + static_cast<int>(k % A::C) : rows_of_b;
    }

    // A copy of chunk `chunk` to a buffer. ahead: rows of B of that chunk for this thread, replaced by those of the next one: they are
    // read one chunk before for their latency.
    template <bool WideA, bool WideB> __device__ __forceinline__ void load(u32 chunk, T* a_to, int (&ahead)[CopiesB]) const {
        T* const b_to = a_to + SizeA;
        const int tid = threadIdx.x;
        if constexpr (WideA) {
#pragma unroll
            for (int i = 0; i < cdiv(Units, Threads); ++i) {
                const int unit = tid + i * Threads, row = unit / LineA, along = unit % LineA * Vector;
                const u32 k = chunk * KC + along;
                const bool real = k < depth && row_of_block + row < A::R;
                const i64 at = (block + (real ? k / A::C : 0)) * A::R + (real ? row_of_block + row : 0);
                if (Units % Threads == 0 || unit < Units)
                    cp_async_16(shared_address(a_to + row * PitchA + along), data + at * A::C + k % A::C, real ? 16 : 0);
            }
        } else {
#pragma unroll 4
            for (int i = tid; i < BM * KC; i += Threads) {
                const int row = i / KC, at = i % KC;
                const u32 k = chunk * KC + at;
                const bool real = k < depth && row_of_block + row < A::R;
                a_to[row * PitchA + at] =
                    real ? data[((block + k / A::C) * A::R + row_of_block + row) * A::C + k % A::C] : from_float<T>(0.0f);
            }
        }
        if constexpr (WideB) {
            const int first = tid / LineB, along = tid % LineB * Vector;
            const int left = n_left - along, valid = left < 0 ? 0 : left < Vector ? left : Vector;
#pragma unroll
            for (int i = 0; i < CopiesB; ++i) {
                const bool real = ahead[i] < rows_of_b && valid;
                const char* row = b + (real ? ahead[i] * ldb + along * int(sizeof(T)) : 0);
                cp_async_16(shared_address(b_to + (first + i * StepB) * PitchB + along), row, real ? valid * sizeof(T) : 0);
            }
            look_ahead(chunk + 1, ahead);
        } else {
#pragma unroll 4
            for (int i = tid; i < KC * BN; i += Threads) {
                const int n = i % BN, row = n < n_left ? b_row(chunk * KC + i / BN) : rows_of_b;
                b_to[i / BN * PitchB + n] =
                    row < rows_of_b ? reinterpret_cast<const T*>(b + row * ldb)[n] : from_float<T>(0.0f);
            }
        }
    }
    __device__ __forceinline__ void look_ahead(u32 chunk, int (&ahead)[CopiesB]) const {
#pragma unroll
        for (int i = 0; i < CopiesB; ++i) ahead[i] = b_row(chunk * KC + threadIdx.x / LineB + i * StepB);
    }

    // += all blocks times their rows of B. ring: Stages * (SizeA + SizeB) values. The thread block must meet before the ring is used again.
    template <bool WideA, bool WideB> __device__ __forceinline__ void multiply(Sums<T, BM, BN, WM>& sum, T* ring) const {
        const u32 chunks = cdiv<u32>(depth, KC);
        int ahead[CopiesB];
        if (WideB) look_ahead(0, ahead);
#pragma unroll 1
        for (u32 s = 0; s < Stages - 1; ++s) {
            if (s < chunks) load<WideA, WideB>(s, ring + s * (SizeA + SizeB), ahead);
            cp_async_commit();
        }
        int stage = 0;
#pragma unroll 1
        for (u32 chunk = 0; chunk < chunks; ++chunk) {
            cp_async_wait<Stages - 2>();
            __syncthreads();  // the chunk has landed, and everyone is done with the buffer that is loaded next
            if (chunk + Stages - 1 < chunks)
                load<WideA, WideB>(chunk + Stages - 1, ring + (stage == 0 ? Stages - 1 : stage - 1) * (SizeA + SizeB), ahead);
            cp_async_commit();
            const T* const a = ring + stage * (SizeA + SizeB);
            sum.template multiply<KC>(a, a + SizeA);
            stage = stage == Stages - 1 ? 0 : stage + 1;
        }
        cp_async_wait<0>();
    }
};

}  // namespace spformat
