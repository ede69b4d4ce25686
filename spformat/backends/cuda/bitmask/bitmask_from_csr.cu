// The bits of a CSR, every byte written once. sm_80 and later. Launcher: bitmask_from_csr.py.
//
//   indptr   Ptr[M + 1]            items indptr[i] .. indptr[i+1]-1 belong to row i
//   indices  Idx[nnz]              their columns, ascending in a row
//   data     T[nnz]                their values, as unsigned words; `live` masks the bits that decide whether one is zero
//   bits     u8[M, ceil(K / 8)]    bit b of byte y is column 8y+b; bits of columns >= K are 0
//   zeros    becomes 1 if a stored value is zero; its bit is 0 then
//
// A warp writes the bits of `width` columns of one row, or of `rows` whole rows (then segments = 1). It marks the items in an
// image with a byte for each column, where no two lanes meet, and then packs eight bytes of the image into one.
#include "spformat/expand.cuh"

using namespace spformat;

constexpr int IMAGE_WARPS = 8, IMAGE = 4096;  // warps of a block; columns that a warp takes at a time

template <int bytes> struct Unsigned { using type = u32; };
template <> struct Unsigned<8> { using type = u64; };

template <class T, class Ptr, class Idx>
__global__ void __launch_bounds__(IMAGE_WARPS * 32)
bitmask_from_csr(const Ptr* __restrict__ indptr, const Idx* __restrict__ indices, const T* __restrict__ data, i64 M, i64 K,
                 u64 live, u8* __restrict__ bits, i64 segments, int width, int rows, u64* zeros) {
    constexpr int BATCH = 8;  // items of a lane whose loads are in flight together
    __shared__ __align__(16) u8 images[IMAGE_WARPS][IMAGE];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const i64 task = i64(blockIdx.x) * IMAGE_WARPS + warp, group = task / segments, wide = (K + 7) / 8;
    const i64 row0 = group * rows, c0 = (task - group * segments) * width;
    if (row0 >= M) return;
    const int live_rows = int(min(M - row0, i64(rows))), columns = int(min(8 * wide - c0, i64(width)));
    const int bytes = ((live_rows - 1) * width + columns) / 8;
    u8* image = images[warp];
    const int lanes = 32 / rows, r = lane / lanes;
    clear_image(image, 8 * bytes, lane, 32);
    __syncwarp();
    bool zero = false;
    if (r < live_rows) {
        i64 at = indptr[row0 + r];
        const i64 end = indptr[row0 + r + 1];
        if (c0 > 0) at = warp_lower_bound(at, end, [&](i64 i) { return indices[i] < c0; });
        using Offset = typename Unsigned<sizeof(Idx)>::type;  // from the first column; huge for what lies before it
        const int most = int(min(end - at, i64(columns)));    // columns differ, so there are no more
        for (int i = lane % lanes; i < most; i += lanes * BATCH) {
            Offset offset[BATCH];
            T value[BATCH];
#pragma unroll
            for (int b = 0; b < BATCH; ++b) {
                offset[b] = columns;
                if (i + b * lanes < most) {
                    offset[b] = Offset(indices[at + (i + b * lanes)]) - Offset(c0);
                    value[b] = __ldcs(data + at + (i + b * lanes));
                }
            }
#pragma unroll
            for (int b = 0; b < BATCH; ++b) {
                if (offset[b] >= Offset(columns)) continue;
                const bool nonzero = (value[b] & T(live)) != 0;
                image[r * width + int(offset[b])] = nonzero;
                zero |= !nonzero;
            }
            if (offset[BATCH - 1] >= Offset(columns)) break;  // what follows belongs to later segments
        }
    }
    if (zero) *reinterpret_cast<volatile u64*>(zeros) = 1;
    __syncwarp();
    u8* to = bits + row0 * wide + c0 / 8;
    for (int y = lane; y < bytes; y += 32)  // the product gathers the lowest bits of eight bytes in the highest byte
        to[y] = u8(reinterpret_cast<const u64*>(image)[y] * 0x0102040810204080ull >> 56);
}
