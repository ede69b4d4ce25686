// Accumulators to C through shared memory and the copy engine: the product goes on while C travels. sm_90 and later.
#pragma once
#include "spformat/staged_store.cuh"
#include "spformat/tma.cuh"

namespace spformat {

constexpr int STORE_SLOT = 64 * 128;  // bytes of a slot below; slots are aligned to 1024

// A warpgroup stores 64 rows x Columns sums of 16 bits each, first element (row, col), through the next of its Slots slots; what
// lies outside C is left alone.
//   acc[4j + r] of lane 4g+t of warp w = C[row + 16w + g + 8*(r/2)][col + 8j + 2t + r%2]
//   c_map    rows of C, boxes of 64 x 64, and Columns is 64; CCol: columns of C, boxes of 64 x 16, and Columns is a multiple of
//            16 up to 64; 128-byte swizzle
//   id       a named barrier of the warpgroup
// Whoever uses the slots for something else, or ends, first calls tma::store_wait_read<0>() in thread 0 of the warpgroup.
template <class Out, bool CCol, int Columns, int Slots>
__device__ __forceinline__ void store_64(const float* acc, u32 slot, const TensorMap& c_map, int row, int col, int id) {
    static_assert(CCol ? Columns % 16 == 0 && Columns <= 64 : Columns == 64, "whole boxes");
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    if (threadIdx.x % 128 == 0) tma::store_wait_read<Slots - 1>();
    named_barrier(id, 128);
    // Tiles 0 .. 3 of a stmatrix: rows 0-7 and 8-15 of eight columns, then of the next eight. A line of the slot is a row of C,
    // or with CCol a column: 64 elements.
#pragma unroll
    for (int j = 0; j < Columns / 8; j += 2) {
        const float* x = acc + 4 * j;
        const u32 r[4] = {pack2<Out>(x[0], x[1]), pack2<Out>(x[2], x[3]), pack2<Out>(x[4], x[5]), pack2<Out>(x[6], x[7])};
        if constexpr (CCol) stmatrix_x4_trans(slot + swizzled<128>(8 * j + lane / 16 * 8 + lane % 8, 2 * warp + lane / 8 % 2), r);
        else stmatrix_x4(slot + swizzled<128>(warp * 16 + lane % 16, j + lane / 16), r);
    }
    tma::fence_shared();
    named_barrier(id, 128);
    if (threadIdx.x % 128 == 0) {
        if constexpr (CCol) {
#pragma unroll
            for (int n = 0; n < Columns; n += 16) tma::store_2d(c_map, slot + n * 128, row, col + n);
        } else {
            tma::store_2d(c_map, slot, col, row);
        }
        tma::store_commit();
    }
}

// The same for any multiple of 16 columns, 64 at a time: slots are the warpgroup's, `number` counts those used before.
// `first` is called before a panel is stored, as store_panels calls it.
template <class Out, bool CCol, int Columns, int Slots, class First>
__device__ __forceinline__ void store_panels_64(float* acc, u32 slots, u32& number, const TensorMap& c_map, int row, int col, int id,
                                                First first) {
    constexpr int WIDTH = Columns < 64 ? Columns : 64;
    first(Panel<WIDTH>{}, acc, col);
    store_64<Out, CCol, WIDTH, Slots>(acc, slots + number++ % Slots * STORE_SLOT, c_map, row, col, id);
    if constexpr (Columns > WIDTH)
        store_panels_64<Out, CCol, Columns - WIDTH, Slots>(acc + WIDTH / 2, slots, number, c_map, row, col + WIDTH, id, first);
}

}  // namespace spformat
