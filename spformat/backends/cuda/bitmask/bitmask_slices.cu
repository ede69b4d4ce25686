// before[i, w] = set bits of row i of a bitmask in columns 0 .. w*slice-1: where the values of a slice of K start.
//
//   bitmask  u8[M, bytes]       before  u32[M, slices]       slice: columns, a multiple of 8
//
// One warp a row.
#include "spformat/dtypes.cuh"

using namespace spformat;

__global__ void bitmask_before(const u8* __restrict__ bitmask, u32* __restrict__ before, i64 M, i64 bytes, i64 slice, int slices) {
    const i64 row = (static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x) / 32;
    const int lane = threadIdx.x % 32;
    if (row >= M) return;
    const u8* bits = bitmask + row * bytes;
    u32 total = 0;
    for (int w = 0; w < slices; ++w) {
        if (lane == 0) before[row * slices + w] = total;
        const i64 end = min(bytes, (w + 1) * (slice / 8));
        u32 count = 0;
        for (i64 y = w * (slice / 8) + lane; y < end; y += 32) count += __popc(bits[y]);
        total += __reduce_add_sync(0xFFFFFFFFu, count);
    }
}
