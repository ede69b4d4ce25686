// C = parts[0] + parts[1] + .., in this order: what blocks with a part of K each have left of a product.
//
//   parts    Sum[splits, lines, along]
//   C        Out[lines, ld], `along` elements of each line: rows of C, or columns where it is column-major
//
// Grid any; block 256 threads.
#include "spformat/launch_order.cuh"
#include "spformat/vector_nm_cuda_cores.cuh"

namespace spformat::vector_nm {

template <class Sum, class Out>
__global__ void __launch_bounds__(256) vector_nm_sums(const Sum* __restrict__ parts, Out* __restrict__ C, int splits, int lines,
                                                      int along, i64 ld) {
    let_next_launch_begin();
    wait_for_launch_before();
    const i64 size = static_cast<i64>(lines) * along;
    const i64 stride = static_cast<i64>(gridDim.x) * 256;
    for (i64 i = blockIdx.x * 256 + threadIdx.x; i < size; i += stride) {
        Sum sum = parts[i];
#pragma unroll 4
        for (int p = 1; p < splits; ++p) sum += parts[p * size + i];
        C[i / along * ld + i % along] = rounded<Out>(sum);
    }
}

}  // namespace spformat::vector_nm
