// A dense array as CSR, in two passes: count the nonzeros before each piece, then store them.
// sm_80 and later. Launcher: csr_from_dense.py.
//
//   x        T[M, K]           row-major, as unsigned words of the width of its values; M*K > 0
//   starts   i64[pieces+1]     nonzeros before each piece, and in all
//   sums     u64[2 + blocks]   zeros before the launch and after it, see look_back.cuh
//   total    u64               in host memory, becomes the number of nonzeros
//   indptr   Ptr[M+1]          nonzeros before each row, and in all
//   indices  Idx[nnz]          their columns
//   data     T[nnz]            their values
//   totals   u64[2]            zeros before the launch; nonzeros, and elements that are -0
//
// The array is cut into pieces of PIECE elements without regard to its rows, so that every shape keeps all warps equally busy
// and every 16-byte unit is loaded whole, whatever K is. A warp takes a piece and stores it as csr_pieces.cuh says.
#include "spformat/csr_pieces.cuh"
#include "spformat/look_back.cuh"

using namespace spformat;

constexpr int COUNT_WARPS = 8, FILL_WARPS = 4, TOTAL_THREADS = 256;  // warps and threads of a block

template <class T, bool Float>
__global__ void __launch_bounds__(COUNT_WARPS * 32)
count_pieces(const T* __restrict__ x, i64 n, i64 pieces, i64* __restrict__ starts, u64* sums, u64* total) {
    __shared__ u64 shared_tile;
    __shared__ u32 counts[COUNT_WARPS];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, head = head_of(x);
    const i64 tile = taken_tile(sums, shared_tile), piece = tile * COUNT_WARPS + warp;
    uint4 unit[STEPS<T>];  // of a piece behind the last one: zeros
#pragma unroll
    for (int s = 0; s < STEPS<T>; ++s) unit[s] = load_unit(x, head, n, (piece * STEPS<T> + s) * 32 + lane);
    u32 count = 0;
#pragma unroll
    for (int s = 0; s < STEPS<T>; ++s) count += __popc(nonzero_bits<T, Float>(unit[s]));
    count = __reduce_add_sync(~0u, count);
    if (lane == 0) counts[warp] = count;
    __syncthreads();
    if (warp == 0) {
        const u64 mine = lane < COUNT_WARPS ? counts[lane] : 0, of_warps = sum_before_lane(mine);
        const u64 start = sum_before(__shfl_sync(~0u, of_warps + mine, 31), tile, sums, total) + of_warps;
        if (lane < COUNT_WARPS && tile * COUNT_WARPS + lane < pieces) {
            starts[tile * COUNT_WARPS + lane] = static_cast<i64>(start);
            if (tile * COUNT_WARPS + lane == pieces - 1) starts[pieces] = static_cast<i64>(start + mine);
        }
    }
    leave_tile(sums, shared_tile);
}

// Counts over the whole array, for `inspect`: any number of blocks.
template <class T, bool Float>
__global__ void __launch_bounds__(TOTAL_THREADS)
count_all(const T* __restrict__ x, i64 n, u64* totals) {
    __shared__ u64 sums[2];
    if (threadIdx.x < 2) sums[threadIdx.x] = 0;
    __syncthreads();
    constexpr int BATCH = 4;  // loads of a thread that are in flight together
    const int head = head_of(x);
    const i64 threads = static_cast<i64>(gridDim.x) * TOTAL_THREADS, units = (head + n + PER_UNIT<T> - 1) / PER_UNIT<T>;
    i64 nonzeros = 0, negative = 0;
    for (i64 q = static_cast<i64>(blockIdx.x) * TOTAL_THREADS + threadIdx.x; q < units; q += threads * BATCH) {
        uint4 unit[BATCH];
#pragma unroll
        for (int b = 0; b < BATCH; ++b) unit[b] = load_unit(x, head, n, q + b * threads);
#pragma unroll
        for (int b = 0; b < BATCH; ++b) {
            const u32 some = nonzero_bits<T, Float>(unit[b]);
            nonzeros += __popc(some);
            if (Float) negative += __popc(nonzero_bits<T, false>(unit[b]) ^ some);
        }
    }
    nonzeros = sum_of_warp(nonzeros), negative = sum_of_warp(negative);
    if (threadIdx.x % 32 == 0) atomicAdd(&sums[0], static_cast<u64>(nonzeros)), atomicAdd(&sums[1], static_cast<u64>(negative));
    __syncthreads();
    if (threadIdx.x < 2 && sums[threadIdx.x]) atomicAdd(totals + threadIdx.x, sums[threadIdx.x]);
}

// Narrow and reciprocal: as in csr_pieces.cuh.
template <class T, bool Float, class Ptr, class Idx, bool Narrow>
__global__ void __launch_bounds__(FILL_WARPS * 32)
fill_pieces(const T* __restrict__ x, i64 M, i64 K, i64 pieces, const i64* __restrict__ starts, Ptr* __restrict__ indptr,
            Idx* __restrict__ indices, T* __restrict__ data, i64 reciprocal) {
    constexpr int N = STEPS<T>;
    __shared__ Packed<T> packed[FILL_WARPS];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, head = head_of(x);
    // The last pieces first: the count, which ran before this, has left them in L2.
    const i64 piece = pieces - 1 - (static_cast<i64>(blockIdx.x) * FILL_WARPS + warp);
    if (piece < 0) return;
    uint4 unit[N];
#pragma unroll
    for (int s = 0; s < N; ++s) unit[s] = load_unit(x, head, M * K, (piece * N + s) * 32 + lane);
    const i64 at = starts[piece];
    const auto bits_of = [&](int s) { return nonzero_bits<T, Float>(unit[s]); };
    store_piece<Narrow>(unit, bits_of, piece, pieces, head, M, K, at, static_cast<int>(starts[piece + 1] - at), packed[warp],
                        indptr, indices, data, reciprocal);
}
