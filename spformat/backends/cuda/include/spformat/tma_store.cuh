// Accumulators to C through shared memory and the copy engine: the product goes on while C travels. sm_90 and later.
#pragma once
#include "spformat/staged_store.cuh"
#include "spformat/tma.cuh"

namespace spformat {

constexpr int STORE_SLOT = 64 * 128;  // bytes of a slot below; slots are aligned to 1024

// A warpgroup stores 64 x 64 sums of 16 bits each, first element (row, col), through the next of its Slots slots. `c_map`:
// rows of C, boxes of 64 x 64, 128-byte swizzle; what lies outside C is left alone.
//   acc[4j + r] of lane 4g+t of warp w = C[row + 16w + g + 8*(r/2)][col + 8j + 2t + r%2]
//   id: a named barrier of the warpgroup
// Whoever uses the slots for something else, or ends, first calls tma::store_wait_read<0>() in thread 0 of the warpgroup.
template <class Out, int Slots>
__device__ __forceinline__ void store_64x64(const float* acc, u32 slot, const TensorMap& c_map, int row, int col, int id) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    if (threadIdx.x % 128 == 0) tma::store_wait_read<Slots - 1>();
    named_barrier(id, 128);
    // Tiles 0 .. 3 of a stmatrix: rows 0-7 and 8-15 of eight columns, then of the next eight.
    const int line = warp * 16 + lane % 16, right = lane / 16;
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
        const float* x = acc + 4 * j;
        const u32 r[4] = {pack2<Out>(x[0], x[1]), pack2<Out>(x[2], x[3]), pack2<Out>(x[4], x[5]), pack2<Out>(x[6], x[7])};
        stmatrix_x4(slot + swizzled<128>(line, j + right), r);
    }
    tma::fence_shared();
    named_barrier(id, 128);
    if (threadIdx.x % 128 == 0) {
        tma::store_2d(c_map, slot, col, row);
        tma::store_commit();
    }
}

}  // namespace spformat
