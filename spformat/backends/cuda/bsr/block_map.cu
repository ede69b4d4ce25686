// From the bits that say which blocks are stored to their numbers, and to the index arrays of BSR and DBSR. sm_80 and later.
// Launcher: block_map.py. The bits and starts of a map are those of block_map.cuh.
#include "spformat/block_map.cuh"
#include "spformat/look_back.cuh"

using namespace spformat;

constexpr int THREADS = 256;

__device__ __forceinline__ i64 thread_of_grid() { return i64(blockIdx.x) * THREADS + threadIdx.x; }

// starts[i]: the bits that are set in words[0] .. words[i-1]. sums and total: as in look_back.cuh.
__global__ void __launch_bounds__(OFFSETS_THREADS)
number_blocks(const u32* __restrict__ words, i64 n, i64* __restrict__ starts, u64* sums, u64* total) {
    write_starts(n, [=](i64 i) { return __popc(words[i]); }, starts, sums, total);
}

// The bits of a map that has all words, from keep u8[Mb, Kb] and the norms f64[Mb, Kb] of the blocks: those that are kept and
// that are not zeros only. across: words of a block row.
__global__ void __launch_bounds__(THREADS)
bits_of_kept(const u8* __restrict__ keep, const double* __restrict__ norms, i64 Mb, i64 Kb, i64 across, u32* __restrict__ words) {
    const int lane = threadIdx.x % 32;
    for (i64 w = thread_of_grid() / 32; w < Mb * across; w += i64(gridDim.x) * (THREADS / 32)) {
        const i64 b = w / across, j = (w - b * across) * 32 + lane, at = b * Kb + j;
        const u32 word = __ballot_sync(~0u, j < Kb && keep[at] && norms[at] != 0);  // a norm that is NaN is not 0
        if (lane == 0) words[w] = word;
    }
}

// places[b]: how many of the block rows before b have blocks.
__global__ void __launch_bounds__(OFFSETS_THREADS)
number_rows(const i64* __restrict__ starts, i64 Mb, const i64* __restrict__ rows, i64 across, i64* __restrict__ places, u64* sums,
            u64* total) {
    const auto has_blocks = [=](i64 b) { return starts[first_word(rows, across, b + 1)] > starts[first_word(rows, across, b)]; };
    write_starts(Mb, has_blocks, places, sums, total);
}

// The index arrays, as write_block_indices has them.
__global__ void __launch_bounds__(THREADS)
block_indices(const u32* __restrict__ bits, const i64* __restrict__ starts, i64 all, i64 Mb, const i64* __restrict__ rows,
              const i64* __restrict__ columns, i64 across, void* __restrict__ indices, int wide_indices,
              void* __restrict__ indptr, int wide_indptr, const i64* __restrict__ places, void* __restrict__ ids, int wide_ids) {
    write_block_indices(thread_of_grid(), i64(gridDim.x) * THREADS, bits, starts, all, Mb, rows, columns, across, indices,
                        wide_indices, indptr, wide_indptr, places, ids, wide_ids);
}
